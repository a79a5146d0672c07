"""The exact law that a verifier realises, from every cell of its random inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Verify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

TOP = 1 - 2.0**-53
_NEAR = 2.0**-22


@dataclass(frozen=True)
class RealizedDistribution:
    """What a verifier emits, drafts drawn from the draft law and coins uniform.

    joint: [V] * (gamma + 1) float64, law of the first gamma + 1 tokens, when decoding goes on with
        the target's own law after the tokens that were emitted.
    accepted: [gamma + 1] float64, law of the number of accepted drafts.
    cells: number of cells that were evaluated.
    """

    joint: Tensor
    accepted: Tensor
    cells: int

    @property
    def mean_accepted(self) -> float:
        return float((self.accepted * torch.arange(len(self.accepted))).sum())


def joint_distribution(tables: Sequence[Tensor]) -> Tensor:
    """[V] * n float64: product of n conditionals, `tables[i]` [V] * (i + 1), last the next token.

    >>> joint_distribution([torch.tensor([0.5, 0.5]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])])
    tensor([[0.5000, 0.0000],
            [0.2500, 0.2500]], dtype=torch.float64)
    """
    joint = torch.ones((), dtype=torch.float64)
    for table in tables:
        joint = joint.unsqueeze(-1) * table
    return joint


def enumerate_distribution(
    verify: Verify,
    draft: Sequence[Tensor],
    target: Sequence[Tensor],
    *,
    steps: int = 36,
    like: Verify | None = None,
) -> RealizedDistribution:
    """The exact law that a verifier realises, from every cell of its random inputs.

    Every draft tuple, weighted by its probability, times every cell of the coins, times every
    cell of the uniform that draws the last token. The edges of the cells are measured on the
    verifier itself by bisection, so that an acceptance probability that is wrong shows as a cell
    of the wrong width. Cells are then evaluated at three inner points, which must agree.

    Args:
        verify: (draft_token_ids [N, gamma], uniforms [N, gamma + 1]) -> (tokens [N, gamma + 1],
            num_accepted [N]). Decisions are step functions of each uniform, and the last token
            grows with the last uniform.
        draft: gamma conditionals, draft[i] [V] * (i + 1) float64, the law the drafts come from.
        target: gamma + 1 conditionals of the same form.
        steps: bisection steps; an edge is known to 2^-steps.
        like: a faster verifier to learn the edges from. `verify` is then tried 2^-22 below and
            above each of them, and bisected only if it does not turn there.

    Raises:
        ValueError: an inner point of a cell gives another answer.

    >>> def verify(drafts, uniforms):
    ...     return (uniforms >= 0.25).long(), torch.zeros(len(uniforms), dtype=torch.int32)
    >>> enumerate_distribution(verify, [], [torch.tensor([0.25, 0.75])]).joint
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    gamma, v = len(draft), target[0].shape[-1]
    weights = joint_distribution(draft).expand((v,) * gamma)
    drafts = weights.nonzero() if gamma else torch.zeros(1, 0, dtype=torch.int64)

    drafts, lows, highs = _coin_cells(verify, like, drafts, steps)
    drafts, lows, highs = _token_cells(verify, like, drafts, lows, highs, v, steps)

    volume = (highs - lows).prod(-1) * weights[tuple(drafts.T)] if gamma else (highs - lows)[:, 0]
    tokens, accepted = verify(drafts, (lows + highs) / 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        inner = 0.001 + 0.998 * torch.rand(lows.shape, generator=generator, dtype=torch.float64)
        again, _ = verify(drafts, lows + inner * (highs - lows))
        wrong = (again != tokens).any(-1).nonzero()
        if len(wrong):
            c = int(wrong[0])
            raise ValueError(
                f"not constant in a cell: draft {drafts[c].tolist()}, coins from "
                f"{lows[c].tolist()} to {highs[c].tolist()}: {tokens[c].tolist()} and "
                f"{again[c].tolist()}"
            )

    joint = torch.zeros((v,) * (gamma + 1), dtype=torch.float64)
    for row, n, w in zip(tokens.tolist(), accepted.tolist(), volume.tolist(), strict=True):
        prefix = tuple(row[: n + 1])
        # What follows the emitted tokens is the target's own continuation.
        joint[prefix] += w * joint_distribution([table[prefix] for table in target[n + 1 :]])
    by_count = torch.zeros(gamma + 1, dtype=torch.float64)
    by_count.index_add_(0, accepted.long(), volume)
    return RealizedDistribution(joint, by_count, len(tokens))


def bisect(
    inside: Callable[[Tensor], Tensor], n: int, steps: int, guess: Tensor | None = None
) -> Tensor:
    """[n] float64: where the interval from 0 on which `inside` holds ends, else 1."""
    low, high = torch.zeros(n, dtype=torch.float64), torch.full((n,), TOP, dtype=torch.float64)
    if guess is not None:
        near, far = (guess - _NEAR).clamp(min=0), (guess + _NEAR).clamp(max=TOP)
        turns_after = inside(near) | (guess < _NEAR)
        turns_before = ~inside(far) | (guess > 1 - _NEAR)
        if bool((turns_after & turns_before).all()):
            # So near to an end the teacher's rounding is not tried: no cell there.
            guess = torch.where(guess < _NEAR, 0.0, guess)
            return torch.where(guess > 1 - _NEAR, 1.0, guess)
    starts, ends = inside(low), inside(high)
    for _ in range(steps):
        middle = (low + high) / 2
        here = inside(middle)
        low, high = torch.where(here, middle, low), torch.where(here, high, middle)
    return torch.where(starts, torch.where(ends, 1.0, high), 0.0)


def _coin_cells(
    verify: Verify, like: Verify | None, drafts: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every draft tuple times every cell of its coins: drafts [C, gamma], lows and highs alike."""
    n, gamma = drafts.shape
    if gamma == 0:
        empty = torch.zeros(n, 0, dtype=torch.float64)
        return drafts, empty, empty
    # An edge of coin i may show only when the other coins have a certain outcome.
    contexts = torch.cartesian_prod(*[torch.tensor([0.0, TOP], dtype=torch.float64)] * gamma)
    contexts = contexts.reshape(-1, gamma)
    edges = []
    for i in range(gamma):
        others = contexts[contexts[:, i] == 0]
        guess = _coin_edges(like, drafts, others, i, steps) if like else None
        edges.append(_coin_edges(verify, drafts, others, i, steps, guess))
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in range(n):
        cuts = [torch.cat([torch.tensor([0.0, 1.0]).double(), e[t]]).unique() for e in edges]
        low = torch.cartesian_prod(*[c[:-1] for c in cuts]).reshape(-1, gamma)
        high = torch.cartesian_prod(*[c[1:] for c in cuts]).reshape(-1, gamma)
        wide = (high - low).min(-1).values > 2.0 ** (2 - steps)
        out.append((drafts[t].expand(int(wide.sum()), gamma), low[wide], high[wide]))
    tuples, low, high = (torch.cat(parts) for parts in zip(*out, strict=True))
    return tuples, low, high


def _coin_edges(
    verify: Verify,
    drafts: Tensor,
    contexts: Tensor,
    i: int,
    steps: int,
    guess: Tensor | None = None,
) -> Tensor:
    """[n, contexts] float64: where the number of accepted drafts changes with coin i."""
    n, gamma = drafts.shape
    uniforms = torch.full((n, len(contexts), gamma + 1), 0.5, dtype=torch.float64)
    uniforms[..., :gamma] = contexts
    uniforms = uniforms.flatten(0, 1)
    repeated = drafts.repeat_interleave(len(contexts), 0)

    def accepted(u: Tensor) -> Tensor:
        uniforms[:, i] = u
        return verify(repeated, uniforms)[1]

    at_zero = accepted(torch.zeros(len(repeated), dtype=torch.float64))
    guess = None if guess is None else guess.flatten()
    return bisect(lambda u: accepted(u) == at_zero, len(repeated), steps, guess).view(n, -1)


def _token_cells(
    verify: Verify,
    like: Verify | None,
    drafts: Tensor,
    lows: Tensor,
    highs: Tensor,
    v: int,
    steps: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Splits every cell of the coins at the steps of the last token."""
    n = len(drafts)
    repeated = drafts.repeat_interleave(v, 0)
    uniforms = torch.cat([(lows + highs) / 2, torch.zeros(n, 1, dtype=torch.float64)], -1)
    uniforms = uniforms.repeat_interleave(v, 0)
    ids = torch.arange(v).repeat(n)

    def at_most(u: Tensor, verifier: Verify = verify) -> Tensor:
        uniforms[:, -1] = u
        tokens, accepted = verifier(repeated, uniforms)
        return tokens.gather(1, accepted.long()[:, None])[:, 0] <= ids

    guess = bisect(lambda u: at_most(u, like), n * v, steps) if like else None
    edges = bisect(at_most, n * v, steps, guess).view(n, v)
    left = torch.cat([torch.zeros(n, 1, dtype=torch.float64), edges[:, :-1]], -1).flatten()
    right = edges.flatten()
    wide = right - left > 2.0 ** (2 - steps)
    low = torch.cat([lows.repeat_interleave(v, 0), left[:, None]], -1)[wide]
    high = torch.cat([highs.repeat_interleave(v, 0), right[:, None]], -1)[wide]
    return repeated[wide], low, high
