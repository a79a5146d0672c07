"""Cascades: drafters that draft for one another, each with exactly its own distribution.

Over a tree, a smaller drafter guesses its nodes: the same tree by fewer forwards.
"""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from specdec_hf import ModelDrafter, StatelessDrafter, TreeSpec, generate
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.drafter import Needs
from specdec_papers.cascade import HorizontalCascade, HorizontalState, level_call
from specdec_papers.ngram import RandomDrafter
from specdec_papers.vertical_cascade import VerticalCascade, VerticalState
from support import drafter_proof, hf_models

from specdec_kernels import Verdict, sample


def middle(model):
    return hf_models.with_noise(model, 0.3)


def small(model):
    return hf_models.with_noise(model, 0.6)


class SamplesTheMiddle(VerticalState):
    """After a rejection it draws from the draft model, as if that were the residual."""

    def _verify(self, logits, ids, drawn, seeds, positions):
        made = super()._verify(logits, ids, drawn, seeds, positions)
        at = made.num_accepted.long()[:, None]
        rows = logits.gather(1, at[..., None].expand(-1, 1, logits.shape[2]))[:, 0]
        found = sample(rows, seeds=seeds, positions=positions + 999).tokens
        tokens = made.tokens.scatter(1, at, found[:, None])
        return Verdict(tokens, made.num_accepted, made.status, made.logprobs, made.accept_probs)


class SharesItsNoise(VerticalState):
    """The draft model verifies with the noise with which the target will."""

    def _round_seeds(self, lengths):
        return self.call.seeds


def of_kind(kind, drafter):
    drafter.begin = lambda call: kind(drafter, call)
    return drafter


@pytest.mark.parametrize("kind", [VerticalState, SamplesTheMiddle, SharesItsNoise])
def test_a_vertical_cascade_is_exact_and_wrong_ones_are_rejected(kind):
    model, _ = drafter_proof.target()
    below = hf_models.build("llama", 5, vocab_size=drafter_proof.VOCAB)
    drafter = of_kind(kind, VerticalCascade(middle(model), below, 2))
    p_value = drafter_proof.joint_p_value(drafter, "token", texts=500)
    assert (p_value < drafter_proof.SIGNIFICANCE) == (kind is not VerticalState)


class ReportsNoThresholds(HorizontalState):
    """Its Q is that of drafts without filters."""

    def propose(self, texts, limits):
        draft = super().propose(texts, limits)
        unfiltered = torch.full_like(draft.drawn.threshold, -torch.inf)
        draft.drawn = dataclasses.replace(draft.drawn, threshold=unfiltered)
        return draft


@pytest.mark.parametrize(
    ("filters", "seeds"), [({"top_k": 2}, (1, 2)), ({"top_p": 0.7}, (3, 4))], ids=["top-k", "top-p"]
)
@pytest.mark.parametrize("kind", [HorizontalState, ReportsNoThresholds])
def test_a_horizontal_cascade_is_exact_under_filters(kind, filters, seeds):
    models = [hf_models.build("llama", seed, vocab_size=drafter_proof.VOCAB) for seed in seeds]
    drafter = of_kind(kind, HorizontalCascade(models, [1]))
    p_value = drafter_proof.joint_p_value(drafter, "token", texts=1000, prompt=0, **filters)
    assert (p_value < drafter_proof.SIGNIFICANCE) == (kind is ReportsNoThresholds)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_noise_of_a_round_is_drawn_once(rule):
    """Whatever a cascade holds, no two drafts of a round or of two rounds share their noise."""
    root = drafter_proof.call_of(None, rule)
    seen = []
    for length in (10, 11, 12):
        first, second = level_call(root, 0), level_call(root, 1)
        third, fourth = level_call(second, 0), level_call(second, 1)
        for call in (first, second):
            call.begin_round(drafter_proof.history_of([0] * length))
        for after in range(2):
            for call in (third, fourth):
                call.begin_round(drafter_proof.history_of([0] * length))
            for call in (first, third, fourth):
                texts = drafter_proof.history_of([0] * (length + after))
                positions = call._noise_positions(texts, np.arange(3), None, call.seeds.device)
                seen += [(call.seeds.item(), at) for at in positions[0].tolist()]
                call.round.asked += 1
            second.round.asked += 1
    assert len(set(seen)) == len(seen) == 3 * 2 * 3 * 3


def test_each_model_of_a_list_drafts_for_the_one_before_it():
    model = hf_models.tiny("llama")
    large, less = middle(model), small(model)
    made = resolve_drafter([large, less, "prompt_lookup"], None, model)
    below = made.drafters[0]
    assert made.model is large
    assert below.model is less
    assert below.drafters[0].name == "prompt_lookup"
    for wrong in (["prompt_lookup", model], [model], []):
        with pytest.raises(ValueError, match="several drafters need tree, unless"):
            generate(model, **hf_models.prompts((9, 4)), drafter=wrong)


def test_a_later_drafter_goes_on_from_the_drafts_of_those_before_it():
    model = hf_models.tiny("llama")
    both = HorizontalCascade([ModelDrafter(model), ModelDrafter(model)], [2])
    out = hf_models.decode(model, (9, 4), gamma=4, max_new_tokens=16, drafter=both)
    assert max(out.stats.gammas) == 4
    assert out.stats.draft_acceptance_rate == 1


class Watched(StatelessDrafter):
    """Drafts a text in which every third token is wrong, and compares what it is told of it."""

    rolls_back = True

    def __init__(self, texts):
        self.texts, self.asked, self.told, self.checked = texts, None, None, 0

    def propose(self, history, limits):
        assert (limits >= 0).all()
        assert (history.active == (limits > 0)).all()
        assert history.active.any()
        texts = [row[:n].tolist() for row, n in zip(history.tokens, history.lengths, strict=True)]
        if self.told is not None:
            for b in np.flatnonzero(history.active & (self.asked > 0)):
                text, draft = texts[b][self.begun[b] :], self.drafts[b]
                equal = [a == b for a, b in zip(text, draft, strict=False)]
                assert self.told[b] == [*equal, False].index(False)
                self.checked += 1
        self.asked, self.begun, self.told = limits, history.lengths.copy(), None
        self.drafts = [
            [(t + (at % 3 == 0)) % hf_models.VOCAB for at, t in enumerate(known[n : n + most], n)]
            for known, n, most in zip(self.texts, self.begun, limits, strict=True)
        ]
        return self.drafts

    def commit(self, texts, done):
        if self.asked is not None and self.told is None:
            self.told = done.accepted.copy()


@pytest.mark.parametrize("kind", ["vertical", "horizontal"])
def test_a_drafter_of_a_cascade_is_told_which_sequences_draft_and_what_was_kept(kind):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 9))
    plain = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    below = Watched(plain.tolist())
    cascade = HorizontalCascade([below, RandomDrafter()], [3])
    if kind == "vertical":
        cascade = VerticalCascade(model, below, 2)
    ends = int(plain[0, 15])  # one sequence ends before the other
    assert ends not in plain[1].tolist()
    out = hf_models.decode(model, (9, 9), drafter=cascade, max_new_tokens=24, eos_token_id=ends)
    assert out.stats.accepted > 0
    assert below.checked > 4


TREE = TreeSpec.branching((2, 2, 1, 1))
RULES = (
    "greedy", "target_only", "match", "multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq",
    "traversal",
)  # fmt: skip


def draft_model():
    """A copy, whose forwards are counted."""
    return copy.deepcopy(hf_models.with_noise(hf_models.tiny("llama"), 0.2))


def decoded(drafter, model, rule, lengths=(9, 4, 12), tree=TREE, new_tokens=14):
    forwards = []
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    out = hf_models.decode(
        hf_models.tiny("llama"), lengths, drafter=drafter, tree=tree, rule=rule,
        do_sample=rule != "greedy", seed=3, max_new_tokens=new_tokens,
    )  # fmt: skip
    hook.remove()
    return out, len(forwards)


def outcomes(stats):
    return [(one.drafted, one.accepted, one.emitted) for one in stats.round_log]


GUESSERS = {
    "itself": ModelDrafter,
    "less": lambda model: hf_models.with_noise(model, 0.3),
    "random": lambda model: RandomDrafter(),
    "copied": lambda model: "prompt_lookup",
    "cascade": lambda model: VerticalCascade(hf_models.with_noise(model, 0.3), "prompt_lookup"),
    "horizontal": lambda model: HorizontalCascade([copy.deepcopy(model), "prompt_lookup"], [1]),
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("guesser", GUESSERS)
@pytest.mark.parametrize("rule", RULES)
def test_guesses_change_no_tree_and_save_forwards(rule, guesser):
    model = draft_model()
    expected, forwards = decoded(model, model, rule)
    staged = VerticalCascade(model, GUESSERS[guesser](copy.deepcopy(model)), 3)
    found, fewer = decoded(staged, model, rule)
    assert found.sequences.equal(expected.sequences)
    assert outcomes(found.stats) == outcomes(expected.stats)
    assert 0 < found.stats.accepted < found.stats.drafted
    if guesser == "itself" and rule in ("greedy", "target_only", "match"):
        assert fewer < forwards, "a drawn child is guessed at times only"
    assert fewer <= forwards, "a guess is never a forward of its own"


def test_a_guesser_reads_as_many_of_the_targets_candidates_as_it_asks_for():
    model, seen = draft_model(), {0: [], 1: [], 3: []}

    def watched(count):
        def told(texts, done):
            seen[count] += [] if done.candidates is None else [done.candidates.ids.shape[2]]

        guesser = drafter_proof.with_states(
            RandomDrafter(), lambda state, call: setattr(state, "commit", told)
        )
        guesser.needs = Needs(candidates=count)
        return VerticalCascade(model, guesser)

    out, _ = decoded([watched(count) for count in seen], model, "match", tree=(2, 1))
    assert seen == {count: [count] * out.stats.rounds * (count > 0) for count in seen}


def test_names_and_models_of_a_cascade_are_checked():
    model = hf_models.tiny("llama")
    assert VerticalCascade(model, "prompt_lookup").drafters[0].name == "prompt_lookup"
    for drafter, message in (
        ("magic", "a cascade must hold drafters with a name, got 'magic'"),
        ("ngram", r"must set rolls_back = True .* got NgramDrafter"),
        (3, "names of drafters and draft models, got int"),
        ("lookahead", "must hold drafters of chains, got lookahead, which drafts trees"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            VerticalCascade(model, drafter)


def test_a_level_whose_nodes_were_guessed_needs_no_forward():
    """A guesser that is right: one forward a round. The control guesses at random."""
    model, chain = draft_model(), TreeSpec.branching((1, 1, 1, 1))
    arguments = {"rule": "greedy", "lengths": (9,), "tree": chain, "new_tokens": 24}
    _, alone = decoded(model, model, **arguments)
    right = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 3)
    out, forwards = decoded(right, model, **arguments)
    rounds = sum(one.drafted[0] > 0 for one in out.stats.round_log)
    assert forwards == rounds > 3
    assert out.stats.drafter == "vertical_cascade"
    wrong = VerticalCascade(model, RandomDrafter(), 3)
    assert decoded(wrong, model, **arguments)[1] > 0.9 * alone > 2 * rounds
    two = VerticalCascade(model, ModelDrafter(copy.deepcopy(model)), 2)
    assert rounds < decoded(two, model, **arguments)[1] < alone
