"""Write the generated parts of README.md: ``python bench/readme.py``."""

from __future__ import annotations

import sys
import typing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from aspire_sglang.config import AspireConfig

README = Path(__file__).resolve().parents[1] / "README.md"


def settings_table(model: type[BaseModel] = AspireConfig) -> str:
    """A Markdown table of every setting, its default and its meaning."""
    rows = ["| setting | default | meaning |", "| --- | --- | --- |"]
    for name, field in _leaves(model):
        rows.append(f"| `{name}` | `{_shown(field)}` | {field.description or ''} |")
    return "\n".join(rows)


def _leaves(model: type[BaseModel], prefix: str = "") -> typing.Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _shown(field: FieldInfo) -> str:
    return "-" if field.default is None else str(field.default).lower()


def with_block(text: str, name: str, content: str) -> str:
    """``text`` with the block between the markers ``name:begin`` and ``name:end`` replaced."""
    before, _, rest = text.partition(f"<!-- {name}:begin")
    opening, _, rest = rest.partition("-->")
    _, _, after = rest.partition(f"<!-- {name}:end -->")
    return f"{before}<!-- {name}:begin{opening}-->\n{content}\n<!-- {name}:end -->{after}"


if __name__ == "__main__":
    README.write_text(with_block(README.read_text(), "settings", settings_table()))
