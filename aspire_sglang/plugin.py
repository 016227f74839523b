"""Entry point of the group ``sglang.srt.plugins``: makes ``--speculative-algorithm ASPIRE`` and
``--attention-backend aspire`` known to SGLang, in every process that loads plugins."""

from __future__ import annotations

from aspire_sglang import compat


def load() -> None:
    """Register ASPIRE with the installed SGLang. Called once per process by SGLang.

    Ends the process with one sentence when the installed SGLang is not supported.
    """
    try:
        compat.require_supported_sglang()
    except compat.UnsupportedSGLang as fault:
        compat.stop(str(fault))

    # Imported late: SGLang is half-imported while it discovers plugins.
    from aspire_sglang.attention.backend import register_attention_backend
    from aspire_sglang.runtime.algorithm import register_algorithm
    from aspire_sglang.runtime.hooks import register_hooks

    register_attention_backend()
    register_algorithm()
    register_hooks()
