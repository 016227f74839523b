"""Write docs/combinations.md from the code: ``python bench/combinations.py``."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from aspire_sglang.runtime.combinations import (
    FLAGS,
    REQUESTS,
    Combination,
    Refused,
    RequestFeature,
    Untested,
    Verdict,
    Works,
)
from aspire_sglang.runtime.model_limits import MODEL_LIMITS, ModelLimit
from aspire_sglang.runtime.plain_requests import FIELDS, SAMPLING
from aspire_sglang.runtime.requests import REFUSED_ON_GPU, UNSUPPORTED_FIELDS
from aspire_sglang.runtime.setting_rules import SETTINGS, Setting

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "combinations.md"

INTRODUCTION = """\
# What ASPIRE works with

Written by `python bench/combinations.py` from the tables that start-up and requests are checked
against. "Works" names a test that would fail otherwise. "Refused" at start means one line per fault
on the terminal, all at once, and exit status 2; a refused request gets status 400 with the
parameter's name. SGLang 0.5.17 has more flags: those that are not listed do not touch speculation,
and a test keeps the list complete."""

DENSE = "tests/server/test_exactness.py::test_greedy_40_prompts"
GPU_DENSE = "tests/gpu/test_engine.py::test_stock_finds_every_text_greedy"

PLAIN = """\
"Plain steps": on a GPU such a request decodes as without speculation. While one runs, nobody in
its batch drafts; when it has left, the others speculate again. `meta_info["aspire"]["reason"]`
names the parameter, and `plain_steps_for_parameters` in `/server_info` counts the steps. What
SGLang's own decoding does, such a request gets as well: with overlap scheduling penalties see a
text one token late, after a retraction they count afresh, and hidden states and custom
processors need their flags. A `sampling_seed` of a sampled request is refused on a GPU: SGLang
itself ignores it there unless the whole server runs with `--enable-deterministic-inference`,
which is refused."""


def document() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for area, rows in groupby(FLAGS, key=lambda row: row.area):
        parts += [f"## {area}", _table(("feature", "flags", "CPU", "GPU"), map(_flag_row, rows))]
    settings = map(_setting_row, SETTINGS)
    parts += ["## Draft contexts", _table(("setting", "values", "CPU", "GPU"), settings)]
    parts += ["## Models", _table(("model", "CPU", "GPU"), _model_rows())]
    parts += ["## Requests", _table(("feature", "parameters", "CPU", "GPU"), _request_rows())]
    parts += [PLAIN]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _flag_row(row: Combination) -> Sequence[str]:
    flags = ", ".join(f"`--{flag.replace('_', '-')}`" for flag in row.flags)
    return row.feature, flags or "default", _shown(row.on_cpu), _shown(row.on_gpu)


def _setting_row(row: Setting) -> Sequence[str]:
    return f"`{row.option}`", _code(row.values), _shown(row.on_cpu), _shown(row.on_gpu)


def _shown(verdict: Verdict) -> str:
    match verdict:
        case Works(test):
            return f"works (`{test}`)"
        case Refused(reason, allowed):
            values = ", ".join(f"`{value}`" for value in allowed)
            return f"refused: {reason}" + (f" (allowed: {values})" if values else "")
        case Untested():
            return "not tested"


def _model_rows() -> Iterable[Sequence[str]]:
    yield (
        "dense decoders with full attention (Llama, SmolLM2)",
        f"works (`{DENSE}`)",
        f"works (`{GPU_DENSE}`)",
    )
    for limit in MODEL_LIMITS:
        yield limit.feature, _limit(limit, limit.on_cpu), _limit(limit, limit.on_gpu)


def _limit(limit: ModelLimit, refused: bool) -> str:
    return f"refused: {limit.reason}" if refused else "not tested"


def _request_rows() -> Iterable[Sequence[str]]:
    for row in REQUESTS:
        yield row.feature, _code(row.names), f"works (`{row.test}`)", _on_gpu(row)
    yield "what speculation cannot give", _code(UNSUPPORTED_FIELDS), "refused", "refused"


def _on_gpu(row: RequestFeature) -> str:
    names = set(row.names)
    if names & set(REFUSED_ON_GPU):
        return "refused"
    if row.gpu_test is None:
        return "not tested"
    how = "plain steps" if names & {*SAMPLING, *FIELDS} else "works"
    return f"{how} (`{row.gpu_test}`)"


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document())
