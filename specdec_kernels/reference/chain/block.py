"""Rule block (Sun et al. 2024), which decides about all drafts together; docs/rules.md#block."""

from __future__ import annotations

from ...arguments.status import Status
from ..row.distribution import TargetRow, prob_of
from ..row.draft import DraftDistribution
from .residual import block_accept_prob, ratio, recovered_token
from .sequence import ChainSequence


def decide_block(s: ChainSequence) -> None:
    """Accepts the first tau drafts, where tau is the last i with u_i < h_i.

    An invalid row ends the block before it, as if nothing had been drafted from there on.
    """
    p_scales = [1.0]  # c_i of docs/rules.md#block
    rows: list[TargetRow] = []
    drafts: list[DraftDistribution] = []
    end, fault = len(s.drafts), 0
    for i, token in enumerate(s.drafts):
        row, draft = s.target(i, token), s.draft(i)
        if not row.valid or not draft.valid_at_token:
            end, fault = i, Status.DRAFT_INVALID if row.valid else Status.TARGET_INVALID
            break
        step = ratio(prob_of(row.probs, token), draft.token_prob)
        p_scales.append(min(1.0, p_scales[-1] * step if p_scales[-1] else 0.0))
        rows.append(row)
        drafts.append(draft)

    tau = end
    while tau > 0:
        h = p_scales[tau]
        if tau < end:
            row, draft = s.target(tau), drafts[tau]
            if not row.valid or not draft.valid:
                end, fault = tau, Status.DRAFT_INVALID if row.valid else Status.TARGET_INVALID
            else:
                h = block_accept_prob(p_scales[tau], row.probs, draft)
        s.accept_probs[tau - 1] = h
        # Rule block looks ahead, so its uniforms belong to the round; see docs/rules.md#noise.
        # u_i is entry i - 1.
        if s.acceptance_uniform(tau - 1, s.position, tau - 1) < h:
            break
        tau -= 1

    s.num_accepted = tau
    for i in range(tau):
        s.emit(rows[i], s.drafts[i])
    if tau == end:
        if not fault and s.no_bonus:
            return
        if fault == Status.TARGET_INVALID:
            s.status |= s.target_fault(tau)
            return
        s.status |= fault or s.status_after_drafts
    row = s.target(tau)
    if not row.valid:
        s.status |= s.target_fault(tau)
    elif tau == end:
        s.emit(row, s.draw_after(tau, row.probs))
    else:
        s.emit(row, recovered_token(s, tau, row.probs, drafts[tau], p_scale=p_scales[tau]))
