"""Which tests of a product of parameters `make quick` and `make test` run.

`make test` runs so many that every pair of values occurs, `make quick` so many that every value
does, and `make test-all` the whole product. `@pytest.mark.covering(test=3)` at a test asks for
triples there. Triton's interpreter and the emulator of CUDA take most of the time, so of a test on
either `make test` runs one combination; `@pytest.mark.covering(emulated=1)` asks for every value.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

Row = tuple[str, ...]
# By the markers of other reasons.
LEFT_OUT = {
    "test": {"build", "full"},
    "quick": {"build", "full", "model", "simt", "slow", "triton"},
}
EMULATED = ("simt", "triton")


def covering(rows: Sequence[Row], strength: int) -> set[int]:
    """Indices of few rows that hold all values of `strength` columns that occur together in any."""
    strength = min(strength, len(rows[0]) if rows else 0)
    parts = [{(c, *(row[i] for i in c)) for c in _choices(row, strength)} for row in rows]
    missing = set().union(*parts)
    waiting = [(-len(part), i) for i, part in enumerate(parts)]
    heapq.heapify(waiting)
    chosen = set()
    while missing:
        _, i = heapq.heappop(waiting)
        gain = len(parts[i] & missing)  # never more than it was when it was put there
        if waiting and gain < -waiting[0][0]:
            heapq.heappush(waiting, (-gain, i))
            continue
        missing -= parts[i]
        chosen.add(i)
    return chosen


def _choices(row: Row, strength: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(len(row)), strength)


def leave_out(items: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """(test, marker) of what is left out: "full" by `make test`, "slow" by `make quick`.

    The tests have their other markers already.
    """
    functions = defaultdict(list)
    for item in sorted(items, key=lambda item: item.nodeid):  # the given order may be random
        if hasattr(item, "callspec") and not _skipped(item):
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        mark = tests[0].get_closest_marker("covering")
        strengths = {"test": 2, "quick": 1, "emulated": 0, **(mark.kwargs if mark else {})}
        remaining = tests
        for lane, marker in (("test", "full"), ("quick", "slow")):
            groups = defaultdict(list)
            for test in remaining:
                markers = {m.name for m in test.iter_markers()}
                if not LEFT_OUT[lane] & markers:
                    emulator = next((name for name in EMULATED if name in markers), None)
                    groups[emulator].append(test)
            remaining = []
            for emulator, group in groups.items():
                strength = strengths["emulated" if emulator else lane]
                kept = covering([_row(test) for test in group], strength)
                yield from ((test, marker) for i, test in enumerate(group) if i not in kept)
                remaining += [test for i, test in enumerate(group) if i in kept]


def _row(item: Any) -> Row:
    """The ids of the values of its parameters; names that are given together have one.

    The public ``indices`` number whole combinations, not values.
    """
    return tuple(item.callspec._idlist)


def _skipped(item: Any) -> bool:
    conditions = [mark.args for mark in item.iter_markers("skipif")]
    return any(args and args[0] is True for args in conditions) or any(item.iter_markers("skip"))
