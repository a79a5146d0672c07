"""A step of SGLang on tensors: trees as links, sampling parameters, seeds and faults."""

import pytest
import torch
from compat.sglang_loops import expected, linked, outputs, random_tree, sampling_info
from proofs import SIGNIFICANCE, chi_square
from specdec_sglang.verification import Step, verify_step_

from specdec_kernels import sample
from specdec_kernels.compat.linked_tree import parents_of_links
from specdec_kernels.compat.sglang import verify_tree_greedy

DRAWS = 6000


def verified(logits, tree, s, lengths=None, **given):
    """The outputs for logits [B, N, V], and the requests without a distribution."""
    b, n, v = logits.shape
    lengths = torch.arange(b) if lengths is None else lengths
    out = outputs(b, n, s)
    step = Step.of(logits.reshape(b * n, v), lengths, sampling_info(b, **given))
    return out, verify_step_(step, *out.values(), **tree)


def test_the_parents_of_links_are_those_of_the_tree():
    tree, parents = random_tree(torch.Generator().manual_seed(1), 40, 17, 17)
    got = parents_of_links(tree["retrieve_next_token"], tree["retrieve_next_sibling"])
    assert got.tolist() == parents


@pytest.mark.parametrize("s", [1, 3, 9])
def test_greedy_requests_of_a_step_get_what_the_greedy_verifier_gives(s):
    """top_k 1 is how SGLang writes temperature 0. The largest logit of some rows is there twice."""
    b, n, v = 50, 9, 9
    generator = torch.Generator().manual_seed(s)
    tree, _ = random_tree(generator, b, n, v)
    logits = torch.randint(6, (b, n, v), generator=generator).float()
    got, missing = verified(logits, tree, s, top_ks=1)
    want = outputs(b, n, s)
    verify_tree_greedy(**want, **tree, target_predict=logits.argmax(-1))
    assert [x.tolist() for x in got.values()] == [x.tolist() for x in want.values()]
    assert missing == []
    assert want["accept_token_num"].sum() > 0 or s == 1


PARAMETERS = [
    dict(temperatures=1.3, top_ks=3), dict(min_ps=0.3),
    dict(temperatures=0.8, top_ks=4, top_ps=0.9, min_ps=0.1),
]  # fmt: skip


@pytest.mark.parametrize("given", PARAMETERS, ids=str)
def test_tokens_follow_the_target_under_all_parameters(given):
    """Those after the root, with two children; and not the target without them, the control."""
    logits = torch.randn(1, 3, 6, generator=torch.Generator().manual_seed(3)).mul(1.5)
    torch.manual_seed(7)
    tree = dict(candidates=torch.tensor([[0, 1, 4]] * DRAWS), **linked([[-1, 0, 0]] * DRAWS))
    out, missing = verified(logits.expand(DRAWS, 3, 6), tree, 3, **given)
    first = out["predicts"].view(DRAWS, 3)[:, 0].long()
    assert missing == []
    assert chi_square(first, expected(logits[0, 0], **given)) > SIGNIFICANCE
    assert chi_square(first, expected(logits[0, 0])) < SIGNIFICANCE
    accepted = out["accept_token_num"] == 1
    assert accepted.tolist() == ((first == 1) | (first == 4)).tolist()
    bonus = out["predicts"].view(DRAWS, 3)[first == 4, 2].long()
    assert chi_square(bonus, expected(logits[0, 2], **given)) > SIGNIFICANCE


def test_with_a_seed_the_tokens_depend_neither_on_the_drafts_nor_on_the_batch():
    """As much of the text as a step emits; other seeds give other tokens."""
    b, n, v = 30, 5, 4
    generator = torch.Generator().manual_seed(2)
    row = torch.randn(v, generator=generator)
    logits = row.expand(b, n, v)
    seeds, lengths = torch.arange(b), torch.full((b,), 11)
    tree, _ = random_tree(generator, b, n, v + 5)
    out, _ = verified(logits, tree, n, lengths, sampling_seed=seeds)
    text = [
        [int(out["predicts"][i]) for i in path if i >= 0] for path in out["accept_index"].tolist()
    ]
    rows = row.expand(b, v)
    steps = [sample(rows, seeds=seeds, positions=lengths + i, noise="residual") for i in range(n)]
    want = torch.stack([step.tokens for step in steps], 1).tolist()
    assert text == [one[: len(got)] for one, got in zip(want, text, strict=True)]
    assert max(map(len, text)) > 2
    other, _ = verified(logits, tree, n, lengths, sampling_seed=seeds + 1)
    assert other["predicts"].tolist() != out["predicts"].tolist()


def test_without_a_seed_every_call_draws_anew_and_manual_seed_repeats_it():
    tree, _ = random_tree(torch.Generator().manual_seed(0), 40, 3, 9)
    logits = torch.zeros(40, 3, 9)
    torch.manual_seed(3)
    first, second = (verified(logits, tree, 3)[0]["predicts"].tolist() for _ in range(2))
    assert first != second
    torch.manual_seed(3)
    assert verified(logits, tree, 3)[0]["predicts"].tolist() == first


def test_rows_are_found_by_their_index():
    """As `predicts` is; the usual index copies no rows."""
    generator = torch.Generator().manual_seed(4)
    tree, _ = random_tree(generator, 20, 4, 9)
    logits = torch.randn(20, 4, 9, generator=generator).mul(4)
    seeds = torch.arange(20)
    out, _ = verified(logits, tree, 4, sampling_seed=seeds)
    order = torch.randperm(80, generator=generator)
    moved = torch.empty(80, 9)
    moved[order] = logits.view(80, 9)
    got, _ = verified(
        moved.view(20, 4, 9), tree | dict(retrieve_index=order.view(20, 4)), 4, sampling_seed=seeds
    )
    assert got["predicts"][order].tolist() == out["predicts"].tolist()
    assert got["accept_token_num"].tolist() == out["accept_token_num"].tolist()


def test_a_row_without_a_distribution_gives_its_largest_finite_logit_and_is_named():
    tree, _ = random_tree(torch.Generator().manual_seed(0), 3, 3, 5)
    logits = torch.zeros(3, 3, 5)
    logits[1, 0] = torch.tensor([0.0, torch.nan, 3.0, 1.0, 0.0])
    out, missing = verified(logits, tree, 3)
    assert missing == [1]
    assert out["accept_token_num"][1] == 0
    assert out["predicts"].view(3, 3)[1, 0] == 2
    assert out["predicts"].view(3, 3)[:, 0].ge(0).all()


def test_a_node_that_no_link_leads_to_is_never_accepted():
    tree, _ = random_tree(torch.Generator().manual_seed(0), 2, 3, 4)
    tree["candidates"] = torch.tensor([[0, 1, 2]] * 2)
    tree["retrieve_next_token"] = torch.tensor([[1, -1, -1]] * 2)
    tree["retrieve_next_sibling"] = torch.full((2, 3), -1)
    logits = torch.full((2, 3, 4), -9.0)
    logits[..., 2] = 30.0
    out, _ = verified(logits, tree, 3)
    assert out["accept_token_num"].tolist() == [0, 0]
    assert out["predicts"].view(2, 3)[:, 0].tolist() == [2, 2]
