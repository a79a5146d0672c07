"""Decoder layers on the CPU for few tokens, and the two halves of one around attention.

The layer is that of Llama, Mistral, Qwen 2 and Qwen 3: RMSNorm, grouped queries, rotary position
embeddings over whole heads, and a gated feed-forward network with SiLU. One call replaces dozens of
PyTorch's, which take longer for a few tokens than the arithmetic itself. Between the halves a
caller writes a cache of its own and attends; `decoder_layers_` runs whole layers one after another,
each by the two halves with `kv_append_` and `cached_attention` between them.

Intermediate results are rounded to the dtype where the forwards of Transformers round them. As in
`packed_linear`, the bits of a token follow from its own numbers and the weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .._ops import ops
from ..arguments import conversion, in_place
from ..arguments.validation import fake_kernel
from ..arguments.values import require_flag, shown
from .linear import PackedLinear


def _require_weight(value: object, name: str) -> None:
    if not isinstance(value, PackedLinear):
        raise TypeError(f"{name} must be a PackedLinear, got {shown(value)}")
    conversion.require_tensor(value.panels, f"{name} panels")


def _require_weights(values: object, name: str) -> None:
    if isinstance(values, PackedLinear) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a list of PackedLinear, got {type(values).__name__}")
    for i, value in enumerate(values):
        # The name costs time, so it is built only on failure.
        if not isinstance(value, PackedLinear) or not isinstance(value.panels, Tensor):
            _require_weight(value, f"{name}[{i}]")


def _unpacked(weights: Sequence[PackedLinear]) -> tuple[list[Tensor], list[int], list[int]]:
    """The panels, inputs and outputs of all, as the native ops take them."""
    return (
        [weight.panels for weight in weights],
        [weight.in_features for weight in weights],
        [weight.out_features for weight in weights],
    )


def norm_qkv_rope(
    x: Tensor,
    norm: Tensor,
    qkv: Sequence[PackedLinear],
    cos: Tensor,
    sin: Tensor,
    *,
    epsilon: float,
    biases: Sequence[Tensor] = (),
    head_norms: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise hidden states, project them to queries, keys and values, and rotate the heads.

    RMSNorm is `norm * (x / sqrt(mean(x ** 2) + epsilon))`. A head with the halves a and b becomes
    `[a * cos - b * sin, b * cos + a * sin]`, with the halves of cos and sin.

    Args:
        x: hidden states [B, n, C] float32, bfloat16 or float16 on the CPU, any strides.
        norm: [C], of the same dtype as all that follow; or [G, C / G], and each of so many equal
            parts of x is normalised on its own, as in heads of EAGLE-3.
        qkv: the packed weights [H * D, C], [H_kv * D, C] and [H_kv * D, C].
        cos, sin: [B, n, D], or [1, n, D] for all sequences; D is even.
        epsilon: of the norms, at least 0.
        biases: three, of the outputs of `qkv`, or none.
        head_norms: two, [D], by which each head of queries and of keys is normalised before it is
            rotated, as in Qwen 3, or none.

    Returns:
        Queries [B, n, H, D], keys and values [B, n, H_kv, D], contiguous. `transpose(1, 2)` is the
        layout of `cached_attention` and `kv_append_`.

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit; the message names it.
        TypeError: an argument has a wrong type.

    >>> from specdec_kernels import pack_linear
    >>> one = pack_linear(torch.eye(2))
    >>> cos, sin = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)  # a quarter turn
    >>> norm_qkv_rope(
    ...     torch.tensor([[[3.0, 3.0]]]), torch.ones(2), [one] * 3, cos, sin, epsilon=0.0
    ... )[0]
    tensor([[[[-1.,  1.]]]])
    """
    conversion.require_tensors(x=x, norm=norm, cos=cos, sin=sin)
    conversion.require_number(epsilon, "epsilon")
    _require_weights(qkv, "qkv")
    outputs: tuple[Tensor, Tensor, Tensor] = ops.norm_qkv_rope.default(
        x, norm, *_unpacked(qkv), cos, sin,
        conversion.require_tensor_list(biases, "biases"),
        conversion.require_tensor_list(head_norms, "head_norms"), epsilon,
    )  # fmt: skip
    return outputs


@fake_kernel("norm_qkv_rope")
def _(
    x: Tensor,
    norm: Tensor,
    qkv: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    biases: Sequence[Tensor],
    head_norms: Sequence[Tensor],
    epsilon: float,
) -> tuple[Tensor, ...]:
    size = cos.shape[-1]
    return tuple(x.new_empty((*x.shape[:2], n // size, size)) for n in out_features)


def output_norm_mlp(
    attended: Tensor,
    residual: Tensor,
    norm: Tensor,
    output: PackedLinear,
    mlp: Sequence[PackedLinear],
    *,
    epsilon: float,
    output_bias: Tensor | None = None,
    biases: Sequence[Tensor] = (),
) -> Tensor:
    """Project the output of attention, add the residual, and do the same with the gated network.

    With `h = residual + output(attended)`, it is `h + down(silu(gate(h')) * up(h'))`, where h' is
    the RMSNorm of h.

    Args:
        attended: [B, n, A] float32, bfloat16 or float16 on the CPU, any strides; for what
            `cached_attention` returns, `flatten(2)`.
        residual: hidden states [B, n, C] before the layer, of the same dtype as all that follow.
        norm: [C].
        output: the packed weight [C, A].
        mlp: the packed weights of gate and up [I, C] and of down [C, I].
        epsilon: of the norm, at least 0.
        output_bias: [C], or None.
        biases: three, of the outputs of `mlp`, or none.

    Returns:
        Hidden states [B, n, C] after the layer.

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit; the message names it.
        TypeError: an argument has a wrong type.

    >>> from specdec_kernels import pack_linear
    >>> one, x = pack_linear(torch.eye(2)), torch.tensor([[[2.0, -2.0]]])
    >>> output_norm_mlp(x, torch.zeros(1, 1, 2), torch.ones(2), one, [one] * 3, epsilon=0.0)
    tensor([[[ 2.7311, -1.7311]]])
    """
    conversion.require_tensors(attended=attended, residual=residual, norm=norm)
    conversion.require_tensors_or_none(output_bias=output_bias)
    conversion.require_number(epsilon, "epsilon")
    _require_weight(output, "output")
    _require_weights(mlp, "mlp")
    panels, in_features, out_features = _unpacked([output, *mlp])
    y: Tensor = ops.output_norm_mlp.default(
        attended, residual, norm, panels[0], panels[1:], in_features, out_features, output_bias,
        conversion.require_tensor_list(biases, "biases"), epsilon,
    )  # fmt: skip
    return y


@fake_kernel("output_norm_mlp")
def _(
    attended: Tensor,
    residual: Tensor,
    norm: Tensor,
    output: Tensor,
    mlp: Sequence[Tensor],
    in_features: Sequence[int],
    out_features: Sequence[int],
    output_bias: Tensor | None,
    biases: Sequence[Tensor],
    epsilon: float,
) -> Tensor:
    return residual.new_empty(residual.shape)


@dataclass(frozen=True, eq=False)
class PackedDecoderLayer:
    """The weights of a decoder layer, as `PackedDecoderLayers` takes them.

    Attributes:
        norms: [C] before attention, and [C] before the MLP. In the first of several layers the
            first norm may be [G, C], as in `norm_qkv_rope`; C is then G * C in the shapes of `qkv`.
        qkv: the packed weights [H * D, C], [H_kv * D, C] and [H_kv * D, C].
        output: the packed weight [C, H * D].
        mlp: the packed weights of gate and up [I, C] and of down [C, I].
        epsilon: of all norms, at least 0.
        scale: what scores of attention are multiplied by.
        qkv_biases: three, or none.
        output_bias: [C], or None.
        mlp_biases: three, or none.
        head_norms: two, [D], of queries and of keys, or none.

    Raises:
        TypeError: a field has a wrong type.
    """

    norms: Sequence[Tensor]
    qkv: Sequence[PackedLinear]
    output: PackedLinear
    mlp: Sequence[PackedLinear]
    epsilon: float
    scale: float
    qkv_biases: Sequence[Tensor] = ()
    output_bias: Tensor | None = None
    mlp_biases: Sequence[Tensor] = ()
    head_norms: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        for name in ("norms", "qkv_biases", "mlp_biases", "head_norms"):
            conversion.require_tensor_list(getattr(self, name), name)
        for name in ("qkv", "mlp"):
            _require_weights(getattr(self, name), name)
        _require_weight(self.output, "output")
        conversion.require_tensors_or_none(output_bias=self.output_bias)
        for name in ("epsilon", "scale"):
            conversion.require_number(getattr(self, name), name)


@dataclass(frozen=True, eq=False)
class PackedDecoderLayers:
    """The weights of layers that follow one another, as `decoder_layers_` reads them.

    Types are checked here once; shapes, dtypes and devices in every call.

    Attributes:
        layers: at least one. They agree on `epsilon`, on `scale`, and on which biases and norms of
            heads there are.

    Raises:
        TypeError: no sequence of `PackedDecoderLayer`.
        ValueError: none, or layers that do not agree.
    """

    layers: Sequence[PackedDecoderLayer]
    _weights: tuple[Any, ...] = field(init=False, repr=False)  # as the native op takes them

    def __post_init__(self) -> None:
        layers = self.layers
        if not isinstance(layers, Sequence):
            raise TypeError(f"layers must be a sequence of PackedDecoderLayer, got {shown(layers)}")
        if not layers:
            raise ValueError("layers must hold at least one layer, got none")
        for i, layer in enumerate(layers):
            if not isinstance(layer, PackedDecoderLayer):
                raise TypeError(f"layers[{i}] must be a PackedDecoderLayer, got {shown(layer)}")
            for name in _ALIKE:
                value, first = (_kind_of(getattr(each, name)) for each in (layer, layers[0]))
                if value != first:
                    raise ValueError(
                        f"layers[{i}].{name} must be like that of layers[0], {first}, got {value}"
                    )

        def joined(name: str) -> list[Tensor]:
            return [x for each in layers for x in getattr(each, name)]

        weights = [w for each in layers for w in (*each.qkv, each.output, *each.mlp)]
        biases = [each.output_bias for each in layers if each.output_bias is not None]
        arguments = (
            joined("norms"), *_unpacked(weights), joined("qkv_biases"), biases,
            joined("mlp_biases"), joined("head_norms"),
        )  # fmt: skip
        object.__setattr__(self, "_weights", arguments)


_ALIKE = ("epsilon", "scale", "qkv_biases", "output_bias", "mlp_biases", "head_norms")


def _kind_of(value: Any) -> Any:
    """A number itself, else how many tensors there are."""
    if isinstance(value, Tensor):
        return "1 tensor"
    return value if isinstance(value, int | float) else f"{len(value or ())} tensors"


def decoder_layers_(
    x: Tensor,
    layers: PackedDecoderLayers,
    cos: Tensor,
    sin: Tensor,
    caches: Sequence[Tensor],
    positions: Tensor,
    mask: Tensor,
    *,
    every_layer: bool = False,
) -> Tensor:
    """Run decoder layers over the next tokens of every sequence, and write their keys and values.

    Each layer is bit for bit `norm_qkv_rope`, `kv_append_`, `cached_attention` and
    `output_norm_mlp`. Nothing is written where an argument does not fit.

    Args:
        x: hidden states [B, n, C] float32, bfloat16 or float16 on the CPU, any strides. Where the
            first norm is [G, C], they are [B, n, G * C], and the last of the G parts is what the
            first layer adds to.
        layers: their weights, of the same dtype.
        cos, sin: [B, n, D], or [1, n, D] for all sequences; D is even.
        caches: keys and values [B, H_kv, T, D] of the first layer, those of the second, and so on,
            of the same dtype, changed in place as by `kv_append_`.
        positions: [B] int32 or int64, the slot of the first token of each sequence.
        mask: [B, 1, n, S] bool with S <= T, True where a token sees one of the first S slots, its
            own included.
        every_layer: whether the results of all layers are returned.

    Returns:
        Hidden states [B, n, C] after the last layer, or [L, B, n, C] after each.

    Raises:
        RuntimeError: a shape, dtype, device or number does not fit; the message names it.
        TypeError: an argument has a wrong type.

    >>> from specdec_kernels import pack_linear
    >>> one, x = pack_linear(torch.eye(2)), torch.tensor([[[2.0, -2.0]]])
    >>> layer = PackedDecoderLayer([torch.ones(2)] * 2, [one] * 3, one, [one] * 3, 0.0, 1.0)
    >>> caches, angles = [torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)], torch.ones(1, 1, 2)
    >>> mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    >>> layers = PackedDecoderLayers([layer])
    >>> decoder_layers_(x, layers, angles, angles * 0, caches, torch.tensor([0]), mask)
    tensor([[[ 3.7311, -2.7311]]])
    >>> caches[1][0, 0, 0]
    tensor([ 1., -1.])
    """
    conversion.require_tensors(x=x, cos=cos, sin=sin, positions=positions, mask=mask)
    if not isinstance(layers, PackedDecoderLayers):
        raise TypeError(f"layers must be a PackedDecoderLayers, got {shown(layers)}")
    require_flag(every_layer, "every_layer")
    caches = conversion.require_tensor_list(caches, "caches")
    in_place.check_leaves(caches, "caches")
    first = layers.layers[0]
    y: Tensor = ops.decoder_layers_.default(
        x, *layers._weights, cos, sin, caches, positions, mask, first.scale, first.epsilon,
        every_layer,
    )  # fmt: skip
    in_place.raise_versions(caches)
    return y


@fake_kernel("decoder_layers_")
def _(x: Tensor, norms: Sequence[Tensor], *arguments: Any) -> Tensor:
    shape = (*x.shape[:2], norms[1].shape[0])
    return x.new_empty((len(norms) // 2, *shape) if arguments[-1] else shape)
