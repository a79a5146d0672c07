"""Faults of the data, wrong arguments and failing ranks: every rank says the same."""

import math
import re

import pytest
import torch
from proofs import assert_outputs_close
from proofs.chain import chain_case
from sharded.on_ranks import (
    decide_alone,
    fail_on_rank,
    sharded_provider,
    verify_on_rank,
    verify_outside,
    verify_with_all_changed,
    verify_with_changes,
)
from support.providers import provider, verify

from specdec_kernels import SampledDraft, Status
from specdec_kernels.sharded import SHARDED_RULES, verify_chain_sharded

cpp = provider("verify_chain", "cpp")
NAN, INF = math.nan, math.inf


def inputs(rule, v=13, b=12, gamma=3, seed=0, coarse=False):
    """Keyword arguments of `providers.verify`. coarse: most logits of a row are equal."""
    g = torch.Generator().manual_seed(seed)
    target, draft = torch.randn(b, gamma + 1, v, generator=g), torch.randn(b, gamma, v, generator=g)
    if coarse:
        target, draft = target.round(), draft.round()
    tokens = target[:, :gamma].argmax(-1)
    return dict(target=target, tokens=tokens, draft=draft, rule=rule,
                seeds=torch.arange(b), positions=torch.arange(b))  # fmt: skip


def assert_equal(ranks, given, size=3, starts=None):
    """Compares the verdict with that of the op, and returns it."""
    got = verify(sharded_provider(ranks, size, starts), **given)
    assert_outputs_close("verify_chain", got, verify(cpp, **given))
    return got


@pytest.mark.parametrize("rule", SHARDED_RULES)
def test_a_fault_in_the_shard_of_one_rank_is_the_status_of_all(ranks, rule):
    given = inputs(rule)
    for b in range(10):
        given["target"][b, b % 4, b] = (NAN, INF)[b % 2]  # columns of every rank that has any
    got = assert_equal(ranks, given, 4, (0, 5, 9, 9))
    assert (got[2][:10] & Status.TARGET_INVALID).any()
    assert not got[2][10:].any()
    given = inputs(rule)
    given["target"][:6, :, 5:] = -INF  # nothing is left on the last rank
    given["target"][3, 1] = -INF  # nor anywhere
    got = assert_equal(ranks, given, 4, (0, 5, 9, 13))
    assert (got[0][:6] < 5).all()
    assert not got[2][:3].any()


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_fault_in_one_rank_of_the_draft_is_the_status_of_all(ranks, rule):
    given = inputs(rule)
    rows = torch.arange(10)
    given["draft"][rows, rows % 3, rows] = torch.tensor([NAN, INF]).repeat(5)
    assert (assert_equal(ranks, given, 4, (0, 5, 5, 9))[2] & Status.DRAFT_INVALID).any()


@pytest.mark.parametrize("rule", SHARDED_RULES)
def test_ids_and_parameters_out_of_range(ranks, rule):
    given = inputs(rule)
    given["tokens"][0, 0], given["tokens"][1, 1], given["tokens"][2, 2] = 13, -1, -5
    given["temperature"] = torch.full((12,), 0.7)
    given["temperature"][3], given["temperature"][4] = NAN, 0.0
    given["top_p"] = torch.full((12,), 0.9)
    given["top_p"][5] = 0.0
    given["top_k"] = torch.full((12,), 4, dtype=torch.int32)
    given["top_k"][6], given["top_k"][7] = -1, 99
    got = assert_equal(ranks, given, 4, (0, 13, 13, 5))
    bad = [b for b in range(12) if got[2][b] & Status.BAD_PARAMETER]
    assert bad == [3, 5, 6]


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_temperature_of_the_draft_out_of_range(ranks, rule):
    given = inputs(rule)
    temperature = torch.full((12,), 0.5)
    temperature[3], temperature[5] = -1.0, NAN
    logsumexp = (given["draft"] / 0.5).logsumexp(-1).double()
    given["sampled"] = logsumexp, torch.full((12, 3), -INF), temperature
    got = assert_equal(ranks, given)
    assert [b for b in range(12) if got[2][b] & Status.BAD_PARAMETER] == [3, 5]


@pytest.mark.parametrize("rule", SHARDED_RULES)
def test_ties_across_shards_go_to_the_lowest_id_and_are_kept_by_filters(ranks, rule):
    given = inputs(rule, b=64, coarse=True)
    given |= {"top_k": 4, "top_p": 0.9, "min_p": 0.1}
    given["temperature"] = torch.tensor([0.0, 0.8, 1.0, 1.5]).repeat(16)
    assert_equal(ranks, given)
    assert_equal(ranks, given, starts=(7, 0, 3))


def test_zeros_of_both_signs_tie_across_shards(ranks):
    given = inputs("greedy")
    given["target"] = torch.zeros(12, 4, 13)
    given["target"][..., :5] = -0.0  # all that the first rank holds
    got = assert_equal(ranks, given)
    assert (got[0][:, 0] == 0).all()


def test_empty_residuals_are_drawn_from_the_target(ranks):
    """Drafts that Q calls impossible are accepted, so only P = Q leaves no residual."""
    given = inputs("token")
    given["draft"] = given["target"][:, :3] + 1e-7
    given["uniforms"] = torch.full((12, 4), 1 - 2**-53, dtype=torch.float64)
    got = verify(sharded_provider(ranks, 3), **given)
    assert not (got[2] & ~Status.EMPTY_RESIDUAL).any()
    assert (got[0][:, 0] >= 0).all()


ROWS = torch.zeros(2, 2, 10)
WRONG = [
    ({"rule": "typical"}, "rule must be one of token, block, greedy, match over a sharded voc"),
    ({"top_p": 2.0}, "top_p must be in (0, 1], got 2"),
    ({"seeds": [1]}, "TypeError: seeds must be a tensor, got [1]"),
    ({"vocab_start": True}, "TypeError: vocab_start must be an integer, got True"),
    ({"draft_shard": torch.zeros(2, 2, 3)}, "draft_shard must have the W = 10 columns of target_s"),
    ({"with_logprobs": 1}, "TypeError: with_logprobs must be True or False, got 1"),
    ({"target_shard": torch.zeros(2, 3, 10, device="meta")}, "on the device of target_shard, "),
    ({"target_shard": torch.zeros(2, 4, 10)}, "[B, gamma+1, W] = [2, 3, W], got [2, 4, 10]"),
    ({"draft_shard": torch.zeros(2, 1, 10)}, "must be [B, gamma, W] = [2, 2, W], got [2, 1, 10]"),
    ({"draft_shard": SampledDraft(ROWS, None, None, 1.0)}, "logsumexp must be a tensor, got None"),
    ({"draft_shard": "draft"}, "TypeError: draft_shard must be None, a tensor, a SampledDraft"),
    ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
]
OTHER_ROWS = {"target_shard": torch.zeros(6, 10), "target_indptr": torch.tensor([0, 3, 6]).int()}
DIFFERENT = [
    ({"temperature": 0.5}, "temperature must be equal on all ranks, got another one than rank 0"),
    ({"vocab_start": 5}, "vocab_start must let the shards follow each other from 0 on"),
    *(
        (changes, f"{[*changes][-1]} must be equal on all ranks")
        for changes in (
            {"seeds": torch.tensor([0, 1])},
            {"positions": torch.tensor([0, 1])},
            {"top_k": 3},
            {"top_p": 0.5},
            {"min_p": 0.5},
            {"token_bitmask": torch.zeros(2, 3, 1).int()},
            {"uniforms": torch.zeros(2, 3, dtype=torch.float64)},
            {"eos_token_ids": torch.tensor([1])},
            {"max_new_tokens": torch.tensor([1, 1])},
            {"with_logprobs": False},
            {"with_accept_probs": False},
            OTHER_ROWS,
            {"draft_token_ids": torch.zeros(2, 2, dtype=torch.int32)},
            {"rule": "block"},
            {"draft_shard": None},
            {"vocab_size": 30},
        )
    ),
]


def test_a_wrong_or_different_argument_of_one_rank_raises_on_all(ranks):
    args = chain_case(2, 2, 30).args()
    for changes, message in WRONG + DIFFERENT:
        for done, answer in ranks.answers(3, verify_with_changes, args, 1, changes):
            assert not done, changes
            assert answer[0] == "RuntimeError"
            assert message in answer[1]
            assert "rank 1" in answer[1] or (changes, message) in DIFFERENT
    ranks.run(3, verify_on_rank, args)  # the group is as good as before


def test_what_does_not_fit_the_vocabulary_of_all_shards_is_refused(ranks):
    args = chain_case(2, 2, 9).args()
    whole = dict(target_shard=args[0], draft_shard=None, vocab_start=None, vocab_size=9)
    empty = dict(target_shard=torch.zeros(2, 3, 0), draft_shard=None)
    words = "token_bitmask must be [2, 3, 1] int32, one bit for each token of the whole vocabulary"
    for changes, message in (
        (whole, "the shards must hold vocab_size = 9 tokens together, got [9, 9]"),
        (empty, "the shards must hold at least 1 token together, got [0, 0]"),
        ({"token_bitmask": torch.zeros(2, 3, 9).int()}, f"{words}, got [2, 3, 9] torch.int32"),
        ({"token_bitmask": torch.zeros(2, 3, 1)}, f"{words}, got [2, 3, 1] torch.float32"),
    ):
        for done, answer in ranks.answers(2, verify_with_all_changed, args, changes):
            assert not done
            assert answer[1] == message
    for verdict in ranks.run(2, verify_with_all_changed, args, {"vocab_size": 9}):
        assert (verdict.tokens < 9).all()
    ((done, answer),) = ranks.answers(1, verify_outside, args)
    assert not done
    assert answer[1] == "group must contain this rank"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("pack_maxima", "greedy"), pytest.param("masses", "token", marks=pytest.mark.full),
        pytest.param("draft_on_shard", "block", marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_rank_that_fails_raises_on_all(ranks, name, rule):
    for vocab in (30, 2):  # of 2 tokens none is left for the rank
        args = chain_case(2, 2, vocab, rule=rule, filters="scalar").args()
        for done, answer in ranks.answers(3, fail_on_rank, args, 2, name):
            assert not done
            assert answer[:2] == (
                "RuntimeError", "verify_chain_sharded failed on rank 2: MemoryError: planted"
            )  # fmt: skip
        ranks.run(3, verify_on_rank, args)


def test_ranks_that_decide_differently_raise_on_all(ranks):
    args = chain_case(100, 3, 60, acceptance=0.5).args()
    for done, answer in ranks.answers(3, decide_alone, args):
        assert not done
        assert answer[1].startswith("the number of accepted drafts must be equal on all ranks")
        assert re.search(r"got \[\d, \d, \d\] on them for sequence \d+$", answer[1])


def test_without_a_group_it_says_what_to_call():
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"distributed must be initialized, call init_pro"):
        verify_chain_sharded(torch.zeros(1, 2, 3), one[None], seeds=one, positions=one)
