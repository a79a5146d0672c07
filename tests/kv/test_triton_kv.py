"""Tests of Triton's cache ops alone, in the interpreter: tables, word widths and schedules."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

import torch
from kv import edge_cases
from proofs import check
from support.providers import provider

from specdec_kernels.triton.kv import table as kv_table

CPU = torch.device("cpu")


def groups(*caches, entries=None, slot=2):
    return kv_table.groups_of(CPU, caches, entries, slot)


def half(*size):
    return torch.zeros(size, dtype=torch.float16)


def test_one_launch_serves_the_caches_of_a_word_width():
    wide = [half(2, 1 + i % 3, 5, 16) for i in range(300)]
    (group,) = groups(*wide)
    assert (group.word_bytes, tuple(group.table.shape), group.words) == (8, (300, 12), 3 * 4)
    scales, odd = half(2, 2, 5, 1).float(), half(2, 1, 5, 3)
    widths = {g.word_bytes: len(g.table) for g in groups(*wide, scales, odd, half(0, 1, 5, 2))}
    assert widths == {8: 300, 4: 1, 2: 1}
    assert groups() == groups(half(2, 0, 5, 4)) == []


def test_a_table_is_reused_only_for_the_same_caches():
    keys, values, new = half(2, 2, 5, 8), half(2, 2, 5, 8), half(2, 2, 1, 8)
    (first,) = groups(keys, values)
    assert groups(keys, values)[0].table is first.table
    others = [
        groups(values, keys),
        groups(keys, values[:, :, :4]),
        groups(keys.transpose(1, 2), values),
        groups(keys, values, slot=1),
        groups(keys, values, entries=[new, new]),
    ]
    assert all(o[0].table is not first.table for o in others)
    assert not any(torch.equal(o[0].table, first.table) for o in others)


def test_a_captured_graph_writes_the_same_table_that_is_copied_otherwise(monkeypatch):
    """Of caches that are all different, and of ten alike between them, more than a launch takes."""
    monkeypatch.setattr(kv_table, "CACHES", 4)
    shapes = [*((1 + i % 3, 1 + i) for i in range(9)), *[(2, 8)] * 5, (3, 4), *[(2, 8)] * 5]
    caches = [half(2, heads, 5, size) for heads, size in shapes]
    entries = [half(2, c.shape[1], 2, c.shape[3]) for c in caches]
    for given in (None, entries):
        layouts = [t and tuple(map(kv_table._layout, t)) for t in (caches, given)]
        copied = kv_table._uploaded(CPU, 0, *layouts, 2)
        written = kv_table._captured(CPU, *layouts, 2)
        for a, b in zip(copied, written, strict=True):
            assert torch.equal(a.table, b.table)
            assert a[1:] == b[1:]


@pytest.mark.parametrize(
    ("block", "blocks"),
    [(16, 3), *(pytest.param(*x, marks=pytest.mark.full) for x in ((16, 1), (4, 40)))],
)
def test_programs_stride_over_words_beyond_the_grid(block, blocks, monkeypatch):
    monkeypatch.setattr(kv_table, "BLOCK", block)
    monkeypatch.setattr(kv_table, "MAX_BLOCKS", blocks)
    shapes, odd = [(2, 7, 3, 16), (1, 5, 2, 3)], torch.float16
    case = edge_cases.append("strides", shapes, [-1, 4], odd, "sliced")
    check(provider("kv_append_", "triton"), case)
    kept = [(h, s, d) for h, s, _, d in shapes]
    case = edge_cases.truncate("strides", kept, [6, 9], [1, 2], odd, "transposed")
    check(provider("kv_truncate_", "triton"), case)
    for seed in range(2):
        for op in ("kv_compact_", "paged_compact_"):
            check(provider(op, "triton"), edge_cases.random_case(op, seed))
    for case in edge_cases.realign_cases():
        if case.id.startswith("strided-"):
            check(provider(case.op, "triton"), case)
