"""SGLang's layouts of EAGLE's trees and of masks: its literal examples, its rules, and the ops."""

import pytest
import torch
from compat.sglang_loops import LINKS, eagle_tree, lineage, linked, links, parents_of

from specdec_kernels.compat.sglang import (
    build_tree_kernel_efficient,
    reconstruct_indices_from_tree_mask,
)

# Topk, depth and number of nodes.
SIZES = [(4, 4, 8), (2, 3, 5), (3, 2, 12), (1, 5, 6), (5, 1, 4), (8, 4, 24)]


def built(parent_list, selected, lengths, topk, depth, mode=1):
    """The mask, the positions and the links, in buffers as SGLang makes them."""
    b, n = len(selected), selected.shape[1] + 1
    mask = {
        0: torch.full((int(lengths.sum()) * n + n * n * b,), True),
        1: torch.full((b * n * n,), True),
        2: torch.zeros(b * n, dtype=torch.uint8 if n <= 8 else torch.uint16 if n <= 16
                       else torch.uint32),
    }[mode]  # fmt: skip
    positions, out = torch.full((b * n,), -7), links(b, n)
    build_tree_kernel_efficient(
        parent_list, selected, lengths, mask, positions, *out.values(), topk, depth, n, mode
    )
    return mask, positions, out


def visible(parents):
    """[B, N, N] bool, each node and its ancestors."""
    n = len(parents[0])
    return torch.tensor([[[j in lineage(row, i) for j in range(n)] for i in range(n)]
                         for row in parents])  # fmt: skip


@pytest.mark.parametrize(("topk", "depth", "n"), SIZES)
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_trees_are_built_as_their_definition_says_and_read_from_their_masks(topk, depth, n, mode):
    parent_list, selected = eagle_tree(torch.Generator().manual_seed(n), 5, topk, depth, n)
    lengths = torch.tensor([0, 3, 11, 1, 6])
    mask, positions, out = built(parent_list, selected, lengths, topk, depth, mode)
    parents = parents_of(parent_list, selected, topk)
    want = linked(parents)
    for name in LINKS:
        assert out[name].tolist() == want[name].tolist(), name
    depths = [[len(lineage(row, i)) - 1 for i in range(n)] for row in parents]
    assert positions.tolist() == (torch.tensor(depths) + lengths[:, None]).flatten().tolist()
    nodes = visible(parents)
    if mode == 0:
        full = [torch.cat([torch.ones(n, s).bool(), m], 1).flatten()
                for s, m in zip(lengths.tolist(), nodes, strict=True)]  # fmt: skip
        assert mask.tolist() == torch.cat(full).tolist()
    elif mode == 1:
        assert mask.tolist() == nodes.flatten().tolist()
        for above in (torch.zeros(n, n), torch.ones(n, n).triu(1)):  # what lies above is not read
            again, out = torch.zeros_like(positions), links(5, n)
            given = mask.view(5, n, n) | above.bool()
            reconstruct_indices_from_tree_mask(given, lengths, again, *out.values(), 5, n)
            assert again.tolist() == positions.tolist()
            for name in LINKS:
                assert out[name].tolist() == want[name].tolist(), name
    else:
        bits = (nodes.long() << torch.arange(n)).sum(-1)
        assert mask.tolist() == bits.flatten().tolist()


RANGES = [
    ("build", "selected_index", torch.tensor(1), "selected_index must be"),
    ("build", "topk", 0, "topk must be at least 1, got 0"),
    ("build", "tree_mask_mode", 3, "must be 0, 1 or 2, got 3"),
    ("build", "verified_seq_len", torch.tensor([-1]), "at least 0, got -1"),
    ("mask", "batch_size", 2, r"at least 18 entries, got \[3, 3\]"),
]


@pytest.mark.parametrize(("function", "name", "value", "message"), RANGES)
def test_a_layout_of_wrong_sizes_is_named_and_nothing_is_written(function, name, value, message):
    """Wrong types and shapes are in test_interfaces.py."""
    good = {
        "tree_mask": torch.eye(3).bool(), "verified_seq_len": torch.tensor([3]),
        "positions": torch.full((3,), -7), **{k: torch.full((1, 3), -7) for k in LINKS},
        "draft_token_num": 3,
    }  # fmt: skip
    if function == "build":
        good |= {
            "parent_list": torch.tensor([[-1, 0, 1]]),
            "selected_index": torch.tensor([[0, 1]]),
        }
        good |= {"topk": 2, "depth": 2, "tree_mask_mode": 1}
        call = build_tree_kernel_efficient
    else:
        call, good["batch_size"] = reconstruct_indices_from_tree_mask, 1
    with pytest.raises(RuntimeError, match=message):
        call(**good | {name: value})
    assert all(good[k].eq(-7).all() for k in (*LINKS, "positions"))
