"""How often each chain rule accepts a draft; see `specdec_kernels.analysis` for P and Q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import RULES

# Rule synthetic does not depend on P and Q.
_RULES = tuple(rule for rule in RULES if rule != "synthetic")
ROW_RULES = tuple(rule for rule in _RULES if rule != "block")
_RULE_OF_PARAMETER = {
    "epsilon": "typical", "delta": "typical", "lenience": "lenient",
    "top_beta_rank": "top_beta", "top_beta_distance": "top_beta",
}  # fmt: skip


def acceptance_rate(p: Tensor, q: Tensor, rule: str = "token", **parameters: float) -> Tensor:
    """Probability that a draft from Q is accepted, [..., V] -> [...].

    Rule token: `sum(min(p, q))`, Theorem 3.5. Rule lenient: `sum(min(p / lenience, q))`, Appendix
    A.5. Rule match: `sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)`, Daliri et al. 2024 (arXiv 2408.07978).
    Rule typical: the mass of Q in `typical_set`. Rule top_beta: that in `top_beta_set`.

    Args:
        rule, parameters: those of `accepted_mass`.

    >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25])
    >>> acceptance_rate(p, q), acceptance_rate(p, q, "lenient", lenience=0.8)
    (tensor(0.7500, dtype=torch.float64), tensor(0.8750, dtype=torch.float64))
    """
    return accepted_mass(p, q, rule, **parameters).sum(-1)


def accepted_mass(
    p: Tensor,
    q: Tensor,
    rule: str = "token",
    *,
    lenience: float = 1.0,
    epsilon: float = 0.09,
    delta: float = 0.3,
    top_beta_rank: float = 1,
    top_beta_distance: float = 0.0,
) -> Tensor:
    """[..., V] float64: probability that each token is drafted and accepted.

    Args:
        rule: `token`, `match`, `greedy`, `typical` (with epsilon, delta), `lenient` (with lenience)
            or `top_beta` (with top_beta_rank, top_beta_distance). Rule `block` looks beyond one
            row: see `num_accepted_distribution`.

    Raises:
        ValueError: another rule, or lenience outside (0, 1].

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
    if rule == "top_beta":
        return torch.where(top_beta_set(p, top_beta_rank, top_beta_distance), q, 0.0)
    if rule == "lenient":
        _check_lenience(lenience)
        return torch.minimum(p / lenience, q)
    raise ValueError(f"rule must be one of {', '.join(ROW_RULES)}, got {rule!r}")


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """D_LK of Definition 3.2, [..., V] -> [...]: `sum(abs(p - m))` with `m = (p + q) / 2`.

    For distributions it is 1 minus the acceptance rate of rule token (Lemma 3.3 and Theorem 3.5),
    symmetric, 0 where they are equal, and 1 where no token has a probability in both (Corollary
    3.4). It is half of the L1 distance, which is the total variation.

    >>> divergence(torch.tensor([0.5, 0.5]), torch.tensor([0.75, 0.25]))
    tensor(0.2500, dtype=torch.float64)
    """
    p, q = p.double(), q.double()
    return (p - (p + q) / 2).abs().sum(-1)


def lenient_argmax(p: Tensor, tokens: Tensor, lenience: float) -> Tensor:
    """Whether rule lenient accepts drafts at temperature 0, Appendix A.5.

    It does where `p(x) >= lenience * max(p)`. The paper prints the comparison the other way round,
    with which smaller values of the lenience would accept less.

    Args:
        p: [..., V], the target's probabilities at temperature 1.
        tokens: [...] int64, the drafts.
        lenience: in (0, 1]; 1 accepts the likeliest token alone, and those as likely.

    Returns:
        [...] bool.

    Raises:
        ValueError: lenience outside (0, 1].

    >>> p = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]])
    >>> lenient_argmax(p, torch.tensor([0, 1]), 1.0), lenient_argmax(p, torch.tensor([0, 1]), 0.5)
    (tensor([ True, False]), tensor([True, True]))
    """
    _check_lenience(lenience)
    drafted = p.gather(-1, tokens[..., None])[..., 0]
    return drafted.double() >= lenience * p.amax(-1).double()


def _check_lenience(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience must be in (0, 1], got {lenience}")


def typical_set(p: Tensor, epsilon: float = 0.09, delta: float = 0.3) -> Tensor:
    """[..., V] bool: where `p > min(epsilon, delta * exp(-H(p)))`, Medusa (arXiv 2401.10774).

    >>> typical_set(torch.tensor([0.9, 0.1, 0.0]))
    tensor([ True,  True, False])
    """
    entropy = torch.special.entr(p.double()).sum(-1, keepdim=True)
    return p.double() > (delta * torch.exp(-entropy)).clamp(max=epsilon)


def top_beta_set(p: Tensor, rank: float = 1, distance: float = 0.0) -> Tensor:
    """[..., V] bool: where fewer than rank tokens are likelier, and `log(max(p) / p) <= distance`.

    Tokens of probability 0 are not in it. Xia et al. 2023 (arXiv 2203.16487).

    >>> top_beta_set(torch.tensor([0.5, 0.3, 0.2, 0.0]), 2, 1.0)
    tensor([ True,  True, False, False])
    """
    p = p.double()
    ordered = p.sort(-1, descending=True).values
    likelier = torch.searchsorted(-ordered, -p.contiguous())
    near = p.amax(-1, keepdim=True).log() - p.log() <= distance
    return (p > 0) & near & (likelier < rank)


def _agreement(p: Tensor, q: Tensor) -> Tensor:
    # max(p_y/p_x, q_y/q_x) is its first argument where p_y/q_y >= p_x/q_x and its second elsewhere,
    # so two prefix sums in the order of p/q give the sum. A token of p = q = 0 sorts as NaN, at any
    # place, and weighs nothing.
    p, q = torch.broadcast_tensors(p, q)
    order = (p / q).argsort(-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    later = q.flip(-1).cumsum(-1).flip(-1) - q
    mass = torch.where((p > 0) & (q > 0), 1 / (p.cumsum(-1) / p + later / q), 0.0)
    return torch.empty_like(mass).scatter_(-1, order, mass)


def block_acceptance(p: Tensor, q: Tensor) -> Tensor:
    """Probability that rule `block` accepts the first i drafts, given their tokens, for each i.

    It is `c_i = min(1, c_(i-1) * p_i / q_i)`, Sun et al. 2024 (arXiv 2403.10444). The sum of c_i,
    averaged over drafts, is the mean number of accepted drafts: an estimate free of the noise of
    the acceptance uniforms.

    Args:
        p, q: [..., gamma], the target's and the draft's probability of each drafted token.

    Returns:
        [..., gamma] float64.

    >>> block_acceptance(torch.tensor([0.1, 0.9]), torch.tensor([0.2, 0.6]))
    tensor([0.5000, 0.7500], dtype=torch.float64)
    """
    p, q = torch.broadcast_tensors(p.double(), q.double())
    out, c = torch.empty_like(p), p.new_ones(p.shape[:-1])
    for i in range(p.shape[-1]):
        scaled = c * p[..., i]
        c = torch.where(scaled < q[..., i], scaled / q[..., i], (scaled > 0).double())
        out[..., i] = c
    return out


def num_accepted_distribution(
    draft: Sequence[Tensor], target: Sequence[Tensor], rule: str = "token", **parameters: float
) -> Tensor:
    """[gamma + 1] float64: exact distribution of the number of accepted drafts.

    It follows from the probability that each draft prefix is drafted and accepted. Rule `block`
    accepts x_1..x_n with mass `m_n = min(q(x_1..x_n), m_(n-1) * p(x_n | x_1..x_(n-1)))`; for the
    other rules it is a product over rows.

    Args:
        draft: gamma conditionals that the drafts are drawn from; conditional i has i + 1
            dimensions of size V.
        target: gamma conditionals of the same form, or more.
        rule: `block`, or a rule of `accepted_mass`.
        parameters: the arguments of `accepted_mass` that belong to the rule.

    Raises:
        ValueError: another rule, a parameter of another rule, fewer conditionals of the target
            than of the draft, or lenience outside (0, 1].

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
    at_least = [mass]
    for p, q in zip(target, draft, strict=False):
        if rule == "block":
            drafted = drafted[..., None] * q
            mass = torch.minimum(drafted, mass[..., None] * p)
        else:
            mass = mass[..., None] * accepted_mass(p, q, rule, **parameters)
        at_least.append(mass.sum())
    return torch.stack(at_least) - torch.stack([*at_least[1:], torch.zeros_like(mass.sum())])


def _check_rule(rule: str, parameters: dict[str, float]) -> None:
    if rule not in _RULES:
        raise ValueError(f"rule must be one of {', '.join(_RULES)}, got {rule!r}")
    for name, value in parameters.items():
        if _RULE_OF_PARAMETER.get(name) != rule:
            raise ValueError(f"{name} must not be given with rule {rule}, got {value}")


def mean_accepted(
    draft: Sequence[Tensor], target: Sequence[Tensor], rule: str = "token", **parameters: float
) -> float:
    """Mean number of accepted drafts; arguments as in `num_accepted_distribution`.

    >>> p, q = torch.tensor([0.25, 0.75]), torch.tensor([0.75, 0.25])
    >>> [mean_accepted([q, q.expand(2, 2)], [p, p.expand(2, 2)], r) for r in ("token", "block")]
    [0.75, 0.875]
    """
    counts = num_accepted_distribution(draft, target, rule, **parameters)
    return float((counts * torch.arange(len(counts), device=counts.device)).sum())
