"""The ops that move or drop tokens of caches, by every provider against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from support import kv_moves, simt_kv
from support.kv_cases import DTYPES, LAYOUTS, far_apart, light, same, strided
from support.kv_moves import MoveCase, check
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference, testing
from specdec_kernels.reference.kv.compact import path_moves

PROVIDERS = ["cpp", *(["cuda"] if simt_kv.available else [])]
EVERY = [*PROVIDERS, *(["triton"] if "triton" in testing.providers("kv_compact_") else [])]


def _each(cases, few):
    """Providers and cases, of which Triton's interpreter takes fewer; the first through `ops`."""
    return [pytest.param(n, c, id=f"{n}-{c}") for n in EVERY for c in (cases, few)[n == "triton"]]


@pytest.fixture(params=PROVIDERS)
def ops(request, capfd):
    """The ops of a provider by name; the test fails when the shim's sanitizer spoke."""
    if request.param != "cuda":
        yield lambda name: provider(name, request.param)
        return
    yield simt_kv.library().op
    assert "runtime error" not in capfd.readouterr().err


CASES = kv_moves.every_case()


@pytest.mark.parametrize(("ops", "case"), _each(CASES, light(CASES)), indirect=["ops"])
def test_leaves_the_bytes_of_the_reference(ops, case):
    check(ops(case.op), case)


@pytest.mark.parametrize(("ops", "seed"), _each(range(60), range(6)), indirect=["ops"])
def test_random(ops, seed):
    for case in (kv_moves.random_compact(seed), kv_moves.random_paged(seed)):
        check(ops(case.op), case)


def _copied(cache, base, path):
    """What compaction leaves, as a gather from a copy."""
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
    """Dense, and through blocks in any order, each against the plain statement of what moves."""
    r = random.Random(f"{dtype}{layout}")
    g = torch.Generator().manual_seed(r.randrange(2**32))
    b, s, size = 6, 40, 5
    base = torch.tensor([r.randint(0, 20) for _ in range(b)])
    path = torch.tensor([kv_moves.increasing(r, 9, 20) for _ in range(b)])
    cache = strided((b, 3, s, 7), dtype, layout, g)
    want = cache.copy()
    want.view.copy_(_copied(cache.view, base, path))
    ops("kv_compact_")([cache.view], base, path.int())
    same("cache", cache.buffer, want.buffer)

    tables = torch.randperm(b * s // size, generator=g).view(b, -1).int()
    paged = strided((b * s // size, size, 3, 7), dtype, layout, g)
    gathered = paged.view[tables.long()].reshape(b, s, 3, 7).transpose(1, 2).contiguous()
    wanted = _copied(gathered, base, path).transpose(1, 2).reshape(b, -1, size, 3, 7)
    want = paged.copy()
    for i, blocks in enumerate(tables.tolist()):
        for j, block in enumerate(blocks):
            want.view[block] = wanted[i, j]
    ops("paged_compact_")([paged.view], tables, base, path)
    same("paged cache", paged.buffer, want.buffer)


# Negative controls: what the comparison must reject.


def _last_first(caches, base, path):
    for cache in caches:
        for b in range(len(base)):
            moves = [*path_moves(int(base[b]), path[b].tolist(), cache.shape[2])]
            for source, to in reversed(moves):
                cache[b, :, to] = cache[b, :, source]


def _off_by(delta):
    def op(caches, base, path):
        reference.kv_compact_(caches, base + delta, path)

    return op


def _through_broken_paths(caches, base, path):
    reference.kv_compact_(caches, base, path.clamp(min=0).cummax(1).values)


def _heads_apart(caches, base, path):
    """Right for the first head alone."""
    reference.kv_compact_([c[:, :1] for c in caches], base, path)


def _overreaching(caches, base, path):
    """Right, but for a byte behind the rows of each cache."""
    reference.kv_compact_(caches, base, path)
    for c in caches:
        end = sum((n - 1) * s for n, s in zip(c.shape, c.stride(), strict=True))
        c.as_strided((1,), (1,), c.storage_offset() + end + 1).view(torch.uint8).bitwise_not_()


@pytest.mark.parametrize(
    "wrong",
    [_last_first, _off_by(1), _off_by(-1), _heads_apart, _overreaching, lambda *_: None],
)
def test_the_comparison_catches_wrong_moves(wrong):
    case = next(c for c in kv_moves.compact_cases() if "int8-sliced" in c.id)
    check(_off_by(0), case)
    with pytest.raises(AssertionError, match="int8-sliced buffers"):
        check(wrong, case)


def test_the_comparison_catches_paths_that_go_on():
    with pytest.raises(AssertionError, match="buffers"):
        check(_through_broken_paths, kv_moves.every_path())


def test_the_comparison_catches_realignment_from_the_wrong_end():
    def wrong(caches, starts, lengths, shifts, zero_fill):
        for cache in caches:
            for b in range(len(starts)):
                start, shift = int(starts[b]), int(shifts[b])
                for slot in range(max(start, 0), min(start + int(lengths[b]), cache.shape[2])):
                    if 0 <= slot + shift < cache.shape[2]:
                        cache[b, :, slot + shift] = cache[b, :, slot].clone()

    case = next(c for c in kv_moves.realign_cases() if c.id.startswith("strided-keep"))
    check(reference.kv_realign_, case)
    with pytest.raises(AssertionError, match="strided-keep buffers"):
        check(wrong, case)


def test_the_comparison_catches_wrong_blocks_and_a_wrong_status():
    def lazy(tables, lengths, new_lengths, size):
        return reference.paged_truncate_(tables, lengths, new_lengths + 1, size)

    def sure(*args):
        return reference.ring_truncate_(*args) * 0

    with pytest.raises(AssertionError, match="buffers"):
        check(lazy, kv_moves.paged_truncate_cases()[2])
    with pytest.raises(AssertionError, match="outputs"):
        check(sure, next(c for c in kv_moves.ring_cases() if c.id.startswith("every")))


# Sizes.


@pytest.mark.parametrize("order", [False, True], ids=["first-to-last", "last-to-first"])
@pytest.mark.skipif(not simt_kv.available, reason="needs g++ and the CUDA sources")
def test_no_thread_relies_on_one_before_it(order):
    library = simt_kv.library()
    with library.order(reverse=order):
        for case in (kv_moves.every_path(), *kv_moves.realign_cases()[-4:]):
            check(library.op(case.op), case)
        for seed in range(20):
            check(library.op("paged_compact_"), kv_moves.random_paged(seed))


def _large(op, *vectors, count=3):
    """Above the size from which the CPU kernels use threads."""

    def make(g):
        caches = [strided((3, 3, 900, 64), torch.float32, "transposed", g) for _ in range(count)]
        caches.append(strided((3, 2, 850, 65), torch.float32, "sliced", g))
        return (caches, *(kv_moves.numbers(v, torch.tensor(v).shape) for v in vectors))

    return MoveCase(op, "large", make)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_share_the_work(threads):
    torch.set_num_threads(threads)
    path = [list(range(0, 850, 2)), list(range(1, 426)), [0, *range(2, 426)]]
    for count in (3, 12):  # the larger one, 11 MB, moves around the caches
        case = _large("kv_compact_", [0, 400, 3], path, count=count)
        check(torch.ops.specdec_kernels.kv_compact_.default, case)
    moves = [0, 30, 3], [700, 850, 900], [150, -7, 1]
    case = _large("kv_realign_", *moves)
    case = MoveCase(case.op, case.id, lambda g, make=case.make: (*make(g), True))
    check(torch.ops.specdec_kernels.kv_realign_.default, case)
    case = _large("ring_truncate_", [2000, 1000, 700], [1000, 150, 200])
    case = MoveCase(case.op, case.id, lambda g, make=case.make: (*make(g), 100, True))
    check(torch.ops.specdec_kernels.ring_truncate_.default, case)


@pytest.mark.parametrize("ops", EVERY, indirect=True)
def test_a_path_need_not_rise(ops):
    """`verify_tree` names the sibling that stood; what follows may hang below an equal one."""
    cache = torch.arange(6.0).view(1, 1, 6, 1)
    ops("kv_compact_")([cache], torch.tensor([1]), torch.tensor([[2, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [0, 3, 2, 5, 4, 5]
    cache, table = torch.arange(6.0).view(3, 2, 1, 1), torch.tensor([[2, 0, 1]], dtype=torch.int32)
    ops("paged_compact_")([cache], table, torch.tensor([0]), torch.tensor([[3, 1, 4, 3, 2]]))
    assert cache.flatten().tolist() == [2, 1, 2, 3, 1, 5]


@pytest.mark.parametrize("ops", EVERY, indirect=True)
def test_more_than_2_to_the_31_elements_apart(ops):
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


@pytest.mark.skipif(not simt_kv.available, reason="needs g++ and the CUDA sources")
@pytest.mark.parametrize(
    ("count", "launches"), [(0, 0), (1, 1), (64, 1), (65, 1), (256, 1), (257, 2)]
)
def test_launches(count, launches):
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
def test_state_select(shape, dtype):
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
def test_state_select_names_what_does_not_fit(states, index, message):
    with pytest.raises(RuntimeError, match=message):
        sk.state_select_(states, index)


# Compiled.


def _tree_round(cache, scale, paged, state, base, path, lengths, tables):
    sk.kv_compact_([cache, scale], base, path)
    sk.paged_compact_([paged], tables, base, path)
    accepted = (path >= 0).sum(1)
    freed = sk.paged_truncate_(tables, lengths, base + accepted, 2)
    sk.kv_realign_([cache], base, accepted, accepted, zero_fill=True)
    status = sk.ring_truncate_([cache], base + 2, accepted, 2)
    sk.state_select_([state], accepted)
    return cache.sum() + scale.sum() + paged.sum() + state.sum(), *freed, status


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole_and_writes_in_place(dynamic):
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
