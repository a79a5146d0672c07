"""The residual on the shard of this rank, and the draw of the recovered or bonus token.

The residual is norm(max(c * P - Q, 0)), with c = 1 for rule token (docs/rules.md#token) and c_i for
rule block (docs/rules.md#block).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..arguments.status import Status
from .collectives import Collectives
from .decide import Decision
from .distribution import RowStats, Shard, weight_unit
from .draft import DraftTables, OneHotDraft
from .noise import draw_uniforms
from .sequence import take

_UNIT = 2.0**60  # of probabilities in fixed point: those of a row sum to 1


def residual_masses(p: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    """max(scale * P - Q, 0) of each entry in int64 units of scale / _UNIT, so that a small scale
    costs no digits. All are 0 where scale is 0."""
    above = (p - q / scale[..., None]).clamp(min=0).nan_to_num(0.0)
    return (above * _UNIT).round().long().where(scale[..., None] > 0, 0)


def deficit_masses(p: Tensor, q: Tensor, scale: Tensor, unit: float) -> Tensor:
    """max(Q - scale * P, 0) of each entry in int64 units of 1 / unit.

    Values above 1, which no distribution has, count as 1, so that no sum overflows.
    """
    above = (q - scale[..., None] * p).nan_to_num(0.0).clamp(0, 1)
    return (above * unit).round().long()


def block_accept_probs(
    collectives: Collectives,
    shard: Shard,
    target: RowStats,
    draft: OneHotDraft,
    p_scales: Tensor,
) -> Tensor:
    """[B, gamma+1] float64: h_i of docs/rules.md#block in column i. It is c_i in the last column.

    p_scales: [B, gamma+1], the factors c_i.
    """
    b, n = p_scales.shape
    index = torch.arange(n - 1, device=p_scales.device).expand(b, -1)
    scale, unit = p_scales[:, :-1], weight_unit(shard.vocab)

    def masses() -> Tensor:
        columns = []
        for i, c in zip(index.split(1, 1), scale.split(1, 1), strict=True):
            p, q = target.at(i).probs(), draft.probs(i)
            both = residual_masses(p, q, c), deficit_masses(p, q, c, unit)
            columns.append(torch.stack([m.sum(-1) for m in both], -1))
        return torch.cat(columns, 1) if columns else scale.new_zeros(b, 0, 2).long()

    added_up = collectives.total(masses, b, n - 1, 2).double()
    positive, negative = added_up[..., 0] * scale / _UNIT, added_up[..., 1] / unit
    h = (positive / negative).clamp(max=1).where(negative > 0, scale)
    return torch.cat([h, p_scales[:, -1:]], 1)


def draw(
    collectives: Collectives,
    a: ChainArguments,
    shard: Shard,
    starts: Tensor,
    target: RowStats,
    draft: OneHotDraft,
    tables: DraftTables,
    d: Decision,
) -> tuple[Tensor, Tensor]:
    """The recovered or bonus token of each sequence and its log-probability, both [B].

    Adds faults of the draft to the status of the decision. The masses of the ranks, laid one after
    the other in the order of the vocabulary, are one cumulative distribution, into which every rank
    puts the same uniform: the one that it falls to finds the token.

    starts: [ranks], where the shard of each rank begins.
    """
    b, gamma = d.from_residual.shape[0], tables.valid.shape[1]
    row = d.num_accepted[:, None].clamp(max=gamma)
    known: list[Tensor] = []

    def masses() -> Tensor:
        """[B, 2] of the residual and of P; then the number of accepted drafts, to compare it."""
        p = target.at(row)
        weights = [torch.zeros_like(p.masses(shard))[:, 0], p.masses(shard)[:, 0]]
        if gamma:
            drafted = row.clamp(max=gamma - 1)
            left = residual_masses(p.probs(), draft.probs(drafted), d.p_scale[:, None])[:, 0]
            weights[0] = left.where((d.from_residual & valid_row)[:, None], 0)
        known[:] = [torch.stack(weights, 1)]
        return torch.cat([known[0].sum(-1), d.num_accepted[:, None]], 1)

    valid_row = torch.ones_like(d.from_residual)
    if gamma:
        valid_row = take(tables.valid, d.num_accepted.clamp(max=gamma - 1))
    each = collectives.gather(masses, b, 3)
    collectives.require_equal(each[..., 2], "the number of accepted drafts")
    each = each[starts.argsort()]
    total = each[..., :2].sum(0)
    use_residual = total[:, 0] > 0
    faults = torch.where(valid_row, Status.EMPTY_RESIDUAL, Status.DRAFT_INVALID)
    d.status |= faults.where(d.from_residual & ~use_residual, 0)

    column = (~use_residual).long()
    of_rank = each.gather(-1, column.expand(len(each), -1)[..., None])[..., 0]
    mass = take(total, column)
    goal = (draw_uniforms(a, d.num_accepted) * mass.double()).long()
    goal = torch.minimum(goal, mass - 1)
    # A boolean index would make the host wait for the device.
    before = (of_rank * (starts.sort().values < shard.start)[:, None]).sum(0)

    def found() -> Tensor:
        """[B, 2]: the token and the bits of its log-weight, 0 where another rank finds it."""
        weights = known[0].gather(1, column[:, None, None].expand(-1, 1, shard.width))[:, 0]
        cumulative = weights.cumsum(-1)
        local = goal - before
        index = torch.searchsorted(cumulative, local[:, None], right=True)
        mine = ((local >= 0) & (local < cumulative[:, -1]))[:, None]
        index = index.clamp(max=shard.width - 1)
        token = torch.where(mine, index + shard.start, 0)
        bits = target.at(row).entries(token.where(mine, -1), shard)
        return torch.cat([token, bits], 1)

    drawn = collectives.total(found, b, 2)
    logprob = drawn[:, 1].contiguous().view(torch.float64) - take(target.log_sum, row[:, 0])
    return drawn[:, 0], logprob
