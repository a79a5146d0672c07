"""Loads the native module, and says so where it was not built."""

from __future__ import annotations

import importlib.util
import os
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path

if importlib.util.find_spec("numpy") is None:
    raise ImportError("specdec_host needs NumPy: pip install numpy")

# Only here: the finder of an editable install would take the module of another folder.
if PathFinder.find_spec("specdec_host._host", [str(Path(__file__).parent)]) is None:
    raise ImportError(
        f"_host{EXTENSION_SUFFIXES[0]} is missing beside specdec_host: it was not built for this "
        "Python. Build it: pip install --no-binary specdec-kernels specdec-kernels, or in the "
        "folder of the sources: pip install ."
    )

from specdec_host._host import (
    Corpus,
    SuffixAutomaton,
    bfloat16_from_dlpack,
    cpu_capability,
    digests,
    get_num_threads,
    kept_tokens,
    sample,
    set_num_threads,
    sort_suffixes,
    verify_chain,
    verify_tree,
)

__all__ = [
    "Corpus",
    "SuffixAutomaton",
    "bfloat16_from_dlpack",
    "cpu_capability",
    "digests",
    "get_num_threads",
    "kept_tokens",
    "sample",
    "set_num_threads",
    "sort_suffixes",
    "verify_chain",
    "verify_tree",
]

# The module reads this variable itself and ignores an unknown value, so it is checked here.
_CAPABILITIES = ("avx512", "avx2", "plain")
if os.environ.get("SPECDEC_CPU_CAPABILITY", "") not in ("", *_CAPABILITIES):
    raise ImportError(
        f"SPECDEC_CPU_CAPABILITY must be one of {', '.join(_CAPABILITIES)}, "
        f"got {os.environ['SPECDEC_CPU_CAPABILITY']}"
    )
