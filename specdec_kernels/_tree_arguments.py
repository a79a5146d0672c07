"""The arguments of `specdec_kernels::verify_tree` by name, and their checks.

csrc/torch/tree_arguments.cpp makes the same checks with the same words; tests/test_errors.py holds
the two together by the table in tests/error_table.py.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels._chain_arguments import KINDS
from specdec_kernels._checks import (
    IDS,
    dtype_name,
    float32,
    one_of,
    require,
    rows,
    same_device,
    sampling,
    shape,
    vector,
)
from specdec_kernels._draft_arguments import DraftArguments, Sizes

TREE_RULES = (
    "greedy",
    "match",
    "target_only",
    "multi_draft",
    "multi_draft_wor",
    "top_k_plus_one",
    "k_seq",
    "traversal",
    "typical",
)
TREE_RATIO_RULES = ("multi_draft", "multi_draft_wor", "top_k_plus_one", "k_seq", "traversal")


class TreeArguments(NamedTuple):
    """In the order of the schema; shapes as in csrc/include/specdec/tree.h."""

    target: Tensor
    tree_tokens: Tensor
    parents: Tensor
    draft: Tensor | None
    draft_ids: Tensor | None
    draft_columns: Tensor | None
    draft_logsumexp: Tensor | None
    draft_threshold: Tensor | None
    draft_temperatures: Tensor | None
    draft_temperature: float
    draft_rows: Tensor | None
    kind: str
    rule: str
    temperatures: Tensor | None
    temperature: float
    top_ks: Tensor | None
    top_k: int
    top_ps: Tensor | None
    top_p: float
    min_ps: Tensor | None
    min_p: float
    seeds: Tensor
    positions: Tensor
    cu_rows: Tensor | None
    uniforms: Tensor | None
    typical_epsilon: float
    typical_delta: float
    eos_ids: Tensor | None
    max_emit: Tensor | None
    max_depth: int
    with_logprobs: bool
    with_acceptance: bool

    @property
    def sampling(self) -> tuple[Tensor | float | None, ...]:
        """The eight sampling arguments."""
        return self[13:21]

    @property
    def law(self) -> DraftArguments:
        return DraftArguments(*self[3:10])

    @property
    def flat_draft(self) -> bool:
        return self.draft is not None and self.draft.dim() == 2

    @property
    def id_limit(self) -> int:
        """Drafted ids below it are judged."""
        v = self.target.shape[-1]
        return self.law.id_limit(v) if self.rule in TREE_RATIO_RULES else v

    def check(self) -> None:
        """Raises RuntimeError naming the argument, the rule and the value."""
        one_of("kind", self.kind, KINDS)
        one_of("rule", self.rule, TREE_RULES)
        tokens, parents = self.tree_tokens, self.parents
        require(tokens.dim() == 2, f"tree tokens must be [B, N], got {shape(tokens)}")
        require(
            tokens.dtype in IDS,
            f"tree tokens must be int32 or int64, got {dtype_name(tokens.dtype)}",
        )
        b, n = tokens.shape
        require(
            parents.shape == tokens.shape,
            f"tree parents must be [B, N] = [{b}, {n}], got {shape(parents)}",
        )
        require(
            parents.dtype in IDS,
            f"tree parents must be int32 or int64, got {dtype_name(parents.dtype)}",
        )
        self._check_target()
        same_device("tree parents", parents, self.target.device, "target")
        self._check_draft()
        dev = self.target.device
        sampling(b, dev, "target", *self.sampling)  # type: ignore[arg-type]
        vector("seeds", self.seeds, b, torch.int64, dev, "target")
        vector("positions", self.positions, b, torch.int64, dev, "target")
        self._check_uniforms()
        self._check_rule()

    def _check_target(self) -> None:
        target, (b, n) = self.target, self.tree_tokens.shape
        if self.cu_rows is None:
            require(
                target.dim() == 3 and target.shape[0] == b and target.shape[1] == n + 1,
                f"target must be [B, N+1, V] = [{b}, {n + 1}, V], got {shape(target)}",
            )
        else:
            require(
                target.dim() == 2,
                f"target must be [R, V] when cu_rows is given, got {shape(target)}",
            )
            vector("cu_rows", self.cu_rows, b + 1, torch.int32, target.device, "target")
        rows("target", target)
        same_device("tree tokens", self.tree_tokens, target.device, "target")

    def _check_draft(self) -> None:
        b, n = self.tree_tokens.shape
        if self.draft_rows is not None:
            require(
                self.draft_rows.shape == self.tree_tokens.shape,
                f"draft_rows must be [B, N] = [{b}, {n}], got {shape(self.draft_rows)}",
            )
            require(
                self.draft_rows.dtype == torch.int32,
                f"draft_rows must be int32, got {dtype_name(self.draft_rows.dtype)}",
            )
            same_device("draft_rows", self.draft_rows, self.target.device, "target")
        require(
            self.draft_rows is not None or not self.flat_draft,
            "draft must be [B, N, D] unless draft_rows is given, got two dimensions",
        )
        require(
            self.rule != "k_seq" or self.draft is not None,
            "draft must be given when rule is k_seq, got None",
        )
        sizes: Sizes = (("B", b), ("N", n) if self.draft_rows is None else ("M", None))
        statistics = sizes
        if self.draft is not None and self.draft_rows is not None and self.draft.dim() in (2, 3):
            m = self.draft.shape[-2]
            sizes = (("M", None),) if self.flat_draft else sizes
            statistics = (("M", m),) if self.flat_draft else (("B", b), ("M", m))
        self.law.check(self.target, b, sizes, statistics)

    def _check_uniforms(self) -> None:
        u, (b, n) = self.uniforms, self.tree_tokens.shape
        if u is None:
            return
        require(
            u.dim() == 2 and u.shape[0] == b and u.shape[1] == 2 * n + 1,
            f"uniforms must be [B, 2N+1] = [{b}, {2 * n + 1}], got {shape(u)}",
        )
        require(u.dtype == torch.float64, f"uniforms must be float64, got {dtype_name(u.dtype)}")
        same_device("uniforms", u, self.target.device, "target")
        require(self.rule != "match", "uniforms must be None when rule is match")

    def _check_rule(self) -> None:
        b, n = self.tree_tokens.shape
        epsilon, delta = float32(self.typical_epsilon), float32(self.typical_delta)
        require(0 <= epsilon <= 1, f"typical_epsilon must be in [0, 1], got {epsilon:g}")
        require(
            math.isfinite(delta) and delta >= 0,
            f"typical_delta must be finite and at least 0, got {delta:g}",
        )
        dev = self.target.device
        if self.eos_ids is not None:
            ids = self.eos_ids
            require(ids.dim() == 1, f"eos_ids must be [E], got {shape(ids)}")
            vector("eos_ids", ids, ids.shape[0], torch.int64, dev, "target")
        if self.max_emit is not None:
            vector("max_emit", self.max_emit, b, torch.int64, dev, "target")
        require(
            0 <= self.max_depth <= n,
            f"max_depth must be in [0, N] = [0, {n}], got {self.max_depth}",
        )

    def new_outputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised (path, tokens, num_accepted, status, logprobs, acceptance)."""
        like, (b, n), depth = self.tree_tokens, self.tree_tokens.shape, self.max_depth
        return (
            self.parents.new_empty((b, depth)),
            like.new_empty((b, depth + 1)),
            like.new_empty((b,), dtype=torch.int32),
            like.new_empty((b,), dtype=torch.int32),
            like.new_empty((b, depth + 1) if self.with_logprobs else (0, 0), dtype=torch.float32),
            like.new_empty((b, n) if self.with_acceptance else (0, 0), dtype=torch.float32),
        )
