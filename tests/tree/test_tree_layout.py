"""tree_attention, rerank_tree and build_trie against oracles that follow parents in Python.

Terms of this folder:
node: a drafted token of a tree; its parent is an earlier node, or -1 for the root.
root: the last committed token, which is not a node.
path: the nodes from a child of the root down to a node.
candidates: nodes with scores, of which rerank_tree keeps the best.
trie: the tree of all prefixes of some sequences.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_outputs_equal
from proofs.tree_layout import random_parents
from proofs.tree_layout_oracles import attention_oracle, check_trie, path, rerank_oracle
from support.providers import provider

import specdec_kernels as sk

NAMES = [n for n in ("reference", "cpp", "triton") if n in proofs.providers("tree_attention")]


def checked(op, name):
    """A provider's op, with poisoned allocations."""
    torch.use_deterministic_algorithms(True)
    return provider(op, name)


def agree(op):
    """(provider, case) pairs; the interpreter takes only the small ones."""
    return [
        pytest.param(n, c, id=f"{n}-{c}")
        for n in NAMES
        for c in proofs.cases(op)
        if n != "triton" or all(t.numel() < 200 for t in c.args() if torch.is_tensor(t))
    ]


def check(op, name, args):
    got = checked(op, name)(*args)
    if op == "build_trie":
        check_trie(*args, got)
        want = proofs.providers(op)["reference"](*args)
    else:
        want = ORACLES[op](*args)
    assert_outputs_equal(op, got, want)


ORACLES = {"tree_attention": attention_oracle, "rerank_tree": rerank_oracle}


@pytest.mark.parametrize(
    ("name", "case"), [*agree("tree_attention"), *agree("rerank_tree"), *agree("build_trie")]
)
def test_layouts_of_trees_are_those_of_the_oracles(name, case):
    check(case.op, name, case.args())


@pytest.mark.parametrize("name", NAMES)
def test_random_forests(name):
    op = checked("tree_attention", name)
    g = torch.Generator().manual_seed(3)
    for seed in range(6 if name == "triton" else 60):
        b, n, slots = (int(torch.randint(0, k, (), generator=g)) for k in (4, 13, 40))
        shape = ("random", "faulty", "wide", "chain")[seed % 4]
        parents = random_parents(b, n, g, shape)
        lengths = torch.randint(-3, 44, (b,), generator=g)
        args = (parents, lengths, slots, seed % 5)
        assert_outputs_equal("tree_attention", op(*args), attention_oracle(*args))


@pytest.mark.parametrize("name", NAMES)
def test_huge_lengths_and_windows_do_not_overflow(name):
    parents = torch.tensor([[-1, 0]]).expand(4, 2)
    lengths = torch.tensor([2**63 - 1, -(2**63), 3, 0])
    for window in (0, 2, 2**63 - 1):
        mask, positions = checked("tree_attention", name)(parents, lengths, 7, window)
        kept = attention_oracle(parents[1:], lengths[1:], 7, window)
        assert_outputs_equal("tree_attention", (mask[1:], positions[1:]), kept)
        assert mask[0].all() == (window != 2)
        assert positions[0].tolist() == [2**62, 2**62 + 1, 2**62 + 2]


def attend(hidden, positions, mask, weights):
    """Two layers of attention with a position embedding, float64: [T, D] -> [T, D]."""
    d = hidden.shape[-1]
    angle = positions.double()[:, None] * torch.arange(1, d + 1) / 7
    hidden = hidden + torch.sin(angle)
    for w in weights:
        q, k, v = (hidden @ part for part in w)
        scores = (q @ k.T / d**0.5).masked_fill(~mask, -torch.inf)
        hidden = hidden + scores.softmax(-1) @ v
    return hidden


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_attention_over_a_tree_equals_attention_over_each_path(name, window):
    """A node gets the same hidden state as at the end of a plain text of its path."""
    g = torch.Generator().manual_seed(5)
    length, n, d, extra = 6, 17, 8, 4
    parents = random_parents(1, n, g)
    table = torch.randn(50, d, generator=g, dtype=torch.float64)
    weights = torch.randn(2, 3, d, d, generator=g, dtype=torch.float64) / d**0.5
    tokens = torch.randint(0, 50, (length + 1 + n + extra,), generator=g)
    slots = len(tokens)  # the last slots hold tokens that no row may see
    op = checked("tree_attention", name)
    tree_mask, positions = op(parents, torch.tensor([length]), slots, window)

    order = torch.arange(slots)
    prefix_mask = order[:length, None] >= order
    if window:
        prefix_mask &= order > order[:length, None] - window
    mask = torch.cat([prefix_mask, tree_mask[0], torch.eye(slots, dtype=torch.bool)[-extra:]])
    at = torch.cat([order[:length], positions[0], order[-extra:]])
    together = attend(table[tokens], at, mask, weights)

    for node in range(-1, n):
        rows = [length + 1 + i for i in reversed(path(parents, 0, node))]
        text = torch.tensor([*range(length + 1), *rows])
        line = torch.arange(len(text))
        causal = line[:, None] >= line
        if window:
            causal &= line > line[:, None] - window
        alone = attend(table[tokens[text]], line, causal, weights)
        error = (alone[-1] - together[length + 1 + node]).abs().max()
        assert error < 1e-12, (node, float(error))


@pytest.mark.parametrize("name", NAMES)
def test_random_candidates(name):
    op = checked("rerank_tree", name)
    g = torch.Generator().manual_seed(4)
    for seed in range(6 if name == "triton" else 100):
        b, m, size = (int(torch.randint(0, k, (), generator=g)) for k in (4, 14, 12))
        parents = random_parents(b, m, g, ("random", "faulty", "wide", "chain")[seed % 4])
        tokens = torch.randint(-1, 9, (b, m), generator=g)
        scores = torch.randint(-4, 2, (b, m), generator=g).float() * (-0.0 if seed == 7 else 1.0)
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf])
        scores[torch.rand(b, m, generator=g) < 0.1] = odd[seed % 3]
        args = (tokens, parents.int() if seed % 2 else parents, scores, size)
        assert_outputs_equal("rerank_tree", op(*args), rerank_oracle(*args))


@pytest.mark.parametrize("name", NAMES)
def test_random_sequences(name):
    op = checked("build_trie", name)
    g = torch.Generator().manual_seed(6)
    for seed in range(6 if name == "triton" else 100):
        b, k, length, size = (int(torch.randint(0, n, (), generator=g)) for n in (4, 6, 6, 25))
        sequences = torch.randint(-1, 1 + seed % 4, (b, k, length), generator=g)
        merge = seed % 3 > 0
        got = op(sequences.int() if seed % 2 else sequences, size, merge)
        check_trie(sequences, size, merge, got)
        assert got[0].dtype == (torch.int32 if seed % 2 else torch.int64)


def test_a_trie_has_room_for_every_token_by_default():
    sequences = torch.arange(12).view(1, 3, 4)
    trie = sk.build_trie(sequences)
    assert trie.tokens.flatten().tolist() == list(range(12))
    assert trie.num_nodes.tolist() == [12]
