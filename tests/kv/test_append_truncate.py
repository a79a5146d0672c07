"""kv_append_ and kv_truncate_ in C++ and Triton against the reference, byte for byte."""

from __future__ import annotations

import pytest
import torch
from support import kv_cases
from support.kv_cases import KvCase, check_append, check_truncate
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference, testing

append = torch.ops.specdec_kernels.kv_append_.default
truncate = torch.ops.specdec_kernels.kv_truncate_.default
# Above the size from which the CPU kernels use threads.
LARGE = [(3, 900, 501, 64)] * 3 + [(1, 850, 490, 65)]


PROVIDERS = [n for n in ("cpp", "triton") if n in testing.providers("kv_append_")]


def _each(cases, light):
    """(provider, case) pairs."""
    return [
        pytest.param(n, c, id=f"{n}-{c}") for n in PROVIDERS for c in (cases, light)[n == "triton"]
    ]


def _all(cases):
    return _each(cases, kv_cases.light(cases))


@pytest.mark.parametrize(("name", "case"), _all(kv_cases.append_cases()))
def test_append(name, case):
    check_append(provider("kv_append_", name), case)


@pytest.mark.parametrize("case", kv_cases.truncate_cases(), ids=str)
def test_truncate_keeps_what_it_drops(case):
    check_truncate(truncate, case, zero_fill=False)


@pytest.mark.parametrize(("name", "case"), _all(kv_cases.truncate_cases()))
def test_truncate(name, case):
    check_truncate(provider("kv_truncate_", name), case, zero_fill=True)


@pytest.mark.parametrize(("name", "seed"), _each(range(60), range(6)))
def test_random(name, seed):
    added, cut = kv_cases.random_case(seed)
    check_append(provider("kv_append_", name), added)
    check_truncate(provider("kv_truncate_", name), cut, zero_fill=seed % 6 > 0)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_threads_share_the_work(threads, batch, layout):
    torch.set_num_threads(threads)
    positions = [-5, 120, 700][:batch]
    check_append(append, KvCase(f"{layout}-large", batch, LARGE, [positions], layout=layout))
    lengths = [[900, 860, 3][:batch], [0, 100, 3][:batch]]
    case = KvCase(f"{layout}-large-cut", batch, LARGE, lengths, layout=layout)
    check_truncate(truncate, case, zero_fill=True)


@pytest.mark.parametrize("name", PROVIDERS)
def test_more_than_2_to_the_31_elements_apart(name):
    kv_cases.check_far_apart(provider("kv_append_", name), provider("kv_truncate_", name))


def _moved(delta):
    def op(caches, entries, positions):
        reference.kv_append_(caches, entries, positions + delta)

    return op


def _cut(old, new):
    def op(caches, lengths, new_lengths, zero_fill):
        reference.kv_truncate_(caches, lengths, new_lengths + new, zero_fill)
        lengths += old

    return op


def _overreaching(caches, entries, positions):
    """Right, but for one element behind the rows of each cache."""
    append(caches, entries, positions)
    for c in caches:
        end = c.storage_offset() + sum(
            (n - 1) * s for n, s in zip(c.shape, c.stride(), strict=True)
        )
        c.as_strided((1,), (1,), end + 1).view(torch.uint8).bitwise_not_()


def test_the_comparison_catches_wrong_slots():
    """Negative control: off-by-one implementations and writes beside the view must fail."""
    case = KvCase("control", 2, [(2, 9, 3, 8)], [[1, 4]], layout="sliced")
    check_append(_moved(0), case)
    for wrong in (_moved(1), _moved(-1), _overreaching, lambda *_: None):
        with pytest.raises(AssertionError, match="control caches"):
            check_append(wrong, case)
    case = KvCase("control", 2, [(2, 9, 3, 8)], [[5, 8], [2, 6]], layout="sliced")
    check_truncate(_cut(0, 0), case, zero_fill=True)
    for wrong in (_cut(0, 1), _cut(0, -1)):
        with pytest.raises(AssertionError, match="control caches"):
            check_truncate(wrong, case, zero_fill=True)
    with pytest.raises(AssertionError, match="lengths"):
        check_truncate(_cut(1, 0), case, zero_fill=True)


def _cache(*size, dtype=torch.float32, device="cpu"):
    return torch.zeros(size, dtype=dtype, device=device)


def _index(*values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


BAD_APPEND = {
    "positions-2d": ([], [], _index(0).view(1, 1)),
    "positions-int32": ([], [], _index(0, dtype=torch.int32)),
    "count": ([_cache(1, 1, 2, 3)] * 2, [_cache(1, 1, 2, 3)], _index(0)),
    "cache-3d": ([_cache(1, 2, 3)], [_cache(1, 1, 2, 3)], _index(0)),
    "cache-batch": ([_cache(2, 1, 2, 3)], [_cache(1, 1, 2, 3)], _index(0)),
    "cache-stride": ([_cache(1, 1, 3, 2).mT], [_cache(1, 1, 2, 3)], _index(0)),
    "entry-batch": ([_cache(1, 1, 2, 3)], [_cache(3, 1, 2, 3)], _index(0)),
    "entry-stride": ([_cache(1, 1, 2, 3)], [_cache(1, 1, 3, 2).mT], _index(0)),
    "entry-heads": (
        [_cache(1, 1, 2, 3), _cache(1, 2, 2, 3)],
        [_cache(1, 1, 2, 3)] * 2,
        _index(0),
    ),
    "entry-size": ([_cache(1, 1, 2, 3)], [_cache(1, 1, 2, 4)], _index(0)),
    "entry-dtype": (
        [_cache(1, 1, 2, 3, dtype=torch.float8_e4m3fn)],
        [_cache(1, 1, 2, 3, dtype=torch.bfloat16)],
        _index(0),
    ),
}
BAD_TRUNCATE = {
    "lengths-2d": ([], _index(0).view(1, 1), _index(0), True),
    "lengths-int32": ([], _index(0, dtype=torch.int32), _index(0), True),
    "new-size": ([], _index(0), _index(0, 1), True),
    "new-int32": ([], _index(0), _index(0, dtype=torch.int32), True),
    "cache-batch": ([_cache(2, 1, 2, 3)], _index(0), _index(0), False),
    "cache-5d": ([_cache(1, 1, 1, 2, 3)], _index(0), _index(0), False),
    "cache-stride": ([_cache(1, 1, 3, 2).mT], _index(0), _index(0), True),
}
BAD = [
    *(pytest.param("kv_append_", a, id=f"append-{k}") for k, a in BAD_APPEND.items()),
    *(pytest.param("kv_truncate_", a, id=f"truncate-{k}") for k, a in BAD_TRUNCATE.items()),
]


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize(("op", "args"), BAD)
def test_errors_are_those_of_the_specification(op, args, name):
    with pytest.raises(RuntimeError) as wanted:
        getattr(reference, op)(*args)
    with pytest.raises(RuntimeError) as got:
        provider(op, name)(*args)
    assert str(got.value) == str(wanted.value)


def test_nothing_is_written_when_one_cache_is_wrong():
    caches = [_cache(1, 1, 2, 3), _cache(1, 1, 2, 4)]
    with pytest.raises(RuntimeError, match=r"entries\[1\] must be"):
        sk.kv_append_(caches, [torch.ones(1, 1, 1, 3)] * 2, _index(0))
    assert not caches[0].any()


def _decoding_step(cache, entry, lengths, drop):
    sk.kv_append_([cache, cache.clone()], [entry, entry], lengths)
    lengths = lengths + entry.shape[2]
    sk.kv_truncate_([cache], lengths, lengths - drop, zero_fill=True)
    return cache.sum(), lengths


def test_compiles_whole():
    compiled = torch.compile(_decoding_step, fullgraph=True, backend="aot_eager")
    lengths, drop = _index(0, 3), _index(1, 0)
    results = []
    for step in (_decoding_step, compiled):
        cache = torch.zeros(2, 2, 6, 4)
        total, after = step(cache, torch.ones(2, 2, 3, 4), lengths, drop)
        results.append((cache, total, after))
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)
    assert results[0][2].tolist() == [2, 6]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_opcheck(dtype):
    caches = [_cache(2, 2, 6, 3, dtype=dtype), _cache(2, 1, 4, 5, dtype=dtype)]
    entries = [torch.ones(2, 3, 2, 3).to(dtype).transpose(1, 2), torch.ones(2, 1, 1, 5).to(dtype)]
    torch.library.opcheck(append, (caches, entries, _index(4, -1)))
    torch.library.opcheck(truncate, (caches, _index(4, 2), _index(1, 3), True))
