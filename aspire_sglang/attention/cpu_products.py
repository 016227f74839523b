"""Attention by plain matrix products, block by block over the queries.

oneDNN's linear is called directly: in float32 it is up to twice as fast as the MKL products inside
PyTorch's flash kernel. A block's scores stay in the caches between its products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Scores of a block, in elements. Prefill chunks are fastest with about a million (float32, so
#: 4 MiB: two blocks fit in the caches of two cores), and nothing of a verify run exceeds it.
SCORE_BUDGET = 1 << 20
#: From so many query rows per KV head on the products beat the flash kernel.
FEWEST_ROWS = 128
#: Query rows of a block are a multiple of this, the width of a vector.
_ROW_STEP = 16
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def products_pay(rows: int, dtype: torch.dtype) -> bool:
    """Whether these products beat the flash kernel for so many query rows per KV head.

    Few rows are bound by reading the keys, which the flash kernel does in one parallel region; for
    prefill chunks oneDNN reaches 290 GFLOP/s where it reaches 185 (two Zen 5 cores).
    """
    return _HAS_ONEDNN and dtype == torch.float32 and rows >= FEWEST_ROWS


def matmul_t(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T`` of two matrices, through oneDNN where the build has it.

    Args:
        x: ``[m, K]``, contiguous.
        w: ``[n, K]``, contiguous or the transpose of a contiguous matrix. Anything else is
            correct but makes oneDNN reorder it, which costs more than the product.

    Returns:
        ``[m, n]`` of the inputs' dtype.
    """
    if _HAS_ONEDNN:
        return torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")
    return torch.mm(x, w.t())


def attend_products(
    x: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    logit_cap: float,
    mask: Tensor | None = None,
    causal_tokens: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention over some keys.

    Args:
        x: ``[Hkv, R, D]`` queries, the heads of a group folded into the rows (token-major).
        keys, values: ``[Hkv, n, D]``, every head contiguous.
        scale: factor of the scores.
        logit_cap: ``c`` of ``c * tanh(score / c)``; 0 for none.
        mask: float32 ``[R, n]`` to add to the scores, or None.
        causal_tokens: ``n`` if the keys are the queries' own tokens, causal among themselves;
            0 otherwise.

    Returns:
        ``[1, Hkv, R, D]`` in the dtype of ``x``, and the log-sum-exp, float32 ``[1, Hkv, R]``.
    """
    heads, rows, dim = x.shape
    length = keys.shape[1]
    queries = x.float() * scale
    out = torch.empty_like(x)
    # The largest score and its probability give the log-sum-exp without another exp.
    lse = x.new_empty((heads, rows), dtype=torch.float32)
    best = torch.empty_like(lse)
    blocks = list(_blocks(rows, length, causal_tokens))
    for head in range(heads):
        key, value = keys[head].float(), values[head].t()
        for span, visible in blocks:
            scores = matmul_t(queries[head, span], key[:visible])
            if logit_cap:
                scores.div_(logit_cap).tanh_().mul_(logit_cap)
            if mask is not None:
                scores.add_(mask[span])
            if causal_tokens:
                token = torch.arange(span.start, span.stop) // (rows // causal_tokens)
                hidden = torch.arange(visible) > token.unsqueeze(1)
                scores.masked_fill_(hidden, float("-inf"))
            probs = torch.softmax(scores, dim=-1)
            torch.amax(scores, -1, out=lse[head, span])
            torch.amax(probs, -1, out=best[head, span])
            out[head, span] = matmul_t(probs.to(value.dtype), value[:, :visible])
    return out.view(1, heads, rows, dim), lse.sub_(best.log_()).unsqueeze(0)


def _blocks(rows: int, length: int, causal_tokens: int) -> Iterator[tuple[slice, int]]:
    """Blocks of query rows, and how many of the keys the last row of each may see."""
    step = max(_ROW_STEP, SCORE_BUDGET // length // _ROW_STEP * _ROW_STEP)
    for first in range(0, rows, step):
        stop = min(first + step, rows)
        # Ceiling of stop * tokens / rows: the block's last query and all keys up to it.
        visible = -(-stop * causal_tokens // rows) if causal_tokens else length
        yield slice(first, stop), visible
