"""The command `tune`: whom its search takes with synthetic timings, and the profile it writes."""

import itertools
import json

import numpy as np
import pytest
import torch
from specdec_hf import generate
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.weights import load_folder
from specdec_hf.lab.bench.runs import Answer, Turns
from specdec_hf.lab.tune import search as searching
from specdec_hf.lab.tune.candidates import DRAFTERS_TRIED, first_candidates
from specdec_hf.lab.tune.search import OutOfTimeError, Trial, ranked, search
from specdec_hf.options import read_profile
from support.cli_models import folder, invoke, says, succeed  # noqa: F401

PROMPTS, TOKENS = 8, 20


@pytest.fixture
def no_embedded_model(monkeypatch):
    """The settings name a model that the synthetic answers do without."""
    monkeypatch.setattr("specdec_hf.cli.checks.find_model", lambda *_, **__: None)


class Synthetic:
    """Answers whose seconds are drawn; decoding without drafts takes a second for each.

    ``model.generate`` takes two, and no answer begins after ``limit``.

    Args:
        speeds: by the beginning of a candidate's name, the mean of its ratio and the standard
            deviation of the logarithm; others have ratio 0.8 without noise.
        refused: beginnings of the names of those that the model refuses.
        other: the same of those whose texts are not those of plain decoding.
        idle: the same of those that draft nothing.
    """

    def __init__(self, speeds, seed=0, refused=(), other=(), idle=()):
        self.speeds, self.refused, self.other = speeds, tuple(refused), tuple(other)
        self.idle = tuple(idle)
        self.random = np.random.default_rng(seed)
        self.now, self.asked, self.limit, self.interrupted = 0.0, [], float("inf"), float("inf")

    def clock(self):
        return self.now

    def take(self, seconds):
        if self.now >= self.interrupted:
            raise KeyboardInterrupt
        if self.now >= self.limit:
            raise OutOfTimeError
        self.now += seconds

    def compare(self, number):
        text = [list(range(TOKENS))]
        self.take(2.0)
        self.take(1.0)
        answers = (Answer([""], "", text, seconds, [seconds]) for seconds in (1.0, 2.0))
        return Turns(*answers, ["pm"])

    def ready(self, candidates):
        return [one for one in candidates if not one.name.startswith(self.refused or "-")]

    def answer(self, trials):
        number = len(self.asked) % PROMPTS
        self.asked.append([trial.candidate.name for trial in trials])
        for trial in trials:
            name = trial.candidate.name
            fits = (speed for start, speed in self.speeds.items() if name.startswith(start))
            mean, deviation = next(fits, (0.8, 0.0))
            seconds = float(np.exp(-deviation * self.random.standard_normal())) / mean
            text = [list(range(TOKENS))]
            same = not name.startswith(self.other or "-")
            rounds = TOKENS if name.startswith(self.idle or "-") else TOKENS // 2
            self.take(1.0)
            self.take(seconds)
            mine = Answer(
                [""], "", text, seconds, [seconds], identical=same, rounds=rounds, drafted=5,
                accepted=0 if rounds == TOKENS else 5,
            )  # fmt: skip
            trial.add(number, Turns(mine, None, ["wm"], Answer([""], "", text, 1.0, [1.0])))


STEADY, NOISY = "prompt_lookup, 7", ("suffix_automaton, 7", "nasd", "ngram", "token_recycling")
SPEEDS = {STEADY: (1.3, 0.05), **dict.fromkeys(NOISY, (0.9, 0.6))}
SEEDS = range(30)


def first(**given):
    return first_candidates(Settings(model="embedded", **given), ())


def searched(speeds, seconds=600.0, seed=0, exact=True, interrupted=float("inf"), **given):
    synthetic = Synthetic(speeds, seed, **given)
    synthetic.limit, synthetic.interrupted = seconds, interrupted
    return search(first(), synthetic, seconds, synthetic.clock, exact=exact), synthetic


@pytest.mark.usefixtures("no_embedded_model")
def test_a_steady_candidate_is_taken_and_not_the_noisiest():
    steady, fastest = 0, 0
    for seed in SEEDS:
        chosen = searched(SPEEDS, seed=seed)[0].chosen
        steady += chosen is not None and chosen.candidate.name.startswith(STEADY)
        trials = list(map(Trial, first()))
        Synthetic(SPEEDS, seed).answer(trials)
        fastest += ranked(trials)[0].candidate.name.startswith(STEADY)
    assert steady >= len(SEEDS) - 2
    assert fastest <= len(SEEDS) / 2, "the control: whoever was fastest on one prompt"


@pytest.mark.usefixtures("no_embedded_model")
def test_where_nothing_pays_plain_decoding_is_taken():
    """Four noisy candidates that are as fast as plain decoding, most of which look faster."""
    speeds, faster = dict.fromkeys(NOISY, (1.0, 0.1)), 0
    chosen = []
    for seed in SEEDS:
        found, _ = searched(speeds, seed=seed)
        chosen.append(found.chosen)
        faster += found.stages["finalists"][0].ratio > 1
    assert faster >= 18
    assert sum(one is not None for one in chosen) <= 6
    found, _ = searched({})
    assert found.chosen is None
    assert all(trial.ratio == pytest.approx(0.8) for trial in found.stages["finalists"])


@pytest.mark.usefixtures("no_embedded_model")
@pytest.mark.parametrize("seconds", [35.0, 300.0])
def test_the_search_keeps_to_its_time(seconds):
    """However little it is, drafters are compared, and the finalists answer enough prompts."""
    found, synthetic = searched({STEADY: (1.3, 0.0)}, seconds)
    assert min(len(trial.turns) for trial in found.stages["finalists"]) >= 5
    assert (len(found.stages) == 4) == (seconds >= 300)
    assert 0.8 * seconds < synthetic.now <= seconds
    assert (found.ended, found.library) == ("", 2)
    assert found.chosen.candidate.name.startswith(STEADY)


@pytest.mark.usefixtures("no_embedded_model")
def test_a_candidate_that_is_refused_or_changes_texts_is_not_taken():
    speeds = {"auto": (2.0, 0.0), "prompt_lookup": (1.5, 0.0)}
    assert searched(speeds)[0].chosen.candidate.name.startswith("auto")
    found, _ = searched(speeds, refused=["auto"])
    assert found.chosen.candidate.name.startswith("prompt_lookup")
    names = {trial.candidate.name for trials in found.stages.values() for trial in trials}
    assert not any(name.startswith("auto") for name in names)
    for exact, name in ((True, "prompt_lookup"), (False, "auto")):
        found, _ = searched(speeds, exact=exact, other=["auto"])
        assert found.chosen.candidate.name.startswith(name)
    found, _ = searched({}, refused=["a", "p", "s", "n", "t", "l"])
    assert (found.stages, found.chosen) == ({}, None)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        "".join(json.dumps({"turns": [f"Say {n} one two one {n}"]}) + "\n" for n in range(5))
    )
    return path


@pytest.fixture
def ticks(monkeypatch):
    """The clock of the search counts how often it is read, so that no machine is too slow."""
    monkeypatch.setattr("specdec_hf.lab.tune.command.clock", itertools.count().__next__)


@pytest.mark.build
@pytest.mark.usefixtures("ticks")
def test_the_command_writes_what_calls_read(folder, prompts, monkeypatch):  # noqa: F811
    """Whatever is chosen; which that is, a clock decides."""
    monkeypatch.setattr(searching, "choose", lambda each, exact: ranked(each)[0])
    output = prompts.with_name("profile.json")
    result = succeed(
        "tune", "--model", folder, "--prompts", prompts, "--output", output, "--minutes", 2.5,
        "--max-new-tokens", 6, "--drafter", "layers:1", "--no-compile",
    )  # fmt: skip
    profile, (model, tokenizer) = read_profile(output), load_folder(folder)
    measured = profile.measured
    assert set(measured["stages"]) >= {"drafters", "finalists"}
    assert len(measured["stages"]["drafters"]) == len(DRAFTERS_TRIED) + 1
    assert all(one["identical"] == one["answers"] >= 5 for one in measured["stages"]["finalists"])
    assert (measured["prompts"], measured["left_out"]) == (5, {})
    assert measured["ended"] == "after all stages"
    library = measured["library"]
    assert library["prompts"] >= 1
    ratio = f"without drafts this library is {library['ratio']:.2f} times as fast as model.generate"
    assert says(result, ratio)
    assert profile.options["compile"] is False
    assert profile.model["name"] == str(folder)
    assert profile.conditions["threads"] == 1
    best = measured["stages"]["finalists"][0]
    assert measured["chosen"] == best
    assert says(result, f"chosen: {best['name']}; model.generate ")
    drafter = profile.options["drafter"]
    assert best["name"].startswith(drafter if isinstance(drafter, str) else "+".join(drafter))
    inputs = {"input_ids": tokenizer("Say one", return_tensors="pt")["input_ids"]}
    how = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    out = generate(model, **inputs, profile=output, **how)
    assert torch.equal(out.sequences, generate(model, **inputs, drafter=None, **how).sequences)
    assert out.stats.drafter != "none"
    assert not any("profile" in note for note in out.stats.notes)
    succeed("generate", "--model", folder, "--prompt", "a", "--profile", output,
                   "--max-new-tokens", 4)  # fmt: skip


@pytest.mark.build
@pytest.mark.usefixtures("ticks")
def test_minutes_that_are_too_few_get_one_line(folder, prompts):  # noqa: F811
    output = prompts.with_name("profile.json")
    asked = ("tune", "--model", folder, "--prompts", prompts, "--output", output)
    result = invoke(*asked, "--minutes", 1, "--max-new-tokens", 4, "--no-compile")
    assert result.exit_code == 1
    assert says(result, "error: --minutes must be longer, got 1: no drafts have answered 5 prompts")
    assert not output.exists()
