"""Theorem 3.8 with measured acceptance and costs, and the efficiency against it."""

import pytest
import torch
from specdec_hf.lab.bench.efficiency import forward_costs, predict, round_costs
from specdec_hf.lab.bench.runs import PLAIN, Answer, Config, Pair
from specdec_hf.lab.bench.summary import rows_of
from specdec_hf.loop.round_record import RoundRecord
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.schedules.costs import MonotoneCost
from support import hf_models

from specdec_kernels.analysis import walltime_factor

pytestmark = pytest.mark.build

STEP, DRAFT, VERIFY, HOST, GAMMA = 0.1, 0.04, 0.15, 0.01, 4  # seconds of each, and drafts
BOUND = walltime_factor(1.0, GAMMA, DRAFT / GAMMA / STEP, VERIFY / STEP)


def call(accepted):
    """Statistics of the prompt's round and of rounds that draft ``GAMMA`` tokens."""
    stats, began = SpecStats(sequences=[SequenceStats()]), 0.0
    for width, verify, kept in [(0, 1.0, 0), *((GAMMA, VERIFY, kept) for kept in accepted)]:
        draft = DRAFT if width else 0.0
        record = RoundRecord(began, draft, verify, HOST, 0.0, 0.0, [width], [kept], [kept + 1])
        began += record.seconds
        stats.record_round(width, record)
        stats.sequences[0].record(width, kept, kept + 1)
    stats.total_seconds = began
    return stats


def curve(verify=VERIFY):
    costs = MonotoneCost()
    costs.observe(1, STEP)
    costs.observe(1 + GAMMA, verify)
    return costs


def row(costs):
    """The row of a drafter whose drafts are all accepted, in ten rounds after the prompt's."""
    stats = call([GAMMA] * 10)
    seconds = 10 * (DRAFT + VERIFY + HOST)
    text = [list(range(51))]
    mine = Answer(["p"], "", text, 1 + seconds, [1.0], 50, seconds, rounds=11, stats=stats)
    plain = Answer(["p"], "", text, 6.0, [6.0], 50, 50 * STEP)
    pairs = {"drafter": [Pair(mine, plain, [True])]}
    return rows_of([Config(PLAIN), Config("drafter")], pairs, costs, sampled=False)[1]


def test_the_bound_is_theorem_3_8_and_the_efficiency_what_the_loop_leaves_of_it():
    found = row(curve())
    assert (found.alpha, found.theorem) == (1, pytest.approx(BOUND))
    assert found.efficiency == pytest.approx((DRAFT + VERIFY) / (DRAFT + VERIFY + HOST))
    assert not any("wrong" in note for note in found.notes)


def test_an_efficiency_above_one_from_wrong_costs_is_flagged():
    found = row(curve(verify=2 * VERIFY))
    assert found.efficiency > 1.5
    assert any("costs or acceptance are not those" in note for note in found.notes)


def test_drafting_is_a_forward_or_a_part_of_the_loop():
    stats = [call([GAMMA] * 3)]
    shares = [predict(stats, curve(), drafts_on_host=host).loop_share for host in (False, True)]
    whole = DRAFT + VERIFY + HOST
    assert shares == pytest.approx([HOST / whole, (HOST + DRAFT) / whole])


def test_drafts_after_a_rejection_are_not_visited():
    assert predict([call([0, 4, 1])], curve(), drafts_on_host=True).alpha == 5 / 7


def test_trees_count_what_they_emitted():
    stats = call([0, 2])
    stats.tree = "4 nodes"
    found = predict([stats], curve(), drafts_on_host=True)
    assert found.alpha is None
    assert found.tokens == pytest.approx(4 / (2 * (DRAFT + VERIFY)))


def test_no_later_round_gives_no_bound():
    assert predict([call([])], curve(), drafts_on_host=True) is None


def test_forwards_are_timed_behind_a_prompt_that_stays_as_long():
    model = hf_models.build("llama")
    widths = []
    model.register_forward_pre_hook(
        lambda module, _, given: widths.append(
            (given["input_ids"].shape[1], given["past_key_values"].get_seq_length())
        ),
        with_kwargs=True,
    )
    ids = torch.ones(2, 7, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = forward_costs(model, inputs, [5, 3])
    assert sorted(found.medians()) == [1, 3, 5]
    assert set(widths) == {(7, 0), (1, 7), (3, 7), (5, 7)}


def test_round_costs_leave_the_prompt_out():
    assert round_costs([call([0, 4])]).medians() == {1 + GAMMA: VERIFY}
    assert curve().scaled(2).medians() == {1: 2 * STEP, 1 + GAMMA: 2 * VERIFY}
