"""Hooks on SGLang's argument parsing and on the sizes derived from its arguments."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aspire_sglang import cpu_platform
from aspire_sglang.compat import stop
from aspire_sglang.config import ENV_CONFIG, ConfigError, load_config
from aspire_sglang.runtime.flag_checks import BadArguments, flag_faults

ALGORITHM = "ASPIRE"


def is_aspire(server_args: Any) -> bool:
    """Whether these server arguments ask for ASPIRE (the name is upper-cased late)."""
    return (server_args.speculative_algorithm or "").upper() == ALGORITHM


class _ConfigAction(argparse.Action):
    """Hands the file to the worker processes through the environment; read in from_cli_args."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        source = values if values.lstrip().startswith("{") else os.path.abspath(values)
        os.environ[ENV_CONFIG] = source
        setattr(namespace, self.dest, source)


def add_cli_args(original: Callable[..., None], parser: argparse.ArgumentParser) -> None:
    """AROUND ``ServerArgs.add_cli_args``: add ASPIRE's one flag, and short messages for faults."""
    original(parser)
    parser.add_argument(
        "--aspire-config",
        action=_ConfigAction,
        metavar="FILE",
        help="YAML file with the settings of --speculative-algorithm ASPIRE, or the settings "
        "themselves as '{gamma_max: 8, context: {ratio: 0.1}}'.",
    )
    if any(word.upper().endswith(ALGORITHM) for word in sys.argv):
        # argparse would print SGLang's four hundred flags before the one line that matters.
        parser.error = lambda message: stop(_with_nearest_flag(parser, message))  # type: ignore


def _with_nearest_flag(parser: argparse.ArgumentParser, message: str) -> str:
    unknown = re.search(r"unrecognized arguments: (--[\w-]+)", message)
    if unknown is None:
        return message
    flags = [flag for flag in parser._option_string_actions if flag.startswith("--")]
    near = difflib.get_close_matches(unknown[1], flags, n=1, cutoff=0.0)
    return f"{message}; did you mean {near[0]}?"


def from_cli_args(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """AROUND ``ServerArgs.from_cli_args``: faults end with one line each, all of them at once,
    before a minute of imports and instead of a page of traceback."""
    speculative = (args.speculative_algorithm or "").upper() == ALGORITHM
    faults = _config_faults(args)
    if speculative:
        faults += flag_faults(args, cpu_platform.is_active())
        faults += filter(None, (_missing_model(args), _context_too_long(args), _port_in_use(args)))
    if getattr(args, "attention_backend", None) == "aspire" and cpu_platform.is_active():
        faults += filter(None, (_heads_do_not_divide(args),))
    if faults:
        stop(*faults)
    try:
        return original(cls, args)
    except BadArguments as found:
        stop(*found.faults)
    except (ValueError, AssertionError, NotImplementedError) as found:
        # SGLang's own checks of its arguments. Without a text only the traceback helps.
        if not speculative or not str(found) or args.log_level == "debug":
            raise
        stop(" ".join(str(found).split()))


def _config_faults(args: argparse.Namespace) -> list[str]:
    if getattr(args, "aspire_config", None) is None:
        return []
    try:
        load_config(args.aspire_config)
    except ConfigError as found:
        return list(found.faults)
    return []


def _missing_model(args: argparse.Namespace) -> str | None:
    path = Path(args.model_path).expanduser()
    local = path.is_absolute() or args.model_path.startswith((".", "~"))
    if local and not path.exists():
        return f"--model-path {args.model_path}: there is no such file or folder."
    return None


def _context_too_long(args: argparse.Namespace) -> str | None:
    wanted = args.context_length
    limit = _model_config(args).get("max_position_embeddings")
    if wanted is not None and limit is not None and wanted > limit:
        return f"--context-length {wanted}: the model holds at most {limit} positions."
    return None


def _heads_do_not_divide(args: argparse.Namespace) -> str | None:
    config = _model_config(args)
    queries: int = config.get("num_attention_heads") or args.tp_size
    keys: int = config.get("num_key_value_heads") or queries
    if queries % args.tp_size == 0 and keys % args.tp_size == 0:
        return None
    sizes = [str(n) for n in range(1, keys + 1) if keys % n == 0 and queries % n == 0]
    return (
        f"--tp-size {args.tp_size}: the model's {queries} query heads and {keys} KV heads cannot "
        f"be shared out equally; choose {' or '.join(sizes)}."
    )


def _model_config(args: argparse.Namespace) -> dict[str, Any]:
    """The model's ``config.json``, empty where the model is not a local folder."""
    file = Path(args.model_path).expanduser() / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def _port_in_use(args: argparse.Namespace) -> str | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host or "127.0.0.1", args.port))
        except OSError as error:
            return f"--port {args.port}: {error.strerror}; choose another port."
    return None


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
