"""`specdec_kernels::verify_tree` in Triton: one program a sequence.

The nodes of a sequence are vectors over the next power of two; a set of nodes is a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.arguments.checks import float32
from specdec_kernels.arguments.rules import TREE_RULES
from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.triton import launch
from specdec_kernels.triton.chain.rules import DRAFT_OUT_OF_RANGE
from specdec_kernels.triton.chain.sequence import plan, sequence, shaping_of
from specdec_kernels.triton.row.draft import POINT, REMOVE, SPARSE, SUBTRACT
from specdec_kernels.triton.row.tile import flag
from specdec_kernels.triton.tree.decide import tree_walk
from specdec_kernels.triton.tree.residual import ENTRY
from specdec_kernels.triton.tree.rules import GREEDY, MULTI_DRAFT, TRAVERSAL
from specdec_kernels.triton.tree.traversal import STATE, traversal


@triton.jit
def read_tree(tree_tokens, parents, draft_rows, nodes, rows, id_limit, point, NODES: tl.constexpr):
    """((tokens, -1 where absent, parents, draft rows, N), status)."""
    index = tl.arange(0, NODES)
    inside = index < tl.minimum(nodes, rows - 1)
    x = tl.load(tree_tokens + index, mask=inside, other=-1).to(tl.int64)
    parent = tl.load(parents + index, mask=inside, other=-1).to(tl.int64)
    lawful = (parent >= -1) & (parent < index) & (x >= -1) & (x < id_limit)
    wrong = tl.max((inside & (lawful == 0)).to(tl.int32), 0)
    laws = index
    if draft_rows is not None:
        laws = tl.load(draft_rows + index, mask=inside, other=0)
        laws = tl.where(point, index, laws)  # a point mass is a law of its own
    tree = (tl.where(lawful, x, -1), parent.to(tl.int32), laws, nodes)
    return tree, tl.where(wrong > 0, DRAFT_OUT_OF_RANGE, 0).to(tl.int32)


@triton.jit
def no_outputs(out, nodes, max_depth, NODES: tl.constexpr):
    """What stands where nothing is written."""
    path, tokens, logprobs, accept_probs = out
    index = tl.arange(0, NODES)
    nothing = tl.full([NODES], -1, tl.int32)
    tl.store(path + index, nothing.to(path.dtype.element_ty), mask=index < max_depth)
    tl.store(tokens + index, nothing.to(tokens.dtype.element_ty), mask=index <= max_depth)
    if logprobs is not None:
        tl.store(logprobs + index, tl.zeros([NODES], tl.float32), mask=index <= max_depth)
    if accept_probs is not None:
        tl.store(
            accept_probs + index, tl.full([NODES], float("nan"), tl.float32), mask=index < nodes
        )
    tl.debug_barrier()


@triton.jit(
    do_not_specialize=[
        "num_nodes", "max_depth", "n_rows", "n_draft", "tiles", "d_tiles", "slot_size", "id_limit",
        "num_eos",
    ]
)  # fmt: skip
def tree_sequences(
    target, target_stride_b, target_stride_i, tree_tokens, parents,
    draft, draft_stride_b, draft_stride_i, draft_ids, draft_columns, draft_logsumexp,
    draft_threshold, draft_temperatures, draft_temperature, draft_rows,
    target_indptr, temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p,
    seeds, positions, uniforms, typical_epsilon, typical_delta, eos_token_ids, max_new_tokens,
    tops, sums, marks,
    path, tokens, num_accepted, status, logprobs, accept_probs,
    num_nodes, max_depth, v, d, n_rows, n_draft, tiles, d_tiles, slot_size, id_limit, num_eos,
    RULE: tl.constexpr, WHAT: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr,
    DRAFT: tl.constexpr, FLAT_DRAFT: tl.constexpr, BEYOND: tl.constexpr, NODES: tl.constexpr,
    TILE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid (B,): the verdict on one sequence."""
    b = tl.program_id(0).to(tl.int64)
    begin, rows = sequence(target_indptr, b, num_nodes, n_rows)
    ratio_rule: tl.constexpr = RULE >= MULTI_DRAFT and RULE <= TRAVERSAL
    shaping, q_temp, flags = shaping_of(
        (temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p),
        draft_temperatures, draft_temperature, b, v, rows, RULE == GREEDY, ratio_rule, PROBS, DRAFT,
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
    no_outputs((path, tokens, logprobs, accept_probs), num_nodes, max_depth, NODES)

    stood = flag(0)
    if flags == 0:
        point = (q_temp == 0) | (DRAFT == POINT)
        mode = tl.where(point, REMOVE, SUBTRACT).to(tl.int32)
        tree, flags = read_tree(
            tree_tokens, parents, draft_rows, num_nodes, rows, id_limit, point, NODES
        )
        most = rows
        if max_new_tokens is not None:
            most = tl.maximum(tl.load(max_new_tokens + b), 0)
        if most > 0:
            target_rows = (
                target + b * target_stride_b + begin * target_stride_i, target_stride_i,
            )  # fmt: skip
            # A ragged draft of no sequence before this one: row i is row i.
            drafts = (
                draft, draft_stride_b, draft_stride_i, (draft_ids, draft_columns), d,
                draft_logsumexp, draft_threshold, q_temp, b * 0, b * 0, n_draft, n_draft,
            )  # fmt: skip
            noise = (tl.load(seeds + b), tl.load(positions + b), uniforms)
            at = 3 * b * slot_size
            scratch = (tops + at, sums + at, slot_size)
            states = marks + b * ((num_nodes + 1) * STATE + num_nodes * ENTRY)
            entries = states + (num_nodes + 1) * STATE
            zero = tl.full([], 0.0, tl.float64)
            judge = (zero + typical_epsilon, zero + typical_delta, shaping[0])
            limits = (most, max_depth, eos_token_ids, num_eos)
            out = (path, tokens, logprobs, accept_probs)
            walking = flag(1)
            if RULE == TRAVERSAL:  # noqa: SIM102  (compiled in for this rule only)
                if shaping[0] != 0:
                    walking = flag(0)
                    stood, more = traversal(
                        target_rows, tree, drafts, mode, shaping, noise, scratch, entries, states,
                        limits, out, v, tiles, d_tiles, RULE, FILTERS, PROBS, DRAFT, BEYOND, TILE,
                        CHUNK, BLOCK, LOG_TILES, WIDTH,
                    )  # fmt: skip
                    flags |= more
            if walking > 0:
                stood, more = tree_walk(
                    target_rows, tree, drafts, mode, shaping, noise, scratch, entries, judge,
                    limits, out, v, tiles, d_tiles, RULE, WHAT, FILTERS, PROBS, DRAFT, BEYOND,
                    TILE, CHUNK, BLOCK, LOG_TILES, WIDTH,
                )  # fmt: skip
                flags |= more
    tl.store(num_accepted + b, stood)
    tl.store(status + b, flags)


def verify_tree(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_tree` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = TreeArguments(*args)
    a.check()
    out = a.new_outputs()
    batch, nodes = a.tree_tokens.shape
    if batch == 0:
        return out
    target, p = a.target, plan(a)
    own = p.form != POINT.value
    # Slots: the target row, a draft row's statistics, what is left of the target.
    tops, sums = launch.scratch(target, 3 * batch * p.slot_size)
    numbers = (nodes + 1) * STATE.value + nodes * ENTRY.value
    marks = target.new_empty((batch * numbers,), dtype=torch.float64)
    # What a sparse row has beyond the target's vocabulary counts in what is left of a tree.
    options = p.options | {"BEYOND": p.options["BEYOND"] or p.form == SPARSE.value}
    with launch.on_device_of(target):
        tree_sequences[(batch,)](
            *p.target, *launch.packed(a.tree_tokens, a.parents), *p.draft, *p.laws,
            *launch.packed(a.draft_rows if own else None, a.target_indptr, a.temperatures),
            float32(a.temperature), *p.filters,
            *launch.packed(a.seeds, a.positions, a.uniforms), float32(a.typical_epsilon),
            float32(a.typical_delta), *launch.packed(a.eos_token_ids, a.max_new_tokens), tops, sums, marks,
            *out[:4], out[4] if a.with_logprobs else None, out[5] if a.with_accept_probs else None,
            nodes, a.max_depth, target.shape[-1], p.draft[0].shape[-1], p.n_rows,
            p.draft[0].shape[-2], p.shape.tiles, p.d_tiles, p.slot_size, a.id_limit, p.num_eos,
            RULE=TREE_RULES.index(a.rule), FLAT_DRAFT=own and a.flat_draft,
            NODES=1 << nodes.bit_length(), **options,
        )  # fmt: skip
    return out
