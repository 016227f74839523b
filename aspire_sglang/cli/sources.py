"""Real documents that every Python installation carries: prose and code for the benchmarks.

Nothing is downloaded and nothing is generated. Debian packages, pyenv and uv builds split the
standard library differently (``test`` and ``idlelib`` may be absent), so only modules that all of
them ship are named here. Descriptions of installed packages are an addition where they exist.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

# Modules whose docstrings read like a manual. None of them is also used as code.
DOCUMENTED_MODULES = (
    "_pydecimal collections contextlib datetime difflib doctest fractions heapq inspect ipaddress "
    "logging pickletools random re statistics textwrap threading turtle typing "
    "unittest.case unittest.mock"
)

CODE_MODULES = (
    "argparse ast asyncio.base_events asyncio.selector_events asyncio.sslproto asyncio.streams "
    "asyncio.tasks asyncio.unix_events bdb calendar concurrent.futures.process configparser "
    "copy csv dataclasses dis email.header email.message enum filecmp ftplib functools gzip "
    "http.client http.cookiejar http.server imaplib "
    "json.decoder json.encoder locale logging.config "
    "logging.handlers mailbox multiprocessing.connection multiprocessing.managers "
    "multiprocessing.pool optparse pathlib pdb pickle platform plistlib pprint pstats pydoc "
    "selectors shelve shutil smtplib socket socketserver sqlite3.dump ssl subprocess tarfile "
    "tempfile trace traceback urllib.parse urllib.request uuid weakref xml.dom.minidom "
    "xml.etree.ElementTree xml.sax.saxutils xmlrpc.client zipfile"
)

DESCRIBED_PACKAGES = (
    "aiohttp einops fastapi huggingface-hub interegular llguidance numpy openai outlines pillow "
    "safetensors sentencepiece sglang tiktoken torch torchao torchvision "
    "transformers uvicorn xgrammar"
)

SHORTEST_DOCUMENT = 1500


@dataclass(frozen=True)
class Document:
    """One text and where it comes from."""

    title: str
    text: str


@functools.cache
def prose() -> tuple[Document, ...]:
    """Documentation: the language reference, docstrings, and descriptions of packages."""
    manuals = (_docstrings(module) for module in DOCUMENTED_MODULES.split())
    packages = (_description(package) for package in DESCRIBED_PACKAGES.split())
    return _long_enough(*_reference_topics(), *manuals, *packages)


@functools.cache
def code() -> tuple[Document, ...]:
    """Source files of the standard library."""
    return _long_enough(*(Document(f"source of {m}", _source(m)) for m in CODE_MODULES.split()))


def _long_enough(*documents: Document) -> tuple[Document, ...]:
    return tuple(d for d in documents if len(d.text) >= SHORTEST_DOCUMENT)


def _reference_topics() -> list[Document]:
    """Topics of the language reference, without those that are a part of a longer one."""
    kept: list[Document] = []
    for name, text in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        # The heading differs between a topic and its copy inside a chapter; the middle does not.
        middle = text[len(text) // 3 : len(text) // 3 + 200]
        if not any(middle in longer.text for longer in kept):
            kept.append(Document(f"Python reference, {name}", text.strip()))
    return kept


def _source(module: str) -> str:
    """Text of a module's file, found without importing it; empty if there is none."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            return ""
        # importlib.util.decode_source honours coding lines and universal newlines.
        return importlib.util.decode_source(Path(spec.origin).read_bytes())
    except (ImportError, OSError, UnicodeDecodeError):
        return ""


def _docstrings(module: str) -> Document:
    """All docstrings of a module in the order of the file, each under the name it documents."""
    lines: list[str] = []

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{path}.{child.name}"
                if text := ast.get_docstring(child):
                    lines.append(f"{name}\n\n{text}\n")
                visit(child, name)

    tree = ast.parse(_source(module))
    if text := ast.get_docstring(tree):
        lines.append(f"{module}\n\n{text}\n")
    visit(tree, module)
    return Document(f"documentation of {module}", "\n".join(lines))


def _description(package: str) -> Document:
    try:
        text = importlib.metadata.metadata(package).json.get("description", "")
    except importlib.metadata.PackageNotFoundError:
        text = ""
    return Document(f"description of {package}", str(text))
