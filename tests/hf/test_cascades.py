"""Cascades: drafters that draft for one another, each with exactly its own distribution."""

import numpy as np
import pytest
import torch
from specdec_hf import (
    HorizontalCascade,
    ModelDrafter,
    VerticalCascade,
    generate,
)
from specdec_hf.drafters.cascade import level_context
from specdec_hf.drafters.model import DraftModel
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.drafting.context import DraftContext, History
from support import hf_models
from support.drafter_proof import (
    VOCAB,
    assert_greedy_identical,
    joint_p_value,
    target,
)
from support.providers import SIGNIFICANCE

from specdec_kernels import Verdict, sample


def middle(model):
    return hf_models.with_noise(model, 0.3)


def small(model):
    return hf_models.with_noise(model, 0.6)


def nested(model):
    """Cascades within cascades."""
    bottom = HorizontalCascade([small(model), ModelDrafter(model)], [1])
    inner = VerticalCascade(hf_models.with_noise(model, 0.5), bottom, 3)
    return HorizontalCascade([middle(model), VerticalCascade(middle(model), inner, 2)], [1])


def test_text_of_nested_cascades_is_that_of_the_target_alone():
    model = hf_models.tiny("llama")
    drafter = nested(model)
    assert assert_greedy_identical(lambda: drafter, model, 10).accepted > 0
    inputs = hf_models.prompts((9, 4, 12))
    sampled = {"max_new_tokens": 10, "do_sample": True, "rule": "match", "seed": 3, "guard": False}
    out = generate(model, **inputs, **sampled, drafter=drafter, return_dict_in_generate=True)
    assert torch.equal(out.sequences, generate(model, **inputs, **sampled, drafter=None))
    assert out.stats.accepted > 0


class SamplesTheMiddle(VerticalCascade):
    """After a rejection it draws from the draft model, as if that were the residual."""

    def _verify(self, logits, ids, distribution, seeds, positions):
        made = super()._verify(logits, ids, distribution, seeds, positions)
        at = made.num_accepted.long()[:, None]
        rows = logits.gather(1, at[..., None].expand(-1, 1, logits.shape[2]))[:, 0]
        drawn = sample(rows, seeds=seeds, positions=positions + 999).tokens
        tokens = made.tokens.scatter(1, at, drawn[:, None])
        return Verdict(tokens, made.num_accepted, made.status, made.logprobs, made.accept_probs)


class SharesItsNoise(VerticalCascade):
    """The draft model verifies with the noise with which the target will."""

    def _round_seeds(self, lengths):
        return self._context.seeds


@pytest.mark.parametrize("kind", [VerticalCascade, SamplesTheMiddle, SharesItsNoise])
def test_a_vertical_cascade_is_exact_and_wrong_ones_are_rejected(kind):
    model, _ = target()
    below = hf_models.build("llama", 5, vocab_size=VOCAB)
    p_value = joint_p_value(kind(middle(model), below, 2), "token", texts=500)
    assert (p_value < SIGNIFICANCE) == (kind is not VerticalCascade)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_noise_of_a_round_is_drawn_once(rule):
    """Whatever a cascade holds, no two drafts of a round or of two rounds share their noise."""
    seeds = torch.zeros(1, dtype=torch.int64)
    root = DraftContext(None, rule, 1.0, 0, 1.0, 0.0, seeds, 1, 99, 16)
    seen = []
    for length in (10, 11, 12):
        history = History(np.zeros((1, length), dtype=np.int64), np.array([length]), np.ones(1))
        first, second = level_context(root, 0), level_context(root, 1)
        third, fourth = level_context(second, 0), level_context(second, 1)
        for context in (first, second):
            context.begin(history)
        for after in range(2):
            for context in (third, fourth):
                context.begin(history)
            for context in (first, third, fourth):
                positions = context.noise_positions(np.array([length + after]), range(3))
                seen += [(context.seeds.item(), at) for at in positions[0].tolist()]
                context.asks += 1
            second.asks += 1
    assert len(set(seen)) == len(seen) == 3 * 2 * 3 * 3


def test_a_deep_nesting_has_noise_for_every_round():
    model = target()[0]
    drafter = ModelDrafter(hf_models.build("llama", 1, vocab_size=VOCAB))
    for seed in range(2, 7):
        drafter = VerticalCascade(hf_models.build("llama", seed, vocab_size=VOCAB), drafter, 6)
    out = generate(
        model, torch.tensor([[1, 2, 1]]), drafter=drafter, gamma=7, max_new_tokens=8,
        do_sample=True, seed=0, guard=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.drafted >= 6


class DrawsItsOwn(ModelDrafter):
    """Its random numbers are none of the call's."""

    noise = "independent"

    def propose(self, history, limits):
        draft = super().propose(history, limits)
        self._context.asked_for_noise = False
        return draft


@pytest.mark.parametrize("wrong", [False, True])
def test_drafters_of_a_horizontal_cascade_may_bring_their_own_noise(wrong):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    drafters = [DrawsItsOwn(middle(model)), DrawsItsOwn(small(model))]
    settings = {"max_new_tokens": 8, "do_sample": True, "rule": "block", "guard": False}
    if not wrong:
        generate(model, **inputs, **settings, drafter=HorizontalCascade(drafters, [1]))
        return
    drafters[1].noise = "context"
    with pytest.raises(ValueError, match=r"DrawsItsOwn\.propose must draw at positions"):
        generate(model, **inputs, **settings, drafter=HorizontalCascade(drafters, [1]))


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


def over_random_drafts(model):
    return VerticalCascade(model, "random", 1)


@pytest.mark.parametrize("kind", [ModelDrafter, over_random_drafts])
def test_a_round_begins_once_for_the_draft_model(kind, monkeypatch):
    """However many rounds of its own the draft model has in a round of the target."""
    begun, model = [], hf_models.tiny("llama")
    monkeypatch.setattr(
        DraftModel, "begin_round", lambda draft, history: begun.append(int(history.lengths[0]))
    )
    out = generate(
        model, **hf_models.prompts((9,)), gamma=3, max_new_tokens=16, do_sample=False, guard=False,
        drafter=kind(small(model)), return_dict_in_generate=True,
    )  # fmt: skip
    emitted = [record.emitted[0] for record in out.stats.round_log]
    lengths = 9 + np.cumsum([0, *emitted[:-1]])
    drafted = [record.drafted[0] > 0 for record in out.stats.round_log]
    assert begun == lengths[drafted].tolist()
    assert len(begun) > 3


def test_a_later_drafter_goes_on_from_the_drafts_of_those_before_it():
    """As good as the first one, it is never wrong."""
    model = hf_models.tiny("llama")
    out = generate(
        model, **hf_models.prompts((9, 4)), gamma=4, max_new_tokens=16, do_sample=False,
        drafter=HorizontalCascade([ModelDrafter(model), ModelDrafter(model)], [2]), guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert max(out.stats.gammas) == 4
    assert out.stats.draft_acceptance_rate == 1


def test_an_object_that_a_cascade_holds_twice_is_refused():
    same = ModelDrafter(hf_models.tiny("llama"))
    with pytest.raises(ValueError, match="drafter must hold an object once, got one ModelDrafter"):
        generate(same.model, torch.tensor([[1, 2]]), drafter=HorizontalCascade([same, same], [1]))


@pytest.mark.parametrize("how", [{"do_sample": False}, {"do_sample": True, "seed": 3}], ids=str)
def test_a_schedule_that_reads_the_drafts_ends_those_of_a_vertical_cascade(how):
    """Greedy, too, where the rule does not read their distribution."""
    model = hf_models.build("llama", vocab_size=31)
    drafter = VerticalCascade(hf_models.with_noise(model, 0.6), "prompt_lookup", 2)
    out = generate(
        model, **hf_models.prompts((9,), vocab_size=31), drafter=drafter, guard=False,
        num_assistant_tokens=6, num_assistant_tokens_schedule="confidence", max_new_tokens=24,
        return_dict_in_generate=True, **how,
    )  # fmt: skip
    drafted = [sum(one.drafted) for one in out.stats.round_log]
    assert 0 < sum(drafted) < 6 * len(drafted) / 2
    assert not [note for note in out.stats.notes if "neither" in note]
