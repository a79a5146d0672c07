"""How often one of several sibling drafts is accepted; see `specdec_kernels.analysis`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import TREE_RULES

# Whether the other rules accept one of several siblings does not depend on how these were drawn, or
# (traversal) not on the siblings alone.
_OTHERS = ("greedy", "match", "typical", "traversal")
SIBLING_RULES = tuple(rule for rule in TREE_RULES if rule not in _OTHERS)
_DRAWS = ("without_replacement", "top_k_plus_one", "top")


def tree_acceptance(p: Tensor, q: Tensor, drafts: int, rule: str) -> Tensor:
    """Exact probability that one of several siblings is accepted, [..., V] -> [...].

    Args:
        drafts: siblings, at least 1.
        rule: it also tells how the siblings are drawn from Q. `multi_draft` and `k_seq`:
            independently; `multi_draft_wor`: without replacement; `top_k_plus_one`: the likeliest
            drafts - 1 and one of the others; `target_only`: the likeliest. Time and memory of
            `multi_draft_wor` grow as V^drafts.

    Raises:
        ValueError: another rule, drafts below 1.

    Source: multi_draft: SpecInfer (arXiv 2305.09781). multi_draft_wor: Sequoia (arXiv 2402.12374).
    k_seq: SpecTr (arXiv 2310.15141), Algorithm 3.

    >>> p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.75, 0.0])
    >>> [round(float(tree_acceptance(p, q, 2, r)), 4) for r in ("multi_draft", "multi_draft_wor")]
    [0.625, 0.75]
    """
    if rule not in SIBLING_RULES:
        raise ValueError(f"rule must be one of {', '.join(SIBLING_RULES)}, got {rule!r}")
    p, q = _pair(p, q, drafts)
    if rule == "k_seq":
        return 1 - (1 - k_seq_factor(p, q, drafts)[1]) ** drafts
    if rule == "multi_draft":
        all_rejected = p.new_ones(p.shape[:-1])
        for _ in range(drafts):
            all_rejected = all_rejected * (1 - torch.minimum(p, q).sum(-1))
            p = _normalised((p - q).clamp(min=0))
        return 1 - all_rejected
    if rule == "multi_draft_wor":
        return _without_replacement(p, q, drafts)
    return tree_acceptance_bound(p, q, drafts, "top" if rule == "target_only" else rule)


def _pair(p: Tensor, q: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    if drafts < 1:
        raise ValueError(f"drafts must be at least 1, got {drafts}")
    p, q = torch.broadcast_tensors(p.double(), q.double())
    return p, q


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, 0.0)


def _without_replacement(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    v = p.shape[-1]
    ids = torch.eye(v, dtype=torch.bool, device=p.device)
    # All rejected so far, and one accepted so far.
    rejected, accepted = p.new_ones(p.shape[:-1]), p.new_zeros(p.shape[:-1])
    batch = p.dim() - 1
    for j in range(drafts):
        # Each rejected token adds a dimension.
        accepted_now = rejected[..., None] * torch.minimum(p, q)
        accepted = accepted + accepted_now.flatten(batch).sum(-1)
        if j == drafts - 1:
            break
        rejected = rejected[..., None] * (q - p).clamp(min=0)
        p = _normalised((p - q).clamp(min=0))[..., None, :].expand(*q.shape, v)
        q = _normalised(q[..., None, :].masked_fill(ids, 0.0))
    return accepted


def k_seq_factor(p: Tensor, q: Tensor, drafts: int) -> tuple[Tensor, Tensor]:
    """rho and beta of rule k_seq, [..., V] -> [...] each.

    The smallest rho in [1, drafts] with `1 - (1 - beta)^drafts <= rho * beta`, where
    `beta = sum(min(q, p / rho))` is the acceptance probability of one draft; SpecTr, section 5.
    The reference of `verify_tree` solves the same for one row on its own, so that neither is
    proved by itself; this one takes batches and never waits for the device.

    Raises:
        ValueError: drafts below 1.

    >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5])
    >>> k_seq_factor(p, q, 2)
    (tensor(1., dtype=torch.float64), tensor(1., dtype=torch.float64))
    """
    p, q = _pair(p, q, drafts)
    low, high = p.new_ones(p.shape[:-1]), p.new_full(p.shape[:-1], drafts)

    def beta(rho: Tensor) -> Tensor:
        return torch.minimum(q, p / rho[..., None]).sum(-1).clamp(max=1)

    for _ in range(60):
        middle = (low + high) / 2
        enough = 1 - (1 - beta(middle)) ** drafts <= middle * beta(middle)
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high, beta(high)


def first_children_acceptance(by_trial: Sequence[float]) -> list[float]:
    """Probability that one of the first k children of a node is accepted, for each k.

    Child k is tried where all before it were rejected, so it is `1 - prod(1 - a_j)` over its trials
    j <= k: the table of SpecInfer (arXiv 2305.09781), which shows how often the target's token is
    among the k likeliest of the drafter.

    Args:
        by_trial: share of trials 0, 1, ... that accepted their child, such as
            ``out.stats.acceptance_by_trial`` of the loop.

    Raises:
        ValueError: a share outside [0, 1].

    >>> first_children_acceptance([0.5, 0.5, 0.2])
    [0.5, 0.75, 0.8]
    """
    accepted, rejected = [], 1.0
    for trial, share in enumerate(by_trial):
        if not 0 <= share <= 1:
            raise ValueError(f"by_trial[{trial}] must be in [0, 1], got {share}")
        rejected *= 1 - share
        accepted.append(1 - rejected)
    return accepted


def tree_acceptance_bound(p: Tensor, q: Tensor, drafts: int, draw: str) -> Tensor:
    """The most that a lossless rule can accept of siblings drawn in one way, [..., V] -> [...].

    It is `1 + min_S [p(S) - Pr(all drafts in S)]`, the probability that one of them is emitted.

    Args:
        draw: `without_replacement` (Q must hold at least `drafts` tokens; takes time
            2^V V^drafts), `top_k_plus_one` or `top` (the likeliest), as in `tree_acceptance`.

    Raises:
        ValueError: another draw, drafts below 1.

    >>> p, q = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.75, 0.0])
    >>> tree_acceptance_bound(p, q, 2, "without_replacement")
    tensor(0.7500, dtype=torch.float64)
    """
    if draw not in _DRAWS:
        raise ValueError(f"draw must be one of {', '.join(_DRAWS)}, got {draw!r}")
    p, q = _pair(p, q, drafts)
    if draw == "without_replacement":
        return _subset_bound(p, q, drafts)
    order = q.argsort(dim=-1, descending=True, stable=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    if draw == "top":
        return p[..., :drafts].sum(-1)
    top = drafts - 1
    rest = torch.minimum(p[..., top:], _normalised(q[..., top:]))
    return p[..., :top].sum(-1) + rest.sum(-1)


def _subset_bound(p: Tensor, q: Tensor, drafts: int) -> Tensor:
    v = p.shape[-1]
    tuples = list(itertools.permutations(range(v), drafts))
    drawn = q.new_ones(*q.shape[:-1], len(tuples))
    index = torch.tensor(tuples, device=q.device).reshape(len(tuples), drafts)
    rest = torch.ones(len(tuples), v, dtype=torch.float64, device=q.device)
    for j in range(drafts):
        weight = q[..., index[:, j]]
        drawn = drawn * torch.where(weight > 0, weight / (q @ rest.T), 0.0)
        rest.scatter_(1, index[:, j : j + 1], 0.0)
    subsets = (torch.arange(2**v, device=q.device)[:, None] >> torch.arange(v, device=q.device)) & 1
    inside = subsets[:, index].prod(-1).double()  # [2^V, tuples]
    return 1 + (p @ subsets.double().T - drawn @ inside.T).amin(-1)
