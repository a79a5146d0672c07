"""The benefit guard by rounds of made-up seconds: what it measures, and when it pauses.

test_optimal.py has whole calls with it.
"""

import math

import pytest
from specdec_hf import BenefitGuard
from specdec_hf.schedules.costs import Costs


def guard_after(plain=1.0, **settings):
    """A guard that has seen a plain round."""
    guard = BenefitGuard(**{"max_loss": math.inf, **settings})
    guard.observe(0, 1.0, plain)
    return guard


def test_tokens_and_seconds_of_a_benefit_are_those_of_the_same_rounds():
    guard = guard_after(window=3)
    for tokens, seconds in [(4.0, 2.0)] * 4 + [(2.0, 1.0)] * 2:
        guard.observe(3, tokens, seconds)
    assert guard.benefit == pytest.approx((4 * 4.0 + 2 * 2.0) / 6 / 2.0), "it has won: all of them"
    guard.observe(3, 2.0, 20.0)
    assert guard.benefit == pytest.approx(2.0 / 1.0), "it has lost: the last three, and a median"


@pytest.mark.parametrize(("before", "after", "step"), [(5.0, 2.0, 2.0), (1.0, 5.0, 1.0)])
def test_a_plain_round_takes_the_lower_median_of_the_last_and_of_many(before, after, step):
    guard = guard_after(plain=before)
    for seconds in [before] * 5 + [after] * 3:
        guard.observe(0, 1.0, seconds)
    assert guard.plain_step == step


def test_a_plain_round_does_not_take_the_seconds_of_a_drafter_asked_in_vain():
    guard = BenefitGuard()
    guard.observe(0, 1.0, 3.0, in_vain=2.0)
    assert guard.plain_step == 1.0


def test_each_pause_takes_twice_as_many_rounds():
    guard = guard_after(window=2, pause=3)
    for pauses, rounds in enumerate((3, 6), 1):
        assert guard.observe(3, 1.0, 2.0) is None
        assert guard.benefit == 0.5
        assert guard.observe(3, 1.0, 2.0).endswith(f"drafting pauses for {rounds} rounds")
        assert guard.stopped == pauses
        for _ in range(rounds):
            assert guard.pausing
            assert guard.affordable(9, 3) == 0
            guard.observe(0, 1.0, 1.0)
        assert not guard.pausing
        assert guard.affordable(9, 3) == 3


def test_a_measurement_after_a_pause_begins_anew():
    guard = guard_after(window=2, pause=1)
    for _ in range(2):
        guard.observe(3, 1.0, 2.0)
    guard.observe(0, 1.0, 1.0)
    guard.observe(3, 3.0, 2.0)
    assert guard.benefit == 1.5


def test_a_call_that_has_won_pauses_after_four_times_as_many_rounds():
    """Most rounds are slower than plain ones here, and a few save more than all others lose."""
    guard = guard_after(window=3)
    notes = [guard.observe(3, 1.5, seconds) for seconds in (0.1, 2.0, 2.0) * 4]
    assert notes[:-1] == [None] * 11
    assert "benefit 0.75" in notes[-1]


@pytest.mark.parametrize(("tokens", "drafts"), [(1.0, 4), (1.2, 16), (1.25, 40)])
def test_without_a_clear_benefit_a_plain_round_follows_half_a_window(tokens, drafts):
    """The window is 8 rounds, and 32 in a call that has won."""
    guard, made = guard_after(max_loss=0.02), 0
    while made < 40 and guard.affordable(made, 3):
        guard.observe(3, tokens, 1.0)
        made += 1
    assert made == drafts


def test_without_a_limit_half_a_window_is_drafted_before_the_first_plain_round():
    guard, made = BenefitGuard(max_loss=math.inf), 0
    while guard.affordable(made, 3):
        guard.observe(3, 1.0, 1.0)
        made += 1
    assert made == 4
    guard.observe(0, 1.0, 1.0)
    assert guard.affordable(made, 3) == 3


def test_a_draft_model_reads_the_prompt_once():
    guard, costs = BenefitGuard(max_loss=0.02), Costs(relative_cost=0.5)
    costs.prefill = 1.0  # half of it for the draft model
    guard.start(costs, 100)
    costs.observe(0, 0, 0.0, 1.0)
    guard.observe(0, 1.0, 1.0)
    for draft in (0.6, 0.1):
        costs.observe(1, 1, draft, 1.0)
    guard.observe(1, 1.0, 1.6)
    # Of 33 seconds 0.66 may be lost, 0.6 are, and a round costs 0.1 more than a plain one.
    assert guard.affordable(2, 1) == 0
    guard.observe(1, 2.0, 1.5)
    assert guard.affordable(3, 1) == 1


def test_every_token_of_a_draft_earns_what_may_be_lost():
    guard, costs = BenefitGuard(max_loss=0.02), Costs()
    guard.start(costs, 100)
    for tokens in (0, 4):
        costs.observe(tokens, tokens, 0.0, 1.0 + 0.25 * tokens)
    for _ in range(10):
        guard.observe(4, 5.0, 5.0)
    guard.observe(0, 1.0, 1.0)
    # 2 % of 51 plain rounds are 1.02 of one, and each token costs .25.
    assert guard.affordable(11, 8) == 4


def test_before_a_plain_round_a_round_of_drafts_counts_as_one_that_takes_as_long():
    guard = BenefitGuard(window=1)
    guard.observe(3, 4.0, 1.0)
    guard.observe(0, 1.0, 1.0)
    guard.observe(3, 1.0, 1.0)
    assert guard.benefit == 2.5, "the call has won three rounds, so that more than the last counts"
