"""Random scenarios: requests of all kinds at once, some aborted, some whose client goes away."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from tests.server.client import request
from tests.server.conftest import FULL, TINY, Aspire
from tests.server.prompts import COUNT, IDS, LOOP, PROSE, SHORT

PROMPTS = (COUNT, IDS, LOOP, PROSE, *SHORT[:12])

# What may be asked of a request besides its length, one entry each; combined at will.
SAMPLED = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.0, "sampling_seed": 7},
)
RULES = (
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    {"logit_bias": {"5": 8.0}},
    {"min_new_tokens": 6},
    {"regex": "[0-9]{3}-[0-9]{4}"},
)
PLAIN = (
    {"ignore_eos": True},
    {"stop": [",", "ing"]},
    {"return_logprob": True, "top_logprobs_num": 2},
    {"return_hidden_states": True},
    {"custom_params": {"aspire": False}},
    {"custom_params": {"aspire": {"gamma_max": 2}}},
)


@dataclass(frozen=True)
class Ask:
    """One request and what becomes of it.

    Attributes:
        prompt: index into ``PROMPTS``. length: tokens of it, at most.
        new: most new tokens.
        options: further sampling parameters and fields.
        greedy: its text must be plain decoding's.
        fate: ``wait`` for the whole answer, ``stream`` it, ``abort`` it after ``delay`` seconds, or
            ``leave`` after the first event of the stream.
    """

    prompt: int
    length: int
    new: int
    options: dict[str, Any]
    greedy: bool
    fate: str
    delay: float


@dataclass(frozen=True)
class Scenario:
    """Requests that are sent at once, and what drafts may read."""

    context: str
    gamma: int
    asks: tuple[Ask, ...]

    def settings(self) -> tuple[dict[str, Any], ...]:
        drafting = {"scheduler": {"policy": "staggered", "gamma": self.gamma}}
        return drafting, {"normal": {}, "full": FULL, "tiny": TINY}[self.context]


@st.composite
def _asks(draw: st.DrawFn) -> Ask:
    options: dict[str, Any] = {}
    for extra in draw(st.lists(st.sampled_from(PLAIN), max_size=2)):
        options |= extra
    kind = draw(st.sampled_from(("greedy", "greedy", "sampled", "ruled", "both")))
    if kind in ("sampled", "both"):
        options |= draw(st.sampled_from(SAMPLED))
    if kind in ("ruled", "both"):
        options |= draw(st.sampled_from(RULES))
    new = draw(st.sampled_from((1, 2, 5, 12, 24, 40)))
    if "min_new_tokens" in options:
        options["min_new_tokens"] = min(options["min_new_tokens"], new)
    return Ask(
        prompt=draw(st.integers(0, len(PROMPTS) - 1)),
        length=draw(st.sampled_from((1, 2, 7, 17, 64, 200))),
        new=new,
        options=options,
        greedy=kind == "greedy",
        fate=draw(st.sampled_from(("wait", "wait", "wait", "stream", "abort", "leave"))),
        delay=draw(st.floats(0.0, 0.6)),
    )


SCENARIOS = st.builds(
    Scenario,
    context=st.sampled_from(("normal", "full", "tiny")),
    gamma=st.integers(1, 8),
    asks=st.lists(_asks(), min_size=1, max_size=8).map(tuple),
)


@dataclass
class Outcome:
    """What came back for one request; ``answer`` is None where the client did not wait for it."""

    ask: Ask
    ids: list[int]
    answer: dict[str, Any] | None = None
    streamed: list[dict[str, Any]] = field(default_factory=list)


def play(client: Aspire, scenario: Scenario, name: str) -> list[Outcome]:
    """Send all requests of a scenario at once and wait for what becomes of them."""

    def one(entry: tuple[int, Ask]) -> Outcome:
        index, ask = entry
        outcome = Outcome(ask, client.ids(PROMPTS[ask.prompt])[: ask.length])
        rid = f"{name}-{index}"
        body = request(outcome.ids, rid=rid, max_new_tokens=ask.new, **ask.options)
        if ask.fate in ("stream", "leave"):
            _stream(client, body, outcome, leave=ask.fate == "leave")
            return outcome
        if ask.fate == "abort":
            threading.Timer(ask.delay, client.post, ({"rid": rid}, "/abort_request")).start()
        reply = client.post(body)
        if reply.status_code == 400 and ask.fate == "abort" and "Aborted" in reply.text:
            # It waited still.
            return outcome
        assert reply.status_code == 200, reply.text
        outcome.answer = reply.json()
        return outcome

    with ThreadPoolExecutor(len(scenario.asks)) as pool:
        return list(pool.map(one, enumerate(scenario.asks)))


def _stream(client: Aspire, body: dict[str, Any], outcome: Outcome, leave: bool) -> None:
    with client.http.stream("POST", "/generate", json=body | {"stream": True}) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                outcome.streamed.append(json.loads(line[6:]))
                if leave:
                    return
    outcome.answer = outcome.streamed[-1]
