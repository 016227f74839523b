"""Attention by plain matrix products, for what the flash kernel cannot do: capped logits.

oneDNN's linear is called directly: on skinny float32 shapes it beats MKL's (batched) products.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Scores held at once, in elements (float32, so 16 MiB; the softmax holds a second copy).
SCORE_BUDGET = 1 << 22
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


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
    heads, rows, _ = x.shape
    length = keys.shape[1]
    out = torch.empty_like(x)
    lse = torch.empty(heads, rows)
    step = max(1, SCORE_BUDGET // length)
    for head in range(heads):
        query, key, value = x[head].float() * scale, keys[head].float(), values[head]
        for first in range(0, rows, step):
            span = slice(first, min(first + step, rows))
            scores = matmul_t(query[span], key)
            if logit_cap:
                scores.div_(logit_cap).tanh_().mul_(logit_cap)
            if mask is not None:
                scores.add_(mask[span])
            if causal_tokens:
                token = torch.arange(span.start, span.stop) // (rows // causal_tokens)
                hidden = torch.arange(length) > token.unsqueeze(1)
                scores.masked_fill_(hidden, float("-inf"))
            probs = torch.softmax(scores, dim=-1)
            # The largest score and its probability give the log-sum-exp without another exp.
            torch.sub(scores.amax(-1), probs.amax(-1).log_(), out=lse[head, span])
            out[head, span] = matmul_t(probs.to(value.dtype), value.t())
    return out.unsqueeze(0), lse.unsqueeze(0)
