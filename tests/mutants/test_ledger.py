"""The ledger lives with the code: every fault can still be planted, and its tests exist."""

import subprocess
from collections import Counter

import pytest
from mutants import ledger
from mutants.ledger import BROKEN, KILLED, SURVIVED, Mutant, Tree

LEDGER = ledger.read_all()
SOURCE = "def half(number):\n    return number / 2\n"
TESTS = """
import half


def test_of_four():
    assert half.half(4) == 2


def test_of_zero():
    assert half.half(0) == 0
"""


def mutant(before="number / 2", after="number / 3", killed_by=("test_half.py::test_of_four",)):
    return Mutant("room", "name", "The half is a third.", "half.py", before, after, killed_by)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of a repository with one function and two tests."""
    folder = tmp_path_factory.mktemp("repository")
    source = folder / "source"
    source.mkdir()
    (source / "half.py").write_text(SOURCE)
    (source / "test_half.py").write_text(TESTS)
    (source / "conftest.py").write_text("")
    (source / "pytest.ini").write_text("[pytest]\npythonpath = .\nmarkers = full\n")
    subprocess.run(["git", "init", "--quiet", source], check=True)
    made = Tree(folder / "copies", source)
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts():
    """File -> its text, of all in which a fault is planted."""
    paths = {one.file: ledger.ROOT / one.file for one in LEDGER}
    return {file: path.read_text() if path.is_file() else "" for file, path in paths.items()}


def test_every_fault_can_be_planted(texts):
    failed = []
    for one in LEDGER:
        try:
            one.planted(texts[one.file])
        except ValueError as error:
            failed.append(str(error))
    assert not failed
    assert not [one.name for one in LEDGER if one.before == one.after]


@pytest.mark.slow
def test_every_planted_fault_of_python_compiles(texts):
    """Any test would fail on a file that does not."""
    for one in LEDGER:
        if one.file.endswith(".py"):
            compile(one.planted(texts[one.file]), one.file, "exec")


def test_a_fault_is_written_into_the_file(tmp_path):
    (tmp_path / "half.py").write_text(SOURCE)
    mutant().plant(tmp_path)
    assert (tmp_path / "half.py").read_text() == SOURCE.replace("/ 2", "/ 3")
    for before, times in (("number / 2", 0), ("number", 2)):
        with pytest.raises(ValueError, match=f"must occur once in half.py, occurs {times} times"):
            mutant(before=before).plant(tmp_path)
    with pytest.raises(ValueError, match=r"must occur once in half.py, occurs 0 times"):
        mutant().plant(tmp_path / "elsewhere")


def test_the_tests_of_every_fault_exist():
    missing = [
        (one.name, test) for one in LEDGER for test in one.killed_by if not ledger.exists(test)
    ]
    assert not missing
    assert not ledger.exists("tests/mutants/test_ledger.py::test_of_five")  # it is only named here
    assert all(one.killed_by for one in LEDGER)


def test_every_name_occurs_once():
    assert [name for name, n in Counter(one.name for one in LEDGER).items() if n > 1] == []


@pytest.mark.build
def test_a_fault_that_its_tests_find_is_killed(tree):
    assert tree.outcome(mutant()) == (KILLED, "test_half.py::test_of_four")
    assert (tree.root / "half.py").read_text() == SOURCE


@pytest.mark.build
def test_a_fault_that_one_of_its_tests_does_not_find_survives(tree):
    state, which = tree.outcome(
        mutant(killed_by=["test_half.py::test_of_four", "test_half.py::test_of_zero"])
    )
    assert (state, which) == (SURVIVED, "test_half.py::test_of_zero passed")


@pytest.mark.build
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (mutant(before="number // 2"), "must occur once in half.py, occurs 0 times"),
        (mutant(before="number"), "must occur once in half.py, occurs 2 times"),
        (mutant(killed_by=["test_half.py::test_of_five"]), "no test ran"),
    ],
    ids=["absent", "ambiguous", "no test"],
)
def test_a_fault_that_shows_nothing_is_no_success(tree, fault, message):
    state, why = tree.outcome(fault)
    assert state == BROKEN
    assert message in why
