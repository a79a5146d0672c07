"""Rows, sampling parameters and samples of FlashInfer's functions, by the ops of this package."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.checks import FLOATS, check_ids, require, shape
from ..arguments.conversion import Param
from ..ops.sample import sample
from ..ops.verify_chain import verify_chain
from .indices import check_in_range
from .noise import seeds_and_positions

Seed = int | Tensor | None
Samples = Tensor | tuple[Tensor, Tensor]

_TINY = torch.finfo(torch.float32).tiny  # in place of a top_p of 0, which the ops refuse


def readable(rows: Tensor) -> Tensor:
    """Rows as the ops read them."""
    rows = rows if rows.dtype in FLOATS else rows.float()
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def require_rows(rows: Tensor, name: str) -> None:
    """Raises unless the rows are a tensor [R, V] with a vocabulary."""
    conversion.require_tensor(rows, name)
    require(rows.dim() == 2, f"{name} must be [R, V], got {shape(rows)}")
    require(rows.shape[1] >= 1, f"{name} must have a vocabulary, V >= 1, got {shape(rows)}")


def _chosen_rows(rows: Tensor, name: str, indices: Tensor | None, check_nan: bool) -> Tensor:
    """[B, V], the row of each output."""
    require_rows(rows, name)
    if check_nan and bool(rows.isnan().any()):
        raise ValueError(f"{name} must hold no NaN if check_nan is given")
    if indices is None:
        return readable(rows)
    conversion.require_tensor(indices, "indices")
    require(indices.dim() == 1, f"indices must be [B], got {shape(indices)}")
    check_ids("indices", indices)
    check_in_range("indices", indices, len(rows))
    return readable(rows)[indices]


def of_rows(value: Param, name: str, rows: int, indices: Tensor | None) -> Param:
    """A sampling parameter as it is, or a tensor [R] as one for each output."""
    if not isinstance(value, Tensor):
        conversion.require_number(value, name)
        return value
    return _tensor_of_rows(value, name, rows, indices)


def _tensor_of_rows(value: Tensor, name: str, rows: int, indices: Tensor | None) -> Tensor:
    if value.dim() != 1 or len(value) != rows:
        raise ValueError(f"{name} must be a scalar or [{rows}], got a tensor {shape(value)}")
    return value if indices is None else value[indices]


def _top_p_of_rows(value: Param, rows: int, indices: Tensor | None) -> Param:
    """`top_p` within (0, 1]."""
    value = of_rows(value, "top_p", rows, indices)
    if isinstance(value, Tensor):
        return value.float().clamp(_TINY, 1.0)
    return min(max(value, _TINY), 1.0)


def _top_k_of_rows(value: int | Tensor, rows: int, indices: Tensor | None) -> int | Tensor:
    """`top_k` as the ops take it: there 0 keeps every token, here a negative one does."""
    if isinstance(value, Tensor):
        value = _tensor_of_rows(value, "top_k", rows, indices).long()
        return torch.where(value < 0, 0, value.clamp(min=1))
    conversion.require_integer(value, "top_k")
    return 0 if value < 0 else max(value, 1)


def is_joint(filter_apply_order: str) -> bool:
    """Whether top-p is applied to the row itself, not to the renormalised top k."""
    if filter_apply_order not in ("top_k_first", "joint"):
        raise ValueError(
            f"filter_apply_order must be top_k_first or joint, got {filter_apply_order!r}"
        )
    return filter_apply_order == "joint"


def _joint_top_p(probs: Tensor, top_k: int | Tensor, top_p: Param) -> Tensor:
    """[B], the top_p that on the renormalised top k keeps what top_p keeps on the whole row."""
    probs = probs.double()
    v = probs.shape[-1]
    count = torch.as_tensor(top_k, device=probs.device).expand(len(probs))
    count = torch.where(count == 0, v, count.clamp(max=v))
    smallest = probs.sort(descending=True).values.gather(1, count[:, None] - 1)
    kept = torch.where(probs >= smallest, probs, 0.0).sum(-1)
    return (top_p * probs.sum(-1) / kept).float().clamp(_TINY, 1.0)


def _top_k_top_p(
    top_k: int | Tensor | None, top_p: Param | None, rows: int, indices: Tensor | None
) -> tuple[int | Tensor, Param]:
    return (
        0 if top_k is None else _top_k_of_rows(top_k, rows, indices),
        1.0 if top_p is None else _top_p_of_rows(top_p, rows, indices),
    )


def sample_logits(
    logits: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Seed,
    offset: Seed,
    *,
    top_k: int | Tensor | None = None,
    top_p: Param | None = None,
    joint: bool = False,
) -> Tensor:
    """[B], a token for each output, by `sample`. A filter that is None keeps all tokens."""
    rows = _chosen_rows(logits, "logits", indices, check_nan)
    top_k, top_p = _top_k_top_p(top_k, top_p, len(logits), indices)
    if joint:
        top_p = _joint_top_p(rows.float().softmax(-1), top_k, top_p)
    seeds, positions = seeds_and_positions(len(rows), rows.device, generator, seed, offset)
    drawn = sample(rows, top_k=top_k, top_p=top_p, seeds=seeds, positions=positions)
    return _ids(drawn.tokens, indices)


def sample_probs(
    probs: Tensor,
    indices: Tensor | None,
    generator: torch.Generator | None,
    check_nan: bool,
    seed: Seed,
    offset: Seed,
    return_valid: bool,
    *,
    top_k: int | Tensor | None = None,
    top_p: Param | None = None,
    min_p: Param = 0.0,
    joint: bool = False,
) -> Samples:
    """As `sample_logits`, from the bonus row of a chain: `verify_chain` reads probabilities."""
    rows = _chosen_rows(probs, "probs", indices, check_nan)
    top_k, top_p = _top_k_top_p(top_k, top_p, len(probs), indices)
    if joint:
        top_p = _joint_top_p(rows, top_k, top_p)
    seeds, positions = seeds_and_positions(len(rows), rows.device, generator, seed, offset)
    no_drafts = seeds.new_empty((len(rows), 0))
    verdict = verify_chain(
        rows[:, None], no_drafts, kind="probs", rule="token", top_k=top_k, top_p=top_p,
        min_p=of_rows(min_p, "min_p", len(probs), indices), seeds=seeds, positions=positions,
        with_logprobs=False,
    )  # fmt: skip
    tokens = verdict.tokens[:, 0]
    ids = _ids(tokens, indices)
    return (ids, tokens >= 0) if return_valid else ids


def _ids(tokens: Tensor, indices: Tensor | None) -> Tensor:
    """-1, which the ops give where a row holds no distribution, becomes id 0."""
    return tokens.clamp(min=0).to(torch.int32 if indices is None else indices.dtype)
