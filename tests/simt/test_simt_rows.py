"""Which rows of a sequence the groups read.

From logits, where sequences are few, each group reads a row of its own, and the last one decides.
From probabilities the group of a sequence reads entries, and the one row to draw from.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal, chain_case
from simt import emulator

V = 512 * 9 + 3
ROW_BYTES = 10 * 12  # of the statistics of the ten tiles of a row
PARALLEL = {"schedule": "parallel", "group": 2}


def outputs(simt, case, **sharing):
    with simt.sharing(**sharing):
        got = simt.op("verify_chain")(*case.args())
    assert_outputs_close("verify_chain", got, proofs.providers("verify_chain")["cpp"](*case.args()))
    return got


def rows_written(simt, b):
    """Rows of statistics that the last launch wrote for each sequence, to the nearest half."""
    return round(2 * simt.last_written() / (b * ROW_BYTES)) / 2


@pytest.mark.parametrize("rule", ["token", "lenient", "greedy"])
@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_every_row_of_a_sequence_is_read_once(simt, rule, acceptance):
    """And once more to draw from the residual. Rule greedy reads no draft and has no residual."""
    b, gamma = 2, 5
    case = chain_case(b, gamma, V, rule=rule, acceptance=acceptance)
    accepted = outputs(simt, case, **PARALLEL)[1]
    drafts = 0 if rule == "greedy" else gamma
    residuals = 0 if rule == "greedy" else (accepted < gamma).double().mean().item()
    assert rows_written(simt, b) == round(2 * (gamma + 1 + drafts + residuals)) / 2


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("order", list(emulator.ORDERS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("acceptance", [0.3, 0.8])
def test_groups_that_run_in_waves_change_no_bit(simt, order, dtype, acceptance):
    case = chain_case(9, 4, V, dtype, acceptance=acceptance)
    want = outputs(simt, case, schedule="lazy", group=2)
    got = outputs(simt, case, **PARALLEL, order=order, fill=0)
    assert_outputs_equal("verify_chain", got, want)


def test_a_replayed_launch_finds_no_arrivals(simt):
    """The tickets that a launch leaves in the workspace are those of no launch."""
    case = chain_case(8, 5, V, acceptance=0.0)
    with simt.sharing(**PARALLEL, fill=0):
        simt.op("verify_chain")(*case.args())
    assert simt.first_words(8) == [0] * 8


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [1, 5])
def test_rows_of_probabilities_are_read_to_draw_from_alone(simt, gamma, acceptance):
    """By one group for each sequence, however few there are."""
    case = chain_case(2, gamma, V, kind="probs", acceptance=acceptance)
    want = outputs(simt, case, schedule="lazy", group=1)
    got = outputs(simt, case)
    assert not simt.last_plan().parallel
    assert simt.last_plan().groups == 2
    assert rows_written(simt, 2) <= 2  # P and the residual
    assert_outputs_equal("verify_chain", got, want)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("order", list(emulator.ORDERS))
def test_a_block_that_is_ahead_disturbs_no_other_one(simt, kind, order):
    """From probabilities only the barrier before a residual keeps the blocks of a group together.

    Each of two groups goes through several sequences.
    """
    case = chain_case(9, 2, V, kind=kind, acceptance=0.3)
    want = outputs(simt, case, schedule="lazy", group=1)
    got = outputs(simt, case, schedule="lazy", group=8, order=order)
    assert simt.last_plan().groups < 9
    assert_outputs_equal("verify_chain", got, want)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_drafts_beyond_the_first_32_are_tested_by_their_own_rows(simt, kind):
    """A warp tests 32 drafts side by side, then the next ones.

    Some would be accepted after the first that is rejected. Their rows are measured before that is
    known where the last groups run first.
    """
    case = chain_case(3, 70, 67, kind=kind, acceptance=0.97)
    want = outputs(simt, case, schedule="lazy", group=1)
    assert want[1].max() > 32
    got = outputs(simt, case, schedule="parallel", group=1, order="reverse")
    assert_outputs_equal("verify_chain", got, want)


def test_rows_of_more_drafts_than_can_be_measured_at_once_are_measured_one_by_one(simt):
    """A block has room for the statistics of a few hundred rows."""
    case = chain_case(1, 650, 67, acceptance=0.95)
    want = outputs(simt, case, schedule="lazy", group=1)
    assert_outputs_equal("verify_chain", outputs(simt, case, schedule="parallel", group=1), want)
