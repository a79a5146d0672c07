"""The sample of mutants: where they are made, which tests they meet, and what is counted."""

import textwrap

import pytest
from mutants import sample
from mutants.sample import EQUIVALENT, KILLED, SURVIVED, UNCOVERED, Site

SITE = Site("half.py", 2, 11, "ReplaceBinaryOperator_Div_Mul", 0)
SOURCE = "def half(number):\n    return number / 2\n"


@pytest.mark.build
def test_what_no_call_can_show_is_left_as_it_is():
    text = textwrap.dedent("""
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            size = 1
        @cached(size=2)
        def f(a: Literal[3] = 4) -> Literal[5]:
            b: Literal[6] = 7
            return zip(a, b, strict=8)
    """)
    lines, ranges = text.splitlines(), sample.unread(text)
    numbers = {
        int(char): (row + 1, column)
        for row, line in enumerate(lines) for column, char in enumerate(line) if char.isdigit()
    }  # fmt: skip
    shown = {n for n, at in numbers.items() if not any(begin <= at < end for begin, end in ranges)}
    assert shown == {4, 7}


@pytest.mark.build
def test_a_line_belongs_to_the_innermost_statement():
    assert sample.statements("if a:\n    b = [\n        1,\n    ]\nc\n") == {
        1: 1, 2: 2, 3: 2, 4: 2, 5: 5
    }  # fmt: skip


class Covering:
    """Of a line: each takes six seconds, so that the first round has one and the second all."""

    def __init__(self, *names):
        self.names = names

    def of(self, site):
        return list(self.names)

    def within(self, tests, seconds):
        return tests[: max(1, int(seconds / 6))]


class Folder:
    """A copy of the repository, where the tests that kill are known."""

    def __init__(self, root, kill=(), error=None):
        self.root, self.kill, self.error, self.rounds = root, kill, error, []

    def fails(self, tests, seconds):
        assert "number * 2" in (self.root / "half.py").read_text()
        self.rounds.append(tests)
        if self.error:
            raise self.error
        found = [test for test in tests if test in self.kill]
        return bool(found), found[0] if found else ""


@pytest.mark.build
@pytest.mark.parametrize(
    ("tests", "kill", "error", "state", "rounds"),
    [
        ([], [], None, UNCOVERED, []), (["quick", "slow"], ["quick"], None, KILLED, [["quick"]]),
        (["quick", "slow"], ["slow"], None, KILLED, [["quick"], ["slow"]]),
        (["quick", "slow"], [], None, SURVIVED, [["quick"], ["slow"]]),
        (["quick"], [], RuntimeError("no test ran"), KILLED, [["quick"]]),
    ],
    ids=["no test", "the first", "a later one", "none", "no import"],
)  # fmt: skip
def test_a_mutant_meets_the_tests_of_its_line(
    tmp_path, monkeypatch, tests, kill, error, state, rounds
):
    (tmp_path / "half.py").write_text(SOURCE)
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    monkeypatch.setattr(sample, "mutated", lambda site, text: text.replace("/", "*"))
    folder = Folder(tmp_path, kill, error)
    found = sample.outcome(folder, SITE, Covering(*tests), known={})
    assert (found["state"], folder.rounds) == (state, rounds)
    assert found["change"] == ["-    return number / 2", "+    return number * 2"]
    assert (tmp_path / "half.py").read_text() == SOURCE


@pytest.mark.build
def test_a_mutant_that_no_test_can_show_meets_none(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text(SOURCE)
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    monkeypatch.setattr(sample, "mutated", lambda site, text: text.replace("/", "*"))
    other_layout = SOURCE.replace("number / 2", "(number  *  2)")
    folder, known = Folder(tmp_path), {sample.changed_tree(tmp_path / "half.py", other_layout): "x"}
    found = sample.outcome(folder, SITE, Covering("quick"), known)
    assert (found["state"], found["why"], folder.rounds) == (EQUIVALENT, "x", [])


def test_what_no_test_can_show_can_be_made():
    for one in sample.equivalents():
        path, text = one.planted()
        assert sample.changed_tree(path, text) != sample.changed_tree(path, path.read_text())


@pytest.mark.build
def test_the_score_is_the_share_of_what_tests_can_show_that_was_killed():
    states = {"a/b.py": KILLED, "a/c.py": SURVIVED, "d.py": UNCOVERED, "e.py": EQUIVALENT}
    found = [
        {"file": f"python/lab/{file}", "place": file, "state": state}
        for file, state in states.items()
    ]
    counted = sample.summary([*found, found[0]])
    assert counted["score"] == 0.5
    apart = {"lab/d.py": {UNCOVERED: 1}, "lab/e.py": {EQUIVALENT: 1}}
    assert counted["rooms"] == {"lab/a": {KILLED: 2, SURVIVED: 1}, **apart}
    assert [one["place"] for one in counted["survivors"]] == ["a/c.py", "d.py"]
