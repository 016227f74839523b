"""Counters of what speculation did, readable in ``/server_info`` under ``aspire``."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aspire_sglang.config import AspireConfig

TOTALS = (
    "decode_steps",
    "graph_steps",
    "eager_steps",
    "plain_graph_steps",
    "plain_steps_for_parameters",
    "mixed_steps",
    "draft_rows",
    "verify_rows",
    "query_tokens",
    "decode_microseconds",
    "accepted_drafts",
    "discarded_drafts",
)
"""Counters since the server started; all are reported from the beginning, also while they are 0."""


@dataclass(slots=True)
class RequestStats:
    """Speculation of one request: drafts of each verify in order, and how many were accepted."""

    lengths: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        verifies = len(self.lengths)
        drafts, accepted = sum(self.lengths), sum(self.accepted)
        return {
            "draft_steps": drafts,
            "verify_steps": verifies,
            "draft_lengths": {str(n): c for n, c in sorted(Counter(self.lengths).items())},
            "draft_length_sequence": self.lengths,
            "accepted_sequence": self.accepted,
            "accepted_drafts": accepted,
            # The bonus of each verify counts, the token of the prefill does not.
            "accept_length": (accepted + verifies) / verifies if verifies else 0.0,
        }


class Telemetry:
    """Totals since the server started, and the statistics of the last ``requests_kept`` requests.

    A *mixed* step holds at least one draft and one verify row.
    """

    def __init__(self, config: AspireConfig) -> None:
        self.config = config
        self._requests: OrderedDict[str, RequestStats] = OrderedDict()
        self.totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self.draft_lengths: Counter[int] = Counter()
        self.cost: Callable[[], dict[str, float]] = dict
        self.ranks: Callable[[], dict[str, int]] = dict

    def step(
        self,
        *,
        drafts: int,
        verifies: int,
        tokens: int,
        seconds: float,
        graph: bool = False,
        plain: bool = False,
        for_parameters: bool = False,
    ) -> None:
        """Book one decode step with ``drafts`` draft rows and ``verifies`` verify rows; ``graph``:
        it was replayed from a CUDA graph; ``plain``: it ran as SGLang decodes plainly;
        ``for_parameters``: because parameters of a request need that."""
        self.totals["decode_steps"] += 1
        self.totals["graph_steps" if graph else "eager_steps"] += 1
        self.totals["plain_graph_steps"] += plain
        self.totals["plain_steps_for_parameters"] += for_parameters
        self.totals["mixed_steps"] += bool(drafts and verifies)
        self.totals["draft_rows"] += drafts
        self.totals["verify_rows"] += verifies
        self.totals["query_tokens"] += tokens
        self.totals["decode_microseconds"] += round(seconds * 1e6)

    def started(self, rid: str) -> RequestStats:
        """Open the statistics of a new request; an earlier one of the same id is forgotten."""
        stats = self._requests[rid] = RequestStats()
        while len(self._requests) > self.config.requests_kept:
            self._requests.popitem(last=False)
        return stats

    def verified(self, rid: str, drafts: int, accepted: int) -> None:
        """Book one verify of ``drafts`` drafts, ``accepted`` of them accepted."""
        self.totals["accepted_drafts"] += accepted
        self.totals["discarded_drafts"] += drafts - accepted
        self.draft_lengths[drafts] += 1
        stats = self._of(rid)
        stats.lengths.append(drafts)
        stats.accepted.append(accepted)

    def dropped(self, drafts: int) -> None:
        """Book drafts that nobody will verify."""
        self.totals["discarded_drafts"] += drafts

    def plain(self, rid: str, steps: int) -> None:
        """Book ``steps`` verifies of no drafts."""
        self.draft_lengths[0] += steps
        stats = self._of(rid)
        stats.lengths += [0] * steps
        stats.accepted += [0] * steps

    def _of(self, rid: str) -> RequestStats:
        stats = self._requests.get(rid) or self.started(rid)
        self._requests.move_to_end(rid)
        return stats

    def snapshot(self) -> dict[str, Any]:
        """Everything, as built-in types."""
        steps = self.totals["decode_steps"]
        return {
            **self.totals,
            "mixed_step_fraction": self.totals["mixed_steps"] / steps if steps else 0.0,
            "draft_lengths": {str(n): c for n, c in sorted(self.draft_lengths.items())},
            "cost_model": self.cost(),
            "ranks": self.ranks(),
            "settings": self.config.model_dump(),
            "requests": {rid: stats.summary() for rid, stats in self._requests.items()},
        }
