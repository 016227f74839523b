"""Fitted cost models on disk, each tied to the machine and settings it was measured with."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aspire_sglang.speculation.cost_model import CostModel, FitQuality

_FORMAT = 1


@dataclass(frozen=True)
class CostKey:
    """Everything a fit depends on. A fit is used only where every field is equal.

    Attributes:
        device: accelerator or CPU name.
        model: model path or name.
        tp_size: tensor-parallel ranks.
        dtype: weights' and KV's type.
        page_size: tokens per KV page.
        budget: the draft context's budget, as configured.
        buckets: token counts that forwards are padded to.
        attention_implementation: which attention kernel runs.
        sglang_version: version of SGLang.
        extra: anything else a step's time depends on, by name.
    """

    device: str
    model: str
    tp_size: int
    dtype: str
    page_size: int
    budget: str
    buckets: tuple[int, ...]
    attention_implementation: str
    sglang_version: str
    extra: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """The key as JSON values, ``extra`` entries as ``extra.NAME``."""
        values = asdict(self)
        values["buckets"] = list(self.buckets)
        extra = values.pop("extra")
        return values | {f"extra.{name}": value for name, value in extra.items()}


class CostKeyMismatch(ValueError):
    """A stored fit belongs to another machine or to other settings.

    Attributes:
        differences: for each differing field, its (stored, wanted) values; a field that one side
            lacks has the value None there.
    """

    def __init__(self, path: Path, differences: dict[str, tuple[Any, Any]]) -> None:
        self.differences = differences
        listed = "; ".join(
            f"{name}: stored {stored!r}, wanted {wanted!r}"
            for name, (stored, wanted) in differences.items()
        )
        super().__init__(f"cost model {path} was fitted for something else ({listed})")


def save_cost_model(path: str | os.PathLike[str], key: CostKey, model: CostModel) -> None:
    """Write ``model``, fitted under ``key``, to ``path`` as JSON, all of it or nothing.

    Raises:
        ValueError: the key names other buckets than the model has.
        OSError: the file cannot be written.
    """
    if model.buckets != key.buckets:
        raise ValueError(f"the model has buckets {model.buckets}, its key {key.buckets}")
    content = {
        "format": _FORMAT,
        "key": key.fields(),
        "seconds": {
            "fixed": model.fixed,
            "per_token": model.per_token,
            "per_kv": model.per_kv,
            "per_pair": model.per_pair,
        },
        "quality": None if model.quality is None else asdict(model.quality),
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Another server may be reading the file: it must see the old content or the new.
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(target)


def load_cost_model(path: str | os.PathLike[str], key: CostKey) -> CostModel:
    """Read the model that ``save_cost_model`` wrote under an equal key.

    Raises:
        FileNotFoundError: no such file.
        CostKeyMismatch: the file was fitted under another key; names each field that differs.
        ValueError: the content is not a cost model.
    """
    source = Path(path)
    try:
        content = json.loads(source.read_text(encoding="utf-8"))
        if content["format"] != _FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {_FORMAT}")
        stored = dict(content["key"])
        quality = content["quality"]
        model = CostModel(
            **{name: float(value) for name, value in content["seconds"].items()},
            buckets=tuple(int(bucket) for bucket in stored["buckets"]),
            quality=None if quality is None else FitQuality(**quality),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"{source} is not a readable cost model ({type(error).__name__}: {error}); "
            "delete it to have it fitted again"
        ) from error
    wanted = key.fields()
    differences = {
        name: (stored.get(name), wanted.get(name))
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    }
    if differences:
        raise CostKeyMismatch(source, differences)
    return model
