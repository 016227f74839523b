"""The prompts of a calibration: the user's texts, or manuals that every Python has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aspire_sglang.cli.calibrate import Plan
from aspire_sglang.cli.texts import encode, real_texts


def load_plan(
    model: str,
    server_args: Sequence[str],
    files: Sequence[Path],
    length: int,
    texts: int,
    new_tokens: int,
    gamma: int,
    batch: int,
) -> Plan:
    """Read the model's tokenizer and shape, and cut the prompts.

    Raises:
        ValueError: the model cannot be read, a text is missing or too short.
    """
    from transformers import AutoConfig, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as fault:
        raise ValueError(f"cannot read the model {model}: {fault}") from None
    if files:
        prompts = _cut_files(tokenizer, files, length, texts)
    else:
        cut = real_texts(tokenizer, [length] * texts, kinds=("continuation", "code", "copy"))
        prompts = [prompt.input_ids for prompt in cut]
    layers = getattr(config, "text_config", config).num_hidden_layers
    return Plan(model, tuple(server_args), tuple(prompts), layers, gamma, new_tokens, batch)


def _cut_files(
    tokenizer: object, files: Sequence[Path], length: int, texts: int
) -> list[tuple[int, ...]]:
    """Consecutive prompts from the files, file after file."""
    prompts: list[tuple[int, ...]] = []
    for file in files:
        try:
            ids = encode(tokenizer, file.read_text(errors="replace"))  # type: ignore[arg-type]
        except OSError as fault:
            raise ValueError(f"cannot read {file}: {fault.strerror}") from None
        prompts += [
            tuple(ids[first : first + length]) for first in range(0, len(ids) - length + 1, length)
        ]
    if not prompts:
        raise ValueError(f"no text holds {length} tokens; give longer ones or a smaller --length")
    return prompts[:texts]
