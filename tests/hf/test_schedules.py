"""Every schedule follows its definition, on statistics and outcomes that are made up."""

import inspect
import math

import numpy as np
import pytest
import torch
from specdec_hf.drafting.sampling import token_stats
from specdec_hf.schedules.base import Outcome, ScheduleContext, TokenStats
from specdec_hf.schedules.registry import SCHEDULES, make_schedule

pytestmark = pytest.mark.quick

MOST = np.array([100])


def started(given, number=5, batch_size=1, vocab_size=16):
    schedule = make_schedule(given)
    schedule.start(ScheduleContext(batch_size, number, vocab_size))
    return schedule


def stats(probability, entropy=math.nan):
    rows = [np.atleast_1d(np.array(x, dtype=np.float32)) for x in (probability, entropy)]
    return TokenStats(rows[0], np.broadcast_to(rows[1], rows[0].shape))


def outcome(drafted, accepted, rejected=None):
    drafted, accepted = np.atleast_1d(drafted), np.atleast_1d(accepted)
    return Outcome(drafted, accepted, accepted < drafted if rejected is None else rejected)


def drafted_length(schedule, probabilities, **kwargs):
    """How many of the tokens with these probabilities one sequence drafts."""
    most = int(schedule.lengths(MOST)[0])
    for i, probability in enumerate(probabilities):
        if i + 1 >= most or not schedule.continue_drafting(i, stats(probability, **kwargs))[0]:
            return i + 1
    return len(probabilities)


@pytest.mark.parametrize("name", ["heuristic", "heuristic_transient"])
def test_heuristic(name):
    heuristic, apart, seen = started(name), started(name, batch_size=3), []
    for drafted, accepted in [(5, 5), (7, 7), (9, 3), (8, 0), (0, 0), (7, 7), (9, 8), (1, 0)]:
        heuristic.observe(outcome(drafted, accepted))
        seen += heuristic.lengths(MOST).tolist()
    assert seen == [7, 9, 8, 7, 7, 9, 8, 7]
    for accepted, length in ((0, 1), (5, 16)):
        for _ in range(20):
            heuristic.observe(outcome(5, accepted))
        assert heuristic.lengths(MOST).tolist() == [length]
    apart.observe(outcome([5, 5, 0], [5, 2, 0]))
    assert apart.lengths(np.array([100] * 3)).tolist() == [7, 4, 5]


def test_confidence_keeps_the_token_that_ends_the_draft():
    schedule = started("confidence:threshold=0.5")
    assert drafted_length(schedule, [0.9, 0.5, 0.49, 0.9]) == 3
    assert drafted_length(schedule, [0.9] * 9) == 5
    assert drafted_length(started("confidence:threshold=0"), [0.0] * 9) == 5
    assert drafted_length(schedule, [math.nan, 0.9]) == 1


def test_confidences_cut_a_copied_draft_before_and_a_drawn_one_after_the_token():
    schedule = started("confidence:threshold=0.5", batch_size=3)
    given = [stats(column) for column in ([0.9, 0.1, 0.9], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9])]
    counts = np.array([3, 3, 2])
    assert schedule.cut(given, counts, drawn=False).tolist() == [1, 0, 2]
    assert schedule.cut(given, counts, drawn=True).tolist() == [2, 1, 2]
    assert schedule.cut([], np.zeros(3, dtype=np.int64), drawn=True).tolist() == [0, 0, 0]


def test_the_tuned_threshold_maximises_tokens_by_cost():
    """One token of every draft is accepted. A threshold above 0.92 drafts one token and emits two
    for 1.1; one above 0.3 drafts two, for 1.2; a lower one drafts five, for 1.5.
    """
    schedule = started("confidence_tuned:draft_cost=0.1,explore=4")
    draft = [0.92, 0.3, 0.3, 0.3, 0.3]
    for _ in range(5):  # the first four rounds explore, and so does every fourth
        assert drafted_length(schedule, draft) == 5
        assert schedule.record() == {"threshold": [0.0]}
        schedule.observe(outcome(5, 1))
    assert schedule.thresholds[0] == pytest.approx(0.95)
    assert drafted_length(schedule, draft) == 1
    assert schedule.record() == {"threshold": [schedule.thresholds[0]]}
    always = started("confidence_tuned:draft_cost=0.1,explore=1")
    for _ in range(9):
        assert drafted_length(always, [0.2] * 5) == 5
        always.observe(outcome(5, 5))
    assert always.thresholds[0] == 0.0, "accepted whatever the probability"


def test_the_draft_exit_follows_the_acceptance_rate_of_each_sequence():
    """By the formulas of Draft & Verify, with numbers that show in single rounds."""
    given = "draft_exit:alpha=0.5,threshold=0.4,beta1=0.25,beta2=0.75,step=0.2"
    schedule = started(given, batch_size=3)
    rates, thresholds = [None] * 3, [0.4] * 3
    for drafted, accepted in (
        ([4, 5, 0], [4, 0, 0]), ([4, 5, 2], [0, 4, 1]), ([0, 5, 4], [0, 1, 4]),
        ([3, 1, 5], [3, 0, 0]),
    ):  # fmt: skip
        schedule.observe(outcome(drafted, accepted))
        for b, (d, a) in enumerate(zip(drafted, accepted, strict=True)):
            if d == 0:
                continue
            before = a / d if rates[b] is None else rates[b]
            rates[b] = 0.25 * before + 0.75 * a / d
            moved = thresholds[b] + (0.2 if rates[b] <= 0.5 else -0.2)
            thresholds[b] = 0.75 * thresholds[b] + 0.25 * moved
        assert schedule.thresholds.tolist() == pytest.approx(thresholds)
        assert schedule.record() == {"threshold": schedule.thresholds.tolist()}
    assert len(set(thresholds)) == 3
    low = np.float32(min(thresholds) - 0.01)
    continue_drafting = schedule.continue_drafting(
        0, stats([float(max(thresholds)) + 0.01, low, math.nan])
    )
    assert continue_drafting.tolist() == [True, False, False]
    for _ in range(200):
        schedule.observe(outcome([4, 4, 4], [0, 4, 0]))
    assert schedule.thresholds.tolist() == [1, 0, 1]


def test_a_round_that_a_threshold_cut_teaches_none():
    """A lower threshold would have drafted on, and to what end is not known.

    Nor does a round without probabilities.
    """
    without = started("confidence_tuned")
    without.lengths(MOST)
    without.observe(outcome(3, 1))
    assert without.thresholds.tolist() == [0]
    schedule = started("confidence_tuned:explore=4")
    for _ in range(5):
        assert drafted_length(schedule, [0.96, 0.3, 0.3, 0.3, 0.3]) == 5
        schedule.observe(outcome(5, 1))
    assert schedule.thresholds[0] == pytest.approx(0.35)
    for _ in range(3):
        assert drafted_length(schedule, [0.6, 0.1, 0.1]) == 2
        schedule.observe(outcome(2, 0))
        assert schedule.thresholds[0] == pytest.approx(0.35)
    assert drafted_length(schedule, [0.6, 0.1, 0.1]) == 3, "the eighth round explores"
    schedule.observe(outcome(3, 0))
    assert schedule.thresholds[0] == pytest.approx(0.65)


def test_the_tuned_threshold_counts_the_token_of_the_target():
    """A round emits it without drafts too, so that drafts dearer than a forward do not pay."""
    for cost, threshold in ((2, 0.95), (0.5, 0.0)):
        schedule = started(f"confidence_tuned:draft_cost={cost}")
        assert drafted_length(schedule, [0.92, 0.5, 0.2]) == 3
        schedule.observe(outcome(3, 3))
        assert schedule.thresholds[0] == pytest.approx(threshold)


def test_statistics_of_a_token_follow_their_definition():
    rows = torch.tensor([[[math.log(3.0), 0.0, -math.inf]]])
    for threshold, entropy in ((-math.inf, math.log(4) - 0.75 * math.log(3)), (0.5, 0.0)):
        (one,) = token_stats(rows, torch.tensor([[0]]), 1.0, torch.tensor([[threshold]]))
        assert one.probability == pytest.approx(0.75 if entropy else 1.0)
        assert one.entropy == pytest.approx(entropy, abs=1e-6)
    # The filters of a greedy row leave its largest logit; the statistics are those of all logits.
    (one,) = token_stats(rows, torch.tensor([[0]]), 0.0, torch.tensor([[math.log(3.0)]]))
    assert one.probability == pytest.approx(0.75)


def test_specdec_plus_plus_stops_when_a_rejection_is_likely():
    """Before anything was verified, a_j is the probability itself."""
    schedule = started("specdec++:h=0.7")
    assert 1 - 0.9 * 0.6 < 0.7 < 1 - 0.9 * 0.6 * 0.5
    assert drafted_length(schedule, [0.9, 0.6, 0.5, 0.9]) == 3
    assert schedule.record()["all_accepted"] == pytest.approx([0.27])
    assert drafted_length(schedule, [0.2, 0.9]) == 1
    never_ends = started("specdec++:h=1")
    drafted_length(never_ends, [0.95, 0.55, 0.95])
    never_ends.observe(outcome(3, 1))  # the third one was compared with nothing
    drafted_length(never_ends, [0.95])
    assert never_ends.record()["all_accepted"] == pytest.approx([(0.95 * 4 + 1) / 5])
    for _ in range(20):  # what is rejected lowers the prediction of its tenth
        drafted_length(schedule, [0.9, 0.9])
        schedule.observe(outcome(2, 0))
    assert drafted_length(schedule, [0.9, 0.9]) == 1


def test_egag_by_hand():
    """V = 16: H_norm of half the largest entropy is 0.5, and gamma = round(9 - 8 * 0.5)."""
    half, schedule = math.log(4), started("egag:gamma_max=9", vocab_size=16)
    assert schedule.max_draft == 9
    assert drafted_length(schedule, [0.1] * 20, entropy=half) == 5
    assert schedule.record() == {"h_norm": [0.5], "gamma": [5]}
    assert drafted_length(schedule, [0.1] * 20, entropy=0.0) == 9
    assert drafted_length(schedule, [0.1] * 20, entropy=math.log(16)) == 1
    of_confidence = started("egag:gamma_max=9", batch_size=2)
    of_confidence.lengths(np.array([100, 100]))
    given = [TokenStats.of_confidence(np.float32([0.5, 1.0]))]
    assert of_confidence.cut(given, np.array([9, 4]), drawn=False).tolist() == [5, 4]


def test_egag_smooths_and_is_bounded_by_what_may_be_generated():
    schedule = started("egag:gamma_min=2,gamma_max=10,beta=0.75", vocab_size=16)
    for most, entropy, gamma in (
        (MOST, math.log(16), 2), (MOST, 0.0, 10 - 8 * 0.75), (np.array([3]), 0.0, 3),
    ):  # fmt: skip
        schedule.lengths(most)
        schedule.continue_drafting(0, stats(0.5, entropy=entropy))
        assert schedule.record()["gamma"] == [gamma]


def test_egag_keeps_the_average_of_a_sequence_that_drew_nothing():
    schedule = started("egag:gamma_min=2,gamma_max=10,beta=0.75", batch_size=2)
    most, least = (np.array([100, n]) for n in (100, 0))
    for given, entropy in ((most, [math.log(16)] * 2), (least, [0.0, math.nan]), (most, [0.0] * 2)):
        schedule.lengths(given)
        drawn = [0.5, 0.5 if given is most else math.nan]
        schedule.continue_drafting(0, stats(drawn, entropy=entropy))
    assert schedule.record()["gamma"] == [round(10 - 8 * 0.75**2), 10 - 8 * 0.75]


WRONG = {
    "best": "num_assistant_tokens_schedule must be one of constant, heuristic, .*got 'best'",
    "constant:": "schedule 'constant' takes no parameters, got ''",
    "egag:gamma=3,beta=0.5": "schedule 'egag' takes gamma_min, gamma_max, beta, got 'gamma=3'",
    "egag:gamma_min=3,gamma_max=2": r"gamma_max must be an integer in \[3, 1024\], got 2",
}


@pytest.mark.parametrize("given", WRONG)
def test_wrong_parameters_are_refused_by_name(given):
    with pytest.raises(ValueError, match=WRONG[given]):
        make_schedule(given)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_parameter_is_a_number_within_its_range(name):
    for parameter, one in inspect.signature(type(make_schedule(name))).parameters.items():
        if not {"int", "float"} & set(str(one.annotation).split(" | ")):
            continue
        for value in ("x", "nan", "-1"):
            message = rf"^{parameter} (of schedule '.*' )?must be .*, got '?{value}"
            with pytest.raises((ValueError, TypeError), match=message):
                make_schedule(f"{name}:{parameter}={value}")
        if "int" in str(one.annotation):
            with pytest.raises(TypeError, match=rf"^{parameter} must be an integer.*, got 2\.5"):
                make_schedule(f"{name}:{parameter}=2.5")
