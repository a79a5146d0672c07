"""tree_attention, rerank_tree and build_trie against oracles that walk parents in Python."""

from __future__ import annotations

import pytest
import torch
from providers import identical, provider
from tree_cases import attention_oracle, path

import specdec_kernels as sk
from specdec_kernels import testing
from specdec_kernels._tree_layout_cases import random_parents

NAMES = [n for n in ("reference", "cpp", "triton") if n in testing.providers("tree_attention")]


def checked(op, name):
    """The implementation, with everything it allocates poisoned."""
    torch.use_deterministic_algorithms(True)
    return provider(op, name)


def agree(op, oracle):
    """(provider, case) pairs; the interpreter takes only the small ones."""
    return [
        pytest.param(n, c, id=f"{n}-{c}")
        for n in NAMES
        for c in testing.cases(op)
        if n != "triton" or all(t.numel() < 200 for t in c.args() if torch.is_tensor(t))
    ]


@pytest.mark.parametrize(("name", "case"), agree("tree_attention", attention_oracle))
def test_attention_is_that_of_the_walk_to_the_root(name, case):
    args = case.args()
    identical("tree_attention", checked("tree_attention", name)(*args), attention_oracle(*args))


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
        identical("tree_attention", op(*args), attention_oracle(*args))


@pytest.mark.parametrize("name", NAMES)
def test_no_length_and_no_window_overflows(name):
    parents = torch.tensor([[-1, 0]]).expand(4, 2)
    lengths = torch.tensor([2**63 - 1, -(2**63), 3, 0])
    for window in (0, 2, 2**63 - 1):
        mask, positions = checked("tree_attention", name)(parents, lengths, 7, window)
        kept = attention_oracle(parents[1:], lengths[1:], 7, window)
        identical("tree_attention", (mask[1:], positions[1:]), kept)
        assert mask[0].all() == (window != 2)
        assert positions[0].tolist() == [2**62, 2**62 + 1, 2**62 + 2]


def test_the_oracle_rejects_a_mask_that_shows_siblings():
    """Negative control: rows that see every node at or above their depth."""
    case = testing.cases("tree_attention")[0]
    parents, lengths, slots, window = case.args()
    mask, positions = attention_oracle(parents, lengths, slots, window)
    for b in range(len(parents)):
        for row in range(1, mask.shape[1]):
            older = (positions[b] < positions[b, row]).nonzero().flatten() + int(lengths[b])
            mask[b, row, older[older < slots]] = True
    with pytest.raises(AssertionError, match="mask"):
        identical("tree_attention", (mask, positions), attention_oracle(*case.args()))


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


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("name", NAMES)
def test_one_pass_over_a_tree_equals_each_path_alone(name, window):
    """What the mask means: a node gets the logits that its own path, run as a text, gives it."""
    g = torch.Generator().manual_seed(5)
    length, n, d, extra = 6, 17, 8, 4
    parents = random_parents(1, n, g)
    table = torch.randn(50, d, generator=g, dtype=torch.float64)
    weights = torch.randn(2, 3, d, d, generator=g, dtype=torch.float64) / d**0.5
    tokens = torch.randint(0, 50, (length + 1 + n + extra,), generator=g)
    slots = len(tokens)  # the last ones hold what no row may see
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
def test_the_number_of_threads_and_the_layout_change_nothing(name):
    g = torch.Generator().manual_seed(7)
    b, n, slots = (2, 9, 33) if name == "triton" else (3, 200, 1500)
    parents = random_parents(b, n, g)
    lengths = torch.randint(0, slots, (b,), generator=g)
    op = checked("tree_attention", name)
    torch.set_num_threads(1)
    want = op(parents, lengths, slots, 5)
    torch.set_num_threads(3)
    spread = parents.T.contiguous().T, lengths.repeat_interleave(2)[::2]
    identical("tree_attention", op(*spread, slots, 5), want)
    identical("tree_attention", op(parents.int(), lengths, slots, 5), want)
    last = op(parents[-1:], lengths[-1:], slots, 5)
    identical("tree_attention", last, [t[-1:] for t in want])


def test_the_public_function_names_its_outputs():
    out = sk.tree_attention(torch.tensor([[-1]]), torch.tensor([2]), slots=4)
    assert out.mask.tolist() == [[[True, True, True, False], [True, True, True, True]]]
    assert out.positions.tolist() == [[2, 3]]
