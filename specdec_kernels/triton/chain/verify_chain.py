"""`specdec_kernels::verify_chain` in Triton: four launches, of which each reads what the last left.

`tile_statistics` and `summarize_rows` (rows.py) make a summary of every row, `fill_residuals`
(residual.py) the tile masses of a residual, and `draw` decides and writes the outputs. A grid over
tiles never waits for another: what has to be known of a whole row is read in the next launch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...arguments.chain import ChainArguments
from ...arguments.checks import float32
from ...arguments.rules import TRITON_RULES
from ...arguments.sample import SamplingArguments
from .. import launch
from ..row.distribution import GUMBEL, MASSES, MAXIMA, draw_token, log_probability
from ..row.draft import DRAFT_LOGITS, DRAFT_PROBS, DRAFT_ROWS, KEEP, ONE_HOT, SAMPLED, SPARSE, Draft
from ..row.noise import ACCEPT, RESIDUAL, SHARED, counter_uniform
from ..row.status import DRAFT_INVALID, EMPTY_RESIDUAL, TARGET_INVALID
from ..row.tile import allowed_words, flag
from .residual import (
    draw_residual,
    fill_residuals,
    fill_tile,
    invalid_draft,
    invalid_target,
    is_empty,
    residual_of,
    residual_sums,
    with_mode,
)
from .rows import summarize_rows, tile_statistics
from .sequence import (
    ACCEPT_PROB,
    BLOCK_RULE,
    CHOSEN,
    FIELDS,
    LISTED,
    LOG_SUM,
    LOGPROB,
    MAXIMUM,
    MODE,
    P_SCALE,
    STEP,
    TARGET_ROWS,
    THRESHOLD,
    VALID,
    Call,
    Outputs,
    Scratch,
    Target,
    find_drafts,
    first_rejected,
    open_sequence,
    row_uniform,
    stats_of,
    target_fault,
)


@triton.jit
def round_uniform(call, b, i):
    """The acceptance uniform of draft i under rule block, which looks ahead.

    It belongs to the round and not to the draft's own position; see docs/rules.md#noise.
    """
    if call.uniforms is None:
        seed, position = tl.load(call.seeds + b).to(tl.int64), tl.load(call.positions + b)
        u = counter_uniform(i.to(tl.uint32), seed, position.to(tl.int64), ACCEPT)
    else:
        u = tl.load(call.uniforms + b * (call.gamma + 1) + i)
    return u


@triton.jit
def decide_block(
    target, draft, call, scratch, out, b, count, begin, params, draft_temperature,
    RULE: tl.constexpr, DRAFT: tl.constexpr, BLOCK: tl.constexpr,
    LOG_TILES: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Rule block (Sun et al. 2024) -> (accepted drafts, drafts before the first faulty row, drafts
    before a row that is faulty at the drafted token, fault).

    The first tau drafts are accepted, tau the last i with u_i < h_i, where h_i is the quotient of
    the two sums of row i. An invalid row ends the block before it, as if nothing had been drafted
    from there on. docs/rules.md#block explains the rule.
    """
    first = b * (call.gamma + 1)
    fault = flag(0)
    end = count * 0
    going = (count > 0).to(tl.int32)
    while going > 0:
        summary = scratch.summaries + (first + end) * FIELDS
        if tl.load(summary + VALID) == 0:
            fault = flag(TARGET_INVALID)
        elif tl.load(summary + MODE) == KEEP:
            fault = flag(DRAFT_INVALID)
        else:
            end += 1
        going = ((fault == 0) & (end < count)).to(tl.int32)
    seen = end
    tau = end
    going = (tau > 0).to(tl.int32)
    while going > 0:
        h = tl.load(scratch.summaries + (first + tau) * FIELDS + P_SCALE)
        if tau < end:
            r = residual_of(
                target, draft, call, scratch, b, tau, count, begin, params, draft_temperature,
                first + tau, RULE, DRAFT, LIST,
            )  # fmt: skip
            if invalid_target(r, BLOCK):
                end = tau
                fault = flag(TARGET_INVALID)
            elif invalid_draft(r, DRAFT, BLOCK):
                end = tau
                fault = flag(DRAFT_INVALID)
            else:
                # If Q <= c * P everywhere, the negative sum is 0. Then c = 1 and P = Q, and h is c.
                above, below = residual_sums(r, LOG_TILES, BLOCK)
                h = tl.where(below > 0, tl.minimum(above / tl.where(below > 0, below, 1.0), 1.0), h)
        if out.accept_probs is not None:
            tl.store(out.accept_probs + b * call.gamma + tau - 1, h.to(tl.float32))
        if round_uniform(call, b, tau - 1) < h:
            going = flag(0)
        else:
            tau -= 1
            going = (tau > 0).to(tl.int32)
    return tau, end, seen, fault


@triton.jit
def recovered_or_bonus(
    r, draft, call, scratch, b, i, params, u, filled,
    RULE: tl.constexpr, FILTERS: tl.constexpr, PROBS: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Draw the recovered or bonus token of row i -> (token, status); -1 where the row is invalid.

    It comes from the residual, or from P where nothing is subtracted. `filled` says that the tile
    masses of the residual r are those that `fill_residuals` left.
    """
    index = b * (call.gamma + 1) + i
    summary = scratch.summaries + index * FIELDS
    token = tl.full([], -1, tl.int64)
    status = flag(0)
    mode = tl.where(filled, r.q.mode, KEEP)
    valid = tl.load(summary + VALID) > 0
    again = (filled == 0) & r.direct
    if valid & filled & (r.direct | (mode != KEEP)):
        if invalid_target(r, BLOCK):
            valid = tl.full([], 0, tl.int1)
        elif mode != KEEP:
            bad = invalid_draft(r, DRAFT, BLOCK)
            if bad | is_empty(r, LOG_TILES, BLOCK):
                # Q cannot be subtracted, so the token is drawn from P.
                status = tl.where(bad, DRAFT_INVALID, EMPTY_RESIDUAL).to(tl.int32)
                mode = flag(KEEP)
                again = r.direct
    r = with_mode(r, mode)
    if valid & again:
        tl.debug_barrier()
        for t in range(0, r.stats.tiles):
            fill_tile(r, draft, t, RULE, FILTERS, PROBS, DRAFT, TILE)
        tl.debug_barrier()
        valid = invalid_target(r, BLOCK) == 0
    if valid & (r.direct | (mode != KEEP)):
        token = draw_residual(r, draft, u, RULE, FILTERS, PROBS, DRAFT, TILE, BLOCK, LOG_TILES)
    elif valid:
        listed = tl.load(summary + LISTED).to(tl.int32)
        stats = stats_of(scratch, index, tl.where(listed >= 0, 1, scratch.tiles))
        token = draw_token(
            r.row, r.v, stats, listed, scratch.ids + index * LIST,
            tl.load(summary + MAXIMUM).to(tl.float32), tl.load(summary + THRESHOLD).to(tl.float32),
            params.inv_t, u, FILTERS, PROBS, TILE, BLOCK, LOG_TILES,
        )  # fmt: skip
    else:
        status = flag(TARGET_INVALID)
    return token, status


@launch.kernel(*TARGET_ROWS, *DRAFT_ROWS)
def draw(
    target: Target, draft: Draft, call: Call, scratch: Scratch, out: Outputs,
    RULE: tl.constexpr, STATS: tl.constexpr, STREAM: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, DIRECT: tl.constexpr, DRAFT: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr, LIST: tl.constexpr,
):  # fmt: skip
    """Grid (B,): decide on the drafts of one sequence, draw its last token, write the outputs."""
    b = tl.program_id(0).to(tl.int64)
    begin, rows, params, draft_temperature, status = open_sequence(
        call, b, target.v, RULE, DIRECT, DRAFT
    )
    gamma = call.gamma
    summaries = scratch.summaries + b * (gamma + 1) * FIELDS
    looks_ahead = (params.temperature != 0) & (RULE == BLOCK_RULE)
    tau = b * 0
    tested = b * 0  # drafts that have an acceptance probability
    token = tl.full([], -1, tl.int64)
    logprob = tl.full([], 0.0, tl.float64)
    logsumexp = tl.full([], 0.0, tl.float64)
    threshold = tl.full([], 0.0, tl.float32)
    if status == 0:
        count, no_bonus, status_after_drafts = find_drafts(call, rows, b)
        fault = flag(0)
        end = count
        place = b
        if RULE == BLOCK_RULE:  # noqa: SIM102  (compiled in for this rule only)
            if looks_ahead:
                tau, end, tested, fault = decide_block(
                    target, draft, call, scratch, out, b, count, begin, params, draft_temperature,
                    RULE, DRAFT, BLOCK, LOG_TILES, LIST,
                )  # fmt: skip
                place = b * (gamma + 1) + tau
        if looks_ahead == 0:
            tau = first_rejected(summaries, count)
            tested = tl.minimum(tau + 1, count)
        summary = summaries + tau * FIELDS
        at_end = tau == end
        if at_end & (fault == TARGET_INVALID):
            status = fault
        elif (at_end & (fault == 0) & (no_bonus > 0)) == 0:
            valid = tl.load(summary + VALID) > 0
            mode = tl.load(summary + MODE).to(tl.int32)
            if valid == 0:
                status = flag(TARGET_INVALID)
            elif (params.temperature == 0) | (STATS == GUMBEL):
                token = tl.load(summary + CHOSEN).to(tl.int64)
                logprob = tl.load(summary + LOGPROB)
            elif STATS == MASSES:
                r = residual_of(
                    target, draft, call, scratch, b, tau, count, begin, params, draft_temperature,
                    place, RULE, DRAFT, LIST,
                )  # fmt: skip
                filled = (at_end == 0) | (tau == count)
                u = row_uniform(call, b, tau, gamma, STREAM)
                token, status = recovered_or_bonus(
                    r, draft, call, scratch, b, tau, params, u, filled, RULE, FILTERS, PROBS,
                    DRAFT, TILE, BLOCK, LOG_TILES, LIST,
                )  # fmt: skip
                if token >= 0:
                    logprob = log_probability(
                        r.row, token, r.v, params.direct, params.temperature,
                        tl.load(summary + MAXIMUM), tl.load(summary + LOG_SUM),
                        tl.load(summary + THRESHOLD).to(tl.float32), PROBS,
                    )  # fmt: skip
                if DRAFT != ONE_HOT:
                    unread = (at_end == 0) & (mode == KEEP) & (token >= 0)
                    status |= tl.where(unread, DRAFT_INVALID, 0).to(tl.int32)
            status |= tl.where(at_end, tl.where(fault > 0, fault, status_after_drafts), 0)
        if (status & TARGET_INVALID) != 0:
            status = (status ^ TARGET_INVALID) | target_fault(target, b, begin + tau)
        if out.logsumexp is not None:
            logsumexp = tl.load(summary + MAXIMUM) / tl.maximum(params.temperature, 1e-300)
            logsumexp += tl.load(summary + LOG_SUM)
            threshold = tl.load(summary + THRESHOLD).to(tl.float32)
    write(call, summaries, out, b, tau, tested, token, logprob, status, looks_ahead)
    if out.logsumexp is not None:
        kept = (token >= 0) & (params.temperature != 0)
        tl.store(out.logsumexp + b, tl.where(kept, logsumexp, 0.0))
        tl.store(out.threshold + b, tl.where(token >= 0, threshold, 0.0))


@triton.jit
def write(call, summaries, out, b, tau, tested, token, logprob, status, looks_ahead):
    """Store the outputs of a sequence: its accepted drafts, its last token, and what is unused."""
    gamma = call.gamma
    for start in range(0, gamma + 1, STEP):
        i = start + tl.arange(0, STEP)
        summary = summaries + i * FIELDS
        x = tl.load(call.draft_token_ids + b * gamma + i, mask=i < tau, other=-1).to(tl.int64)
        x = tl.where(i == tau, token, x).to(out.tokens.dtype.element_ty)
        tl.store(out.tokens + b * (gamma + 1) + i, x, mask=i <= gamma)
        if out.logprobs is not None:
            each = tl.load(summary + LOGPROB, mask=i < tau, other=0.0)
            each = tl.where(i == tau, logprob, each).to(tl.float32)
            tl.store(out.logprobs + b * (gamma + 1) + i, each, mask=i <= gamma)
        if out.accept_probs is not None:
            known = i < tl.where(looks_ahead, 0, tested)
            prob = tl.load(summary + ACCEPT_PROB, mask=known, other=float("nan")).to(tl.float32)
            # Those of rule block are stored already, down from the last draft.
            rest = (i < tl.where(looks_ahead, tau - 1, gamma)) | (i >= tested)
            tl.store(out.accept_probs + b * gamma + i, prob, mask=(i < gamma) & rest)
    if out.num_accepted is not None:
        tl.store(out.num_accepted + b, tau.to(tl.int32))
    tl.store(out.status + b, status)


def draft_form(a: ChainArguments) -> tuple[int, Draft]:
    """The form of a call's draft, and the draft as a kernel takes it."""
    draft = a.draft
    if not a.reads_draft or draft is None:
        return ONE_HOT.value, Draft(a.target, 0, 0, 0, None, None, a.target, 0, 0)
    form = DRAFT_PROBS if a.kind_name == "probs" else DRAFT_LOGITS
    form = SPARSE if a.draft_ids is not None else SAMPLED if a.draft_logsumexp is not None else form
    stride_b, rows_b = (0, 0) if draft.dim() == 2 else (draft.stride(0), draft.shape[1])
    ids, columns, chosen = launch.packed(a.draft_ids, a.draft_columns, a.draft_rows)
    m, d = draft.shape[-2:]
    return form.value, Draft(
        draft,
        stride_b,
        draft.stride(-2),
        d,
        ids,
        columns,
        *allowed_words(draft, a.draft_bitmask, a.flat_draft),
        chosen,
        m,
        rows_b,
        int(a.ragged_draft),
    )


def run(target: Target, draft: Draft, call: Call, out: Outputs, options: dict[str, Any]) -> None:
    """Launch the kernels. options: those of their constants that do not follow from the sizes."""
    rows, form, batch = target.rows, options["DRAFT"], len(out.status)
    logits = form == DRAFT_LOGITS.value
    scanned = logits or form in {DRAFT_PROBS.value, SAMPLED.value}
    own, d_tiles = launch.tiling(target.v), launch.tiling(draft.d).tiles if scanned else 0
    most = launch.tiling(max(target.v, draft.d)) if scanned else own
    places = batch * (call.gamma + 1)
    residuals = (places if options["RULE"] == BLOCK_RULE.value else batch) * options["READS_DRAFT"]
    size = most.tiles * (2 if options["STATS"] == GUMBEL.value else 1)
    maxima, sums = launch.scratch(rows, (2 if logits else 1) * places * size)
    residual_maxima, residual_sums = launch.scratch(rows, residuals * 4 * most.tiles)
    listed = places * options["FILTERS"]
    scratch = Scratch(
        maxima, sums, size, own.tiles, d_tiles if logits else 0, places,
        maxima.new_empty(listed * own.spans),
        maxima.new_empty(listed * own.spans, dtype=torch.int32),
        maxima.new_empty(listed * launch.LIST, dtype=torch.int32),
        maxima.new_empty(places * FIELDS.value, dtype=torch.float64),
        residual_maxima, residual_sums, most.tiles,
    )  # fmt: skip
    constants = options | {
        "TILE": launch.TILE, "CHUNK": launch.CHUNK, "LIST": launch.LIST, "SPANS": own.spans,
        "SPAN": own.span, "BLOCK": most.block, "LOG_TILES": most.log_tiles,
    }  # fmt: skip
    per_sequence = (call.gamma + 1, batch)
    with launch.on_device_of(rows):
        # Rows of probabilities that are used as they are need no statistics.
        scaled = options["FILTERS"] or call.temperatures is not None or call.temperature != 1
        if scaled or not options["DIRECT"]:
            launch.start(
                tile_statistics, (max(own.tiles, scratch.d_tiles), *per_sequence),
                (target, draft, call, scratch), constants,
            )  # fmt: skip
        launch.start(summarize_rows, per_sequence, (target, draft, call, scratch), constants)
        if residuals:
            grid = (most.tiles, residuals // batch, batch)
            launch.start(fill_residuals, grid, (target, draft, call, scratch), constants)
        launch.start(draw, (batch,), (target, draft, call, scratch, out), constants)


def sampling_of(v: int, a: SamplingArguments) -> dict[str, Any]:
    """The sampling arguments as a kernel takes them; a top_k of V or more keeps every token."""
    names = ("temperatures", "top_ks", "top_ps", "min_ps")
    tensors = launch.packed(*(getattr(a, name) for name in names))
    out: dict[str, Any] = dict(zip(names, tensors, strict=True))
    return out | {
        "temperature": float32(a.temperature), "top_k": min(a.top_k, v),
        "top_p": float32(a.top_p), "min_p": float32(a.min_p),
    }  # fmt: skip


def filtering(v: int, call: Call) -> bool:
    """Whether some sequence may have a filter; values on the device are not read."""
    tensors = call.top_ks is not None or call.top_ps is not None or call.min_ps is not None
    return tensors or 0 < call.top_k < v or call.top_p < 1 or call.min_p > 0


def verify_chain(*args: Any) -> tuple[Tensor, ...]:
    """`reference.verify_chain` on a CUDA device; CPU tensors with TRITON_INTERPRET=1."""
    a = ChainArguments(*args)
    if a.rule_name not in TRITON_RULES:
        raise NotImplementedError(
            f"rule must be one of {', '.join(TRITON_RULES)} in Triton (the CPU and the CUDA "
            f"kernels have all), got {a.rule_name}"
        )
    out = a.new_outputs()
    batch, gamma = a.draft_token_ids.shape
    if batch == 0:
        return out
    rows, v, ragged = a.target, a.target.shape[-1], a.target_indptr is not None
    form, draft = draft_form(a)
    tensors = {
        name: launch.packed(getattr(a, name))[0]
        for name in (
            "draft_token_ids", "draft_logsumexp", "draft_threshold", "draft_temperatures",
            "target_indptr", "seeds", "positions", "uniforms", "eos_token_ids", "max_new_tokens",
        )
    }  # fmt: skip
    call = Call(
        **tensors, **sampling_of(v, a), draft_temperature=float32(a.draft_temperature),
        lenience=float32(a.lenience), id_limit=a.id_limit, gamma=gamma,
        num_eos=0 if a.eos_token_ids is None else len(a.eos_token_ids),
        n_rows=rows.shape[:-1].numel(),
    )  # fmt: skip
    options = {
        "RULE": a.rule, "DRAFT": form,
        "PROBS": a.kind_name == "probs",
        "STATS": {"match": GUMBEL, "greedy": MAXIMA}.get(a.rule_name, MASSES).value,
        "STREAM": (SHARED if a.rule_name == "match" else RESIDUAL).value,
        "FILTERS": a.rule_name != "greedy" and filtering(v, call),
        "DIRECT": a.kind_name == "probs" and a.reads_draft and a.token_bitmask is None,
        "READS_DRAFT": a.reads_draft,
    }  # fmt: skip
    outputs = Outputs(
        out.tokens, out.num_accepted, out.status, out.logprobs if a.with_logprobs else None,
        out.accept_probs if a.with_accept_probs else None, None, None,
    )  # fmt: skip
    target = Target(
        rows, 0 if ragged else rows.stride(0), rows.stride(-2), v,
        *allowed_words(rows, a.token_bitmask, ragged),
    )  # fmt: skip
    run(target, draft, call, outputs, options)
    return out
