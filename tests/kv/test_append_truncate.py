"""kv_append_ and kv_truncate_ of C++ and Triton leave the same bytes as the reference.

Terms of this folder:
slot: the place of one token in a cache [B, H, S, D].
compact: move the tokens of an accepted path to the slots right after the committed prefix.
realign: move a range of slots by a shift, as after left padding changes.
ring: a cache of a sliding window, where token t is in slot t modulo the number of slots.
block table: the blocks of a paged cache that hold a sequence, in order; -1 for none.
"""

from __future__ import annotations

import functools

import proofs
import pytest
import torch
from support import kv_cases
from support.kv_buffers import check, check_far_apart
from support.providers import provider

import specdec_kernels as sk
from specdec_kernels import reference
from specdec_kernels._library import CACHE_OPS

append = torch.ops.specdec_kernels.kv_append_.default
# Large enough for the CPU kernels to use several threads.
LARGE = [(3, 900, 501, 64)] * 3 + [(1, 850, 490, 65)]
BOUND = [n for n in kv_cases.PROVIDERS if n != "cuda"]  # those with checks of arguments
CASES = {
    "kv_append_": [*proofs.cases("kv_append_"), *kv_cases.append_cases()],
    "kv_truncate_": [*proofs.cases("kv_truncate_"), *kv_cases.truncate_cases()],
}


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("ops", "case"), kv_cases.each(CASES["kv_append_"]), indirect=["ops"])
def test_append_leaves_the_bytes_of_the_reference(ops, case):
    check(ops("kv_append_"), case)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("ops", "case"), kv_cases.each(CASES["kv_truncate_"]), indirect=["ops"])
def test_truncate_leaves_the_bytes_of_the_reference(ops, case):
    check(ops("kv_truncate_"), case)


def test_random_calls(ops, request):
    for op in CACHE_OPS:
        for seed in range(6 if "triton" in request.node.name else 60):
            check(ops(op), kv_cases.random_case(op, seed))


@functools.cache
def _large_cases(batch, layout):
    cut = [(h, s, d) for h, s, _, d in LARGE]
    new, old = (v[:batch] for v in ([-5, 120, 700], [900, 860, 3]))
    return (
        kv_cases.append("large", LARGE, new, layout=layout),
        kv_cases.truncate("large", cut, old, [0, 100, 3][:batch], layout=layout),
    )


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.full), 5])
@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
def test_any_number_of_threads_leaves_the_same_bytes(threads, batch, layout):
    torch.set_num_threads(threads)
    for case in _large_cases(batch, layout):
        check(provider(case.op, "cpp"), case)


def test_addresses_beyond_2_to_the_31_elements(ops):
    check_far_apart(ops("kv_append_"), ops("kv_truncate_"))


def _append_shifted(delta):
    def op(caches, entries, positions):
        reference.kv_append_(caches, entries, positions + delta)

    return op


def _truncate_shifted(old, new):
    def op(caches, lengths, new_lengths, zero_fill):
        reference.kv_truncate_(caches, lengths, new_lengths + new, zero_fill)
        lengths += old

    return op


def _append_and_write_past_the_end(caches, entries, positions):
    """Correct, except for a write to the element after each cache."""
    append(caches, entries, positions)
    for c in caches:
        end = c.storage_offset() + sum(
            (n - 1) * s for n, s in zip(c.shape, c.stride(), strict=True)
        )
        c.as_strided((1,), (1,), end + 1).view(torch.uint8).bitwise_not_()


def test_the_comparison_rejects_wrong_slots_and_writes_beside_the_cache():
    """Negative controls."""
    case = kv_cases.append("control", [(2, 9, 3, 8)], [1, 4], layout="sliced")
    check(_append_shifted(0), case)
    for wrong in (_append_shifted(1), _append_shifted(-1), lambda *_: None):
        with pytest.raises(AssertionError, match=r"^kv_append_control arguments\[0\]\[0\]"):
            check(wrong, case)
    with pytest.raises(AssertionError, match=r"^buffer of kv_append_control arguments\[0\]\[0\]"):
        check(_append_and_write_past_the_end, case)
    case = kv_cases.truncate("control", [(2, 9, 8)], [5, 8], [2, 6], layout="sliced")
    check(_truncate_shifted(0, 0), case)
    for wrong in (_truncate_shifted(0, 1), _truncate_shifted(0, -1)):
        with pytest.raises(AssertionError, match=r"control-fill arguments\[0\]\[0\]"):
            check(wrong, case)
    with pytest.raises(AssertionError, match=r"control-fill arguments\[1\]"):
        check(_truncate_shifted(1, 0), case)


def _index(*values):
    return torch.tensor(values)


@pytest.mark.parametrize("name", ["reference", *BOUND])
@pytest.mark.parametrize("into", [0, 1])
def test_entries_that_lie_in_a_cache_are_read_before_any_is_written(name, into):
    """As if they had been copied; each slot would otherwise be copied from the one just written."""
    pool = torch.arange(24.0).view(2, 1, 1, 12, 1)
    entries = pool[into][:, :, 3:9]
    wanted = entries.clone()
    others = torch.zeros(1, 1, 6, 1)
    given = [entries, others] if into == 0 else [others, entries]
    provider("kv_append_", name)([pool[0], pool[1]], given, _index(4))
    assert torch.equal(pool[into][:, :, 4:10], wanted)
    moved = [pool[1][:, :, :6], pool[0][:, :, 6:]]  # each in the other's cache
    wanted = [m.clone() for m in moved]
    provider("kv_append_", name)([pool[0], pool[1]], moved, _index(3))
    assert torch.equal(torch.stack([p[:, :, 3:9] for p in pool]), torch.stack(wanted))


@pytest.mark.parametrize("name", ["reference", *BOUND])
def test_new_lengths_that_lie_among_the_lengths_are_read_first(name):
    pool = torch.tensor([1, 8, 7, 6, 5, 4])
    provider("kv_truncate_", name)([], pool[1:], pool[:-1], False)
    assert pool.tolist() == [1, 1, 7, 6, 5, 4]


def test_views_with_gaps_may_lie_in_each_others_gaps():
    """Keys and values of one buffer [B, 2, H, S, D] interleave and share no element."""
    pool = torch.zeros(2, 2, 1, 3, 1)
    sk.kv_append_([pool[:, 0], pool[:, 1]], [torch.ones(2, 1, 1, 1)] * 2, _index(0, 1))
    assert pool.sum() == 4


def test_caches_that_overlap_in_part_are_refused():
    pool, pools = torch.zeros(1, 1, 6, 1), torch.zeros(2, 1, 6, 1)
    for a, b in (
        (pool[:, :, :4], pool[:, :, 3:]), (pool, pool[:, :, :2]), (pools, pools[:, :, 1:]),
    ):  # fmt: skip
        where, entry = _index(*[0] * len(a)), torch.ones(len(a), 1, 1, 1)
        for pair in ([a, b], [b, a]):
            with pytest.raises(RuntimeError, match=r"caches\[1\] must not overlap caches\[0\]"):
                append(pair, [entry] * 2, where)


def test_nothing_is_written_if_one_cache_is_invalid():
    caches = [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 4)]
    with pytest.raises(RuntimeError, match=r"entries\[1\] must be"):
        sk.kv_append_(caches, [torch.ones(1, 1, 1, 3)] * 2, _index(0))
    assert not caches[0].any()


def _decoding_step(cache, entry, lengths, drop):
    sk.kv_append_([cache, cache.clone()], [entry, entry], lengths)
    lengths = lengths + entry.shape[2]
    sk.kv_truncate_([cache], lengths, lengths - drop, zero_fill=True)
    return cache.sum(), lengths


@pytest.mark.slow
def test_a_decoding_step_compiles_as_one_graph():
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
