"""What speculative decoding is worth, and the exact law that a verifier realises.

Formulas of Leviathan et al. 2023 (arXiv 2211.17192), section 3, unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Verify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

_TOP = 1 - 2.0**-53
_NEAR = 2.0**-22


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `token` accepts a draft from q: `sum(min(p, q))`, [..., V] -> [...].

    Theorem 3.5.

    >>> acceptance_rate(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.7500)
    """
    return torch.minimum(p, q).sum(-1)


def match_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `match` accepts: both draw [V] with the same noise.

    `sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)`, Daliri et al. 2024 (arXiv 2408.07978).

    >>> match_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5]))
    tensor(1.)
    """
    both = (p > 0) & (q > 0)
    ratios = torch.maximum(p / p[both, None], q / q[both, None])
    return (1 / ratios.sum(-1)).sum()


def expected_tokens(alpha: float, gamma: int) -> float:
    """Mean tokens of one verification, bonus included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Equation 1.

    >>> expected_tokens(0.5, 1), expected_tokens(1.0, 4)
    (1.5, 5.0)
    """
    return sum(alpha**i for i in range(gamma + 1))


def walltime_factor(alpha: float, gamma: int, cost: float, verification: float = 1.0) -> float:
    """Speed-up over plain decoding, Theorem 3.8.

    cost: time of one draft step, and verification: time of one verification of gamma drafts, both
    in units of one plain target step.

    >>> round(walltime_factor(0.8, 5, 0.02), 3)
    3.354
    """
    return expected_tokens(alpha, gamma) / (gamma * cost + verification)


def operations_factor(alpha: float, gamma: int, cost: float) -> float:
    """Arithmetic per token against plain decoding, Theorem 3.11.

    cost: operations of the draft model for one token, those of the target model being 1.

    >>> operations_factor(0.5, 1, 0.0)
    1.3333333333333333
    """
    return (gamma * cost + gamma + 1) / expected_tokens(alpha, gamma)


def optimal_gamma(
    alpha: float,
    cost: float,
    limit: int = 64,
    verification: Callable[[int], float] | None = None,
) -> int:
    """The gamma in [0, limit] of largest walltime factor; the smallest of equals.

    verification: time of a verification of gamma drafts; None takes 1 for all.

    >>> optimal_gamma(0.8, 0.02), optimal_gamma(0.1, 0.5)
    (11, 0)
    """

    def factor(gamma: int) -> float:
        return walltime_factor(alpha, gamma, cost, verification(gamma) if verification else 1.0)

    return max(range(limit + 1), key=factor)


def filtered_law(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """[V] float64 probabilities by the definition of each filter, from pairwise comparisons.

    A token stands if fewer than top_k tokens are larger, if the larger survivors hold less than
    top_p of the survivors' mass, and if it has at least min_p of the largest probability.

    >>> filtered_law(torch.tensor([0.0, 0.0, -1.0]), top_k=1)
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    x = logits.double()
    if temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    larger = x[None, :] > x[:, None]  # [V, V]
    keep = torch.ones_like(x, dtype=torch.bool)
    if top_k > 0:
        keep &= larger.sum(-1) < top_k
    p = torch.where(keep, ((x - x.max()) / temperature).exp(), 0.0)
    if top_p < 1:
        keep &= (larger * p).sum(-1) < top_p * p.sum()
    keep &= p >= min_p * p.max()
    p = torch.where(keep, p, 0.0)
    return p / p.sum()


@dataclass(frozen=True)
class RealizedLaw:
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


def joint_law(tables: Sequence[Tensor]) -> Tensor:
    """Product of conditionals `tables[i]` [V] * (i + 1), the last dimension the next token."""
    joint = torch.ones((), dtype=torch.float64)
    for table in tables:
        joint = joint.unsqueeze(-1) * table
    return joint


def mean_accepted(draft: Sequence[Tensor], target: Sequence[Tensor]) -> float:
    """Expected accepted drafts of rule `token` for conditionals that depend on the prefix."""
    overlaps = [torch.minimum(p, q) for p, q in zip(target, draft, strict=False)]
    return sum(float(joint_law(overlaps[:i]).sum()) for i in range(1, len(draft) + 1))


def enumerate_law(
    verify: Verify,
    draft: Sequence[Tensor],
    target: Sequence[Tensor],
    *,
    steps: int = 36,
    like: Verify | None = None,
) -> RealizedLaw:
    """The exact law that a verifier realises, from every cell of its random inputs.

    Every draft tuple, weighted by its probability, times every cell of the coins, times every
    cell of the uniform that draws the last token. The edges of the cells are measured on the
    verifier itself by bisection, so that an acceptance probability that is wrong shows as a cell
    of the wrong width. Cells are then evaluated at three inner points, which must agree.

    Args:
        verify: (draft_tokens [N, gamma], uniforms [N, gamma + 1]) -> (tokens [N, gamma + 1],
            num_accepted [N]). Decisions are step functions of each uniform, and the last token
            grows with the last uniform.
        draft: gamma conditionals, draft[i] [V] * (i + 1) float64, the law the drafts come from.
        target: gamma + 1 conditionals of the same form.
        steps: bisection steps; an edge is known to 2^-steps.
        like: a faster verifier to learn the edges from. `verify` is then tried 2^-22 below and
            above each of them, and bisected only if it does not turn there.

    Raises:
        ValueError: an inner point of a cell gives another answer.
    """
    gamma, v = len(draft), target[0].shape[-1]
    weights = joint_law(draft).expand((v,) * gamma)
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
        joint[prefix] += w * joint_law([table[prefix] for table in target[n + 1 :]])
    by_count = torch.zeros(gamma + 1, dtype=torch.float64)
    by_count.index_add_(0, accepted.long(), volume)
    return RealizedLaw(joint, by_count, len(tokens))


def _bisect(
    inside: Callable[[Tensor], Tensor], n: int, steps: int, guess: Tensor | None = None
) -> Tensor:
    """[n] float64: where the interval from 0 on which `inside` holds ends, else 1."""
    low, high = torch.zeros(n, dtype=torch.float64), torch.full((n,), _TOP, dtype=torch.float64)
    if guess is not None:
        near, far = (guess - _NEAR).clamp(min=0), (guess + _NEAR).clamp(max=_TOP)
        turns_after = inside(near) | (guess < _NEAR)
        turns_before = ~inside(far) | (guess > 1 - _NEAR)
        if bool((turns_after & turns_before).all()):
            return guess
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
    contexts = torch.cartesian_prod(*[torch.tensor([0.0, _TOP], dtype=torch.float64)] * gamma)
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
    return _bisect(lambda u: accepted(u) == at_zero, len(repeated), steps, guess).view(n, -1)


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

    guess = _bisect(lambda u: at_most(u, like), n * v, steps) if like else None
    edges = _bisect(at_most, n * v, steps, guess).view(n, v)
    left = torch.cat([torch.zeros(n, 1, dtype=torch.float64), edges[:, :-1]], -1).flatten()
    right = edges.flatten()
    wide = right - left > 2.0 ** (2 - steps)
    low = torch.cat([lows.repeat_interleave(v, 0), left[:, None]], -1)[wide]
    high = torch.cat([highs.repeat_interleave(v, 0), right[:, None]], -1)[wide]
    return repeated[wide], low, high
