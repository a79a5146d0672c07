"""What is learnt from the measured times of a call."""

import numpy as np
import pytest
from specdec_hf.schedules.costs import Costs, MonotoneCost


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


def test_the_costs_of_a_tree_follow_its_depth():
    costs = Costs()
    costs.observe(0, 0, 0.0, 1.0)
    costs.observe(3, 21, 0.3, 3.0)
    assert costs.round(3) == pytest.approx(3.3)
    assert costs.round(1) == pytest.approx(0.1 + 1 + 2 * 7 / 21)


def test_a_draft_models_first_round_says_nothing_about_others():
    costs = Costs(relative_cost=0.5)
    costs.observe_prompt(9, 3.0)
    costs.observe(0, 0, 0.0, 1.0)
    assert costs.round(4) == pytest.approx(2.0 + 4 * 0.5)
    costs.observe(4, 4, 50.0, 1.5)
    costs.observe(4, 4, 0.4, 1.5)
    assert costs.round(4) == pytest.approx(1.9)


@pytest.mark.parametrize("plain", [0.01, 3.0])
@pytest.mark.parametrize("each", [0.0, 0.02, 0.6, 1.0])
def test_what_drafts_will_cost_is_what_the_machine_showed(plain, each):
    """Before any draft, the prompt's forward tells how much more each token takes."""
    costs = Costs()
    costs.observe_prompt(33, plain * (1 + 32 * each))
    costs.observe(0, 0, 0.0, plain)
    expected = [plain * (1 + n * each) for n in (1, 5, 32)]
    assert [costs.round(n) for n in (1, 5, 32)] == pytest.approx(expected)


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
    costs.padded = lambda width: 8 if width <= 8 else 16
    costs.observe_prompt(16, 2.0)
    costs.observe(0, 0, 0.0, 1.0)
    assert [costs.round(n) for n in (1, 7, 8)] == [1.0, 1.0, 2.0]


def test_narrower_trees_are_expected_halfway_between_their_bounds():
    costs = Costs()
    costs.observe(3, 9, 0.5, 4.0)
    assert costs.trees(3, 9)[::3] == pytest.approx(
        [0.5 + 4.0 * (1 + n / 10) / 2 for n in (1, 4, 7, 10)]
    )


def test_drafts_that_are_made_at_once_cost_the_same_at_other_lengths():
    for at_once, seconds in ((True, (0.4, 0.4, 0.4)), (False, (0.1, 0.4, 0.8))):
        costs = Costs()
        costs.expect(0.1, at_once, False)
        costs.observe(0, 0, 0.0, 1.0)
        costs.observe(4, 4, 0.4, 1.0)
        assert [costs.round(n) - 1 for n in (1, 4, 8)] == pytest.approx(seconds)
        assert costs.trees(1, 4) == pytest.approx([1 + seconds[0]] * 5)
        assert costs.round(0) == 1
        # Earlier calls may have had another drafter of its class.
        later = Costs()
        later.adopt(costs)
        later.expect(0.1, not at_once, False)
        assert later.round(1) - 1 == pytest.approx(0.1 if at_once else 0.4)
