"""The cache ops of C++, CUDA and PyTorch's indexing leave the same bytes as the reference.

Terms of this folder:
slot: the place of one token in a cache [B, H, S, D].
compact: move the tokens of an accepted path to the slots right after the committed prefix.
realign: move a range of slots by a shift, as after left padding changes.
ring: a cache of a sliding window, where token t is in slot t modulo the number of slots.
block table: the blocks of a paged cache that hold a sequence, in order; -1 for none.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from kv import edge_cases
from kv.edge_cases import check_far_apart, far_apart
from proofs import check, same
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference
from specdec_kernels._library import CACHE_OPS

append = torch.ops.specdec_kernels.kv_append_.default
BOUND = [n for n in edge_cases.PROVIDERS if n != "cuda"]  # those with checks of arguments
CASES = [*(c for op in CACHE_OPS for c in proofs.cases(op)), *edge_cases.all_cases()]


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("ops", "case"), edge_cases.each(CASES), indirect=["ops"])
def test_leaves_the_bytes_of_the_reference(ops, case):
    check(ops(case.op), case)


def test_random_calls(ops):
    for op in CACHE_OPS:
        for seed in range(60):
            check(ops(op), edge_cases.random_case(op, seed))


# Large enough for the CPU kernels to use several threads.
LARGE, WIDE = [(3, 900, 64)] * 3 + [(2, 850, 65)], [(3, 900, 64)] * 12
PATH = [(0, [*range(0, 850, 2)]), (400, [*range(1, 426)]), (3, [0, *range(2, 426)])]
SHIFTS, RINGS = [(0, 700, 150), (30, 850, -7), (3, 900, 1)], [(2000, 1000), (1000, 150), (700, 200)]


def large(layout):
    one = dict(layout=layout)
    entries, last = [(3, 900, 501, 64)] * 3, [(1, 850, 490, 65)]
    return [
        *(edge_cases.append(f"large-B{b}", entries + last, [-5, 120, 700][:b], **one)
          for b in (1, 3)),
        *(edge_cases.truncate(f"large-B{b}", LARGE, [900, 860, 3][:b], [0, 100, 3][:b], **one)
          for b in (1, 3)),
        edge_cases.compact("large", LARGE, PATH, **one),
        # 11 MB move, for which the CPU kernel bypasses the cache with its stores.
        edge_cases.compact("larger", WIDE, PATH, **one),
        edge_cases.realign("large", LARGE, SHIFTS, **one),
        edge_cases.ring("large", LARGE, RINGS, 100, **one),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full), 5])
@pytest.mark.parametrize("layout", ["sliced", "transposed"])
def test_any_number_of_threads_leaves_the_same_bytes(threads, layout):
    torch.set_num_threads(threads)
    for case in large(layout):
        check(provider(case.op, "cpp"), case)


STREAMED = 8 * 1024 * 1024  # bytes, from which on csrc/cpu/kv/compact.cpp streams


@pytest.mark.parametrize("size", [96, 160, 224, 128])
def test_moves_of_more_than_8_mib_leave_the_right_bytes(size):
    """Rows that are no multiple of 256 bytes are copied, the others streamed past the caches."""
    heads, slots = 32, 1500
    moved = STREAMED // (heads * size * 2) + 1
    g = torch.Generator().manual_seed(size)
    cache = torch.randint(-(2**15), 2**15, (1, heads, slots, size), generator=g).to(torch.int16)
    # Each node lies after its new slot, so that all tokens move.
    path = torch.randperm(slots - 2, generator=g)[: moved + 1].sort().values[None] + 1
    want = cache.clone()
    want[:, :, : path.shape[1]] = cache[:, :, path[0]]
    provider("kv_compact_", "cpp")([cache], torch.tensor([0]), path)
    assert torch.equal(cache, want)


def test_addresses_of_a_cache_lie_beyond_2_to_the_31_elements(ops):
    check_far_apart(ops("kv_append_"), ops("kv_truncate_"))
    view = far_apart()
    view.copy_(torch.arange(12, dtype=torch.int8).view(2, 2, 3, 1).expand(view.shape))
    want = view.contiguous()
    base, path = torch.tensor([0, 1]), torch.tensor([[1, 2], [1, -1]])
    blocks, shift = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([1, -1])
    for name, in_blocks, *arguments in (
        ("kv_compact_", False, base, path),
        ("paged_compact_", True, blocks, base[:1], torch.tensor([[2, 4, 5]])),
        ("kv_realign_", False, base, torch.tensor([2, 2]), shift, True),
    ):
        for op, cache in ((ops(name), view), (getattr(reference, name), want)):
            op([cache.transpose(1, 2) if in_blocks else cache], *arguments)
        same(name, view, want)


# Negative controls.


def _append_shifted(delta):
    return lambda caches, entries, at: reference.kv_append_(caches, entries, at + delta)


def _truncate_shifted(old, new):
    def op(caches, lengths, new_lengths, zero_fill):
        reference.kv_truncate_(caches, lengths, new_lengths + new, zero_fill)
        lengths += old

    return op


def _append_and_write_past_the_end(caches, entries, positions):
    """Correct, except for a write to the element after each cache."""
    append(caches, entries, positions)
    for c in caches:
        last = sum((n - 1) * s for n, s in zip(c.shape, c.stride(), strict=True))
        after = c.as_strided((1,), (1,), c.storage_offset() + last + 1)
        after.view(torch.uint8).bitwise_not_()


def test_the_comparison_rejects_wrong_slots_and_writes_beside_the_cache():
    one = edge_cases.append("control", [(2, 9, 3, 8)], [1, 4], layout="sliced")
    cut = edge_cases.truncate("control", [(2, 9, 8)], [5, 8], [2, 6], layout="sliced")
    check(_append_shifted(0), one)
    check(_truncate_shifted(0, 0), cut)
    for wrong, case, message in (
        (_append_shifted(1), one, r"^kv_append_control arguments\[0\]\[0\]"),
        (_append_shifted(-1), one, r"^kv_append_control arguments\[0\]\[0\]"),
        (lambda *_: None, one, r"^kv_append_control arguments\[0\]\[0\]"),
        (_append_and_write_past_the_end, one, r"^buffer of kv_append_control arguments\[0\]\[0\]"),
        (_truncate_shifted(0, 1), cut, r"control-fill arguments\[0\]\[0\]"),
        (_truncate_shifted(0, -1), cut, r"control-fill arguments\[0\]\[0\]"),
        (_truncate_shifted(1, 0), cut, r"control-fill arguments\[1\]"),
    ):
        with pytest.raises(AssertionError, match=message):
            check(wrong, case)


# Arguments that share memory, and paths out of order.


@pytest.mark.parametrize("name", ["reference", *BOUND])
@pytest.mark.parametrize("into", [0, 1])
def test_entries_that_lie_in_a_cache_are_read_before_any_is_written(name, into):
    """As if they had been copied; each slot would otherwise be copied from the one just written."""
    pool = torch.arange(24.0).view(2, 1, 1, 12, 1)
    entries = pool[into][:, :, 3:9]
    wanted = entries.clone()
    others = torch.zeros(1, 1, 6, 1)
    given = [entries, others] if into == 0 else [others, entries]
    provider("kv_append_", name)([pool[0], pool[1]], given, torch.tensor([4]))
    assert torch.equal(pool[into][:, :, 4:10], wanted)
    moved = [pool[1][:, :, :6], pool[0][:, :, 6:]]  # each in the other's cache
    wanted = [m.clone() for m in moved]
    provider("kv_append_", name)([pool[0], pool[1]], moved, torch.tensor([3]))
    assert torch.equal(torch.stack([p[:, :, 3:9] for p in pool]), torch.stack(wanted))


@pytest.mark.parametrize("name", ["reference", *BOUND])
@pytest.mark.parametrize(
    ("op", "given", "more"),
    [
        ("kv_truncate_", [], [False]), ("ring_truncate_", [], [4, False]),
        ("paged_truncate_", torch.arange(10, dtype=torch.int32).view(5, 2), [4]),
    ],
    ids=["dense", "ring", "paged"],
)  # fmt: skip
def test_new_lengths_that_lie_among_the_lengths_are_read_first(op, given, more, name):
    pool = torch.tensor([1, 8, 7, 6, 5, 4])
    provider(op, name)(given, pool[1:], pool[:-1], *more)
    assert pool.tolist() == [1, 1, 7, 6, 5, 4]


def test_views_with_gaps_may_lie_in_each_others_gaps():
    """Keys and values of one buffer [B, 2, H, S, D] interleave and share no element."""
    pool = torch.zeros(2, 2, 1, 3, 1)
    entries = [torch.ones(2, 1, 1, 1)] * 2
    sk.kv_append_([pool[:, 0], pool[:, 1]], entries, torch.tensor([0, 1]))
    assert pool.sum() == 4


def test_caches_that_overlap_in_part_are_refused():
    pool, pools = torch.zeros(1, 1, 6, 1), torch.zeros(2, 1, 6, 1)
    for a, b in (
        (pool[:, :, :4], pool[:, :, 3:]), (pool, pool[:, :, :2]), (pools, pools[:, :, 1:]),
    ):  # fmt: skip
        where, entry = torch.zeros(len(a)).long(), torch.ones(len(a), 1, 1, 1)
        for pair in ([a, b], [b, a]):
            with pytest.raises(RuntimeError, match=r"caches\[1\] must not overlap caches\[0\]"):
                append(pair, [entry] * 2, where)


def test_node_ids_on_a_path_may_decrease(ops):
    """Among siblings with equal tokens, `verify_tree` may go on below another one than it names."""
    cache = torch.arange(6.0).view(1, 1, 6, 1)
    ops("kv_compact_")([cache], torch.tensor([1]), torch.tensor([[2, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [0, 3, 2, 5, 4, 5]
    cache, table = torch.arange(6.0).view(3, 2, 1, 1), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    ops("paged_compact_")([cache], table, torch.tensor([0]), torch.tensor([[3, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [2, 1, 2, 3, 1, 5]


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


ONE = torch.tensor([1])
OF_A_BATCH = r"states\[0\] must be \[B, S, ...\] with B = 1, got"


@pytest.mark.parametrize(
    ("states", "index", "message"),
    [
        ([], ONE[None], r"index must be \[B\], got \[1, 1\]"),
        ([], torch.zeros(1), "index must be int32 or int64, got float32"),
        ([torch.zeros(3)], ONE, OF_A_BATCH), ([torch.zeros(2, 3)], ONE, OF_A_BATCH),
        ([torch.zeros(1, 3, 2, 4).mT], ONE,
         r"states\[0\] must have contiguous trailing dimensions, got \(24, 8, 1, 4\)"),
        ([torch.zeros(1, 3, device="meta")], ONE,
         r"states\[0\] must be on the device of index, cpu, got meta"),
    ],
)  # fmt: skip
def test_state_select_names_the_wrong_argument(states, index, message):
    with pytest.raises(RuntimeError, match=message):
        sk.state_select_(states, index)


# Compilation.


def _round(cache, scale, paged, state, entry, base, path, lengths, tables):
    sk.kv_append_([cache, cache.clone()], [entry, entry], base)
    sk.kv_compact_([cache, scale], base, path)
    sk.paged_compact_([paged], tables, base, path)
    accepted = (path >= 0).sum(1)
    freed = sk.paged_truncate_(tables, lengths, base + accepted, 2)
    sk.kv_realign_([cache], base, accepted, accepted, zero_fill=True)
    status = sk.ring_truncate_([cache], base + 2, accepted, 2)
    sk.kv_truncate_([scale], base + 3, accepted, zero_fill=True)
    sk.state_select_([state], accepted)
    return cache.sum() + scale.sum() + paged.sum() + state.sum(), *freed, status


@pytest.mark.build  # it traces
def test_a_tree_round_compiles_as_one_graph_and_writes_in_place():
    torch._dynamo.reset()
    compiled = torch.compile(_round, fullgraph=True, backend="aot_eager", dynamic=True)
    for b in (2, 3):
        results = []
        for f in (_round, compiled):
            g = torch.Generator().manual_seed(b)
            sizes = [(b, 2, 9, 4), (b, 2, 9, 1), (4 * b, 2, 3, 4), (b, 5, 2, 3), (b, 2, 3, 4)]
            args = [
                *(torch.randn(shape, generator=g) for shape in sizes),
                torch.arange(b) + 1,
                torch.tensor([[0, 2, 4, -1], [1, 2, 3, 5], [0, -1, -1, -1]])[:b],
                torch.arange(b) + 7,
                torch.arange(4 * b, dtype=torch.int32).view(b, 4),
            ]
            results.append([*f(*args), *args])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
