"""Benchmarks: `make bench` runs pytest-benchmark, `python -m bench.sweep` measures a grid of sizes.

Terms used in this folder:
config: one setting of a benchmark, such as batch size, vocabulary and dtype.
grid: the configs that a sweep measures, in order of importance.
peer: an implementation that is timed, this project's own providers included.
turn: the draft tokens and seeds of one call; calls go through the turns of a config in a cycle, so
    that acceptance is averaged over several drafts.
byte floor: the bytes that this algorithm has to read (and, for a cache, to write): it normalises
    the rows that it tests and draws from whole rows (docs/benchmarks.md#the-byte-floor).
"""

import sys
from pathlib import Path

# The cases and the synthetic rows are those of the tests: `proofs`.
sys.path.append(str(Path(__file__).parents[1] / "tests"))
