"""Profiles: what `tune` writes, what calls take, and the faults of a file by its keys."""

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from specdec_hf import SpeculativeDecoder, TreeSpec, generate
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.weights import load_folder
from specdec_hf.lab.bench.runs import Answer, Turns
from specdec_hf.lab.tune import candidates as tuned
from specdec_hf.lab.tune import search
from specdec_hf.options import Options, read_profile
from support import hf_models
from support.cli_models import answered, invoke, one_line_error, says, succeed
from transformers import GenerationConfig

LOOKUP = {"drafter": "prompt_lookup", "num_assistant_tokens": 3}
ASKED = ("generate", "--prompt", "a", "--profile")


@pytest.fixture
def write(model, tmp_path):
    def save(**options):
        hf_models.profile_of(model, options or LOOKUP).save(tmp_path / "profile.json")
        return tmp_path / "profile.json"

    return save


def run(model, **kwargs):
    inputs = hf_models.prompts((9,), vocab_size=11)
    return generate(model, **inputs, max_new_tokens=16, **kwargs)


def changed(**changes):
    def change(content):
        for path, value in changes.items():
            *above, last = path.split("__")
            functools.reduce(dict.get, above, content)[last] = value
        return content

    return change


FAULTS = {
    "a list": (lambda content: [content], "must be a file that tune wrote, with format 'specdec"),
    "an unknown key": (changed(option={}), "measured alone, got 'option'; did you mean 'options'?"),
    "a drafter of another type": (changed(options__drafter=3), "null, a name or a list of names"),
    "a schedule that needs a distribution": (
        changed(options__num_assistant_tokens_schedule="egag"), "distribution or a confidence, got"
    ),
    "a flag for a number": (changed(conditions__batch_size=True), "batch_size must be an integer"),
    "a number that is none": (
        changed(options__num_assistant_tokens="3"), "integer in [0, 1024], got '3'"
    ),
    "a layout without fields": (
        changed(options__tree={"TrieTree": 3}), "tree: TrieTree must be an object, got 3"
    ),
    "a tree of no layout": (
        changed(options__tree={"Star": {}}), "one of TreeSpec, EagleTree, TrieTree, got"
    ),
    "a schedule for chains with trees of a drafter's own": (
        changed(options={"drafter": "lookahead", "num_assistant_tokens_schedule": "heuristic"}),
        "'optimal' with trees, got 'heuristic'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_by_file_and_key(write, fault):
    change, message = FAULTS[fault]
    path = write()
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    for read in (read_profile, lambda path: SpeculativeDecoder(profile=path)):
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value).startswith(f"profile {path}")
        assert message in str(error.value)


def test_options_that_are_given_win_over_the_profile(write):
    path = write(**LOOKUP, num_assistant_tokens_schedule="heuristic")

    def taken(**given):
        options = Options(profile=path, **given)
        return (
            options.drafter, options.num_assistant_tokens, options.tree,
            options.num_assistant_tokens_schedule,
        )  # fmt: skip

    assert taken() == ("prompt_lookup", 3, None, "heuristic")
    assert taken(num_assistant_tokens_schedule="optimal") == ("prompt_lookup", 3, None, "optimal")
    assert taken(gamma=5) == ("prompt_lookup", 5, None, "heuristic")
    # The schedule is one of chains, which trees refuse.
    assert taken(tree=(2, 1)) == ("prompt_lookup", None, TreeSpec.branching((2, 1)), None)
    # What was measured with one drafter is not taken for another.
    for drafter in ("auto", None, "nasd"):
        assert taken(drafter=drafter) == (drafter, None, None, None)


def test_a_number_in_the_config_of_a_call_wins_over_the_profile(model, write):
    asked = GenerationConfig(num_assistant_tokens=1)
    how = {"profile": write(), "guard": False, "return_dict_in_generate": True}
    calls = [run(model, **how), run(model, **how, generation_config=asked)]
    assert [max(call.stats.gammas) for call in calls] == [3, 1]


def test_a_profile_of_another_model_is_refused_by_name(model, write):
    path = write()
    others = {
        "whose vocab_size is 11; this model's is 13": hf_models.build("llama", vocab_size=13),
        "num_hidden_layers is 2; this model's is 3": hf_models.build("llama", 0, 11, layers=3),
        "whose weights have digest ": hf_models.build("llama", 1, vocab_size=11),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=message) as error:
            run(other, profile=path)
        assert f"profile {path} must be that of the model, got one of tiny" in str(error.value)


@pytest.mark.build
def test_tune_writes_what_calls_read(home, monkeypatch):
    """Whatever is chosen; which that is, a clock decides, here one that counts its readings."""
    monkeypatch.setattr("specdec_hf.lab.tune.command.clock", itertools.count().__next__)
    lines = [json.dumps({"turns": [f"Say {n} one two one {n}"]}) + "\n" for n in range(5)]
    (home / "prompts.jsonl").write_text("".join(lines))
    asked = "tune --model tiny --prompts prompts.jsonl --output profile.json --no-compile"
    asked += " --max-new-tokens 6 --drafter layers:1 --minutes"
    result = invoke(*asked.split(), 1)
    assert result.exit_code == 1
    assert says(result, "error: --minutes must be longer, got 1: no drafts have answered 5 prompts")
    monkeypatch.setattr(search, "choose", lambda each, exact: search.ranked(each)[0])
    result = succeed(*asked.split(), 2.5)
    profile, (model, tokenizer) = read_profile("profile.json"), load_folder("tiny")
    stages = profile.measured["stages"]
    assert len(stages["drafters"]) == len(tuned.DRAFTERS_TRIED) + 1
    assert all(one["identical"] == one["answers"] >= 5 for one in stages["finalists"])
    assert (profile.options["compile"], profile.model["name"]) == (False, "tiny")
    assert profile.measured["chosen"] == stages["finalists"][0]
    assert says(result, f"chosen: {stages['finalists'][0]['name']}; model.generate ")
    count = stages["finalists"][0]["answers"]
    assert says(result, "tokens/s speculation 90 % tau same")
    assert says(result, f"{count}/{count}")
    assert says(result, "without drafts this library is ")
    inputs = {"input_ids": tokenizer("Say one", return_tensors="pt")["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = generate(model, **inputs, profile="profile.json", **how)
    assert torch.equal(out.sequences, generate(model, **inputs, drafter=None, **how).sequences)
    assert out.stats.drafter != "none"
    asked = (home, "--model", "tiny", "--prompt", "a", "--profile", "profile.json")
    assert answered(*asked)["stats"]["drafter"] == out.stats.drafter
    assert answered(*asked, "--drafter", "ngram")["stats"]["drafter"] == "ngram"
    (home / "cut.json").write_bytes(b'{"format": ')
    assert "must be a JSON file that tune wrote" in one_line_error(*ASKED, "cut.json")


def test_names_of_files_are_absolute_in_a_profile(home):
    names = ("tiny,temperature=0.5", "eagle3:tiny", "layers:4", "hub/model", "embedded")
    found = [tuned.with_absolute_path(name) for name in names]
    assert found == [f"{home}/tiny,temperature=0.5", f"eagle3:{home}/tiny", *names[2:]]


SCHEDULES = {
    "layers:1": [None, "heuristic", "optimal", "confidence", "egag"],
    "prompt_lookup": [None, "heuristic", "optimal"],  # without a distribution
    "lookahead": [None, "optimal"],  # trees, which take no schedule of chains
    "auto": [None, "constant"],  # trees of the optimal schedule
}


def candidate(drafter):
    return tuned.Candidate(Settings(model="tiny", drafter=[drafter]))


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("drafter", SCHEDULES)
def test_tune_tries_the_schedules_that_a_drafter_takes(drafter):
    tried = tuned.schedules_of(candidate(drafter))
    found = [one.settings.num_assistant_tokens_schedule for one in tried]
    assert found == SCHEDULES[drafter]


@pytest.mark.usefixtures("home")
def test_a_profile_names_each_of_several_drafters():
    several = tuned.Candidate(Settings(model="tiny", drafter=["nasd", "ngram"]))
    options = [one.options["drafter"] for one in (several, candidate("nasd"))]
    assert options == [["nasd", "ngram"], "nasd"]


@pytest.mark.usefixtures("home")
def test_half_of_the_trials_answer_again_while_more_are_left_than_are_asked_for():
    """A rung has time for one answer of each."""
    trials, asked, now = [search.Trial(candidate("nasd")) for _ in range(8)], [], [0]

    def answer(alive):
        asked.append([trials.index(trial) for trial in alive])
        now.append(now[-1] + 10)
        for trial in alive:
            took = 1.0 + trials.index(trial)
            mine = Answer(["p"], "", [[1, 2]], took, [took], 2, took)
            trial.add(len(asked), Turns(mine, mine, ["pwm"], mine))

    found = search.halve(trials, answer, 30, 1, lambda: now[-1])
    assert [trials.index(trial) for trial in found] == [*range(8)]
    assert asked == [[*range(8)], [*range(4)], [0, 1]]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("batches", "ended"), [(4, "out of time"), (5, ""), (6, "")])
def test_a_search_is_whole_once_its_finalists_have_answered_five_prompts(batches, ended):
    with_drafts, without = (
        Answer(["p"], "", [[1, 2]], took, [took], 2, took, identical=True, rounds=1)
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
