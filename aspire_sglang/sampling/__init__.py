"""Sampling chain, draft sampling and lossless accept rules on plain tensors."""

from aspire_sglang.sampling.coupling import draw_coupled, gumbel_noise, sample_coupled
from aspire_sglang.sampling.drafting import DraftProbs, DraftSample, flat_draft_rows, sample_draft
from aspire_sglang.sampling.draw import draw, uniforms
from aspire_sglang.sampling.mixed import Coupling, verify
from aspire_sglang.sampling.processors import TOP_K_ALL, SamplingRows, filter_probs, target_probs
from aspire_sglang.sampling.verification import (
    Verified,
    verify_coupled,
    verify_greedy,
    verify_rejection,
)

__all__ = [
    "TOP_K_ALL",
    "Coupling",
    "DraftProbs",
    "DraftSample",
    "SamplingRows",
    "Verified",
    "draw",
    "draw_coupled",
    "filter_probs",
    "flat_draft_rows",
    "gumbel_noise",
    "sample_coupled",
    "sample_draft",
    "target_probs",
    "uniforms",
    "verify",
    "verify_coupled",
    "verify_greedy",
    "verify_rejection",
]
