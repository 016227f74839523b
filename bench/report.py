"""The demo's report: figures of two rounds put side by side. Pure functions, no server needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from bench.answer import Answer, decode_speed
from bench.rescore import is_consistent
from bench.rounds import Request, Round
from bench.stats import Speculation, Steps

SPEED_MEANS = (
    "tokens_per_s: decoding only. Prompts are in the prefix cache of either server; the clock runs "
    "from the moment the last of the concurrent requests has its first token to the last token of "
    "all, and only tokens of that span count. tokens_per_s_end_to_end: all new tokens, divided by "
    "the time for filling the prefix cache plus the whole decoding round. A request's tokens_per_s "
    "is its own, from its first token to its last, with all others running beside it."
)


class Pair(BaseModel):
    """One figure for both servers."""

    plain: float
    aspire: float


class Count(BaseModel):
    """``n`` of ``of``."""

    n: int
    of: int


class Consistency(Count):
    """Answers all of whose tokens are greedy choices of plain decoding, within ``tau``."""

    tau: float


class RequestReport(BaseModel):
    """One request, answered by both servers."""

    door: str
    kind: str
    title: str
    prompt_tokens: int
    completion_tokens: int
    accept_length: float
    mean_draft_length: float
    draft_steps: int
    verify_steps: int
    draft_lengths: dict[int, int]
    draft_length_sequence: list[int]
    tokens_per_s: Pair
    identical: bool
    largest_gap: float | None
    prompt_end: str
    text: str
    plain_text: str


class Report(BaseModel):
    """The contents of ``demo-report.json``."""

    model_config = ConfigDict(extra="forbid")

    mixed_step_fraction: float
    decode_steps: int
    mixed_steps: int
    greedy_consistent: Consistency
    identical: Count
    tokens_per_s: Pair
    speedup: float
    tokens_per_s_end_to_end: Pair
    prefill_s: Pair
    tokens_per_s_means: str = SPEED_MEANS
    requests: list[RequestReport]
    machine: dict[str, Any]
    versions: dict[str, str]
    commit: str | None
    date: str
    command: str
    server_flags: dict[str, list[str]]


def build_report(
    requests: Sequence[Request],
    *,
    plain: tuple[Round, Round],
    aspire: tuple[Round, Round],
    speculation: Sequence[Speculation],
    steps: Steps,
    gaps: Sequence[Sequence[float]],
    tau: float,
    about: dict[str, Any],
) -> Report:
    """Put the prefill and decode rounds of both servers side by side.

    ``speculation`` and ``gaps`` (see ``rescore``) belong to the ASPIRE answers, in order;
    ``about`` says where, when and with what the figures were measured.
    """
    plain_speed, aspire_speed = decode_speed(plain[1].answers), decode_speed(aspire[1].answers)
    entries = [
        _request_report(*one)
        for one in zip(
            requests, plain[1].answers, aspire[1].answers, speculation, gaps, strict=True
        )
    ]
    return Report(
        mixed_step_fraction=round(steps.mixed_fraction, 4),
        decode_steps=steps.decode,
        mixed_steps=steps.mixed,
        greedy_consistent=Consistency(
            n=sum(is_consistent(own, tau) for own in gaps), of=len(gaps), tau=tau
        ),
        identical=Count(n=sum(entry.identical for entry in entries), of=len(entries)),
        tokens_per_s=Pair(plain=round(plain_speed, 2), aspire=round(aspire_speed, 2)),
        speedup=round(aspire_speed / plain_speed, 3) if plain_speed else 0.0,
        tokens_per_s_end_to_end=Pair(
            plain=round(_end_to_end(plain), 2), aspire=round(_end_to_end(aspire), 2)
        ),
        prefill_s=Pair(plain=round(plain[0].seconds, 2), aspire=round(aspire[0].seconds, 2)),
        requests=entries,
        **about,
    )


def _request_report(
    request: Request,
    plain: Answer,
    aspire: Answer,
    speculation: Speculation,
    gaps: Sequence[float],
) -> RequestReport:
    return RequestReport(
        door=request.door,
        kind=request.prompt.kind,
        title=request.prompt.title,
        prompt_tokens=aspire.prompt_tokens,
        completion_tokens=aspire.completion_tokens,
        accept_length=round(speculation.accept_length, 3),
        mean_draft_length=round(speculation.mean_draft_length, 3),
        draft_steps=speculation.draft_steps,
        verify_steps=speculation.verify_steps,
        draft_lengths=speculation.draft_lengths,
        draft_length_sequence=list(speculation.sequence),
        tokens_per_s=Pair(plain=round(plain.tokens_per_s, 2), aspire=round(aspire.tokens_per_s, 2)),
        identical=plain.text == aspire.text and plain.output_ids == aspire.output_ids,
        largest_gap=max(gaps, default=None),
        prompt_end=request.prompt.text[-300:],
        text=aspire.text,
        plain_text=plain.text,
    )


def _end_to_end(rounds: tuple[Round, Round]) -> float:
    prefill, decode = rounds
    tokens = sum(answer.completion_tokens for answer in decode.answers)
    return tokens / (prefill.seconds + decode.seconds)
