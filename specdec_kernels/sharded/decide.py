"""Which drafts are accepted, from tables that every rank knows alike; docs/rules.md#token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..arguments.status import Status
from .draft import DraftTables
from .sequence import Sequences, leading, take


@dataclass
class Decision:
    """What was decided about each of B sequences.

    emits: a token follows the accepted drafts. from_residual: it is drawn from the residual, with
    P scaled by p_scale. accept_probs: [B, gamma], NaN for drafts that were not looked at.
    """

    num_accepted: Tensor
    status: Tensor
    emits: Tensor
    from_residual: Tensor
    p_scale: Tensor
    accept_probs: Tensor

    def where(self, condition: Tensor, other: Decision) -> Decision:
        """This decision for sequences of which the condition [B] holds, the other for the rest."""

        def chosen(x: Tensor, y: Tensor) -> Tensor:
            return torch.where(condition if x.dim() == 1 else condition[:, None], x, y)

        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Decision(*(chosen(x, y) for x, y in pairs))


def decide_in_order(
    s: Sequences, valid: Tensor, accepted: Tensor, accept_probs: Tensor, residual: bool
) -> Decision:
    """Accepts drafts from the first on, up to the first rejection; every rule but block.

    valid: [B, gamma+1], of the target rows. accepted: [B, gamma], whether each draft would be if
    all before it were. accept_probs: [B, gamma]. residual: the token after a rejection is drawn
    from the residual.
    """
    steps = torch.arange(accepted.shape[1], device=accepted.device)
    among = steps < s.num_drafts[:, None]
    tau = leading(accepted & valid[:, :-1] & among)
    whole = tau == s.num_drafts
    looks = s.verifiable & ~(whole & s.no_bonus)
    row_valid = take(valid, tau)
    status = s.status + torch.where(looks & whole, s.status_after_drafts, 0)
    status |= torch.where(looks & ~row_valid, Status.TARGET_INVALID, 0)
    reached = among & (steps <= tau[:, None]) & valid[:, :-1] & s.verifiable[:, None]
    emits = looks & row_valid
    return Decision(
        num_accepted=tau.where(s.verifiable, 0),
        status=status,
        emits=emits,
        from_residual=emits & ~whole & residual,
        p_scale=torch.ones_like(tau, dtype=torch.float64),
        accept_probs=accept_probs.where(reached, torch.nan),
    )


def decide_by_choice(s: Sequences, valid: Tensor, choice: Tensor) -> Decision:
    """Accepts drafts that equal the target's own choice [B, gamma+1]."""
    accepted = s.drafted == choice[:, :-1]
    return decide_in_order(s, valid, accepted, accepted.double(), residual=False)


def decide_token(
    s: Sequences, valid: Tensor, log_p: Tensor, draft: DraftTables, uniforms: Tensor
) -> Decision:
    """Rule token: u Q(x) < P(x), in logarithms. log_p: [B, gamma] of the drafted tokens."""
    log_ratio = log_p - draft.log_q
    accepted = draft.valid_at_token & (uniforms.log() < log_ratio)
    probs = log_ratio.clamp(max=0).exp().where(log_p > -torch.inf, 0.0)
    probs = probs.where(draft.valid_at_token, torch.nan)
    return decide_in_order(s, valid, accepted, probs, residual=True)


def block_scales(
    s: Sequences, valid: Tensor, log_p: Tensor, draft: DraftTables
) -> tuple[Tensor, Tensor, Tensor]:
    """The factors c_i of docs/rules.md#block [B, gamma+1]; how many drafts the block has, and the
    fault that ended it, both [B].

    A row that is not valid ends the block before it, as if nothing had been drafted from there on.
    """
    b, gamma = s.drafted.shape
    steps = torch.arange(gamma, device=log_p.device)
    good = valid[:, :-1] & draft.valid_at_token & (steps < s.num_drafts[:, None])
    end = leading(good)
    column = end.clamp(max=max(gamma - 1, 0))
    cut = end < s.num_drafts
    fault = torch.zeros_like(end)
    if gamma:
        of_row = torch.where(take(valid, column), Status.DRAFT_INVALID, Status.TARGET_INVALID)
        fault = of_row.where(cut, 0)
    ratios = (log_p - draft.log_q).exp().where(log_p > -torch.inf, 0.0)
    scales = [torch.ones(b, dtype=torch.float64, device=log_p.device)]
    for i in range(gamma):
        product = (scales[-1] * ratios[:, i]).clamp(max=1.0)
        scales.append(product.where((ratios[:, i] > 0) & (scales[-1] > 0), 0.0))
    return torch.stack(scales, 1), end, fault


def decide_block(
    s: Sequences,
    valid: Tensor,
    draft: DraftTables,
    uniforms: Tensor,
    p_scales: Tensor,
    accept_probs: Tensor,
    end: Tensor,
    fault: Tensor,
) -> Decision:
    """Rule block: accepts the first tau drafts, where tau is the last i with u_i < h_i.

    p_scales, end, fault: of `block_scales`. accept_probs: [B, gamma+1], h_i in column i for the
    case that draft i + 1 exists.
    """
    gamma = s.drafted.shape[1]
    begin, tau = end, torch.zeros_like(end)
    undecided = s.verifiable
    recorded = torch.full_like(uniforms, torch.nan)
    for i in range(gamma, 0, -1):
        tried = undecided & (i <= begin)
        if i < gamma:  # the residual of row i needs all of draft row i
            broken = tried & (i < end) & ~draft.valid[:, i]
            end = torch.where(broken, i, end)
            fault = torch.where(broken, Status.DRAFT_INVALID, fault)
        h = torch.where(end == i, p_scales[:, i], accept_probs[:, i])
        recorded[:, i - 1] = h.where(tried, torch.nan)
        accepted = tried & (uniforms[:, i - 1] < h)
        tau = torch.where(accepted, i, tau)
        undecided = undecided & ~accepted
    whole = tau == end
    looks = s.verifiable & ~(whole & (fault == 0) & s.no_bonus)
    row_valid = take(valid, tau)
    after = torch.where(fault != 0, fault, s.status_after_drafts)
    status = s.status | after.where(looks & whole, 0)
    status |= torch.where(looks & ~row_valid, Status.TARGET_INVALID, 0)
    emits = looks & row_valid
    return Decision(
        num_accepted=tau.where(s.verifiable, 0),
        status=status,
        emits=emits,
        from_residual=emits & ~whole,
        p_scale=take(p_scales, tau),
        accept_probs=recorded,
    )
