"""What speculative decoding is worth: how often drafts stand, and what is emitted instead.

Formulas of Leviathan et al. 2023 (arXiv 2211.17192), section 3, unless said otherwise. p is the
target's law and q the draft's, the one that the draft was really drawn from: probabilities
[..., V] of any floating dtype on any device. Sums and results are float64, and no function of
tensors waits for their device but `mean_accepted`, which gives a Python float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec_kernels.analysis.estimates import AcceptanceEstimate, wilson_interval
from specdec_kernels.analysis.tree_acceptance import (
    k_seq_factor,
    tree_acceptance,
    tree_acceptance_bound,
)
from specdec_kernels.analysis.walltime import (
    expected_tokens,
    operations_factor,
    optimal_gamma,
    walltime_factor,
)
from specdec_kernels.testing.drawn_trees import drawn_trees, lineage
from specdec_kernels.testing.enumeration import (
    RealizedDistribution,
    Verify,
    enumerate_distribution,
    joint_distribution,
)
from specdec_kernels.testing.tree_enumeration import (
    RealizedTreeDistribution,
    TreeVerify,
    Trials,
    enumerate_tree_distribution,
)

__all__ = [
    "AcceptanceEstimate",
    "RealizedDistribution",
    "RealizedTreeDistribution",
    "TreeVerify",
    "Trials",
    "Verify",
    "acceptance_bound",
    "acceptance_rate",
    "accepted_mass",
    "block_acceptance",
    "drawn_trees",
    "enumerate_distribution",
    "enumerate_tree_distribution",
    "expected_tokens",
    "filtered_distribution",
    "joint_distribution",
    "k_seq_factor",
    "lenient_acceptance",
    "lenient_distribution",
    "lineage",
    "match_acceptance",
    "mean_accepted",
    "num_accepted_distribution",
    "operations_factor",
    "optimal_gamma",
    "residual",
    "tree_acceptance",
    "tree_acceptance_bound",
    "typical_acceptance",
    "typical_distribution",
    "typical_set",
    "walltime_factor",
    "wilson_interval",
]


def acceptance_rate(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `token` accepts a draft from q: `sum(min(p, q))`, [..., V] -> [...].

    Theorem 3.5.

    >>> acceptance_rate(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.7500, dtype=torch.float64)
    """
    return accepted_mass(p, q).sum(-1)


def match_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `match` accepts, [..., V] -> [...]: both draw with the same noise.

    `sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)`, Daliri et al. 2024 (arXiv 2408.07978), by one sort.

    >>> match_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.7500, dtype=torch.float64)
    """
    return accepted_mass(p, q, "match").sum(-1)


def lenient_acceptance(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """Probability that rule `lenient` accepts: `sum(min(p / lenience, q))`, [..., V] -> [...].

    Appendix A.5.

    Raises:
        ValueError: lenience is outside (0, 1].

    >>> lenient_acceptance(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]), 0.8)
    tensor(0.8750, dtype=torch.float64)
    """
    return accepted_mass(p, q, "lenient", lenience=lenience).sum(-1)


def typical_acceptance(p: Tensor, q: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """Probability that rule `typical` accepts: q of the typical set of p, [..., V] -> [...].

    >>> typical_acceptance(torch.tensor([0.95, 0.05]), torch.tensor([0.75, 0.25]))
    tensor(0.7500, dtype=torch.float64)
    """
    return accepted_mass(p, q, "typical", epsilon=epsilon, delta=delta).sum(-1)


def typical_set(p: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """[..., V] bool: where `p > min(epsilon, delta * exp(-H(p)))`, Medusa (arXiv 2401.10774).

    >>> typical_set(torch.tensor([0.9, 0.1, 0.0]))
    tensor([ True,  True, False])
    """
    entropy = torch.special.entr(p.double()).sum(-1, keepdim=True)
    return p.double() > (delta * torch.exp(-entropy)).clamp(max=epsilon)


def accepted_mass(
    p: Tensor,
    q: Tensor,
    rule: str = "token",
    *,
    lenience: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
) -> Tensor:
    """[..., V] float64: probability that x is drafted and accepted, by a rule that goes row by row.

    Args:
        rule: `token`, `match`, `greedy`, `typical` (epsilon, delta) or `lenient` (lenience).

    Raises:
        ValueError: another rule, `block` too, for it looks beyond the row; lenience outside (0, 1].

    >>> accepted_mass(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor([0.5000, 0.2500], dtype=torch.float64)
    """
    p, q = p.double(), q.double()
    if rule == "token":
        return torch.minimum(p, q)
    if rule == "match":
        return _agreement(p, q)
    if rule == "greedy":
        ids = torch.arange(p.shape[-1], device=p.device)
        return torch.where(ids == p.argmax(-1, keepdim=True), q, 0.0)
    if rule == "typical":
        return torch.where(typical_set(p, epsilon, delta), q, 0.0)
    if rule == "lenient":
        if not 0 < lenience <= 1:
            raise ValueError(f"lenience must be in (0, 1], got {lenience}")
        return torch.minimum(p / lenience, q)
    raise ValueError(f"rule must be token, match, greedy, typical or lenient, got {rule!r}")


def _agreement(p: Tensor, q: Tensor) -> Tensor:
    # max(p_y/p_x, q_y/q_x) is the first where p_y/q_y >= p_x/q_x and the second elsewhere: two
    # prefix sums in the order of p/q. Where both are 0 the NaN goes anywhere with weight 0.
    p, q = torch.broadcast_tensors(p, q)
    order = (p / q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    later = q.flip(-1).cumsum(-1).flip(-1) - q
    mass = torch.where((p > 0) & (q > 0), 1 / (p.cumsum(-1) / p + later / q), 0.0)
    return torch.empty_like(mass).scatter_(-1, order, mass)


def residual(p: Tensor, q: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """[..., V] float64: `norm(max(scale * p - q, 0))`, what is drawn from after a rejection.

    Where nothing is left it is p itself, as the ops have it (status bit 2).

    Args:
        scale: a number or [...]; 1 for rule `token`, c_tau for `block`, 1 / lenience for `lenient`.

    >>> residual(torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.9, 0.1, 0.0]))
    tensor([0.0000, 0.5000, 0.5000], dtype=torch.float64)
    """
    p, q = p.double(), q.double()
    factor = scale.double()[..., None] if isinstance(scale, Tensor) else scale
    left = (factor * p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def lenient_distribution(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """[..., V] float64: law of the token emitted at one position under rule `lenient`.

    Appendix A.5; nowhere above p / lenience.

    >>> lenient_distribution(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]), 0.8)
    tensor([0.6250, 0.3750], dtype=torch.float64)
    """
    mass = accepted_mass(p, q, "lenient", lenience=lenience)
    return mass + _rejected(mass) * residual(p, q, 1 / lenience)


def typical_distribution(p: Tensor, q: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """[..., V] float64: law of the token emitted at one position under rule `typical`.

    After a rejection it is drawn from p (not from a residual).

    >>> typical_distribution(torch.tensor([0.95, 0.05]), torch.tensor([0.5, 0.5]))
    tensor([0.9750, 0.0250], dtype=torch.float64)
    """
    mass = accepted_mass(p, q, "typical", epsilon=epsilon, delta=delta)
    return mass + _rejected(mass) * p.double()


def _rejected(mass: Tensor) -> Tensor:
    return (1 - mass.sum(-1, keepdim=True)).clamp(min=0)


def acceptance_bound(p: Tensor, q: Tensor, drafts: int = 1) -> Tensor:
    """Most that a lossless rule can accept of independent drafts from q, [..., V] -> [...].

    `1 + min_S [p(S) - q(S)^drafts]`: the probability that one of the drafts is emitted. The
    minimum is at a set of largest q/p, so one sort finds it. One draft: `acceptance_rate`.

    >>> acceptance_bound(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]), drafts=2)
    tensor(0.9375, dtype=torch.float64)
    """
    p, q = torch.broadcast_tensors(p.double(), q.double())
    order = (p / q).argsort(-1)
    within = q.gather(-1, order).cumsum(-1)
    # A float32 row sums to 1 only nearly, and what q lacks would count as missed.
    missed = (within / within[..., -1:]) ** drafts
    return 1 + (p.gather(-1, order).cumsum(-1) - missed).amin(-1).clamp(max=0)


def block_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `block` keeps the first i drafts, given what they are: c_1 to c_gamma.

    `c_i = min(1, c_(i-1) * p_i / q_i)`, Sun et al. 2024 (arXiv 2403.10444). The mean of their sum
    over drafts is the mean number of accepted drafts: an estimate without the noise of the coins.

    Args:
        p, q: [..., gamma], target's and draft's probability of each drafted token.

    Returns:
        [..., gamma] float64.

    >>> block_acceptance(torch.tensor([0.1, 0.9]), torch.tensor([0.2, 0.6]))
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    p, q = torch.broadcast_tensors(p.double(), q.double())
    kept, c = torch.empty_like(p), p.new_ones(p.shape[:-1])
    for i in range(p.shape[-1]):
        grown = c * p[..., i]
        c = torch.where(grown < q[..., i], grown / q[..., i], (grown > 0).double())
        kept[..., i] = c
    return kept


def num_accepted_distribution(
    draft: Sequence[Tensor], target: Sequence[Tensor], rule: str = "token", **parameters: float
) -> Tensor:
    """[gamma + 1] float64: exact law of the number of accepted drafts.

    From the mass of every draft prefix that stands. Rule `block` keeps x_1..x_n with mass
    `m_n = min(q(x_1..x_n), m_(n-1) * p(x_n | x_1..x_(n-1)))`, the others with a product over rows.

    Args:
        draft: gamma conditionals, draft[i] [V] * (i + 1), the law the drafts come from.
        target: gamma conditionals of the same form, or more.
        rule: `block`, or one that `accepted_mass` knows.
        parameters: those of `accepted_mass` that belong to the rule.

    Raises:
        ValueError: another rule, a parameter of another rule, fewer conditionals of the target
            than of the draft, lenience outside (0, 1].

    >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.75, 0.25])
    >>> num_accepted_distribution([q, q.expand(2, 2)], [p, p.expand(2, 2)])
    tensor([0.5000, 0.2500, 0.2500], dtype=torch.float64)
    >>> num_accepted_distribution([q, q.expand(2, 2)], [p, p.expand(2, 2)], "block")
    tensor([0.5000, 0.1250, 0.3750], dtype=torch.float64)
    """
    _check_rule(rule, parameters)
    if len(target) < len(draft):
        raise ValueError(f"target must have {len(draft)} conditionals or more, got {len(target)}")
    device = draft[0].device if draft else None
    drafted = mass = torch.ones((), dtype=torch.float64, device=device)
    reach = [mass]
    for p, q in zip(target, draft, strict=False):
        if rule == "block":
            drafted = drafted[..., None] * q
            mass = torch.minimum(drafted, mass[..., None] * p)
        else:
            mass = mass[..., None] * accepted_mass(p, q, rule, **parameters)
        reach.append(mass.sum())
    return torch.stack(reach) - torch.stack([*reach[1:], torch.zeros_like(mass.sum())])


_RULES = ("token", "block", "match", "greedy", "typical", "lenient")
_RULE_OF = {"epsilon": "typical", "delta": "typical", "lenience": "lenient"}


def _check_rule(rule: str, parameters: dict[str, float]) -> None:
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}, got {rule!r}")
    for name, value in parameters.items():
        if _RULE_OF.get(name) != rule:
            raise ValueError(f"{name} must not be given with rule {rule}, got {value}")


def mean_accepted(
    draft: Sequence[Tensor], target: Sequence[Tensor], rule: str = "token", **parameters: float
) -> float:
    """Expected accepted drafts for conditionals that depend on the prefix; see `num_accepted_distribution`.

    >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.75, 0.25])
    >>> [mean_accepted([q, q.expand(2, 2)], [p, p.expand(2, 2)], r) for r in ("token", "block")]
    [0.75, 0.875]
    """
    law = num_accepted_distribution(draft, target, rule, **parameters)
    return float((law * torch.arange(len(law), device=law.device)).sum())


def filtered_distribution(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """[V] float64 probabilities by the definition of each filter, from pairwise comparisons.

    A token stands if fewer than top_k tokens are larger, if the larger survivors hold less than
    top_p of the survivors' mass, and if it has at least min_p of the largest probability.

    Raises:
        ValueError: temperature is negative or not finite.

    >>> filtered_distribution(torch.tensor([0.0, 0.0, -1.0]), top_k=1)
    tensor([0.5000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if not 0 <= temperature < math.inf:
        raise ValueError(f"temperature must be finite and at least 0, got {temperature}")
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
