"""Mutants that cosmic-ray makes of the loop and its guests: a sample, against the covering tests.

make more TASK=mutation                                    # 500 mutants, as every night
make more TASK=mutation ARGS='--size 40 --under loop'      # of the files of a folder
make more TASK=mutation ARGS='--again FILE'                # the survivors of a record alone

First the tests run once, to learn which lines each of them covers and how long it takes. Then a
mutant meets the tests that cover its line, the quickest first. Those of equivalent/*.toml meet
none: an entry there has a function and a change as in the ledger, or `each` of several, and says
why no test can show it. The record has the score, and each survivor as a change.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import functools
import itertools
import json
import random
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from mutants.ledger import ROOT, Mutant, Tree, over_trees
from setuptools.compat.py310 import tomllib

from bench.results import processor

PACKAGES = ("specdec_hf", "specdec_papers", "specdec_lab", "specdec_serve")  # in python/
TESTS = ["tests/hf", "tests/analysis", "tests/compat"]
LANE = "not full and not simt and not triton"
# Changes that somebody could make. cosmic-ray has more, most of which end in a TypeError.
OPERATORS = [
    "AddNot", "ExceptionReplacer", "NumberReplacer", "ZeroIterationForLoop",
    "ReplaceAndWithOr", "ReplaceOrWithAnd", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue",
    "ReplaceBreakWithContinue", "ReplaceContinueWithBreak",
    "ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub",
    *(f"ReplaceBinaryOperator_{pair}" for pair in (
        "Add_Sub", "Sub_Add", "Mul_FloorDiv", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul",
        "BitAnd_BitOr", "BitOr_BitAnd", "LShift_RShift", "RShift_LShift",
    )),
    *(f"ReplaceComparisonOperator_{pair}" for pair in (
        "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt", "Lt_Gt", "Gt_Lt", "Eq_NotEq", "NotEq_Eq",
        "Is_IsNot", "IsNot_Is",
    )),
]  # fmt: skip
# Seconds of covering tests that a mutant meets at first, and where these pass.
BUDGETS = (10.0, 90.0)
LONGEST = 60.0  # seconds of a single test, after which the mutant counts as killed
KILLED, SURVIVED, UNCOVERED, EQUIVALENT = "killed", "survived", "uncovered", "equivalent"


class Site(NamedTuple):
    """A place where an operator of cosmic-ray applies.

    Attributes:
        file: below the root.
        line, column: of the place.
        operator: its name.
        occurrence: which of the places of this operator in the file.
    """

    file: str
    line: int
    column: int
    operator: str
    occurrence: int


def sites(file: str) -> Iterator[Site]:
    """The places of a file whose change a call could show."""
    from cosmic_ray.ast import ast_nodes, get_ast  # noqa: PLC0415  # only this task installs it
    from cosmic_ray.plugins import get_operator  # noqa: PLC0415

    text = (ROOT / file).read_text()
    nodes, outside = list(ast_nodes(get_ast(text))), unread(text)
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        places = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            if not any(begin <= place < end for begin, end in outside):
                yield Site(file, *place, name, occurrence)


def mutated(site: Site, text: str) -> str:
    """The text of a file with the fault."""
    from cosmic_ray.mutating import mutate_code  # noqa: PLC0415
    from cosmic_ray.plugins import get_operator  # noqa: PLC0415

    changed = mutate_code(text, get_operator(f"core/{site.operator}")(), site.occurrence)
    assert changed is not None, site
    return str(changed)


def equivalents() -> list[Mutant]:
    """The mutants that no test can show, with the reason as their fault."""
    files = sorted(Path(__file__).parent.glob("equivalent/*.toml"))
    entries = [(path, one) for path in files for one in tomllib.loads(path.read_text()).items()]
    return [
        Mutant(path.stem, name, one["why"], at, by=(), swap=swap)
        for path, (name, one) in entries
        for at, *swap in one.get("each") or [[one["at"], *one["swap"]]]
    ]


def changed_tree(file: Path, text: str) -> tuple[Path, str]:
    """What two changes of a file have in common if they differ in layout only."""
    return file, ast.dump(ast.parse(text))


def is_a_program(site: Site) -> bool:
    """Whether the changed file can be read: cosmic-ray also changes the `*` of a signature."""
    try:
        ast.parse(mutated(site, (ROOT / site.file).read_text()))
    except SyntaxError:
        return False
    return True


def unread(text: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a change shows nothing: what only type checkers read, decorators, and `strict=`."""
    found: list[ast.expr | ast.stmt | ast.keyword | None] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.AnnAssign | ast.arg):
            found.append(node.annotation)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found += [*node.decorator_list, getattr(node, "returns", None)]
        elif (isinstance(node, ast.keyword) and node.arg == "strict") or (
            isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ):
            found.append(node)
    return [
        ((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0))
        for part in found
        if part is not None
    ]


def statements(text: str) -> dict[int, int]:
    """Line -> the first line of the innermost statement around it."""
    lines: dict[int, int] = {}
    for node in ast.walk(ast.parse(text)):  # from the outermost to the innermost
        if isinstance(node, ast.stmt):
            lines |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), node.lineno)
    return lines


class Coverage:
    """Which tests run a line, and how long each takes."""

    def __init__(self, folder: Path) -> None:
        from coverage import CoverageData  # noqa: PLC0415

        self._data = CoverageData(str(folder / "coverage"))
        self._data.read()
        cases = ET.parse(folder / "times.xml").iter("testcase")
        self._seconds = {
            f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}":
            float(case.get("time", 0)) for case in cases
        }  # fmt: skip

    def of(self, site: Site) -> list[str]:
        """The tests that run the line of a site, or if that runs on import, any line of the file.

        The quickest come first; there are none where no test runs it.
        """
        by_line = self._data.contexts_by_lineno(str(ROOT / site.file))
        first = statements((ROOT / site.file).read_text()).get(site.line, site.line)
        contexts = {*by_line.get(site.line, ()), *by_line.get(first, ())}
        if "" in contexts:
            contexts = {context for several in by_line.values() for context in several}
        tests = {context.rpartition("|")[0] for context in contexts - {""}}
        return sorted(tests & self._seconds.keys(), key=lambda test: (self._seconds[test], test))

    def within(self, tests: Sequence[str], seconds: float) -> list[str]:
        """As many of the first tests as run in this time, and at least one."""
        chosen, spent = [], 0.0
        for test in tests:
            spent += self._seconds[test]
            if chosen and spent > seconds:
                break
            chosen.append(test)
        return chosen


def measure(folder: Path, jobs: int) -> None:
    """Run the tests once, with the lines that each covers."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "coveragerc"
    source = ",".join(str(ROOT / "python" / package) for package in PACKAGES)
    settings.write_text(f"[run]\ndata_file = {folder / 'coverage'}\nsource = {source}\n")
    subprocess.run(
        [
            sys.executable, "-m", "pytest", f"-n{jobs}", "-p", "no:randomly", "-m", LANE,
            f"--junitxml={folder / 'times.xml'}", "--cov", f"--cov-config={settings}",
            "--cov-context=test", "--cov-report=", *TESTS,
        ],
        cwd=ROOT, check=True,
    )  # fmt: skip


def outcome(
    tree: Tree, site: Site, coverage: Coverage, known: Mapping[tuple[Path, str], str]
) -> dict[str, Any]:
    """What became of a mutant: its change, and the test that killed it or how many passed.

    Args:
        known: for changed trees, why no test can show them.
    """
    path = tree.root / site.file
    text = (ROOT / site.file).read_text()
    fault = mutated(site, text)
    lines = difflib.unified_diff(text.splitlines(), fault.splitlines(), n=0, lineterm="")
    change = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    found = {"place": f"{site.file}:{site.line}", "change": change, **site._asdict()}
    if why := known.get(changed_tree(ROOT / site.file, fault)):
        return found | {"state": EQUIVALENT, "why": why}
    tests = coverage.of(site)
    if not tests:
        return found | {"state": UNCOVERED}
    try:
        path.write_text(fault)
        ran: list[str] = []
        for budget in BUDGETS:
            more = [test for test in coverage.within(tests, budget) if test not in ran]
            failed, which = tree.fails(more, LONGEST) if more else (False, "")
            if failed:
                return found | {"state": KILLED, "by": which}
            ran += more
        return found | {"state": SURVIVED, "passed": len(ran)}
    except RuntimeError:  # no test can be imported
        return found | {"state": KILLED, "by": "import"}
    finally:
        path.write_text(text)


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The score, in all and by the folders of the packages, and the survivors."""
    rooms: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        rooms["/".join(one["file"].split("/")[1:3])][one["state"]] += 1
    total = sum(rooms.values(), Counter())
    shown = total.total() - total[EQUIVALENT]  # what a test can show
    alive = [one for one in found if one["state"] in (SURVIVED, UNCOVERED)]
    return {
        "mutants": total.total(), **total, "score": round(total[KILLED] / max(1, shown), 4),
        "rooms": {room: dict(counts) for room, counts in sorted(rooms.items())},
        "survivors": sorted(alive, key=lambda one: one["place"]),
    }  # fmt: skip


def main() -> int:
    """Returns 1 if nothing was run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=500, help="how many mutants")
    parser.add_argument("--seed", type=int, default=1, help="which")
    parser.add_argument("--under", default="", help="a folder or file of python/")
    parser.add_argument("--again", type=Path, help="a record: run its survivors")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with its own tree")
    parser.add_argument("--coverage", type=Path, help="folder of an earlier run, which is read")
    parser.add_argument("--record", type=Path, help="file to write; by default in bench/results")
    args = parser.parse_args()
    folder = args.coverage or ROOT / "build/mutation"
    if not args.coverage:
        measure(folder, args.jobs)
    if args.again:
        old = json.loads(args.again.read_text())["survivors"]
        again = (Site(*(one[name] for name in Site._fields)) for one in old)
        chosen = [site for site in again if is_a_program(site)]
    else:
        files = (path for p in PACKAGES for path in (ROOT / "python" / p).rglob("*.py"))
        names = sorted(path.relative_to(ROOT).as_posix() for path in files)
        every = [s for n in names if n.startswith(f"python/{args.under}") for s in sites(n)]
        drawn = random.Random(args.seed).sample(every, len(every))
        chosen = list(itertools.islice(filter(is_a_program, drawn), args.size))
        print(f"{len(chosen)} of {len(every)} mutants", flush=True)
    coverage, found = Coverage(folder), []
    head = ["git", "describe", "--always", "--dirty", "--abbrev=8"]
    commit = subprocess.run(head, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    record = args.record or ROOT / f"bench/results/mutation-{date.today():%Y%m%d}.json"
    about = {
        "commit": commit.stdout.strip(), "date": f"{date.today()}", "seed": args.seed,
        "cpu": processor(), "under": args.under,
    }  # fmt: skip
    known = {changed_tree(*one.planted()): one.fault for one in equivalents()}
    work = functools.partial(outcome, coverage=coverage, known=known)
    for one in over_trees(work, chosen, args.jobs):
        found.append(one)
        reason = one.get("by") or one.get("why", "")
        print(one["state"], one["place"], one["operator"], reason, flush=True)
        record.write_text(json.dumps({**about, **summary(found)}, indent=1) + "\n")
    totals = summary(found)
    print({name: value for name, value in totals.items() if name not in ("rooms", "survivors")})
    return int(not found)


if __name__ == "__main__":
    sys.exit(main())
