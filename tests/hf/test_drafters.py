"""Drafters by name, what they are told, statistics, and the benefit guard in a call."""

import math

import numpy as np
import pytest
import torch
from specdec_hf import (
    BenefitGuard,
    Candidates,
    Draft,
    ModelDrafter,
    Needs,
    SequenceStats,
    SpecStats,
    StatelessDrafter,
    generate,
)
from specdec_papers.vertical_cascade import VerticalCascade
from support import hf_models
from support.hf_models import Clock, SlowLookup


@pytest.mark.parametrize(
    ("rule", "tree"),
    [(rule, None) for rule in ("greedy", "match", "token", "block")]
    + [(rule, (2, 1, 1)) for rule in ("greedy", "multi_draft_wor", "traversal")],
)
def test_a_perfect_drafter_is_always_accepted(rule, tree):
    """But for rounding, which differs between batch shapes, where probabilities are compared."""
    model = hf_models.tiny("llama")
    out = hf_models.decode(
        model, (9, 4), drafter=model, max_new_tokens=25, do_sample=rule != "greedy", seed=2,
        rule=rule, temperature=0.8, top_k=0, **({"tree": tree} if tree else {"gamma": 3}),
    )  # fmt: skip
    if tree:
        assert out.stats.mean_acceptance_length > 3.5
        assert out.stats.acceptance_by_trial[0] > 0.9
        assert out.stats.draft_acceptance_rate == pytest.approx(0.5, abs=0.06)
    else:
        assert out.stats.mean_acceptance_length > 3
        assert out.stats.draft_acceptance_rate > (0.999 if rule in ("greedy", "match") else 0.9)


CASCADES = {
    "alone": lambda one, other: one,
    "vertical": lambda one, other: VerticalCascade(other.model, one, 3),
}


@pytest.mark.covering(test=0)
@pytest.mark.parametrize("cascade", CASCADES)
@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=str)
def test_a_draft_model_with_a_sliding_window_forgets_several_drafts(lengths, cascade):
    """Its cache has dropped nothing that it needs, and drafts as one that drops nothing does."""
    model = hf_models.build("mistral", sliding_window=8)
    near, far = (hf_models.with_noise(model, amount) for amount in (0.05, 0.2))
    accepted = []
    for cache in ("spec", "dynamic"):
        drafter = CASCADES[cascade](ModelDrafter(near, cache), ModelDrafter(far, cache))
        out = hf_models.decode_as_generate(
            model, lengths, max_new_tokens=20, drafter=drafter, gamma=5
        )
        accepted.append([one.acceptance_histogram for one in out.stats.sequences])
    assert accepted[0] == accepted[1]
    assert 0 < out.stats.accepted < out.stats.drafted - 2 * out.stats.rounds


def test_a_guard_of_the_caller_is_copied():
    guard = BenefitGuard(window=2, pause=3, max_loss=math.inf)
    calls = []
    for _ in range(2):
        clock = Clock()
        settings = {"drafter": SlowLookup(clock, 30.0), "guard": guard, "clock": clock}
        stats = hf_models.decode(hf_models.tiny("llama"), max_new_tokens=40, **settings).stats
        assert "drafting pauses for 3 rounds" in stats.notes[0]
        assert "drafting pauses for 6 rounds" in stats.notes[1]
        calls.append((stats.gammas, stats.notes))
    assert calls[0] == calls[1]
    assert (guard.stopped, guard.pause, guard.plain_step) == (0, 3, None)


def test_statistics_follow_their_definition():
    one = SequenceStats()
    one.record(drafted=4, accepted=4, emitted=5)
    one.record(drafted=4, accepted=1, emitted=2)
    one.record(drafted=0, accepted=0, emitted=1)
    one.record(drafted=2, accepted=2, emitted=2)
    assert one.new_tokens == 10
    assert one.mean_acceptance_length == 10 / 4, "the last round has no bonus token"
    assert one.draft_acceptance_rate == 7 / 10
    assert one.acceptance_by_position == [1.0, 2 / 3, 1 / 2, 1 / 2]
    assert one.to_dict()["acceptance_histogram"] == {"0": 1, "1": 1, "2": 1, "4": 1}


def test_the_statistics_of_a_call_are_those_of_all_sequences():
    tree, chain = SequenceStats(prompt_tokens=9), SequenceStats(prompt_tokens=4)
    tree.record(drafted=6, accepted=2, emitted=3, depth=2)
    tree.record(drafted=2, accepted=0, emitted=1, depth=1)
    tree.record_trials(3, 1)
    chain.record(drafted=3, accepted=1, emitted=2)
    chain.record_trials(1, 0)
    assert tree.acceptance_by_position == [1 / 2, 1.0], "siblings have one position"
    assert chain.acceptance_by_position == [1.0, 0.0, 0.0]
    for sequences in ([tree, chain], [chain, tree]):
        call = SpecStats(sequences=sequences)
        assert (call.drafted, call.accepted, call.new_tokens) == (11, 3, 6)
        assert call.acceptance_by_position == [2 / 3, 1 / 2, 0.0]
        assert call.acceptance_by_trial == [1 / 2, 1.0, 0.0]
        assert call.acceptance_histogram == {0: 1, 1: 1, 2: 1}
        assert call.mean_acceptance_length == 1 + 3 / 3
        assert call.draft_acceptance_rate == 3 / 11
        assert call.tokens_per_second == 0, "no time was measured"
        assert (call.together.prompt_tokens, call.together.rounds) == (13, 3)
    assert SpecStats(sequences=[tree]).acceptance_by_position == tree.acceptance_by_position


RAGGED = (9, 5, 12)


class Observer:
    """Drafts what an earlier call has taught it, and keeps every observation."""

    needs = Needs(candidates=3)

    def __init__(self):
        self.seen = []

    def commit(self, texts, done):
        before = [texts.tokens[b, :n].copy() for b, n in enumerate(done.lengths)]
        self.seen.append((before, done.candidates))


class Chains(Observer, StatelessDrafter):
    """The target's own next token may be among them: they are simply counted up."""

    def propose(self, history, limits):
        return (history.last(1) + np.arange(1, limits.max() + 1)) % 64


class Trees(Observer, StatelessDrafter):
    name = "pairs"
    size, depth = 4, 2

    def propose(self, history, limits):
        tokens = (torch.from_numpy(history.last(1)) + torch.tensor([1, 2, 3, 4])) % 64
        parents = torch.tensor([-1, -1, 0, 1])
        return Draft(tokens, parents.expand_as(tokens), depth=2)


@pytest.mark.parametrize("made", [Chains, Trees])
def test_a_drafter_learns_the_most_likely_next_tokens(made):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    settings = {"max_new_tokens": 6, "do_sample": False}
    drafter = made()
    got = generate(model, **inputs, **settings, drafter=drafter, guard=False)
    assert torch.equal(got, model.generate(**inputs, **settings))
    checked = 0
    for texts, seen in drafter.seen:
        assert (seen.parents[:, 0] == -1).all()
        for b, row in np.argwhere(seen.tokens >= 0).tolist():
            path, above = [], row
            while above > 0:
                path.insert(0, int(seen.tokens[b, above]))
                above = int(seen.parents[b, above])
            assert above == 0
            assert seen.tokens[b, 0] == texts[b][-1]
            text = torch.from_numpy(np.append(texts[b], path).astype(np.int64))[None]
            with torch.no_grad():
                expected = model(text).logits[0, -1].topk(3).indices
            assert seen.ids[b, row].tolist() == expected.tolist()
            checked += 1
    assert checked > 30


def test_the_rows_of_a_path_hang_below_one_another():
    tokens, parents = np.array([[4, 5, 6, 6]]), np.array([[-1, 0, 0, 1]])
    candidates = Candidates(tokens, parents, np.zeros((1, 4, 1), dtype=np.int64))
    assert candidates.path(0, [5, 6, 6]) == [0, 1, 3]
