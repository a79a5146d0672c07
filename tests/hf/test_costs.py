"""What is learnt from the measured times of a call, and what drafters say of theirs before."""

import numpy as np
import pytest
from specdec_hf import HorizontalCascade, TrieTree, generate
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.schedules.costs import Costs, MonotoneCost
from support import drafter_cases, hf_models
from support.heads import head_for


def test_monotone_costs_by_hand():
    cost = MonotoneCost()
    for n, seconds in ((1, 1.0), (3, 4.0), (5, 2.0), (9, 5.0), (9, 5.0), (9, 99.0)):
        cost.observe(n, seconds)
    # 3 and 5 are pooled to their mean; the median of 9 is 5.
    assert [cost.at(n) for n in (0, 1, 2, 3, 4, 5, 7, 9)] == [1, 1, 2, 3, 3, 3, 4, 5]
    assert cost.at(17) == 5 + 8 * 0.5
    origin = MonotoneCost(from_zero=True)
    origin.observe(4, 2.0)
    assert (origin.at(0), origin.at(1), origin.at(8)) == (0.0, 0.5, 4.0)


def test_pooling_gives_the_closest_monotone_values():
    generator = np.random.default_rng(1)
    for _ in range(20):
        values = generator.random(6)
        cost = MonotoneCost()
        for n, value in enumerate(values):
            cost.observe(n, float(value))
        fitted = np.array([cost.at(n) for n in range(6)])
        assert (np.diff(fitted) >= -1e-12).all()
        # Optimality of a projection onto a cone: the residual is orthogonal to the fit, and has no
        # positive product with any monotone direction.
        residual = values - fitted
        assert residual @ fitted == pytest.approx(0, abs=1e-9)
        assert all(residual[k:].sum() <= 1e-9 for k in range(6))


def test_a_draft_models_first_round_says_nothing_about_others():
    costs = Costs(relative_cost=0.5)
    costs.observe_prompt(9, 3.0)
    costs.observe(0, 0, 0.0, 1.0)
    assert costs.round(4) == pytest.approx(2.0 + 4 * 0.5)
    costs.observe(4, 4, 50.0, 1.5)
    costs.observe(4, 4, 0.4, 1.5)
    assert costs.round(4) == pytest.approx(1.9)


def test_what_nothing_was_measured_of_lies_between_the_bounds_of_all_machines():
    """A forward of n tokens takes as much as one of fewer at least, and n plain rounds at most."""
    costs = Costs()
    costs.observe(0, 0, 0.0, 1.0)
    assert [costs.round(n) for n in (0, 1, 5)] == [1.0, 1.5, 3.5], "no prompt: halfway"
    costs.observe_prompt(0, 9.0)
    assert costs.round(5) == 3.5, "the model's own prefill read it, in a time that is not known"
    costs.observe_prompt(4, 1.9)
    assert [costs.round(n) for n in (3, 5)] == pytest.approx([1.9, 3.5]), "up to its width"
    costs.observe_prompt(11, 99.0)
    assert [costs.round(n) for n in (1, 5)] == [2.0, 6.0], "the first forward prepares much"
    costs.observe_prompt(11, 0.2)
    assert [costs.round(n) for n in (1, 5)] == [1.0, 1.0]
    assert costs.prefill == pytest.approx(9.0 + 1.9 + 99.0 + 0.2)


def test_drafts_that_are_made_at_once_cost_the_same_at_other_lengths():
    for at_once, seconds in ((True, (0.4, 0.4, 0.4)), (False, (0.1, 0.4, 0.8))):
        costs = Costs()
        costs.expect(0.1, at_once, False)
        costs.observe(0, 0, 0.0, 1.0)
        costs.observe(4, 4, 0.4, 1.0)
        assert [costs.round(n) - 1 for n in (1, 4, 8)] == pytest.approx(seconds)
        assert costs.trees(1, 4) == pytest.approx([1 + seconds[0]] * 5)
        assert costs.round(0) == 1


# Of a target with hidden states of 32, and of three heads that draft 66 of its 67 tokens.
OUTPUTS = 3 * 66 * 32
MEDUSA = 2 * 3 * (32 * 32 + 32)
BLOCKWISE = (32 * 6 + 6) + (6 * 96 + 96)
EXIT = 32 * 32 + 32


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=4)


def size(module):
    return sum(x.numel() for x in module.parameters())


def costs_of(target, drafter, monkeypatch):
    """What schedule and benefit guard of a call begin with."""
    seen, adopt = [], Costs.adopt

    def recorded(self, *args, **kwargs):
        seen.append(self)
        adopt(self, *args, **kwargs)

    monkeypatch.setattr(Costs, "adopt", recorded)
    generate(target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=1)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "weights", "at_once", "reads_prompt"),
    [
        ("medusa", MEDUSA + OUTPUTS, True, False),
        ("blockwise", BLOCKWISE + OUTPUTS, True, False),
        ("pass_head", size, True, False),
        ("exit_head", lambda t: size(t) - size(t.model.layers[1:]) + EXIT, False, False),
        ("early_exit", lambda t: size(t) - size(t.model.layers[1:]), False, False),
        ("layer_skip", lambda t: size(t) - size(t.model.layers[1:2]), False, False),
        ("eagle3", lambda t: size(head_for(t)) + 66 * 32, False, True),
    ],
)
def test_a_draft_costs_the_weights_that_it_reads(
    name, weights, at_once, reads_prompt, target, monkeypatch, tmp_path
):
    costs = costs_of(target, drafter_cases.NAMED[name](target, tmp_path), monkeypatch)
    share = (weights(target) if callable(weights) else weights) / size(target)
    assert costs.relative_cost == pytest.approx(share)
    assert (costs.drafts_at_once, costs.reads_prompt) == (at_once, reads_prompt)


class Stated(Drafter):
    """A drafter of which only the costs matter."""

    rolls_back = True

    def __init__(self, cost, at_once, reads_prompt):
        self.costs = cost, at_once, reads_prompt

    def start(self, context):
        self.relative_cost, self.drafts_at_once, self.reads_prompt = self.costs

    def propose(self, history, limits):
        return None


AT_ONCE, STEPS, FREE = (0.2, True, False), (0.3, False, True), (0.0, False, True)


@pytest.mark.parametrize(
    ("stated", "expected", "merged"),
    [
        ((AT_ONCE, AT_ONCE), (0.4, True, False), 0.4),
        ((STEPS, AT_ONCE), (0.3, False, True), 0.5),
        ((AT_ONCE, FREE), (0.2, True, False), 0.2),
    ],
    ids=["at-once", "both", "free"],
)
def test_costs_of_several_drafters_follow_from_theirs(
    stated, expected, merged, target, monkeypatch
):
    """In a cascade a step is one drafter's; in a merged tree it is one of each."""
    cascade = HorizontalCascade([Stated(*one) for one in stated], [1])
    tree = TrieDrafter([Stated(*one) for one in stated], TrieTree())
    for drafter, cost in ((cascade, expected[0]), (tree, merged)):
        with monkeypatch.context() as patch:
            costs = costs_of(target, drafter, patch)
        assert costs.relative_cost == pytest.approx(cost)
        assert (costs.drafts_at_once, costs.reads_prompt) == expected[1:]
