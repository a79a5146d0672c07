"""The ledger lives with the code: every fault can still be planted, and its tests exist."""

import re
import subprocess
from collections import Counter

import pytest
from mutants import ledger
from mutants.ledger import BROKEN, KILLED, SURVIVED, Mutant, Tree

LEDGER = ledger.read_all()
SOURCE = """
LEAST: float = 1e-4


class Half:
    def of(self, number):
        return number / 2 if number > LEAST else 0.0  # exact


def twice(number):
    if not number:
        return 0
    if number:
        number = number + number
    return number
"""
TESTS = """
from halves import Half


def test_of_four():
    assert Half().of(4) == 2


def test_of_zero():
    assert Half().of(0) == 0
"""
NATIVE = """
struct Pair {
  Pair(int a) : first(a), second{a} { first += 1; }
  int sum() const { return first /* of two */ + second; }
  int first, second;
};
inline int total(const Pair& p) { return p.sum(); }
template <int kN> int sum(int a) { return total(Pair(a)) > 1 ? total(Pair(kN)) : sum(a); }
"""


def mutant(at="source::Half.of", swap=("number / 2", "number / 3"), drop="", by=("test_of_four",)):
    return Mutant("room", "name", "The half is a third.", at, by, swap, "" if swap else drop)


@pytest.fixture
def root(tmp_path):
    """A repository with functions of both languages, and three tests."""
    for file, text in {
        "source/halves.py": SOURCE,
        "source/pair.h": NATIVE,
        "tests/test_half.py": TESTS,
        "tests/deep/test_other.py": "def test_of_zero():\n    assert True\n",
        "pytest.ini": "[pytest]\npythonpath = source\nmarkers = full\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    return tmp_path


def test_every_fault_can_be_planted_and_its_tests_exist():
    failed = []
    for one in LEDGER:
        try:
            path, text = one.planted()
            if path.suffix == ".py":
                compile(text, path, "exec")  # any test would fail on a file that does not
            for test in one.by:
                ledger.id_of(test)
        except (ValueError, SyntaxError) as error:
            failed.append(f"{one.name}: {error}")
    assert not failed
    assert [name for name, n in Counter(one.name for one in LEDGER).items() if n > 1] == []


@pytest.mark.parametrize(
    ("at", "old", "new"),
    [
        ("source::Half.of", "number / 2", "number / 3"),
        ("source::of", "number/\n2", "0"),
        ("source::twice", "number = number + number", "pass"),
        ("source::LEAST", "1e-4", "0"),
        ("source/halves.py", "not number", "number"),
        ("source::sum", "+ second", "- second"),
        ("source::Pair", "first += 1;", ""),
        ("source::sum", "total(Pair(kN))", "0"),
    ],
)
def test_a_fault_is_planted_in_its_function(root, at, old, new):
    path, text = mutant(at, (old, new) if new not in ("", "pass") else (), old).planted(root)
    assert text == path.read_text().replace(
        " ".join(old.split()).replace("number/ 2", "number / 2"), new
    )


@pytest.mark.parametrize(
    ("at", "old", "message"),
    [
        ("source::Half.twice", "number", "nothing is defined as source::Half.twice"),
        ("source::half", "number", "nothing is defined as source::half"),
        ("source::Half.of", "number // 2", "'number // 2' occurs 0 times in source::Half.of"),
        ("source::Half.of", "numb", "'numb' occurs 0 times"),
        ("source::Half.of", "number", "'number' occurs 3 times in source::Half.of"),
        ("source::sum", "return", "'return' occurs 2 times in source::sum, of which there are 2"),
        ("source::total", "exact", "'exact' occurs 0 times"),
    ],
)
def test_a_fault_that_cannot_be_planted_says_why(root, at, old, message):
    with pytest.raises(ValueError, match=re.escape(f"name: {message}")):
        mutant(at, (old, "0")).planted(root)


def test_a_test_is_found_by_its_name_wherever_it_lies(root):
    assert ledger.id_of("test_of_four[1-2]", root) == "tests/test_half.py::test_of_four[1-2]"
    assert ledger.id_of("deep::test_of_zero", root) == "tests/deep/test_other.py::test_of_zero"
    assert ledger.id_of("half::test_of_zero", root) == "tests/test_half.py::test_of_zero"
    with pytest.raises(ValueError, match="test_of_zero is in 2 files"):
        ledger.id_of("test_of_zero", root)
    for name in ("test_of_five", "deep::test_of_four"):
        with pytest.raises(ValueError, match=f"{name} is no test"):
            ledger.id_of(name, root)


@pytest.mark.parametrize(
    "change", ['swap = ["a", "a"]', 'swap = ["a", "b"]\ndrop = "a"', "", 'drop = "a"\nby = []'],
    ids=["equal", "both", "neither", "no test"],
)  # fmt: skip
def test_an_entry_without_one_change_and_a_test_is_refused(tmp_path, change):
    by = "" if "by" in change else 'by = "test_x"'
    (tmp_path / "room.toml").write_text(f'[name]\nfault = "It is."\nat = "csrc::f"\n{by}\n{change}')
    with pytest.raises(ValueError, match="name needs a test, and one of swap and drop"):
        ledger.read(tmp_path / "room.toml")


@pytest.mark.build
def test_what_becomes_of_a_fault(root, tmp_path_factory):
    subprocess.run(["git", "init", "--quiet", root], check=True)
    tree = Tree(tmp_path_factory.mktemp("copies"), root)
    four, zero = "tests/test_half.py::test_of_four", "tests/test_half.py::test_of_zero"
    assert tree.outcome(mutant()) == (KILLED, four)
    assert (tree.root / "source/halves.py").read_text() == SOURCE
    assert tree.outcome(mutant(by=["test_of_four", "half::test_of_zero"])) == (
        SURVIVED, f"{zero} passed",
    )  # fmt: skip
    assert tree.outcome(mutant(), by=["tests/deep"]) == (SURVIVED, "tests/deep passed")
    for one, message in (
        (mutant(by=["test_of_four[5]"]), "no test ran"),
        (mutant(by=["test_of_five"]), "test_of_five is no test"),
        (mutant(swap=("number // 2", "0")), "occurs 0 times"),
    ):
        state, why = tree.outcome(one)
        assert (state, message in why) == (BROKEN, True), why
    tree.close()
