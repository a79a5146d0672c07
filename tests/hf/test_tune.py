"""The command ``tune``: what it tries, how it chooses, and that the calls it prints work."""

import itertools
import json
import re
import shlex
from types import SimpleNamespace

import pytest
import torch
from specdec_hf import TrieTree, generate
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.weights import load_folder
from specdec_lab.bench.runs import TimedAnswer, Turns
from specdec_lab.tune import candidates as tuned
from specdec_lab.tune import search
from support.cli_models import answered, invoke, says, succeed


@pytest.mark.build
def test_the_calls_that_tune_prints_draft_as_it_measured(home, monkeypatch):
    """Whatever is chosen; which that is, a clock decides, here one that counts its readings."""
    monkeypatch.setattr("specdec_lab.tune.command.clock", itertools.count().__next__)
    lines = [json.dumps({"turns": [f"Say {n} one two one {n}"]}) + "\n" for n in range(5)]
    (home / "prompts.jsonl").write_text("".join(lines))
    asked = "tune --model tiny --prompts prompts.jsonl --no-compile --max-new-tokens 6"
    asked += " --drafter layers:1 --minutes"
    result = invoke(*asked.split(), 1)
    assert result.exit_code == 1
    assert says(result, "error: --minutes must be longer, got 1: no drafts answered 5 prompts")
    assert "generate(" not in result.output
    monkeypatch.setattr(search, "choose", lambda each, exact: search.ranked(each)[0])
    result = succeed(*asked.split(), 2.5)
    name = re.search(r"chosen: (.*); model.generate ", result.output)[1]
    assert says(result, "tokens/s speculation 90 % tau same")
    assert says(result, "without drafts this library is ")
    _, call, command = result.output.rstrip().rsplit("\n", 2)
    model, tokenizer = load_folder("tiny")
    inputs = {"input_ids": tokenizer("Say one", return_tensors="pt")["input_ids"]}
    inputs |= {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = eval(call)
    assert torch.equal(out.sequences, generate(model, **inputs | {"drafter": None}).sequences)
    python, _, module, _, *words = shlex.split(command)
    assert (python, module) == ("python", "specdec_hf")
    assert answered(home, *words)["stats"]["drafter"] == out.stats.drafter
    assert name.startswith(words[words.index("--drafter") + 1])


CALLS = {  # what differs from the default -> options of the call, words of the command
    "no drafts": ({"drafter": ["none"]}, "drafter=None", "--drafter none"),
    "a tree of a model": (
        {"drafter": ["embedded,temperature=0.5"], "tree": "2,1"},
        "drafter='GGUF,temperature=0.5', tree=(2, 1)",
        "--drafter embedded,temperature=0.5 --tree 2,1",
    ),
    "several": (
        {"drafter": ["nasd", "ngram:2"], "num_assistant_tokens": 5, "compile": False},
        f"drafter=['nasd', 'ngram:2'], tree={TrieTree(4, 5, 15)!r}, compile=False",
        "--drafter nasd --drafter ngram:2 --num-assistant-tokens 5 --no-compile",
    ),
    "a schedule": (
        {"drafter": ["layers:1"], "num_assistant_tokens_schedule": "egag"},
        "drafter='layers:1', num_assistant_tokens=5, num_assistant_tokens_schedule='egag'",
        "--drafter layers:1 --num-assistant-tokens-schedule egag",
    ),
}


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("case", CALLS)
def test_a_candidate_prints_what_its_user_would_type(case, monkeypatch):
    monkeypatch.setattr("specdec_hf.cli.sources.embedded_gguf", lambda: "GGUF")
    given, call, command = CALLS[case]
    one = tuned.Candidate.of(Settings(model="tiny", **given))
    assert one.call == f"generate(model, **inputs, {call})"
    assert one.command == f"python -m specdec_hf generate --model tiny --prompt TEXT {command}"


SCHEDULES = {
    "layers:1": [None, "heuristic", "optimal", "confidence", "egag"],
    "prompt_lookup": [None, "heuristic", "optimal"],  # without a distribution
    "lookahead": [None, "optimal"],  # trees, which take no schedule of chains
    "auto": [None, "constant"],  # trees of the optimal schedule
}


def candidate(drafter):
    return tuned.Candidate.of(Settings(model="tiny", drafter=[drafter]))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("drafter", SCHEDULES)
def test_tune_tries_the_schedules_that_a_drafter_takes(drafter):
    tried = tuned.schedules_of(candidate(drafter))
    found = [one.settings.num_assistant_tokens_schedule for one in tried]
    assert found == SCHEDULES[drafter]


@pytest.mark.usefixtures("home")
def test_half_of_the_trials_answer_again_while_more_are_left_than_are_asked_for():
    """A rung has time for one answer of each."""
    trials, asked, now = [search.Trial(candidate("nasd")) for _ in range(8)], [], [0]

    def answer(alive):
        asked.append([trials.index(trial) for trial in alive])
        now.append(now[-1] + 10)
        for trial in alive:
            took = 1.0 + trials.index(trial)
            mine = TimedAnswer(["p"], "", [[1, 2]], took, [took], 2, took)
            trial.add(len(asked), Turns(mine, mine, ["pwm"], mine))

    found = search.halve(trials, answer, 30, 1, lambda: now[-1])
    assert [trials.index(trial) for trial in found] == [*range(8)]
    assert asked == [[*range(8)], [*range(4)], [0, 1]]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("batches", "ended"), [(4, "out of time"), (5, ""), (6, "")])
def test_a_search_is_whole_once_its_finalists_have_answered_five_prompts(batches, ended):
    with_drafts, without = (
        TimedAnswer(["p"], "", [[1, 2]], took, [took], 2, took, identical=True, rounds=1)
        for took in (1.0, 2.0)
    )
    turns, numbers = Turns(with_drafts, without, ["pwm"], without), iter(range(batches))

    def answer(trials):
        number = next(numbers, None)
        if number is None:
            raise search.OutOfTimeError
        for trial in trials:
            trial.add(number, turns)

    measurement = SimpleNamespace(compare=lambda number: turns, ready=list, answer=answer)
    clock = itertools.count().__next__
    found = search.search([candidate("lookahead")], measurement, 1e6, clock, exact=True)
    assert (found.ended, found.tells, found.library) == (ended, not ended, 2)
    assert [len(trial.turns) for trial in found.stages["finalists"]] == [batches] * 2


@pytest.mark.parametrize(("seconds", "minimum", "answers"), [(5, 1, 2), (6, 1, 3), (1, 4, 4)])
def test_prompts_are_answered_while_there_is_time_for_another(seconds, minimum, answers):
    now = [0]
    search.repeat([], lambda trials: now.append(now[-1] + 2), seconds, minimum, lambda: now[-1])
    assert len(now) - 1 == answers
