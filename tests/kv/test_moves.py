"""The ops that move or drop tokens of caches leave the same bytes as the reference."""

from __future__ import annotations

import random

import pytest
import torch
from support import kv_cases, kv_path_cases, simt_kv
from support.kv_buffers import (
    DTYPES,
    LAYOUTS,
    check,
    copied,
    embedded,
    far_apart,
    integers,
    same,
    same_buffers,
)
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference, testing
from specdec_kernels._library import CACHE_OPS
from specdec_kernels.testing import Case

PROVIDERS = ["cpp", *(["cuda"] if simt_kv.available else [])]
EVERY = [*PROVIDERS, *(["triton"] if "triton" in testing.providers("kv_compact_") else [])]


def _each(cases, fewer):
    """(provider, case) pairs, the provider for fixture `ops`; Triton's interpreter gets fewer."""
    return [
        pytest.param(n, c, id=f"{n}-{getattr(c, 'op', '')}{c}")
        for n in EVERY
        for c in (cases, fewer)[n == "triton"]
    ]


@pytest.fixture(params=PROVIDERS)
def ops(request, capfd):
    """A function from the name of an op to a provider's op.

    The test fails if the undefined-behaviour sanitizer of the SIMT emulator reports something.
    """
    if request.param != "cuda":
        yield lambda name: provider(name, request.param)
        return
    yield simt_kv.library().op
    assert "runtime error" not in capfd.readouterr().err


MOVES = [op for op in CACHE_OPS if op not in ("kv_append_", "kv_truncate_")]
CASES = [*(c for op in MOVES for c in testing.cases(op)), *kv_path_cases.move_cases()]


@pytest.mark.parametrize(
    ("ops", "case"), _each(CASES, kv_cases.for_interpreter(CASES)), indirect=["ops"]
)
def test_leaves_the_bytes_of_the_reference(ops, case):
    check(ops(case.op), case)


@pytest.mark.parametrize(("ops", "seed"), _each(range(60), range(6)), indirect=["ops"])
def test_random_paths(ops, seed):
    for case in kv_path_cases.random_moves(seed):
        check(ops(case.op), case)


def _compacted(cache, base, path):
    """A compacted copy of a cache [B, H, S, D], by gathering the path's slots."""
    out = cache.clone()
    for b, nodes in enumerate(path.tolist()):
        kept = [n for n in nodes if n >= 0]
        start = int(base[b])
        source = torch.tensor([start + n for n in kept], dtype=torch.int64)
        rows = cache[b].view(torch.uint8).index_select(1, source)
        out[b].view(torch.uint8)[:, start : start + len(kept)] = rows
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_compaction_is_a_gather_from_a_copy(ops, dtype, layout):
    """The same paths in a dense cache and in blocks in random order."""
    r = random.Random(f"{dtype}{layout}")
    g = torch.Generator().manual_seed(r.randrange(2**32))
    b, s, size = 6, 40, 5
    base = torch.tensor([r.randint(0, 20) for _ in range(b)])
    path = torch.tensor([kv_path_cases.increasing_path(r, 9, 20) for _ in range(b)])
    cache = embedded((b, 3, s, 7), dtype, layout, g)
    want = copied(cache)
    want.copy_(_compacted(cache, base, path))
    ops("kv_compact_")([cache], base, path.int())
    same_buffers("cache", cache, want)

    tables = torch.randperm(b * s // size, generator=g).view(b, -1).int()
    paged = embedded((b * s // size, size, 3, 7), dtype, layout, g)
    dense = paged[tables.long()].reshape(b, s, 3, 7).transpose(1, 2).contiguous()
    expected = _compacted(dense, base, path).transpose(1, 2).reshape(b, -1, size, 3, 7)
    want = copied(paged)
    for i, blocks in enumerate(tables.tolist()):
        for j, block in enumerate(blocks):
            want[block] = expected[i, j]
    ops("paged_compact_")([paged], tables, base, path)
    same_buffers("paged cache", paged, want)


# Negative controls: wrong implementations that the comparison has to reject.


def _compact_last_node_first(caches, base, path):
    for cache in caches:
        for b, nodes in enumerate(path.tolist()):
            for i, node in reversed([*enumerate(n for n in nodes if n >= 0)]):
                cache[b, :, int(base[b]) + i] = cache[b, :, int(base[b]) + node]


def _compact_shifted(delta):
    def op(caches, base, path):
        reference.kv_compact_(caches, base + delta, path)

    return op


def _compact_beyond_the_end_of_a_path(caches, base, path):
    reference.kv_compact_(caches, base, path.clamp(min=0).cummax(1).values)


def _compact_first_head_only(caches, base, path):
    reference.kv_compact_([c[:, :1] for c in caches], base, path)


def _compact_and_write_past_the_end(caches, base, path):
    """Correct, except for a write to the element after each cache."""
    reference.kv_compact_(caches, base, path)
    for c in caches:
        end = sum((n - 1) * s for n, s in zip(c.shape, c.stride(), strict=True))
        c.as_strided((1,), (1,), c.storage_offset() + end + 1).view(torch.uint8).bitwise_not_()


@pytest.mark.parametrize(
    "wrong",
    [
        _compact_last_node_first,
        _compact_shifted(1),
        _compact_shifted(-1),
        _compact_first_head_only,
        _compact_and_write_past_the_end,
        lambda *_: None,
    ],
)
def test_the_comparison_rejects_wrong_compactions(wrong):
    base, path = [0, 3], [[1, 2, 4, -1], [0, 2, 3, 5]]
    shapes = [(2, 9, 16), (3, 9, 3)]
    case = kv_path_cases.compact("control", shapes, base, path, torch.int8, "sliced")
    check(_compact_shifted(0), case)
    with pytest.raises(AssertionError, match=r"control arguments\[0\]"):
        check(wrong, case)


def test_the_comparison_rejects_a_compaction_that_continues_a_path_after_its_end():
    with pytest.raises(AssertionError, match=r"arguments\[0\]"):
        check(_compact_beyond_the_end_of_a_path, kv_path_cases.every_path())


def test_the_comparison_rejects_a_realignment_that_overwrites_slots_it_still_has_to_move():
    def wrong(caches, starts, lengths, shifts, zero_fill):
        for cache in caches:
            for b in range(len(starts)):
                start, shift = int(starts[b]), int(shifts[b])
                for slot in range(max(start, 0), min(start + int(lengths[b]), cache.shape[2])):
                    if 0 <= slot + shift < cache.shape[2]:
                        cache[b, :, slot + shift] = cache[b, :, slot].clone()

    case = next(c for c in kv_cases.realign_cases() if c.id.startswith("strided-keep"))
    check(reference.kv_realign_, case)
    with pytest.raises(AssertionError, match=r"strided-keep arguments\[0\]"):
        check(wrong, case)


def test_the_comparison_rejects_wrong_blocks_and_a_wrong_status():
    def one_token_too_many(tables, lengths, new_lengths, size):
        return reference.paged_truncate_(tables, lengths, new_lengths + 1, size)

    def no_status(*args):
        return reference.ring_truncate_(*args) * 0

    with pytest.raises(AssertionError, match="arguments"):
        check(one_token_too_many, kv_path_cases.paged_truncate_cases()[2])
    with pytest.raises(AssertionError, match="outputs"):
        check(no_status, next(c for c in kv_cases.ring_cases() if c.id.startswith("every")))


# Schedules and sizes.


@pytest.mark.simt
@pytest.mark.parametrize("order", [False, True], ids=["first-to-last", "last-to-first"])
@pytest.mark.skipif(not simt_kv.available, reason="needs g++ and the CUDA sources")
def test_any_order_of_gpu_threads_leaves_the_same_bytes(order):
    library = simt_kv.library()
    with library.order(reverse=order):
        for case in (kv_path_cases.every_path(), *kv_cases.realign_cases()[-4:]):
            check(library.op(case.op), case)
        for seed in range(20):
            check(library.op("paged_compact_"), kv_path_cases.random_paged_compact(seed))


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
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_leaves_the_same_bytes(threads, case):
    torch.set_num_threads(threads)
    check(provider(case.op, "cpp"), case)


@pytest.mark.parametrize("ops", EVERY, indirect=True)
def test_node_ids_on_a_path_may_decrease(ops):
    """Among siblings with equal tokens, `verify_tree` may go on below another one than it names."""
    cache = torch.arange(6.0).view(1, 1, 6, 1)
    ops("kv_compact_")([cache], torch.tensor([1]), torch.tensor([[2, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [0, 3, 2, 5, 4, 5]
    cache, table = torch.arange(6.0).view(3, 2, 1, 1), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    ops("paged_compact_")([cache], table, torch.tensor([0]), torch.tensor([[3, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [2, 1, 2, 3, 1, 5]


@pytest.mark.parametrize("ops", EVERY, indirect=True)
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


@pytest.mark.simt
@pytest.mark.skipif(not simt_kv.available, reason="needs g++ and the CUDA sources")
@pytest.mark.parametrize(
    ("count", "launches"), [(0, 0), (1, 1), (64, 1), (65, 1), (256, 1), (257, 2)]
)
def test_one_launch_serves_up_to_256_caches(count, launches):
    library = simt_kv.library()
    caches = [torch.zeros(2, 1, 4, 3) for _ in range(count)]
    lengths, path = torch.tensor([2, 1]), torch.tensor([[0, 2], [1, 2]])
    tables = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)

    def launched(name, *args):
        before = library.launches()
        library.op(name)(*args)
        return library.launches() - before

    assert launched("kv_compact_", caches, lengths, path) == launches
    assert launched("kv_compact_", caches, lengths, path[:, :0]) == 0
    assert launched("paged_compact_", caches, tables, lengths, path) == launches
    assert launched("kv_realign_", caches, lengths, lengths, lengths, True) == launches
    assert launched("paged_truncate_", tables, lengths, lengths, 4) == 1
    assert launched("ring_truncate_", caches, lengths, lengths - 1, 2, True) == launches + 1
    assert launched("ring_truncate_", caches, lengths, lengths - 1, 2, False) == 1


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


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_tree_round_compiles_as_one_graph_and_writes_in_place(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(_tree_round, fullgraph=True, backend="aot_eager", dynamic=dynamic)
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
