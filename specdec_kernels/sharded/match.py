"""The choice of rule match over a sharded vocabulary, with the bits of `sample`.

`sample` scores the tokens of a row in an arithmetic of its own, which differs between providers in
the last bit. So the shards are sampled by that op too, inside of rows that hold nothing else but
the maximum of the whole row, to which all scores are relative: the best token of each shard is then
exactly the one that would be the best among these tokens in the whole row. The same op chooses
among the tokens that the ranks found.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments.chain import ChainArguments
from ..ops.sample import sample
from .collectives import Collectives
from .distribution import RowStats, Shard


def choose(
    collectives: Collectives, a: ChainArguments, shard: Shard, target: RowStats
) -> tuple[Tensor, Tensor]:
    """(tokens, their logits in float64), both [B, gamma+1]: argmax(log P + G) of each row.

    The token of a greedy sequence is the argmax.
    """
    b, n = target.max.shape

    def best_of_shard() -> Tensor:
        survives = target.logits.double() >= target.threshold[..., None]
        rows = _rows_with_maximum(target, shard.vocab)
        own = rows[..., shard.start : shard.start + shard.width]
        own.copy_(torch.where(survives | (own > -torch.inf), target.logits, -torch.inf))
        return _with_logits(_sample(a, rows), rows)

    found = collectives.gather(best_of_shard, b, n, 2)
    tokens = found[..., 0].movedim(0, -1)
    logits = found[..., 1].movedim(0, -1).contiguous().view(torch.float64)

    def best_of_all() -> Tensor:
        rows = _rows_with_maximum(target, shard.vocab)
        rows.scatter_(-1, tokens, logits.to(rows.dtype))
        return _with_logits(_sample(a, rows), rows)

    # Every rank has the same answer; to exchange it tells all of a rank that failed to find it.
    chosen = collectives.maximum(best_of_all, b, n, 2)
    return chosen[..., 0], chosen[..., 1].contiguous().view(torch.float64)


def _with_logits(tokens: Tensor, rows: Tensor) -> Tensor:
    """[B, gamma+1, 2] int64: the tokens, and the bits of their logits in float64."""
    logits = rows.gather(-1, tokens[..., None])[..., 0].double()
    return torch.stack([tokens, logits.view(torch.int64)], -1)


def _rows_with_maximum(target: RowStats, vocab: int) -> Tensor:
    """[B, gamma+1, V] in the dtype of the target: the maximum where it is, else -inf."""
    shape = (*target.max.shape, vocab)
    rows = torch.full(shape, -torch.inf, dtype=target.logits.dtype, device=target.max.device)
    top = target.max.where(target.valid, 0.0).to(rows.dtype)
    return rows.scatter_(-1, target.argmax[..., None].clamp(max=vocab - 1), top[..., None])


def _sample(a: ChainArguments, rows: Tensor) -> Tensor:
    """[B, gamma+1] tokens of rows that are filtered already."""
    n = rows.shape[1]
    steps = torch.arange(n, device=rows.device)
    temperature = a.temperature if a.temperatures is None else a.temperatures.repeat_interleave(n)
    tokens = sample(
        rows.flatten(0, 1),
        temperature=temperature,
        seeds=a.seeds.repeat_interleave(n),
        positions=(a.positions[:, None] + steps).flatten(),
        noise="shared",
        method="gumbel",
    ).tokens
    return tokens.view(rows.shape[:2]).clamp(min=0)
