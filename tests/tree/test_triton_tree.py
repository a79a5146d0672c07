"""`verify_tree` of the Triton provider in the interpreter, against the specification.

The interpreter takes up to a second for each row. Trees are therefore small, and each rule, form of
draft and limit has few settings. tests/chain/test_triton_chain.py compiles the kernels for devices.
"""

import os

import pytest

pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

import torch
from proofs import assert_close, assert_outputs_close
from support.providers import small_tiles, verify_tree  # noqa: F401

from specdec_kernels import reference
from specdec_kernels.triton.tree import verify_tree as tree

# Siblings.


def siblings(tokens):
    """[1, N] tokens that are all children of the root, their parents, and draft rows of zeros."""
    n = len(tokens)
    return torch.tensor([tokens]), torch.full((1, n), -1), torch.zeros(1, n, dtype=torch.int32)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("near", [0.0, 0.9, 0.999])
@pytest.mark.parametrize("k", [2, 3, 8])
def test_the_factor_of_k_seq_is_the_smallest_that_is_lossless(k, near):
    """rho is computed from the acceptance probability P(x) / (rho * Q(x)) of one token."""
    g = torch.Generator().manual_seed(k)
    p, q = torch.randn(2, 23, generator=g).mul(2).softmax(-1)
    q = (1 - near) * q + near * p
    x = int((q / p).argmax())
    tokens, parents, rows = siblings([x] * k)
    target = p.expand(1, k + 1, 23).contiguous()
    draft = q.expand(1, 1, 23).contiguous()
    out = verify_tree(
        tree.verify_tree, target, tokens, parents, draft, rule="k_seq", kind="probs",
        draft_rows=rows, uniforms=torch.full((1, 2 * k + 1), 0.999999, dtype=torch.float64),
    )  # fmt: skip
    rho = float(p[x].double() / q[x].double()) / float(out[5][0, 0])
    beta = torch.minimum(q.double(), p.double() / rho).sum().clamp(max=1)
    least = torch.minimum(q.double(), p.double() / (rho - 4e-6)).sum().clamp(max=1)
    assert 1 - (1 - beta) ** k <= rho * beta + 1e-6
    assert rho <= 1 + 4e-6 or 1 - (1 - least) ** k > (rho - 4e-6) * least - 1e-7


def test_without_replacement_the_rest_of_a_peaked_draft_is_accurate():
    """The first sibling has all but 1e-9 of Q, so the rest of Q decides about the second."""
    v = 50
    q = torch.full((1, 1, v), -24.0)
    q[..., 7] = 0.0
    q[..., 9] = -21.0
    target = torch.zeros(1, 3, v)
    target[..., 7] = -30.0
    tokens, parents, rows = siblings([7, 9])
    u = torch.full((1, 5), 0.99, dtype=torch.float64)
    args = (target, tokens, parents, q)
    options = {"rule": "multi_draft_wor", "draft_rows": rows, "uniforms": u}
    want = verify_tree(reference.verify_tree, *args, **options)
    got = verify_tree(tree.verify_tree, *args, **options)
    assert_close("accept_probs", got[5], want[5], rtol=1e-6)
    assert 0.01 < float(want[5][0, 1]) < 0.5


def test_traversal_counts_the_draft_of_every_token_beyond_a_tiny_vocabulary():
    """V = 2: the rejected token 2 has most of Q, and the acceptance of token 1 depends on it."""
    target = torch.tensor([0.7, 0.3]).expand(1, 4, 2).contiguous()
    draft = torch.tensor([0.1, 0.25, 0.6, 0.05]).expand(1, 1, 4).contiguous()
    tokens, parents, rows = siblings([2, 1, 0])
    options = {"rule": "traversal", "kind": "probs", "draft_rows": rows,
               "uniforms": torch.full((1, 7), 0.99999, dtype=torch.float64)}  # fmt: skip
    args = (target, tokens, parents, draft)
    want = verify_tree(reference.verify_tree, *args, **options)
    assert_outputs_close("verify_tree", verify_tree(tree.verify_tree, *args, **options), want)
    assert 0.3 < float(want[5][0, 1]) < 0.31


@pytest.mark.parametrize("rule", ["multi_draft", "multi_draft_wor", "traversal"])
@pytest.mark.usefixtures("small_tiles")
def test_many_siblings_of_several_rows_in_many_tiles(rule):
    """Tiles of 256; siblings share draft rows, also with other rows tried in between."""
    g = torch.Generator().manual_seed(4)
    v, n = 600, 7
    target, draft = torch.randn(1, n + 1, v, generator=g), torch.randn(1, 3, 700, generator=g)
    tokens = torch.tensor([[1, 300, 599, 300, 2, 650, 3]])
    draft[..., tokens[0]] += 5
    rows = torch.tensor([[0, 0, 1, 0, 1, 2, 2]], dtype=torch.int32)
    u = torch.full((1, 2 * n + 1), 0.9999, dtype=torch.float64)
    u[:, n:] = 0.37
    args = (target, tokens, torch.full((1, n), -1), draft)
    options = {"rule": rule, "draft_rows": rows, "uniforms": u}
    want = verify_tree(reference.verify_tree, *args, **options)
    assert_outputs_close("verify_tree", verify_tree(tree.verify_tree, *args, **options), want)
    assert int(want[2]) == 0
