"""Plants each fault of the ledger and runs the tests that must find it.

make mutants                              # all of them
make mutants ARGS='chain tree-rules'      # rooms, or names of mutants
make mutants ARGS='my-fault --by tests/hf/test_seeds.py'    # which test finds it?
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mutants.ledger import (  # as the tests import it
    BROKEN,
    COMPILED,
    KILLED,
    ROOT,
    SURVIVED,
    Mutant,
    Tree,
    outside_of_lanes,
    over_trees,
    read,
    read_all,
)


def main() -> int:
    """Returns the number of mutants that were not killed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("which", nargs="*", help="rooms or names; by default all")
    parser.add_argument("--ledger", type=Path, help="another file of mutants")
    parser.add_argument("--by", nargs="+", default=[], help="run these tests in place of the named")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with its own tree")
    parser.add_argument("--seconds", type=float, default=120, help="longest time of a test")
    args = parser.parse_args()
    ledger = read(args.ledger) if args.ledger else read_all()
    chosen = [m for m in ledger if not args.which or {m.room, m.name} & {*args.which}]
    unknown = {*args.which} - {name for m in ledger for name in (m.room, m.name)}
    if unknown:
        parser.error(f"the ledger has no {', '.join(sorted(unknown))}")
    try:
        outside = [] if args.by else outside_of_lanes(chosen)
    except ValueError as error:
        parser.error(str(error))
    for test in outside:
        print(f"{BROKEN}: neither make test nor make more TASK=test-build runs {test}", flush=True)
    # What needs a build begins first, because it takes longest, and room by room: a build compiles
    # again what the fault before had changed.
    chosen.sort(key=lambda mutant: (not COMPILED.match(mutant.at), mutant.at))

    def work(tree: Tree, mutant: Mutant) -> tuple[Mutant, str]:
        began = time.monotonic()
        state, which = tree.outcome(mutant, args.by, args.seconds)
        took = time.monotonic() - began
        print(f"{state} {mutant.room} {mutant.name} {took:.0f} s: {which}", flush=True)
        return mutant, state

    found = list(over_trees(work, chosen, args.jobs))
    rooms = Counter((mutant.room, state) for mutant, state in found)
    for room in sorted({mutant.room for mutant, _ in found}):
        counts = (f"{rooms[room, state]} {state}" for state in (KILLED, SURVIVED, BROKEN))
        print(f"{room}: {', '.join(counts)}")
    alive = [mutant.name for mutant, state in found if state != KILLED]
    print(f"{len(found)} mutants of {ROOT.name}, {len(alive)} not killed {' '.join(alive)}".strip())
    return int(bool(alive or outside) or len(found) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
