"""The ops that move or drop tokens of caches leave the same bytes as the reference."""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import Case
from support import kv_cases, kv_path_cases
from support.kv_buffers import (
    check,
    embedded,
    far_apart,
    integers,
    same,
)
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference
from specdec_kernels._library import CACHE_OPS

MOVES = [op for op in CACHE_OPS if op not in ("kv_append_", "kv_truncate_")]
CASES = [*(c for op in MOVES for c in proofs.cases(op)), *kv_path_cases.move_cases()]
NAMED = kv_cases.each(CASES, of="{provider}-{op}{case}")


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("ops", "case"), NAMED, indirect=["ops"])
def test_leaves_the_bytes_of_the_reference(ops, case):
    check(ops(case.op), case)


# Schedules and sizes.


def _large(op, *vectors, options=(), count=3):
    """A case large enough for the CPU kernels to use several threads."""

    def build(g):
        caches = [embedded((3, 3, 900, 64), torch.float32, "transposed", g) for _ in range(count)]
        caches.append(embedded((3, 2, 850, 65), torch.float32, "sliced", g))
        return (caches, *(integers(v, torch.tensor(v).shape) for v in vectors), *options)

    return Case(op, f"large-{count}", build)


LARGE_PATH = [list(range(0, 850, 2)), list(range(1, 426)), [0, *range(2, 426)]]
LARGE = [
    _large("kv_compact_", [0, 400, 3], LARGE_PATH),
    # 11 MB move, for which the CPU kernel bypasses the cache with its stores.
    _large("kv_compact_", [0, 400, 3], LARGE_PATH, count=12),
    _large("kv_realign_", [0, 30, 3], [700, 850, 900], [150, -7, 1], options=(True,)),
    _large("ring_truncate_", [2000, 1000, 700], [1000, 150, 200], options=(100, True)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c.op}{c}")
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full), 5])
def test_any_number_of_threads_leaves_the_same_bytes(threads, case):
    torch.set_num_threads(threads)
    check(provider(case.op, "cpp"), case)


def test_node_ids_on_a_path_may_decrease(ops):
    """Among siblings with equal tokens, `verify_tree` may go on below another one than it names."""
    cache = torch.arange(6.0).view(1, 1, 6, 1)
    ops("kv_compact_")([cache], torch.tensor([1]), torch.tensor([[2, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [0, 3, 2, 5, 4, 5]
    cache, table = torch.arange(6.0).view(3, 2, 1, 1), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    ops("paged_compact_")([cache], table, torch.tensor([0]), torch.tensor([[3, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [2, 1, 2, 3, 1, 5]


def test_addresses_beyond_2_to_the_31_elements(ops):
    view = far_apart()
    slots = torch.arange(12, dtype=torch.int8).view(2, 2, 3, 1)
    view.copy_(slots.expand(view.shape))
    want = view.contiguous()
    base, path = torch.tensor([0, 1]), torch.tensor([[1, 2], [1, -1]])
    reference.kv_compact_([want], base, path)
    ops("kv_compact_")([view], base, path)
    same("cache", view, want)
    blocks = torch.tensor([[1, 0]], dtype=torch.int32)
    for op, cache in ((ops("paged_compact_"), view), (reference.paged_compact_, want)):
        op([cache.transpose(1, 2)], blocks, base[:1], torch.tensor([[2, 4, 5]]))
    same("paged cache", view, want)
    shift = torch.tensor([1, -1])
    for op, cache in ((ops("kv_realign_"), view), (reference.kv_realign_, want)):
        op([cache], base, torch.tensor([2, 2]), shift, True)
    same("moved cache", view, want)


# Recurrent states.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 2, 5), (6, 1, 3), (6, 0, 3)])
def test_state_select_moves_the_chosen_state_to_the_front(shape, dtype):
    g = torch.Generator().manual_seed(1)
    wide = [torch.randint(-100, 100, (8, *shape[1:]), generator=g) for _ in range(2)]
    states = [wide[0][1:7], wide[1].half()[1:7]]
    index = torch.tensor([0, 3, 1, -1, 4, 2], dtype=dtype)
    want = [s.clone() for s in states]
    for state in want:
        for b, slot in enumerate(index.tolist()):
            if 0 <= slot < shape[1]:
                state[b, 0] = state[b, slot].clone()
    sk.state_select_(states, index)
    for got, wanted in zip(states, want, strict=True):
        same("state", got, wanted)


@pytest.mark.parametrize(
    ("states", "index", "message"),
    [
        ([], torch.zeros(1, 1, dtype=torch.int64), r"index must be \[B\], got \[1, 1\]"),
        ([], torch.zeros(1), "index must be int32 or int64, got float32"),
        ([torch.zeros(3)], torch.tensor([1]), r"states\[0\] must be \[B, S, ...\] with B = 1, got"),
        ([torch.zeros(2, 3)], torch.tensor([1]), r"states\[0\] must be \[B, S, ...\] with B = 1"),
        (
            [torch.zeros(1, 3, 2, 4).mT],
            torch.tensor([1]),
            r"states\[0\] must have contiguous trailing dimensions, got \(24, 8, 1, 4\)",
        ),
        (
            [torch.zeros(1, 3, device="meta")],
            torch.tensor([1]),
            r"states\[0\] must be on the device of index, cpu, got meta",
        ),
    ],
)
def test_state_select_names_the_wrong_argument(states, index, message):
    with pytest.raises(RuntimeError, match=message):
        sk.state_select_(states, index)


def _tree_round(cache, scale, paged, state, base, path, lengths, tables):
    sk.kv_compact_([cache, scale], base, path)
    sk.paged_compact_([paged], tables, base, path)
    accepted = (path >= 0).sum(1)
    freed = sk.paged_truncate_(tables, lengths, base + accepted, 2)
    sk.kv_realign_([cache], base, accepted, accepted, zero_fill=True)
    status = sk.ring_truncate_([cache], base + 2, accepted, 2)
    sk.state_select_([state], accepted)
    return cache.sum() + scale.sum() + paged.sum() + state.sum(), *freed, status


@pytest.mark.build  # it traces
def test_a_tree_round_compiles_as_one_graph_and_writes_in_place():
    torch._dynamo.reset()
    compiled = torch.compile(_tree_round, fullgraph=True, backend="aot_eager", dynamic=True)
    for b in (2, 3):
        results = []
        for f in (_tree_round, compiled):
            g = torch.Generator().manual_seed(b)
            made = [(b, 2, 9, 4), (b, 2, 9, 1), (4 * b, 2, 3, 4), (b, 5, 2, 3)]
            args = [
                *(torch.randn(shape, generator=g) for shape in made),
                torch.arange(b) + 1,
                torch.tensor([[0, 2, 4, -1], [1, 2, 3, 5], [0, -1, -1, -1]])[:b],
                torch.arange(b) + 7,
                torch.arange(4 * b, dtype=torch.int32).view(b, 4),
            ]
            results.append([*f(*args), *args])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
