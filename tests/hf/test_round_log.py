"""`SpecStats.round_log`: its counts and times are those of the statistics."""

import json
from statistics import fmean

import numpy as np
import pytest
from hf.test_generate import NEW, RAGGED, run
from specdec_hf import Drafter, TrieTree
from specdec_hf.schedules.base import Schedule
from support import hf_models
from support.clocks import Clock, SlowLookup

CALLS = {"plain": {}, "model": {"do_sample": True, "seed": 1}, "tree": {"tree": (2, 1)}}


@pytest.mark.parametrize("kind", CALLS)
def test_the_log_of_rounds_adds_up_to_the_statistics(kind):
    drafter = None if kind == "plain" else hf_models.perturbed("llama")
    options = {"drafter": drafter, **CALLS[kind]}
    out = hf_models.decode(
        hf_models.tiny("llama"), (9, 4, 12), **options, max_new_tokens=9, clock=Clock(0.25)
    )
    stats, log = out.stats, out.stats.round_log
    assert len(log) == stats.rounds
    for b, one in enumerate(stats.sequences):
        assert sum(record.drafted[b] for record in log) == one.drafted
        assert sum(record.accepted[b] for record in log) == one.accepted
        assert sum(record.emitted[b] for record in log) == one.new_tokens
    for phase, seconds in stats.time_split.items():
        assert sum(getattr(record, phase) for record in log) == seconds
    assert log[0].began == 0.25
    assert all(record.seconds == 0.75 for record in log)
    ends = [record.began + record.seconds for record in log]
    assert all(record.began >= end for record, end in zip(log[1:], ends, strict=False))
    written = json.loads(json.dumps(stats.to_dict()))["round_log"]
    assert written == [record.to_dict() for record in log]


class Foresees(Drafter):
    """Drafts how the texts go on, also beyond their ends; remembers what it was asked."""

    def __init__(self, model, inputs):
        longer = model.generate(**inputs, max_new_tokens=NEW + 8, do_sample=False)
        begins = longer.shape[1] - NEW - 8 - inputs["attention_mask"].sum(1)
        self.texts = [row[begin:].tolist() for row, begin in zip(longer, begins, strict=True)]
        self.asked = []

    def propose(self, history, limits):
        gamma = int(limits.max())
        self.asked.append((gamma, history.lengths.copy(), history.active.copy()))
        return [text[n : n + gamma] for text, n in zip(self.texts, history.lengths, strict=True)]


def rounds_of_right_drafts(limit, end):
    """(drafted, accepted, emitted) of every round of a sequence that emits ``end`` tokens."""
    rounds, new = [(0, 0, 1)], 1
    while new < end:
        drafted = min(limit, NEW - new - 1)
        emitted = min(drafted + 1, end - new)
        rounds.append((drafted, min(drafted, emitted), emitted))
        new += emitted
    return rounds


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_right_drafts_are_all_accepted_up_to_the_limits_and_the_end_of_the_text(name):
    model, inputs, limits = hf_models.tiny(name), hf_models.prompts(RAGGED), (1, 3, 5)
    drafter, outcomes = Foresees(model, inputs), []

    class Limits(Schedule):
        def lengths(self, most):
            return np.minimum(most, limits)

        def observe(self, outcome):
            outcomes.append(outcome)

    new = [text[n : n + NEW] for text, n in zip(drafter.texts, RAGGED, strict=True)]
    stop = new[2][8]  # inside of the draft that follows seven tokens
    ends = [text.index(stop) + 1 if stop in text else NEW for text in new]
    out = run(
        model, inputs, drafter=drafter, eos_token_id=stop, num_assistant_tokens_schedule=Limits()
    )
    expected = [rounds_of_right_drafts(*one) for one in zip(limits, ends, strict=True)]
    assert any(accepted < drafted for drafted, accepted, _ in expected[2])
    for b, rounds in enumerate(expected):
        found = [(r.drafted[b], r.accepted[b], r.emitted[b]) for r in out.stats.round_log]
        assert found == rounds + [(0, 0, 0)] * (out.stats.rounds - len(rounds))
    assert not any(outcome.rejected.any() for outcome in outcomes)


@pytest.mark.parametrize("tree", [None, TrieTree()], ids=["chain", "tree"])
def test_a_round_drafts_no_more_than_the_sequences_that_go_on_can_take(tree):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafter = Foresees(model, inputs)
    run(model, inputs, drafter=drafter, tree=tree, eos_token_id=drafter.texts[0][9 + 2])
    for gamma, lengths, active in drafter.asked:
        most = NEW - (lengths - (9, 4)) - 1
        assert gamma == min(5, most[active].max())
    gamma, _, active = drafter.asked[-1]
    assert gamma < 5
    assert active.tolist() == [False, True]


def test_the_benefit_is_that_of_the_sequences_that_go_on():
    """By this clock a plain round takes two thirds of one with drafts."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafter = Foresees(model, inputs)
    stats = run(
        model, inputs, drafter=drafter, gamma=2, eos_token_id=drafter.texts[0][9 + 5], guard=True,
        clock=Clock(0.25),
    ).stats  # fmt: skip
    drafting = [record for record in stats.round_log if any(record.drafted)]
    assert any(record.emitted[0] == 0 for record in drafting)
    tokens = [fmean(n for n in record.emitted if n) for record in drafting]
    assert stats.benefit == pytest.approx(fmean(tokens) * 0.5 / 0.75)


@pytest.mark.parametrize("phase", ["draft", "target"])
def test_seconds_are_counted_to_the_phase_that_took_them(phase):
    clock, model = Clock(0.25), hf_models.build("llama")
    if phase == "target":
        model.model.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 100))
    drafter = SlowLookup(clock, 100) if phase == "draft" else "prompt_lookup"
    stats = run(model, hf_models.prompts((9,)), drafter=drafter, clock=clock).stats
    split = stats.time_split
    assert split[phase] >= 100
    assert sum(split.values()) - split[phase] < 100


def test_a_sequence_without_drafts_has_no_token_statistics():
    """A drafter that drafts at once for the whole batch gives them to the others."""
    out = hf_models.decode(
        hf_models.tiny("llama"), (9, 4, 12), drafter="suffix_automaton", max_new_tokens=16,
        num_assistant_tokens_schedule="egag",
    )  # fmt: skip
    found = [
        (drafted > 0, h_norm is not None)
        for record in out.stats.round_log[1:]
        for drafted, h_norm in zip(record.drafted, record.schedule["h_norm"], strict=True)
        if any(record.drafted)
    ]
    assert all(drafts == known for drafts, known in found)
    assert {drafts for drafts, _ in found} == {True, False}
