"""ASPIRE for SGLang: lossless self-speculative decoding in which every request drafts or
verifies on its own schedule inside one forward.

Importing this package imports neither torch nor sglang; SGLang reaches it through the entry
points ``sglang.srt.plugins`` and ``sglang.srt.platforms``.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("aspire-sglang")
except PackageNotFoundError:  # a source tree on PYTHONPATH, not installed
    __version__ = "0+unknown"
