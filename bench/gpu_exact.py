"""Is what ASPIRE writes on a GPU what stock SGLang would write? Texts, scores, KV, distributions.

Used by ``bench/gpu_lab.py``. bfloat16 logits of a small model are multiples of 1/8 where they
decide, so two right engines may part at a near-tie; these checks tell rounding from faults:

* :func:`compare_texts` lists where greedy texts part and how undecided stock was there;
* :func:`score` lets stock judge every token of a text in one prefill (qa rule I5);
* :func:`kv_errors` compares the KV that a text left in the pool, layer by layer, with stock's
  prefill of the same tokens; stock's own decoding against that prefill is the measure;
* :func:`chi_square` compares sampled second and third tokens with stock's exact probabilities.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from bench.rescore import MARGIN, gaps

Texts = list[list[int]]


def compare_texts(ours: list[Any], theirs: list[Any]) -> dict[str, Any]:
    """Answers to the same prompts; ``theirs`` with the two best log-probabilities per token."""
    splits: list[dict[str, Any]] = []
    for text, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        a, b = mine["output_ids"], other["output_ids"]
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None and len(a) == len(b):
            continue
        if at is None:
            splits.append({"text": text, "lengths": [len(a), len(b)], "gap": 99.0})
            continue
        best, second = other["meta_info"]["output_top_logprobs"][at][:2]
        splits.append(
            {
                "text": text,
                "at": at,
                "gap": best[0] - second[0],
                "near": a[at] in (best[1], second[1]),
            }
        )
    return {
        "texts": len(ours),
        "same": len(ours) - len(splits),
        "worst_gap": max((split["gap"] for split in splits), default=0.0),
        "splits": splits,
    }


def score(stock: Any, prompts: Texts, answers: list[Any]) -> list[float]:
    """Per text, how far the worst of its tokens lies below stock's best, in log-probability.

    One prefill of prompt and answer without the prefix cache, which also leaves stock's own KV of
    these tokens in the pool.
    """
    texts = [p + a["output_ids"] for p, a in zip(prompts, answers, strict=True)]
    stock.ask("flush_cache")
    reply = stock.ask(
        "generate",
        input_ids=texts,
        sampling_params={"max_new_tokens": 1, "temperature": 0.0},
        return_logprob=True,
        logprob_start_len=[len(p) - 1 for p in prompts],
        top_logprobs_num=1,
    )
    return [
        max(gaps(one["meta_info"], answer["output_ids"]))
        for one, answer in zip(reply, answers, strict=True)
    ]


def allowed_gap(plain: list[float]) -> float:
    """tau of rule I5: what stock's decoding shows against its own prefill, times 1.5."""
    return MARGIN * max(plain)


def save_kv(variant: Any, prompts: Texts, answers: list[Any], path: Path) -> None:
    """KV of the answers' tokens, as the engine holds it now."""
    texts = [p + a["output_ids"] for p, a in zip(prompts, answers, strict=True)]
    starts = [len(p) for p in prompts]
    variant.ask("collective_rpc", method="probe_kv", texts=texts, starts=starts, path=str(path))


def kv_errors(path: Path, reference: Path) -> dict[str, Any]:
    """Relative error of keys and values per token and layer.

    Returns:
        Median, 99th percentile and maximum over tokens, over all layers and for some of them.
    """
    import torch

    def errors(ours: Any, theirs: Any) -> Any:
        count = min(ours.shape[2], theirs.shape[2])
        a, b = ours[:, :, :count].double().flatten(3), theirs[:, :, :count].double().flatten(3)
        return (a - b).norm(dim=-1) / b.norm(dim=-1)

    pairs = zip(torch.load(path), torch.load(reference), strict=True)
    found = torch.cat([errors(a, b) for a, b in pairs], dim=2)

    def summary(part: Any) -> list[float]:
        flat = part.flatten().numpy()
        return [float(np.quantile(flat, q)) for q in (0.5, 0.99, 1.0)]

    layers = found.shape[1]
    return {
        "tokens": found.shape[2],
        "median_p99_max": summary(found),
        "layers": {layer: summary(found[:, layer]) for layer in {0, 1, layers // 2, layers - 1}},
        "median_by_layer": [float(found[:, layer].median()) for layer in range(layers)],
        "worst_by_layer": [float(found[:, layer].max()) for layer in range(layers)],
    }


def sampled(variant: Any, prompt: list[int], count: int, params: dict[str, Any]) -> np.ndarray:
    """``[count, 3]`` first tokens of independent answers to one prompt."""
    given = {"max_new_tokens": 3, "ignore_eos": True, **params}
    variant.ask("generate", input_ids=[prompt], sampling_params={**given, "max_new_tokens": 1})
    reply = variant.ask(
        "generate", timeout=200.0, input_ids=[prompt] * count, sampling_params=given
    )
    return np.array([answer["output_ids"] for answer in reply])


def chi_square(stock: Any, prompt: list[int], tokens: np.ndarray) -> list[dict[str, Any]]:
    """Second tokens after the commonest first, third after the commonest two, at temperature 1.

    The 30 likeliest tokens by stock's exact probabilities, the rest pooled.
    """
    from scipy import stats

    found: list[dict[str, Any]] = []
    for depth in (1, 2):
        heads = Counter(map(tuple, tokens[:, :depth].tolist()))
        head, _ = heads.most_common(1)[0]
        rows = tokens[(tokens[:, :depth] == np.array(head)).all(axis=1)]
        reply = stock.ask(
            "generate",
            input_ids=[prompt + list(head)],
            sampling_params={"max_new_tokens": 1, "temperature": 1.0},
            return_logprob=True,
            top_logprobs_num=30,
        )
        top = reply[0]["meta_info"]["output_top_logprobs"][0]
        probs = np.exp([entry[0] for entry in top])
        ids = [entry[1] for entry in top]
        counts = Counter(rows[:, depth].tolist())
        seen = np.array([counts[token] for token in ids], dtype=float)
        expected = probs * len(rows)
        keep = expected >= 5
        seen = np.append(seen[keep], len(rows) - seen[keep].sum())
        expected = np.append(expected[keep], len(rows) - expected[keep].sum())
        if expected[-1] < 5:
            seen = np.append(seen[:-2], seen[-2:].sum())
            expected = np.append(expected[:-2], expected[-2:].sum())
        if len(seen) < 2:
            found.append({"token": depth + 1, "samples": len(rows), "cells": len(seen)})
            continue
        test = stats.chisquare(seen, expected)
        found.append(
            {
                "token": depth + 1,
                "samples": len(rows),
                "cells": len(seen),
                "statistic": float(test.statistic),
                "p": float(test.pvalue),
            }
        )
    return found


def two_samples(ours: np.ndarray, theirs: np.ndarray) -> list[dict[str, Any]]:
    """The same places, against samples of stock where filters make exact probabilities awkward."""
    from scipy import stats

    found: list[dict[str, Any]] = []
    for depth in (1, 2):
        head, _ = Counter(map(tuple, ours[:, :depth].tolist())).most_common(1)[0]
        sides = [rows[(rows[:, :depth] == np.array(head)).all(axis=1)] for rows in (ours, theirs)]
        counts = [Counter(side[:, depth].tolist()) for side in sides]
        common = [t for t, n in (counts[0] + counts[1]).most_common() if n >= 10]
        table = np.array([[c[t] for t in common] for c in counts])
        rest = np.array([[len(s)] for s in sides]) - table.sum(axis=1, keepdims=True)
        if rest.sum() >= 10:
            table = np.hstack([table, rest])
        if table.shape[1] < 2:
            found.append({"token": depth + 1, "cells": table.shape[1]})
            continue
        test = stats.chi2_contingency(table)
        found.append(
            {
                "token": depth + 1,
                "samples": [len(side) for side in sides],
                "cells": table.shape[1],
                "p": float(test.pvalue),
                "only_ours": [t for t in counts[0] if counts[0][t] >= 10 and not counts[1][t]],
            }
        )
    return found
