"""Loads the native module, and says so where it was not built."""

from __future__ import annotations

from importlib.machinery import PathFinder
from pathlib import Path

# Only here: the finder of an editable install would take the module of another folder.
if PathFinder.find_spec("specdec_host._host", [str(Path(__file__).parent)]) is None:
    raise ImportError(
        "_host is missing beside specdec_host: the native module was not built for this Python. "
        "Install with: pip install --no-build-isolation ."
    )

from specdec_host._host import Corpus, SuffixAutomaton, sort_suffixes

__all__ = ["Corpus", "SuffixAutomaton", "sort_suffixes"]
