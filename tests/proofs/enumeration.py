"""The exact distribution that a chain verifier realizes, measured over all its random inputs.

A verifier is a step function of its uniforms: they fall into *cells*, boxes of uniforms in which
it always gives the same answer. Sum the answers, weighted by the volume of their cells and by the
probability of the drafts, and the result is the exact distribution of the emitted tokens: no
sampling, no tolerance for noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from proofs.distributions import joint_distribution

Verify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

LARGEST_UNIFORM = 1 - 2.0**-53
_NEAR = 2.0**-22  # how far from an edge found on one verifier another one is tried


@dataclass(frozen=True)
class RealizedDistribution:
    """The emitted tokens if drafts come from the draft distribution and uniforms are uniform.

    joint: [V] * (gamma + 1) float64, joint distribution of the first gamma + 1 tokens, if the
        target's own distribution goes on after the emitted tokens.
    accepted: [gamma + 1] float64, distribution of the number of accepted drafts.
    """

    joint: Tensor
    accepted: Tensor

    @property
    def mean_accepted(self) -> float:
        return float((self.accepted * torch.arange(len(self.accepted))).sum())


def enumerate_distribution(verify, draft, target, *, steps=36, like=None) -> RealizedDistribution:
    """Measures a verifier on every draft tuple, every cell of its acceptance uniforms and every
    cell of the uniform that draws the last token.

    The edges of the cells are found by bisection on the verifier itself, so a wrong acceptance
    probability shows as a cell of wrong width. Each cell is then evaluated at three inner places,
    which must agree.

    Args:
        verify: (draft_token_ids [N, gamma], uniforms [N, gamma + 1]) -> (tokens [N, gamma + 1],
            num_accepted [N]). It must be a step function of each uniform, and the last token must
            not fall as the last uniform grows.
        draft: gamma conditionals, draft[i] [V] * (i + 1) float64, that the drafts are drawn from.
        target: gamma + 1 conditionals of the same form.
        steps: bisection steps; an edge is known to 2^-steps.
        like: a faster verifier whose edges are tried first: where `verify` turns within 2^-22 of
            an edge, that edge is not searched by bisection.

    >>> def verify(drafts, uniforms):
    ...     return (uniforms >= 0.25).long(), torch.zeros(len(uniforms), dtype=torch.int32)
    >>> enumerate_distribution(verify, [], [torch.tensor([0.25, 0.75])]).joint
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    gamma, v = len(draft), target[0].shape[-1]
    weights = joint_distribution(draft).expand((v,) * gamma)
    drafts = weights.nonzero() if gamma else torch.zeros(1, 0, dtype=torch.int64)

    drafts, lows, highs = _acceptance_cells(verify, like, drafts, steps)
    drafts, lows, highs = _token_cells(verify, like, drafts, lows, highs, v, steps)

    volume = (highs - lows).prod(-1) * weights[tuple(drafts.T)] if gamma else (highs - lows)[:, 0]
    tokens, accepted = verify(drafts, (lows + highs) / 2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        inner = 0.001 + 0.998 * torch.rand(lows.shape, generator=generator, dtype=torch.float64)
        again, _ = verify(drafts, lows + inner * (highs - lows))
        check_constant((again != tokens).any(-1), drafts, lows, highs, tokens, again)

    joint = torch.zeros((v,) * (gamma + 1), dtype=torch.float64)
    for row, n, w in zip(tokens.tolist(), accepted.tolist(), volume.tolist(), strict=True):
        prefix = tuple(row[: n + 1])
        joint[prefix] += w * joint_distribution([table[prefix] for table in target[n + 1 :]])
    by_count = torch.zeros(gamma + 1, dtype=torch.float64)
    by_count.index_add_(0, accepted.long(), volume)
    return RealizedDistribution(joint, by_count)


def check_constant(
    wrong: Tensor, drafts: Tensor, lows: Tensor, highs: Tensor, tokens: Tensor, again: Tensor
) -> None:
    """Raises ValueError with the first cell whose outcome is ``wrong`` [S] at another place."""
    if wrong.any():
        c = int(wrong.nonzero()[0])
        raise ValueError(
            f"not constant in a cell: draft {drafts[c].tolist()}, uniforms from "
            f"{lows[c].tolist()} to {highs[c].tolist()}: {tokens[c].tolist()} and "
            f"{again[c].tolist()}"
        )


def bisect(inside, n, steps, guess=None, together=1) -> Tensor:
    """[n] float64: where the interval from 0 on which `inside` holds ends; 1 if it holds for all.

    inside: (rows [M] int64, which of the n; places [M] float64) -> [M] bool.
    guess: [n] edges; where `inside` turns near one, that edge is returned and not searched.
    together: guesses are kept or dropped in groups of this many. Edges of one cell form a group,
        because a guessed one may lie above a searched one that should follow it.
    """
    edges = torch.empty(n, dtype=torch.float64)
    rows = torch.arange(n)
    if guess is not None:
        # A cell narrower than 2^-22 may be due to the rounding of the other verifier alone.
        edges = torch.where(guess < _NEAR, 0.0, torch.where(guess > 1 - _NEAR, 1.0, guess))
        before, after = rows[edges > 0], rows[edges < 1]
        turns = torch.ones(n, dtype=torch.bool)
        if len(before) > 0:
            turns[before] = inside(before, guess[before] - _NEAR)
        if len(after) > 0:
            turns[after] &= ~inside(after, (guess[after] + _NEAR).clamp(max=LARGEST_UNIFORM))
        rows = rows[~turns.view(-1, together).all(-1).repeat_interleave(together)]
    if len(rows) == 0:
        return edges
    low = torch.zeros(len(rows), dtype=torch.float64)
    high = torch.full((len(rows),), LARGEST_UNIFORM, dtype=torch.float64)
    starts, ends = inside(rows, low), inside(rows, high)
    for _ in range(steps):
        middle = (low + high) / 2
        here = inside(rows, middle)
        low, high = torch.where(here, middle, low), torch.where(here, high, middle)
    edges[rows] = torch.where(starts, torch.where(ends, 1.0, high), 0.0)
    return edges


def check_in_vocabulary(tokens: Tensor, v: int) -> None:
    """Raises ValueError if a token is negative or not less than v."""
    outside = tokens[(tokens < 0) | (tokens >= v)]
    if len(outside):
        raise ValueError(f"a token is outside of the vocabulary of {v}: {int(outside[0])}")


def _acceptance_cells(
    verify: Verify, like: Verify | None, drafts: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Every draft tuple times every cell of its acceptance uniforms.

    Returns drafts [C, gamma] and the lower and upper corners of the cells [C, gamma].
    """
    n, gamma = drafts.shape
    if gamma == 0:
        empty = torch.zeros(n, 0, dtype=torch.float64)
        return drafts, empty, empty
    # An edge along one uniform may show only when the others accept, or only when they reject.
    ends = torch.tensor([0.0, LARGEST_UNIFORM], dtype=torch.float64)
    contexts = torch.cartesian_prod(*[ends] * gamma).reshape(-1, gamma)
    edges = []
    for i in range(gamma):
        others = contexts[contexts[:, i] == 0]
        guess = _acceptance_edges(like, drafts, others, i, steps) if like else None
        edges.append(_acceptance_edges(verify, drafts, others, i, steps, guess))
    out: list[tuple[Tensor, Tensor, Tensor]] = []
    for t in range(n):
        cuts = [torch.cat([torch.tensor([0.0, 1.0]).double(), e[t]]).unique() for e in edges]
        low = torch.cartesian_prod(*[c[:-1] for c in cuts]).reshape(-1, gamma)
        high = torch.cartesian_prod(*[c[1:] for c in cuts]).reshape(-1, gamma)
        wide = (high - low).min(-1).values > 2.0 ** (2 - steps)
        out.append((drafts[t].expand(int(wide.sum()), gamma), low[wide], high[wide]))
    tuples, low, high = (torch.cat(parts) for parts in zip(*out, strict=True))
    return tuples, low, high


def _acceptance_edges(verify, drafts, contexts, i, steps, guess=None) -> Tensor:
    """[n, contexts] float64: where the number of accepted drafts changes with uniform i."""
    n, gamma = drafts.shape
    uniforms = torch.full((n, len(contexts), gamma + 1), 0.5, dtype=torch.float64)
    uniforms[..., :gamma] = contexts
    uniforms = uniforms.flatten(0, 1)
    repeated = drafts.repeat_interleave(len(contexts), 0)

    uniforms[:, i] = 0
    at_zero = verify(repeated, uniforms)[1]

    def as_at_zero(rows: Tensor, u: Tensor) -> Tensor:
        moved = uniforms[rows]
        moved[:, i] = u
        return verify(repeated[rows], moved)[1] == at_zero[rows]

    guess = None if guess is None else guess.flatten()
    return bisect(as_at_zero, len(repeated), steps, guess).view(n, -1)


def _token_cells(verify, like, drafts, lows, highs, v, steps) -> tuple[Tensor, Tensor, Tensor]:
    """Splits every cell where the last token changes with the last uniform."""
    n = len(drafts)
    middle = torch.cat([(lows + highs) / 2, torch.zeros(n, 1, dtype=torch.float64)], -1)

    def at_most(rows: Tensor, u: Tensor, verifier: Verify = verify) -> Tensor:
        """Whether cell rows // (v-1) gives a token up to rows % (v-1)."""
        cells, ids = rows // (v - 1), rows % (v - 1)
        uniforms = middle[cells]
        uniforms[:, -1] = u
        return _last_token(verifier, drafts[cells], uniforms) <= ids

    count = n * (v - 1)
    guess = bisect(lambda rows, u: at_most(rows, u, like), count, steps) if like else None
    found = bisect(at_most, count, steps, guess, together=max(v - 1, 1)).view(n, v - 1)
    _check_ends(verify, drafts, middle, found)
    edges = torch.cat([found, torch.ones(n, 1, dtype=torch.float64)], -1)  # no token is above v-1
    begin = torch.cat([torch.zeros(n, 1, dtype=torch.float64), edges[:, :-1]], -1).flatten()
    end = edges.flatten()
    wide = end - begin > 2.0 ** (2 - steps)
    low = torch.cat([lows.repeat_interleave(v, 0), begin[:, None]], -1)[wide]
    high = torch.cat([highs.repeat_interleave(v, 0), end[:, None]], -1)[wide]
    return drafts.repeat_interleave(v, 0)[wide], low, high


def _check_ends(verify: Verify, drafts: Tensor, middle: Tensor, edges: Tensor) -> None:
    """Where the last uniform is smallest and largest, cells give the tokens that the edges say."""
    v = edges.shape[1] + 1
    for end in (0.0, LARGEST_UNIFORM):
        uniforms = middle.clone()
        uniforms[:, -1] = end
        token = _last_token(verify, drafts, uniforms)
        check_in_vocabulary(token, v)
        at_most = token[:, None] <= torch.arange(v - 1)
        wrong = at_most & (edges < 1 - _NEAR) if end else ~at_most & (edges > _NEAR)
        if bool(wrong.any()):
            c = int(wrong.any(-1).nonzero()[0])
            raise ValueError(
                f"the last token of draft {drafts[c].tolist()} falls as the last uniform grows: "
                f"it is {int(token[c])} at {end}"
            )


def _last_token(verify: Verify, drafts: Tensor, uniforms: Tensor) -> Tensor:
    tokens, accepted = verify(drafts, uniforms)
    return tokens.gather(1, accepted.long()[:, None])[:, 0]
