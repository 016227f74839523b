"""A request's own say in its speculation: ``sampling_params: {"custom_params": {"aspire": ...}}``.

``false`` turns speculation off, ``true`` leaves it to the server, ``{"gamma_max": 4}`` allows at
most that many drafts before a verify. The field reaches the scheduler through every door of SGLang
(native, OpenAI, ``Engine``) and changes no text, only how it is made.
"""

from __future__ import annotations

import difflib
from typing import Any

KEY = "aspire"
LIMIT = "gamma_max"

# Keys of custom_params that SGLang itself reads; all others are for custom logit processors.
_SGLANG_KEYS = ("thinking_budget",)


def draft_limit(custom_params: Any) -> int | None:
    """Most drafts the request allows, 0 if it wants none; None if it leaves that to the server.

    Args:
        custom_params: the sampling parameter of that name, or None.

    Raises:
        ValueError: the entry ``aspire`` is none of the forms above.
    """
    wish = custom_params.get(KEY) if isinstance(custom_params, dict) else None
    match wish:
        case None | True:
            return None
        case False:
            return 0
        case dict():
            for name in wish:
                if name != LIMIT:
                    raise ValueError(
                        f"custom_params.{KEY} has no entry '{name}'; did you mean '{LIMIT}'?"
                    )
            limit = wish.get(LIMIT)
            if limit is None:
                return None
            if type(limit) is int and limit >= 0:
                return limit
            raise ValueError(
                f"custom_params.{KEY}.{LIMIT} must be an integer of at least 0, not {limit!r}."
            )
    raise ValueError(f"custom_params.{KEY} must be true, false or {{'{LIMIT}': N}}, not {wish!r}.")


def check_custom_params(custom_params: Any, has_processor: bool, most: int) -> None:
    """Refuse what would have no effect.

    Args:
        custom_params: as the request gives it.
        has_processor: a custom logit processor reads entries of any name.
        most: drafts before a verify that the server has room for.

    Raises:
        ValueError: not an object, an entry that nothing reads, or a bad entry ``aspire``.
    """
    if custom_params is None:
        return
    if not isinstance(custom_params, dict):
        raise ValueError(f"custom_params must be an object, not {custom_params!r}.")
    known = (KEY, *_SGLANG_KEYS)
    for name in custom_params:
        if name not in known and not has_processor:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.0)
            raise ValueError(
                f"custom_params has no entry '{name}'; did you mean '{near[0]}'? Other entries "
                "are read by custom logit processors only."
            )
    limit = draft_limit(custom_params)
    if limit is not None and limit > most:
        raise ValueError(
            f"custom_params.{KEY}.{LIMIT} is {limit}, but this server makes at most {most} drafts "
            "before a verify."
        )
