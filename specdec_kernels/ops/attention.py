"""Attention of a few queries over a static cache, on the CPU."""

from __future__ import annotations

from torch import Tensor

from .._ops import ops
from ..arguments import conversion
from ..arguments.validation import fake_kernel


def cached_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attend with a few queries of each sequence to keys and values where the cache holds them.

    Not differentiable: the output requires no gradient, even where an argument does.

    Heads of queries that share a head of keys read it once. On one machine the bits of a query's
    output follow from the query, `scale`, `soft_cap`, and the keys and values that it sees, in the
    order of their slots: not from the slots themselves, from what hidden slots hold, from the
    queries, heads and sequences beside it, from strides or the number of threads. So a token has
    the same output in a plain step, in a chain and in a tree.

    Sums are in float32, and the output is rounded once. A query that sees nothing gives zeros. A
    NaN or an infinity in a visible key or value reaches the queries that see it, and no others.

    Args:
        query: [B, H, n, D] float32, bfloat16 or float16 on the CPU. Its last dimension is
            contiguous, and so are those of `keys` and `values`; other strides are free.
        keys: [B, H_kv, S, D] of the same dtype; H_kv divides H.
        values: [B, H_kv, S, D_v] of the same dtype.
        mask: [B, 1, n, S] bool, True where a query sees a slot; strides of 0 are allowed.
            `tree_attention` makes that of a tree. None: every query sees every slot.
        scale: what scores are multiplied by; D ** -0.5 by default.
        soft_cap: scores become `soft_cap * tanh(score / soft_cap)`, as in Gemma 2.

    Returns:
        [B, n, H, D_v] of the dtype of query, contiguous: the layout of Transformers' attention.

    Raises:
        RuntimeError: a shape, dtype, device, stride or number does not fit; the message names it.
        TypeError: an argument has a wrong type.

    >>> cache = torch.tensor([[[[1.0, 0.0], [0.0, 1.0], [9.0, 9.0]]]])
    >>> visible = torch.tensor([True, True, False]).expand(1, 1, 1, 3)
    >>> cached_attention(torch.zeros(1, 1, 1, 2), cache, cache, visible)
    tensor([[[[0.5000, 0.5000]]]])
    """
    conversion.require_tensors(query=query, keys=keys, values=values)
    conversion.require_tensors_or_none(mask=mask)
    for name, value in (("scale", scale), ("soft_cap", soft_cap)):
        if value is not None:
            conversion.require_number(value, name)
    out: Tensor = ops.cached_attention.default(query, keys, values, mask, scale, soft_cap)
    return out


@fake_kernel("cached_attention")
def _(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float | None,
    soft_cap: float | None,
) -> Tensor:
    batch, heads, queries, _ = query.shape
    return query.new_empty((batch, queries, heads, values.shape[3]))
