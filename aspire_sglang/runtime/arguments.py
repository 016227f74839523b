"""Hooks on SGLang's argument parsing and on the sizes derived from its arguments."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from aspire_sglang.compat import stop
from aspire_sglang.config import ENV_CONFIG, ConfigError, load_config

ALGORITHM = "ASPIRE"


def is_aspire(server_args: Any) -> bool:
    """Whether these server arguments ask for ASPIRE (the name is upper-cased late)."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


class _ConfigAction(argparse.Action):
    """Checks the file at once and hands it to the worker processes through the environment."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        source = values if values.lstrip().startswith("{") else os.path.abspath(values)
        try:
            load_config(source)
        except ConfigError as fault:
            stop(str(fault))
        os.environ[ENV_CONFIG] = source
        setattr(namespace, self.dest, source)


def add_cli_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    """AROUND ``ServerArgs.add_cli_args``: add ASPIRE's one flag."""
    original(parser)
    parser.add_argument(
        "--aspire-config",
        action=_ConfigAction,
        metavar="FILE",
        help="YAML file with the settings of --speculative-algorithm ASPIRE, or the settings "
        "themselves as '{gamma_max: 8, context: {ratio: 0.1}}'.",
    )


def draft_kv_pool(original: Callable[..., Any], **kwargs: Any) -> Any:
    """AROUND ``get_draft_kv_pool``: self-speculation keeps its drafts in the target's pool."""
    return None if is_aspire(kwargs["server_args"]) else original(**kwargs)


def req_to_token_headroom(original: Callable[[Any], int], server_args: Any) -> int:
    """AROUND ``get_req_to_token_extra_context_len``: columns of a request's slot table beyond the
    context length, enough for the decode reserve of ``2 * (gamma_max + 1)`` slots."""
    extra = original(server_args)
    if not is_aspire(server_args):
        return extra
    reserve = 2 * server_args.speculative_num_draft_tokens
    return max(extra, reserve + server_args.page_size - 1)
