"""Every test that the documents name exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QA = ROOT / "docs" / "qa.md"
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py::[\w:]+)`", QA.read_text())))


def functions(path: Path) -> set[str]:
    """Names of the tests of a file, those of a class as ``Class::test``."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            inner = (child for child in node.body if isinstance(child, ast.FunctionDef))
            found |= {f"{node.name}::{child.name}" for child in inner}
    return found


@pytest.mark.parametrize("name", NAMED)
def test_named_tests_exist(name):
    path, _, function = name.partition("::")
    assert function in functions(ROOT / path)


def test_every_row_names_a_test_or_says_that_it_is_not_done():
    rows = [line for line in QA.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if not row.startswith(("| ---", "| fault", "| wish"))]
    assert len(rows) > 40
    for row in rows:
        assert "`tests/" in row or "| not done:" in row, row
