"""`specdec_kernels::verify_tree` in Triton: one program verifies one sequence.

The nodes of a sequence are vectors over the next power of two, and a set of nodes is a mask. Rule
traversal is in traversal.py, the other rules are in decide.py. At temperature 0 rule traversal is
greedy too, and goes down from the root like the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from ...arguments.checks import float32
from ...arguments.conversion import to_int32
from ...arguments.tree import TreeArguments
from .. import launch
from ..chain.sequence import (
    ROW_ARGUMENTS,
    Noise,
    TargetRows,
    plan,
    sequence_rows,
    verification_params,
)
from ..row.distribution import Sampling
from ..row.draft import ONE_HOT, REMOVE, SPARSE, SUBTRACT, Drafts
from ..row.tile import flag
from .decide import TypicalParams, decide_from_root
from .residual import ENTRY
from .rules import GREEDY, TRAVERSAL
from .sequence import (
    Limits,
    TreeOutputs,
    TreeScratch,
    clear_outputs,
    read_tree,
)
from .traversal import STATE, traversal


@launch.kernel(*ROW_ARGUMENTS, "draft_ids", "draft_columns")
def tree_sequences(
    target, target_stride_b, target_stride_i, tree_tokens, parents,
    draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, draft_logsumexp,
    draft_threshold, draft_temperatures, draft_temperature, draft_rows,
    target_indptr, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions, uniforms, typical_epsilon, typical_delta, eos_token_ids, max_new_tokens,
    tile_maxima, tile_sums, workspace,
    path, tokens, num_accepted, status, logprobs, accept_probs,
    num_nodes, max_depth, v, d, n_rows, n_draft, tiles, d_tiles, stats_size, id_limit, num_eos,
    RULE: tl.constexpr, READS_DRAFT: tl.constexpr, STATS: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr,
    DRAFT: tl.constexpr, FLAT_DRAFT: tl.constexpr, BEYOND: tl.constexpr, NODES: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (B,): each program verifies one sequence."""
    b = tl.program_id(0).to(tl.int64)
    begin, rows = sequence_rows(target_indptr, b, num_nodes, n_rows)
    sampling = Sampling(temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p)
    params, draft_temperature, flags = verification_params(
        sampling, draft_temperatures, draft_temperature, b, v, rows, uniforms, 2 * num_nodes + 1,
        RULE == GREEDY, READS_DRAFT, PROBS, DRAFT,
    )  # fmt: skip
    tree_tokens += b * num_nodes
    parents += b * num_nodes
    if draft_rows is not None:
        draft_rows += b * num_nodes
    if not FLAT_DRAFT:
        draft += b * draft_stride_b
        if draft_ids is not None:
            draft_ids += b * n_draft * d
        if draft_logsumexp is not None:
            draft_logsumexp += b * n_draft
            draft_threshold += b * n_draft
    path += b * max_depth
    tokens += b * (max_depth + 1)
    if logprobs is not None:
        logprobs += b * (max_depth + 1)
    if accept_probs is not None:
        accept_probs += b * num_nodes
    if uniforms is not None:
        uniforms += b * (2 * num_nodes + 1)
    out = TreeOutputs(path, tokens, logprobs, accept_probs)
    clear_outputs(out, num_nodes, max_depth, NODES)

    accepted = flag(0)
    if flags == 0:
        one_hot = (draft_temperature == 0) | (DRAFT == ONE_HOT)
        mode = tl.where(one_hot, REMOVE, SUBTRACT).to(tl.int32)
        tree, flags = read_tree(
            tree_tokens, parents, draft_rows, num_nodes, rows, id_limit, one_hot, NODES
        )
        most = rows
        if max_new_tokens is not None:
            most = tl.maximum(tl.load(max_new_tokens + b).to(tl.int64), 0)
        if most > 0:
            target_rows = TargetRows(
                target + b * target_stride_b + begin * target_stride_i, target_stride_i
            )
            # The pointers above are those of this sequence. As a ragged draft with no sequence
            # before it, row i of the draft is row i of these pointers.
            drafts = Drafts(
                draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, d,
                draft_logsumexp, draft_threshold, draft_temperature, b * 0, b * 0, n_draft, n_draft,
            )  # fmt: skip
            seed, position = tl.load(seeds + b).to(tl.int64), tl.load(positions + b).to(tl.int64)
            noise = Noise(seed, position, uniforms)
            offset = 3 * b * stats_size
            states = workspace + b * ((num_nodes + 1) * STATE + num_nodes * ENTRY)
            scratch = TreeScratch(
                tile_maxima + offset, tile_sums + offset, stats_size, tiles, d_tiles,
                states + (num_nodes + 1) * STATE,
            )  # fmt: skip
            zero = tl.full([], 0.0, tl.float64)
            typical_params = TypicalParams(zero + typical_epsilon, zero + typical_delta)
            limits = Limits(most, max_depth, eos_token_ids, num_eos)
            from_root = flag(1)
            if RULE == TRAVERSAL:  # noqa: SIM102  (compiled in for this rule only)
                if params.temperature != 0:
                    from_root = flag(0)
                    accepted, more = traversal(
                        target_rows, tree, drafts, mode, params, noise, scratch, states, limits,
                        out, v, RULE, FILTERS, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK, LOG_TILES,
                        WIDTH,
                    )  # fmt: skip
                    flags |= more
            if from_root > 0:
                accepted, more = decide_from_root(
                    target_rows, tree, drafts, mode, params, noise, scratch, typical_params,
                    limits, out, v, RULE, STATS, FILTERS, PROBS, DRAFT, BEYOND, TILE, CHUNK, BLOCK,
                    LOG_TILES, WIDTH,
                )  # fmt: skip
                flags |= more
    tl.store(num_accepted + b, accepted)
    tl.store(status + b, flags)


def verify_tree(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_tree` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = TreeArguments(*args)
    out = a.new_outputs()
    batch, nodes = a.tree_tokens.shape
    if batch == 0:
        return out
    target, p = a.target, plan(a)
    own = p.form != ONE_HOT.value
    draft_rows = to_int32(a.draft_rows) if own and a.draft_rows is not None else None
    # Tile statistics of a target row, a draft row and a residual for each sequence.
    maxima, sums = launch.scratch(target, 3 * batch * p.stats_size)
    numbers = (nodes + 1) * STATE.value + nodes * ENTRY.value
    workspace = target.new_empty((batch * numbers,), dtype=torch.float64)
    # A sparse draft's ids beyond the target's vocabulary count in the residuals of a tree.
    options = p.options | {"BEYOND": p.options["BEYOND"] or p.form == SPARSE.value}
    with launch.on_device_of(target):
        tree_sequences[(batch,)](
            *p.target, *launch.packed(a.tree_tokens, a.parents), *p.draft, *p.draft_arguments,
            *launch.packed(draft_rows, a.target_indptr, a.temperatures),
            float32(a.temperature), *p.filters,
            *launch.packed(a.seeds, a.positions, a.uniforms), float32(a.typical_epsilon),
            float32(a.typical_delta), *launch.packed(a.eos_token_ids, a.max_new_tokens),
            maxima, sums, workspace,
            out.path, out.tokens, out.num_accepted, out.status,
            out.logprobs if a.with_logprobs else None,
            out.accept_probs if a.with_accept_probs else None,
            nodes, a.max_depth, target.shape[-1], p.draft.rows.shape[-1], p.n_rows,
            p.draft.rows.shape[-2], p.shape.tiles, p.d_tiles, p.stats_size, a.id_limit, p.num_eos,
            RULE=a.rule, FLAT_DRAFT=own and a.flat_draft,
            NODES=1 << nodes.bit_length(), **options,
        )  # fmt: skip
    return out
