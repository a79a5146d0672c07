"""A draft tree of EAGLE-2 that a head of EAGLE-3 grows on the CPU, in one call.

One call replaces those between the levels, which take longer than a small head's forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._ops import ops
from ..arguments import conversion, in_place
from ..arguments.validation import fake_kernel
from ..arguments.values import shown
from .decoder_layer import PackedDecoderLayers
from .linear import PackedLinear


class GrownTree(NamedTuple):
    """The result of `grow_tree_`: N = `size` nodes below the pending token of each sequence.

    Attributes:
        tokens: [B, N] int64, in the target's vocabulary; -1 where there is no node.
        parents: [B, N] int64, -1 for the pending token.
        scores: [B, N] float32, the log-probability of the path to the node under the head; -inf
            where there is no node.
        levels: [B] int64, how many levels were drafted.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    levels: Tensor


@dataclass(frozen=True, eq=False)
class PackedHead:
    """The weights of a head of EAGLE-3, as `grow_tree_` reads them.

    Types are checked here once; shapes, dtypes and devices in every call.

    Attributes:
        layers: of the head. The first norm of the first layer is [2, C]: of embeddings, and of
            hidden states.
        embeddings: [V, C], of the target's tokens.
        norm: [C], before `output`, with the epsilon of the layers.
        output: the packed weight [V_d, C].
        draft_tokens: [V_d] int32 or int64, the target's token of each output; None where they are
            the same.

    Raises:
        TypeError: a field has a wrong type.
    """

    layers: PackedDecoderLayers
    embeddings: Tensor
    norm: Tensor
    output: PackedLinear
    draft_tokens: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, PackedDecoderLayers):
            raise TypeError(f"layers must be a PackedDecoderLayers, got {shown(self.layers)}")
        if not isinstance(self.output, PackedLinear):
            raise TypeError(f"output must be a PackedLinear, got {shown(self.output)}")
        conversion.require_tensors(embeddings=self.embeddings, norm=self.norm)
        conversion.require_tensors_or_none(draft_tokens=self.draft_tokens)


def grow_tree_(
    hidden: Tensor,
    tokens: Tensor,
    head: PackedHead,
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[Tensor],
    starts: Tensor,
    *,
    counts: Tensor,
    limits: Tensor,
    width: int,
    size: int,
    min_probability: float = 0.0,
) -> GrownTree:
    """Feed the pairs of committed tokens to a head, grow a tree below the last, and keep its best.

    A pair is a token and the hidden state of the token before it. The tree grows as EAGLE-2's does:
    each level is one forward of the head over the `width` likeliest nodes of the last one, of which
    each gets `width` children; `expand_tree` says what those are, `rerank_tree` which nodes are
    kept. The hidden state of a node is the head's own, after its layers and before `norm`. A node
    takes a slot of the cache behind its sequence's pairs when it is expanded; the next call
    overwrites these slots.

    A sequence drafts no further level once its `limits` are reached, where all paths that would be
    expanded have less than `min_probability` together, or where none of them is likelier than the
    `size`-th of the candidates so far.

    Args:
        hidden: [B, n, C] float32, bfloat16 or float16 on the CPU, of the pairs.
        tokens: [B, n] int32 or int64, of the pairs.
        head: its weights, of the same dtype.
        cos, sin: [P, D], of the rotary embedding at the places 0 to P - 1; D is even.
        caches: keys and values [B, H_kv, S, D] of each layer, changed in place as by
            `decoder_layers_`.
        starts: [B] int32 or int64, slot and place of the first pair.
        counts: [B] int32 or int64 in [1, n], the pairs of each sequence; what follows them in
            `hidden` and `tokens` is padding, whose tokens must be in the vocabulary too.
        limits: [B] int32 or int64, most levels of each sequence; 0 or less drafts nothing.
        width: in [1, 64].
        size: N, at least 1.
        min_probability: in [0, 1].

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit, or the caches or the tables of
            angles are too short; the message names it. Nothing is written then.
        TypeError: an argument has a wrong type.

    Source: EAGLE-2 (arXiv 2406.16858, section 4), EAGLE-3 (arXiv 2503.01840).

    >>> from specdec_kernels import PackedDecoderLayer, pack_linear
    >>> zero, narrow = pack_linear(torch.zeros(2, 2)), pack_linear(torch.zeros(2, 4))
    >>> norms = [torch.ones(2, 2), torch.ones(2)]
    >>> layer = PackedDecoderLayer(norms, [narrow] * 3, zero, [zero] * 3, 1e-5, 1.0)
    >>> head = PackedHead(  # whose layer changes nothing
    ...     PackedDecoderLayers([layer]), torch.eye(2), torch.ones(2), pack_linear(torch.eye(2))
    ... )
    >>> one, caches = torch.tensor([1]), [torch.zeros(1, 1, 9, 2), torch.zeros(1, 1, 9, 2)]
    >>> angles = torch.zeros(9, 2)
    >>> hidden = torch.tensor([[[0.0, 1.0]]])
    >>> tree = grow_tree_(
    ...     hidden, one[None], head, angles, angles, caches, one * 0, counts=one, limits=one * 2,
    ...     width=1, size=2,
    ... )
    >>> tree.tokens, tree.parents, tree.levels
    (tensor([[1, 1]]), tensor([[-1,  0]]), tensor([2]))
    """
    conversion.require_tensors(
        hidden=hidden, tokens=tokens, cos=cos, sin=sin, starts=starts, counts=counts, limits=limits
    )
    if not isinstance(head, PackedHead):
        raise TypeError(f"head must be a PackedHead, got {shown(head)}")
    conversion.require_integer(width, "width")
    conversion.require_integer(size, "size")
    conversion.require_number(min_probability, "min_probability")
    caches = conversion.require_tensor_list(caches, "caches")
    in_place.check_leaves(caches, "caches")
    first = head.layers.layers[0]
    grown = ops.grow_tree_.default(
        hidden, tokens, counts, starts, limits, head.embeddings, *head.layers._weights, head.norm,
        head.output.panels, head.output.out_features, head.draft_tokens, cos, sin, caches,
        first.scale, first.epsilon, width, size, min_probability,
    )  # fmt: skip
    in_place.raise_versions(caches)
    return GrownTree(*grown)


@fake_kernel("grow_tree_")
def _(hidden: Tensor, tokens: Tensor, counts: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    shape = hidden.shape[0], arguments[-2]
    return (
        hidden.new_empty(shape, dtype=torch.int64),
        hidden.new_empty(shape, dtype=torch.int64),
        hidden.new_empty(shape, dtype=torch.float32),
        hidden.new_empty(hidden.shape[:1], dtype=torch.int64),
    )
