"""The search of the command ``tune``: its candidates, and whom it takes with synthetic timings."""

from types import SimpleNamespace

import numpy as np
import pytest
from specdec_hf.cli.checks import Settings
from specdec_hf.lab.bench.runs import Answer, Turns
from specdec_hf.lab.tune import measure
from specdec_hf.lab.tune.candidates import (
    DRAFTERS_TRIED,
    Candidate,
    first_candidates,
    schedules_of,
    shapes_of,
    with_absolute_path,
)
from specdec_hf.lab.tune.search import (
    Found,
    OutOfTimeError,
    Trial,
    choose,
    halve,
    ranked,
    search,
)
from specdec_hf.runner.fit import record_of
from support import hf_models

PROMPTS, TOKENS = 8, 20


def candidate(drafter="prompt_lookup", **given):
    return Candidate(Settings(model="embedded", drafter=[drafter], **given))


@pytest.fixture(autouse=True)
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


def test_the_stages_refine_the_best_drafter():
    speeds = {
        "prompt_lookup, 3 tokens, optimal": (1.6, 0.0), "prompt_lookup, 3 tokens": (1.5, 0.0),
        "prompt_lookup": (1.3, 0.0), "auto": (1.1, 0.0),
    }  # fmt: skip
    found, synthetic = searched(speeds)
    assert list(found.stages) == ["drafters", "lengths and trees", "schedules", "finalists"]
    assert found.chosen.candidate.name == "prompt_lookup, 3 tokens, optimal"
    assert found.chosen.candidate.options == {
        "drafter": "prompt_lookup", "num_assistant_tokens": 3,
        "num_assistant_tokens_schedule": "optimal",
    }  # fmt: skip
    assert found.chosen.ratio == pytest.approx(1.6)
    names = [[trial.candidate.name for trial in trials] for trials in found.stages.values()]
    assert len(names[0]) == len(DRAFTERS_TRIED)
    assert "auto" in names[-1]
    # Their ratios are those of new answers, which the last passes made.
    passes = sum(set(asked) == set(names[-1]) for asked in synthetic.asked)
    assert {len(trial.every) for trial in found.stages["finalists"]} == {passes}


@pytest.mark.parametrize("seconds", [35.0, 75.0, 150.0, 300.0, 1200.0])
def test_the_search_keeps_to_its_time(seconds):
    """However little it is, drafters are compared, and the finalists answer enough prompts."""
    found, synthetic = searched({STEADY: (1.3, 0.0)}, seconds)
    assert min(len(trial.turns) for trial in found.stages["finalists"]) >= 5
    assert (len(found.stages) == 4) == (seconds >= 300)
    assert 0.8 * seconds < synthetic.now <= seconds
    assert (found.ended, found.library) == ("", 2)
    assert found.chosen.candidate.name.startswith(STEADY)


@pytest.mark.parametrize("seconds", [0.5, 5.0, 25.0])
def test_a_search_without_time_ends_within_an_answer(seconds):
    """And chooses from nothing that has not answered enough prompts."""
    found, synthetic = searched({STEADY: (1.3, 0.0)}, seconds)
    assert seconds <= synthetic.now <= seconds + 2
    assert (found.ended, found.measured, found.chosen) == ("out of time", [], None)
    assert (found.best is not None) == (seconds > 1)
    assert all(trial.turns for trials in found.stages.values() for trial in trials)


def test_a_search_that_is_interrupted_has_the_best_so_far():
    """From the last stage in which enough prompts were answered, and all three speeds of it."""
    speeds = {STEADY: (1.3, 0.0), "prompt_lookup, 3 tokens": (1.5, 0.0)}
    whole, synthetic = searched(speeds)
    ends = {}
    for at in (60.0, synthetic.now - 20):
        found, _ = searched(speeds, interrupted=at)
        assert found.ended == "interrupted"
        ends[at] = found
    first, last = ends.values()
    assert (first.measured, first.chosen) == ([], None)
    assert first.best.candidate.name.startswith(STEADY)
    assert list(last.stages) == list(whole.stages)
    assert last.chosen.candidate.name.startswith("prompt_lookup, 3 tokens")
    said = str(last.chosen.speeds(last.library))
    words = ("model.generate 10.0 tokens/s", "without drafts 20.0 (2.00 times)",
             "with drafts 30.0 (3.00 times)", "1.50 times as fast as without drafts")  # fmt: skip
    assert all(one in said for one in words)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OutOfTimeError])
def test_a_stage_that_is_done_is_told_once(error):
    """Where the search ends before the next stage, the ranks that halving gave stay."""
    told, ready = [], iter((None, None, error))
    synthetic = Synthetic({STEADY: (1.3, 0.0), "auto": (1.1, 0.5)})

    def until(candidates):
        end = next(ready)
        if end is not None:
            raise end
        return list(candidates)

    synthetic.ready = until
    found = search(
        first(), synthetic, 600.0, synthetic.clock, exact=True,
        on_stage=lambda name, trials: told.append((name, trials)),
    )  # fmt: skip
    assert found.ended
    assert [name for name, _ in told] == ["drafters"]
    assert found.stages == dict(told)


@pytest.mark.parametrize(
    ("ratio", "sure", "ended", "tells"),
    [(1.3, False, "interrupted", False), (1.3, False, "out of time", False),
     (1.3, False, "", True), (1.3, True, "interrupted", True), (0.9, False, "interrupted", True)],
)  # fmt: skip
def test_an_early_end_tells_nothing_of_what_looks_faster(ratio, sure, ended, tells):
    """That drafts do not pay is no result where more answers may show that they do."""
    trial, synthetic = Trial(candidate()), Synthetic({"prompt_lookup": (ratio, 0.0)})
    for _ in range(5):
        synthetic.answer([trial])
    found = Found({"finalists": [trial]}, trial if sure else None, ended=ended)
    assert found.tells == tells
    del trial.turns[4]
    assert found.tells == (sure or not ended)


def test_an_error_of_a_measurement_is_not_taken_for_an_end():
    synthetic = Synthetic({})
    synthetic.take = lambda seconds: 1 / 0
    with pytest.raises(ZeroDivisionError):
        search(first(), synthetic, 60.0, synthetic.clock, exact=True)


def test_what_drafts_nothing_is_not_faster_whatever_the_clock_says():
    """A round costs a forward, so that no speed-up exceeds the tokens a round."""
    speeds = {"prompt_lookup": (1.5, 0.0), "ngram": (1.2, 0.0)}
    found, _ = searched(speeds, idle=["prompt_lookup"])
    assert found.chosen.candidate.name.startswith("ngram")
    found, _ = searched(speeds, idle=["prompt_lookup", "ngram"])
    assert found.chosen is None
    trial = Trial(candidate())
    Synthetic({"prompt_lookup": (2.5, 0.0)}).answer([trial])
    assert (trial.ratio, trial.speed) == pytest.approx((2.5, 2.0))


def test_halving_gives_the_faster_half_about_twice_as_many_answers():
    synthetic = Synthetic({"auto": (2.0, 0.0), STEADY: (1.5, 0.0)})
    trials = halve(list(map(Trial, first())), synthetic.answer, 400.0, 2, synthetic.clock)
    assert [trial.candidate.name for trial in trials[:2]] == ["auto", "prompt_lookup, 7 tokens"]
    counts = [len(trial.every) for trial in trials]
    assert counts == sorted(counts, reverse=True)
    out, better = counts[-1], counts[0]
    assert 2.5 * out <= better <= 4 * out  # those of the first rung, and twice as many


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


def test_an_interval_is_one_over_prompts_and_not_over_answers():
    """Ten answers to one prompt say nothing of another prompt."""
    trial, synthetic = Trial(candidate()), Synthetic({STEADY: (1.3, 0.1)})
    synthetic.answer([trial])
    trial.turns[0] *= 10
    assert (trial.interval, trial.low, len(trial.every)) == (None, 0.0, 10)
    assert choose([trial], exact=True) is None
    synthetic.answer([trial])
    low, high = trial.interval
    ratios = sorted(20 / turns[0].mine.seconds / 20 for turns in trial.turns.values())
    assert (low, high) == pytest.approx(tuple(ratios))
    assert low < trial.ratio < high


def names(candidates):
    return [one.name for one in candidates]


def test_candidates_have_what_their_drafters_take():
    """The command line has checked each of them."""
    assert names(first())[:2] == ["auto", "prompt_lookup, 7 tokens"]
    assert names(first())[-1] == "prompt_lookup+suffix_automaton, 7 deep"
    lookup = ["7 tokens", "3 tokens", "5 tokens", "10 tokens", "tree 4,2,1", "tree 2,2,1,1"]
    assert names(shapes_of(candidate())) == [f"prompt_lookup, {shape}" for shape in lookup]
    assert names(shapes_of(candidate("ngram"))) == [f"ngram, {shape}" for shape in lookup[:4]]
    assert names(shapes_of(candidate("auto"))) == ["auto"]
    (merged,) = [one for one in first() if "+" in one.name]
    depths = [f"prompt_lookup+suffix_automaton, {n} deep" for n in (7, 3, 5, 10)]
    assert names(shapes_of(merged)) == depths
    schedules = {
        "prompt_lookup": ["heuristic", "optimal"],
        "suffix_automaton": ["heuristic", "optimal", "confidence", "egag"],
        "layers:1": ["heuristic", "optimal", "confidence", "egag"],
        "token_recycling": ["optimal"],
        "auto": ["constant"],
    }
    for drafter, wanted in schedules.items():
        one = candidate(drafter)
        assert names(schedules_of(one)) == [one.name, *(f"{one.name}, {name}" for name in wanted)]
    assert names(schedules_of(merged)) == [merged.name, f"{merged.name}, optimal"]
    named = first_candidates(Settings(model="embedded"), ["layers:1", "auto", "layers:1"])
    assert names(named)[-1] == "layers:1, 7 tokens"
    assert [one.named for one in named].count(True) == 2
    assert not any(one.named for one in shapes_of(named[-1])[1:])


def test_files_of_drafters_have_their_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b").touch()
    wanted = {
        "rest:a,b": f"rest:{tmp_path}/a,b",
        "suffix_automaton:a,b,keep=1MiB": f"suffix_automaton:{tmp_path}/a,b,keep=1MiB",
        "a,b:temperature=0.5": f"{tmp_path}/a,b:temperature=0.5",
        "ngram:2": "ngram:2", "layers:4,top_k=3": "layers:4,top_k=3", "embedded": "embedded",
        "org/name": "org/name", "prompt_lookup": "prompt_lookup",
    }  # fmt: skip
    assert {name: with_absolute_path(name) for name in wanted} == wanted


def test_candidates_do_not_share_what_calls_remember(monkeypatch):
    """Ten drafts of a class that do not pay would let three drafts wait."""
    model = hf_models.build("llama")
    before, seen = record_of(model).measured, {}

    def used(config):
        memory = record_of(model).measured
        seen.setdefault(config.name, []).append(memory)
        return memory

    def warm(loaded, configs, *_, **__):
        for config in configs:
            used(config)
        return configs, {}

    def answered(loaded, configs, *_, **__):
        used(configs[1])
        return {configs[1].name: [None]}

    monkeypatch.setattr(measure, "warm_up", warm)
    monkeypatch.setattr(measure, "run_turns", answered)
    settings = Settings(sampling={"temperature": 0.0}, max_new_tokens=4)
    loaded, drafters = SimpleNamespace(model=model), {"prompt_lookup": "prompt_lookup"}
    answers = measure.Answers(loaded, drafters, [None, None], settings, str)
    ready = answers.ready(shapes_of(candidate())[:2])
    trials = list(map(Trial, ready))
    answers.answer(trials)
    answers.answer(trials)
    assert [list(trial.turns) for trial in trials] == [[0, 1], [0, 1]]
    assert record_of(model).measured is before
    memories = [seen[one.name] for one in ready]
    assert [len(each) for each in memories] == [3, 3]
    assert all(memory is each[0] for each in memories for memory in each)
    assert len({id(memory) for memory in (before, *(each[0] for each in memories))}) == 3
