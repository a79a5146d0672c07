"""Losses of a drafter: how far its rows are from the target's probabilities.

P is the target's row, Q the drafter's softmax.

- forward_kl: the cross-entropy -sum P log Q, which is KL(P, Q) plus the entropy of P.
- reverse_kl: KL(Q, P) = sum Q log(Q / P).
- total_variation: sum |P - Q| / 2 = 1 - sum min(P, Q), so that the smallest loss is the largest
  acceptance rate alpha (Leviathan et al. 2023, Corollary 3.6).

Source: DistillSpec, arXiv 2310.08461, section 4 and appendix A.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specdec_lab.training.settings import LOSSES

# Logits and P [..., V] -> the loss of each row, float32 [...], and its gradient, in the logits'
# dtype.
RowLoss = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _forward_kl(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    draft = logits.softmax(dim=-1)
    # The logarithm of the sum follows from any logit and its probability; on a CPU logsumexp takes
    # as long as the softmax does, and rounds more.
    normalizers = logits.amax(dim=-1).float() - draft.amax(dim=-1).float().log()
    shared = torch.linalg.vecdot(labels.to(logits.dtype), logits).float()
    return normalizers - shared, draft.sub_(labels)


def _reverse_kl(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    draft = logits.softmax(dim=-1)
    # A probability that the dtype rounded to 0 has no logarithm.
    logs = labels.clamp(min=torch.finfo(labels.dtype).tiny).log_()
    ratios = logits.log_softmax(dim=-1).sub_(logs)
    values = _mean(ratios, draft)
    return values, draft.mul_(ratios.sub_(values[..., None]))


def _total_variation(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    draft = logits.softmax(dim=-1)
    excess = draft - labels
    values = excess.abs().sum(dim=-1, dtype=torch.float32) / 2
    signs = excess.sign_()  # 0 where P = Q, which lies between the slopes of both sides
    return values, draft.mul_(signs.sub_(_mean(signs, draft)[..., None]).div_(2))


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Float32 [...], the mean of values [..., V] under a distribution."""
    return (values * weights).sum(dim=-1, dtype=torch.float32)


_OF_ROWS: dict[str, RowLoss] = dict(
    zip(LOSSES, (_forward_kl, _reverse_kl, _total_variation), strict=True)
)


class _MeanLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor, of_rows: RowLoss
    ) -> torch.Tensor:
        weights = valid / valid.sum().clamp(min=1)
        values, gradient = of_rows(logits, labels)
        ctx.save_for_backward(gradient, weights)
        loss: torch.Tensor = (values * weights).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        gradient, weights = ctx.saved_tensors
        scale = (weights * gradients[0]).to(gradient.dtype)
        return gradient.mul_(scale[..., None]), None, None, None


def mean_loss(
    name: str, logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor
) -> torch.Tensor:
    """Mean loss of rows of logits with the probabilities that they are to have.

    "forward_kl" equals `torch.nn.functional.cross_entropy` of the valid rows. That one makes
    several float32 copies of the rows, which took a third of the training time: here the gradient,
    in the dtype of the logits, is the only one, and it can be taken once.

    Args:
        name: of the loss, one of `LOSSES`.
        logits, labels: [..., V].
        valid: [...] bool, which rows count.
    """
    loss: torch.Tensor = _MeanLoss.apply(  # type: ignore[no-untyped-call]
        logits, labels, valid, _OF_ROWS[name]
    )
    return loss
