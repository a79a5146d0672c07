"""Which rows of a sequence the blocks read, and what they leave in the workspace."""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal, chain_case
from simt import emulator

V = 512 * 9 + 3
ROW_BYTES = 10 * 12  # of the statistics of the ten tiles of a row


def outputs(simt, case, **running):
    with simt.running(**running):
        got = simt.op("verify_chain")(*case.args())
    assert_outputs_close("verify_chain", got, proofs.providers("verify_chain")["cpp"](*case.args()))
    return got


def rows_written(simt, b, others=0):
    """Rows of statistics that the last call wrote for each sequence.

    others: bytes of summaries and tickets that it wrote for a row.
    """
    return simt.last_written() / (b * (ROW_BYTES + others))


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("rule", ["token", "lenient", "greedy"])
def test_rows_behind_a_rejection_are_not_read(simt, rule):
    """Where blocks run one after the other the first rejection is known in time."""
    b, gamma = 2, 5
    counts = {}
    for acceptance in (0.0, 1.0):
        case = chain_case(b, gamma, V, rule=rule, acceptance=acceptance)
        accepted = outputs(simt, case, processors=0)[1]
        assert accepted.unique().tolist() == [0 if acceptance == 0 else gamma]
        counts[acceptance] = rows_written(simt, b, others=24)
    kinds = 1 if rule == "greedy" else 2
    assert kinds <= counts[0.0] <= kinds + 2  # and the residual
    assert counts[1.0] >= kinds * gamma + 1


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("acceptance", [0.0, 0.5])
@pytest.mark.parametrize("order", ["forward", "reverse", "interleaved-1", "interleaved-2"])
def test_when_a_rejection_is_known_changes_no_bit(simt, acceptance, order):
    """Blocks that run from the last to the first read every row."""
    case = chain_case(9, 4, V, torch.bfloat16, acceptance=acceptance)
    want = outputs(simt, case, processors=0)
    for processors in (0, 16):
        got = outputs(simt, case, processors=processors, order=order, fill=0)
        assert_outputs_equal("verify_chain", got, want)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("acceptance", [0.0, 0.7])
def test_a_replayed_launch_finds_no_arrivals_and_no_limit(simt, rule, acceptance):
    """The words that a call leaves in the workspace are those of no launch."""
    b, gamma = 4, 5
    case = chain_case(b, gamma, V, rule=rule, acceptance=acceptance)
    with simt.running(processors=16, fill=0, order="interleaved-1"):
        simt.op("verify_chain")(*case.args())
    words = simt.words_at(64 * b * (2 * gamma + 1), b * (4 * gamma + 3))
    assert words == [0] * len(words)


@pytest.mark.parametrize("acceptance", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("gamma", [1, 5])
def test_rows_of_probabilities_are_read_to_draw_from_alone(simt, gamma, acceptance):
    case = chain_case(2, gamma, V, kind="probs", acceptance=acceptance)
    want = outputs(simt, case, processors=0)
    got = outputs(simt, case, processors=16)
    assert rows_written(simt, 2) <= 3  # P and the residual
    assert_outputs_equal("verify_chain", got, want)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_drafts_beyond_the_first_32_are_tested_by_their_own_rows(simt, kind):
    """A warp tests 32 drafts side by side, then the next ones.

    Some would be accepted after the first that is rejected. Their rows are measured before that is
    known where the last blocks run first.
    """
    case = chain_case(3, 70, 67, kind=kind, acceptance=0.97)
    want = outputs(simt, case, processors=0)
    assert want[1].max() > 32
    got = outputs(simt, case, processors=16, order="reverse")
    assert_outputs_equal("verify_chain", got, want)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_hundreds_of_drafts_are_verified(simt, rule):
    outputs(simt, chain_case(1, 650, 67, rule=rule, acceptance=0.95))
    outputs(simt, chain_case(0, 650, 67, rule=rule))


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("order", list(emulator.ORDERS)[1:])
def test_a_block_that_skips_its_part_is_remembered(simt, order):
    """A row that was not read whole has no summary, whoever arrives last."""
    case = chain_case(6, 5, 512 * 40, acceptance=0.2)
    want = outputs(simt, case, processors=0)
    got = outputs(simt, case, processors=64, order=order)
    assert_outputs_equal("verify_chain", got, want)
