"""Cases and measurements that prove an op. CONTRIBUTING.md says how to add one.

`CASES` is the one list of inputs, from a seed, for correctness, opcheck, compilation and
benchmarks; `providers` finds the implementations that take them. `enumerate_distribution` and
`enumerate_tree_distribution` measure the exact distribution that an implementation realizes.
"""

# ruff: noqa: F401 - the names that tests take from here

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from proofs import chain, forward, history, kv, row, tree, tree_layout
from proofs.bounds import acceptance_bound
from proofs.case import Case, noisy_draft, packed_bits, sliced, zipf_logits
from proofs.chain import chain_case
from proofs.comparisons import (
    MAX_TIE_RATE,
    OUTPUTS,
    SIGNIFICANCE,
    assert_all_equal,
    assert_bits,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    check,
    chi_square,
    chi_square_of_counts,
    copied,
    same,
    same_buffers,
    same_tensors,
    tensors,
)
from proofs.distributions import filtered_distribution, joint_distribution
from proofs.drawn_trees import drawn_trees, lineage
from proofs.enumeration import enumerate_distribution
from proofs.row import kept_case, penalty_case, sample_case
from proofs.tree import tree_case
from proofs.tree_enumeration import enumerate_tree_distribution
from specdec_kernels import indexing, reference, triton
from specdec_kernels._library import INDEXED_OPS, OPS, TRITON_OPS

Op = Callable[..., Any]

CASES: tuple[Case, ...] = (
    *row.CASES,
    *row.PENALTY_CASES,
    *row.KEPT_CASES,
    *chain.CASES,
    *tree.CASES,
    *tree_layout.CASES,
    *kv.CASES,
    *history.CASES,
    *forward.CASES,
)


def cases(op: str, *, heavy: bool = False, rows: int | None = None) -> list[Case]:
    """The cases of one op: heavy ones only if asked for, and only those of at most `rows` rows."""
    return [
        c
        for c in CASES
        if c.op == op and (heavy or not c.heavy) and (rows is None or c.rows <= rows)
    ]


def providers(op: str) -> dict[str, Op]:
    """The implementations of an op that run on the CPU, with the op's own signature."""
    found: dict[str, Op] = {
        "reference": getattr(reference, op),
        "cpp": getattr(torch.ops.specdec_kernels, op).default,
    }
    if op in INDEXED_OPS:
        found["indexing"] = indexing.implementation(op)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and op in TRITON_OPS
    if interpreted and importlib.util.find_spec("triton"):
        found["triton"] = triton.implementation(op, OPS[op])
    return found
