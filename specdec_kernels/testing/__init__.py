"""Inputs for every op from a seed: one list for correctness, opcheck, compile and benchmarks.

`CASES` holds the inputs, `providers` the implementations that take them.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from specdec_kernels import reference
from specdec_kernels._library import OPS
from specdec_kernels.testing import tree_layout as _tree_layout_cases
from specdec_kernels.testing.case import (
    Case,
    noisy_draft,
    sample_case,
    sliced,
    zipf_logits,
)
from specdec_kernels.testing.chain import chain_case
from specdec_kernels.testing.kv import (
    append_case,
    compact_case,
    paged_compact_case,
    paged_truncate_case,
    realign_case,
    ring_case,
    truncate_case,
)
from specdec_kernels.testing.tree import tree_case

__all__ = [
    "CASES",
    "Case",
    "append_case",
    "cases",
    "chain_case",
    "compact_case",
    "noisy_draft",
    "paged_compact_case",
    "paged_truncate_case",
    "providers",
    "realign_case",
    "ring_case",
    "sample_case",
    "sliced",
    "tree_case",
    "truncate_case",
    "zipf_logits",
]

Op = Callable[..., Any]


def providers(op: str) -> dict[str, Op]:
    """Every implementation of an op on the CPU, with the op's own signature."""
    found: dict[str, Op] = {
        "reference": getattr(reference, op),
        "cpp": getattr(torch.ops.specdec_kernels, op).default,
    }
    name = f"specdec_kernels.triton.{OPS.get(op)}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")
    if op in OPS and interpreted and importlib.util.find_spec(name):
        found["triton"] = getattr(importlib.import_module(name), op)
    return found


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16

i32 = torch.int32

TREE_CASES: tuple[Case, ...] = (
    tree_case(3, 7, 517, rule="greedy", draft="none"),
    tree_case(4, 9, 131, bf16, rule="greedy", layout="ragged", id_dtype=i32, limits=True),
    tree_case(3, 7, 131, rule="match", draft="none"),
    tree_case(5, 6, 131, bf16, rule="match", draft="none", filters="tensor", layout="sliced"),
    tree_case(2, 2, 67, rule="match", draft="none", kind="probs", parent_dtype=i32),
    tree_case(5, 9, 517, rule="target_only", draft="none"),
    tree_case(4, 7, 517, bf16, rule="target_only", draft="none", filters="scalar", layout="ragged"),
    tree_case(3, 5, 67, f16, rule="target_only", kind="probs", draft="none", limits=True),
    tree_case(5, 9, 517),
    tree_case(3, 7, 517, bf16, laws="shared", id_dtype=i32),
    tree_case(4, 9, 517, f16, laws="flat", filters="tensor", layout="ragged", parent_dtype=i32),
    tree_case(3, 9, 517, draft="none", filters="scalar", layout="sliced"),
    tree_case(3, 9, 131, kind="probs", laws="shared", layout="sliced"),
    tree_case(3, 7, 131, kind="probs", draft="none"),
    tree_case(4, 9, 517, draft="sampled", laws="shared", filters="tensor"),
    tree_case(4, 9, 131, bf16, draft="sparse", laws="flat", id_dtype=i32, limits=True),
    tree_case(3, 7, 131, draft="mapped", laws="shared", filters="topk"),
    tree_case(3, 7, 131, draft="wide", filters="warm"),
    tree_case(4, 5, 67, draft="narrow-sampled", laws="flat", bare=True),
    tree_case(3, 9, 23, laws="shared", acceptance=0.3),  # many siblings of one token
    tree_case(3, 4, 131, chain=True),
    tree_case(2, 4, 67, filters="zero"),
    tree_case(5, 9, 517, rule="multi_draft_wor", laws="shared"),
    tree_case(4, 9, 131, bf16, rule="multi_draft_wor", laws="flat", filters="scalar"),
    tree_case(3, 9, 131, rule="multi_draft_wor", kind="probs", laws="shared", layout="sliced"),
    tree_case(3, 7, 131, rule="multi_draft_wor", draft="sparse", laws="shared", layout="ragged"),
    tree_case(3, 7, 67, rule="multi_draft_wor", draft="mapped-sampled", laws="shared", limits=True),
    tree_case(3, 6, 67, rule="multi_draft_wor", draft="none", filters="tensor", id_dtype=i32),
    tree_case(4, 9, 517, rule="top_k_plus_one", laws="shared"),
    tree_case(4, 7, 131, bf16, rule="top_k_plus_one", laws="flat", filters="tensor"),
    tree_case(3, 7, 131, rule="top_k_plus_one", kind="probs", draft="wide", laws="shared"),
    tree_case(3, 5, 67, rule="top_k_plus_one", draft="sampled", laws="shared", limits=True),
    tree_case(4, 9, 517, rule="k_seq", laws="shared"),
    tree_case(4, 9, 131, bf16, rule="k_seq", laws="flat", filters="tensor", layout="ragged"),
    tree_case(3, 7, 131, rule="k_seq", kind="probs", laws="shared", layout="sliced"),
    tree_case(3, 6, 67, rule="k_seq", draft="sparse", laws="shared", parent_dtype=i32),
    tree_case(3, 6, 67, f16, rule="k_seq", draft="mapped-sampled", laws="shared", limits=True),
    tree_case(5, 9, 517, rule="traversal", laws="shared"),
    tree_case(4, 7, 131, bf16, rule="traversal", filters="tensor", layout="ragged"),
    tree_case(3, 9, 131, rule="traversal", kind="probs", laws="flat", layout="sliced"),
    tree_case(3, 7, 131, rule="traversal", draft="sparse", laws="shared", id_dtype=i32),
    tree_case(3, 6, 67, rule="traversal", draft="none", filters="scalar"),
    tree_case(3, 6, 67, rule="traversal", draft="mapped-sampled", limits=True),
    tree_case(3, 5, 67, f16, rule="traversal", draft="wide", laws="shared", chain=True),
    tree_case(5, 9, 517, rule="typical", draft="none"),
    tree_case(4, 7, 131, bf16, rule="typical", kind="probs", draft="none", layout="ragged"),
    tree_case(3, 5, 67, rule="typical", draft="none", filters="scalar", limits=True),
    *(tree_case(0, 5, 17, rule=r, laws="shared") for r in ("multi_draft", "traversal")),
    *(tree_case(3, 0, 131, rule=r, laws="shared") for r in ("k_seq", "traversal", "target_only")),
    *(tree_case(3, 4, 1, rule=r, laws="shared") for r in ("multi_draft", "multi_draft_wor")),
    *(tree_case(3, 4, 1, rule=r, laws="shared") for r in ("top_k_plus_one", "k_seq", "traversal")),
    tree_case(3, 3, 1, rule="match", draft="none"),
    tree_case(2, 4, 4097, bf16, laws="shared"),
    tree_case(2, 4, 4097, rule="traversal", filters="scalar"),
    tree_case(2, 3, 4097, bf16, rule="k_seq", draft="wide", laws="shared"),
    tree_case(1, 5, 131073, bf16, laws="shared"),
    tree_case(1, 4, 131073, rule="traversal", laws="shared"),
    tree_case(1, 4, 131073, bf16, rule="k_seq", laws="shared", filters="topp"),
    tree_case(1, 4, 131073, rule="multi_draft_wor", laws="shared", filters="topk"),
)

CASES: tuple[Case, ...] = (
    sample_case(5, 1031),
    sample_case(5, 1031, bf16, layout="sliced"),
    sample_case(4, 517, f16, filters="scalar"),
    sample_case(7, 517, filters="tensor"),
    sample_case(6, 1031, bf16, filters="tensor", noise="residual"),
    sample_case(3, 131, method="gumbel"),
    sample_case(4, 131, bf16, noise="shared", method="gumbel", layout="sliced"),
    sample_case(5, 131, filters="tensor", noise="shared", method="gumbel"),
    sample_case(3, 1031, filters="topk"),
    sample_case(3, 1031, filters="topp"),
    sample_case(3, 1031, f16, filters="minp"),
    sample_case(3, 1031, filters="warm"),
    sample_case(3, 1031, filters="zero"),
    sample_case(0, 17),
    sample_case(3, 1),
    sample_case(3, 1, filters="scalar", noise="shared", method="gumbel"),
    sample_case(2, 4097, bf16, filters="scalar"),
    sample_case(1, 131073, bf16),
    sample_case(2, 151936, filters="scalar"),
    chain_case(3, 5, 1031),
    chain_case(3, 5, 1031, bf16),
    chain_case(3, 5, 1031, f16, layout="sliced"),
    chain_case(4, 3, 517, kind="probs"),
    chain_case(4, 3, 517, bf16, kind="probs", layout="ragged"),
    chain_case(4, 3, 517, kind="probs", filters="scalar"),
    chain_case(4, 3, 517, kind="probs", draft="none"),
    chain_case(5, 4, 517, draft="none", id_dtype=torch.int32),
    chain_case(5, 4, 517, draft="none", filters="tensor", layout="ragged"),
    chain_case(4, 3, 517, draft="sampled"),
    chain_case(4, 3, 517, bf16, draft="sampled", filters="scalar"),
    chain_case(5, 3, 517, draft="sampled", filters="tensor", layout="ragged"),
    chain_case(5, 3, 517, f16, draft="sampled", layout="ragged-padded"),
    chain_case(5, 4, 517, layout="ragged", id_dtype=torch.int32),
    chain_case(7, 4, 517, filters="tensor"),
    chain_case(3, 4, 517, filters="warm"),
    chain_case(3, 4, 517, filters="zero"),
    chain_case(4, 4, 517, rule="greedy"),
    chain_case(4, 4, 517, bf16, rule="greedy", draft="none", layout="ragged"),
    chain_case(3, 4, 517, kind="probs", rule="greedy", id_dtype=torch.int32),
    chain_case(3, 4, 131, rule="match", draft="none"),
    chain_case(5, 3, 131, bf16, rule="match", draft="none", filters="tensor"),
    chain_case(4, 3, 131, rule="match", layout="ragged"),
    chain_case(3, 2, 131, kind="probs", rule="match", draft="none"),
    chain_case(0, 4, 17),
    chain_case(3, 0, 517),
    chain_case(3, 0, 517, draft="none", filters="scalar", layout="ragged"),
    chain_case(4, 3, 1),
    chain_case(4, 3, 1, rule="match", draft="none"),
    chain_case(2, 2, 4097, bf16, filters="scalar"),
    chain_case(2, 2, 67),
    chain_case(1, 2, 67, f16, draft="sampled", filters="scalar"),
    chain_case(1, 2, 67, kind="probs", filters="topp"),
    chain_case(2, 2, 67, bf16, kind="probs", layout="sliced", id_dtype=torch.int32),
    chain_case(2, 1, 67, draft="none", filters="tensor", layout="ragged"),
    chain_case(2, 2, 67, rule="greedy", draft="none", layout="ragged-padded"),
    chain_case(2, 2, 67, rule="match", draft="none", filters="warm"),
    chain_case(1, 1, 4097, draft="none", filters="topk"),
    chain_case(1, 3, 131073, bf16),
    chain_case(2, 4, 151936, filters="scalar", acceptance=0.7),
    chain_case(1, 3, 67, rule="block"),
    chain_case(2, 2, 67, bf16, rule="block"),
    chain_case(1, 4, 67, rule="block", kind="probs", id_dtype=torch.int32),
    chain_case(2, 2, 67, f16, rule="block", draft="none", filters="tensor"),
    chain_case(1, 3, 131, rule="block", draft="sampled", filters="scalar", layout="ragged"),
    chain_case(2, 2, 67, rule="block", draft="sparse", id_dtype=torch.int32),
    chain_case(2, 2, 67, rule="block", draft="mapped", layout="ragged"),
    chain_case(1, 3, 67, rule="block", draft="wide", limits=True),
    chain_case(2, 2, 67, rule="block", draft="narrow-sampled", limits=True),
    chain_case(1, 2, 4097, bf16, rule="block"),
    chain_case(1, 3, 1, rule="block"),
    chain_case(2, 2, 67, draft="sparse", filters="scalar"),
    chain_case(2, 2, 67, bf16, draft="mapped-sampled"),
    chain_case(2, 2, 67, kind="probs", draft="wide"),
    chain_case(2, 1, 67, f16, draft="narrow", layout="ragged-padded"),
    chain_case(2, 2, 67, limits=True, bare=True),
    chain_case(2, 2, 67, rule="typical", filters="tensor"),
    chain_case(1, 2, 67, rule="lenient", limits=True),
    chain_case(2, 2, 67, bf16, rule="lenient", filters="zero"),
    chain_case(2, 2, 67, rule="synthetic", draft="none", limits=True, id_dtype=torch.int32),
    chain_case(2, 2, 67, rule="synthetic", filters="zero"),
    chain_case(7, 4, 517, rule="block"),
    chain_case(5, 4, 517, rule="block", filters="tensor", layout="ragged"),
    chain_case(5, 4, 517, bf16, rule="block", kind="probs", layout="sliced"),
    chain_case(
        5, 4, 517, rule="block", draft="sparse", filters="scalar", layout="sliced", limits=True
    ),
    chain_case(5, 4, 517, bf16, rule="block", draft="mapped-sampled", filters="tensor"),
    chain_case(4, 3, 517, rule="block", kind="probs", draft="wide", filters="topp"),
    chain_case(4, 5, 517, f16, rule="block", draft="wide-sampled", layout="ragged-padded"),
    chain_case(5, 3, 517, bf16, draft="sparse", filters="tensor", layout="ragged"),
    chain_case(4, 3, 517, kind="probs", draft="mapped", layout="sliced"),
    chain_case(5, 4, 517, rule="lenient", draft="sparse", filters="tensor", layout="ragged"),
    chain_case(7, 4, 517, rule="lenient", kind="probs"),
    chain_case(4, 3, 517, rule="lenient", filters="zero"),
    chain_case(7, 4, 517, rule="typical", draft="none"),
    chain_case(
        5,
        4,
        517,
        bf16,
        rule="typical",
        kind="probs",
        filters="scalar",
        layout="ragged",
        limits=True,
    ),
    chain_case(7, 5, 517, rule="synthetic", filters="tensor"),
    chain_case(5, 3, 131, rule="match", draft="none", layout="ragged", limits=True),
    chain_case(5, 4, 517, kind="probs", rule="greedy", limits=True),
    chain_case(0, 4, 17, rule="block", draft="sparse"),
    chain_case(3, 0, 517, rule="block", draft="mapped"),
    chain_case(3, 2, 1, rule="block", draft="sparse"),
    chain_case(1, 3, 131073, bf16, rule="block"),
    chain_case(2, 4, 151936, rule="block", draft="sparse", filters="scalar", limits=True),
    *TREE_CASES,
    append_case(3, 9, 4),
    append_case(2, 7, 3, bf16, "sliced"),
    append_case(2, 5, 1, torch.int8),
    append_case(0, 5, 2),
    append_case(3, 5, 0),
    truncate_case(4, 9, fill=False),
    truncate_case(4, 9, fill=True),
    truncate_case(3, 6, bf16, fill=True, layout="sliced"),
    truncate_case(3, 6, torch.int8, fill=True),
    truncate_case(0, 6, fill=True),
    *_tree_layout_cases.CASES,
    compact_case(5, 9, 4),
    compact_case(3, 11, 5, bf16, layout="sliced", id_dtype=torch.int32),
    compact_case(4, 7, 6, torch.int8, id_dtype=torch.int32),
    compact_case(2, 5, 3, torch.float64),
    compact_case(0, 5, 3),
    compact_case(3, 5, 0),
    paged_compact_case(3, 4, 4, 5),
    paged_compact_case(4, 3, 3, 6, bf16, layout="HND", id_dtype=torch.int32),
    paged_compact_case(2, 5, 1, 4, f16, layout="sliced"),
    paged_compact_case(3, 2, 5, 7, torch.int8, id_dtype=torch.int32),
    paged_compact_case(0, 2, 4, 3),
    paged_compact_case(2, 0, 4, 3),
    paged_compact_case(2, 2, 4, 0),
    paged_truncate_case(5, 6, 4),
    paged_truncate_case(4, 40, 3, layout="sliced"),
    paged_truncate_case(3, 5, 1),
    paged_truncate_case(0, 5, 4),
    paged_truncate_case(3, 0, 4),
    realign_case(6, 9, fill=False),
    realign_case(6, 9, fill=True),
    realign_case(5, 7, bf16, fill=True, layout="sliced"),
    realign_case(4, 6, torch.int8, fill=False),
    realign_case(0, 6, fill=True),
    ring_case(6, 7, 3, fill=True),
    ring_case(6, 7, 7, fill=False),
    ring_case(5, 6, 4, bf16, fill=True, layout="sliced"),
    ring_case(4, 5, 1, torch.int8, fill=True),
    ring_case(0, 6, 4, fill=True),
)


def cases(op: str, *, heavy: bool = False, rows: int | None = None) -> list[Case]:
    """The cases of one op; the heavy ones only when asked for, and at most so many rows."""
    return [
        c
        for c in CASES
        if c.op == op and (heavy or not c.heavy) and (rows is None or c.rows <= rows)
    ]
