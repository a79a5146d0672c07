"""Intervals that hold what `norm_qkv_rope` and `output_norm_mlp` may return.

Every step is computed in float64 from the intervals of its inputs, is widened by what float32
arithmetic may add, and is rounded to the dtype where the ops round. So an interval is one number
but where a result lies so near the middle of two numbers that the order of a sum decides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import reference

_UNIT = 2.0**-24  # the largest relative error of one rounding to float32
_TINY = 1e-36  # where numbers are subnormal, errors are absolute


class Interval(NamedTuple):
    """From `middle - radius` to `middle + radius`, in float64; NaN or infinite says nothing."""

    middle: Tensor
    radius: Tensor

    def holds(self, y: Tensor) -> Tensor:
        inside = (y.double() - self.middle).abs() <= self.radius
        return inside | ~(self.middle.isfinite() & self.radius.isfinite())


def _exactly(x: Tensor) -> Interval:
    return Interval(x.double(), torch.zeros_like(x, dtype=torch.float64))


def _rounded(middle: Tensor, radius: Tensor, dtype: torch.dtype) -> Interval:
    low, high = ((middle + sign * radius).to(dtype).double() for sign in (-1, 1))
    return Interval((low + high) / 2, (high - low) / 2)


def _norm(x: Interval, weight: Tensor, epsilon: float) -> Interval:
    size, wide = x.middle.shape[-1], weight.double()
    mean = x.middle.square().mean(-1, keepdim=True) + epsilon
    change = (2 * x.middle.abs() * x.radius + x.radius.square()).mean(-1, keepdim=True)
    change = change + _TINY  # squares underflow
    factor = mean.rsqrt()
    # Squares are summed in at least 16 lanes, and a sum under a root counts half.
    off = (
        (mean - change).clamp(min=0).rsqrt() - factor + ((size / 16 + 20) / 2 + 4) * _UNIT * factor
    )
    y = x.middle * factor
    radius = x.radius * (factor + off) + x.middle.abs() * off + _UNIT * y.abs() + _TINY
    y, radius = _rounded(y, radius, weight.dtype)
    return _rounded(wide * y, wide.abs() * radius + _UNIT * (wide * y).abs(), weight.dtype)


def _linear(
    x: Interval, panels: Tensor, in_features: int, out_features: int, bias: Tensor | None
) -> Interval:
    eye = torch.eye(in_features, dtype=torch.float64)
    weight = reference.packed_linear(eye, panels, in_features, out_features, None)
    b = torch.zeros(out_features) if bias is None else bias
    y, radius = x.middle @ weight + b.double(), x.radius @ weight.abs()
    magnitude = (x.middle.abs() + x.radius) @ weight.abs() + b.double().abs()
    # Runs of 16 products, at most 16 of them in a block, then the blocks, the bias, the rounding.
    depth = 16 + 16 + in_features / 256 + 2
    return _rounded(y, radius + depth * _UNIT * magnitude + _TINY, panels.dtype)


def _product(x: Interval, y: Interval, dtype: torch.dtype) -> Interval:
    middle = x.middle * y.middle
    radius = x.radius * y.middle.abs() + y.radius * x.middle.abs() + x.radius * y.radius
    return _rounded(middle, radius + _UNIT * middle.abs() + _TINY, dtype)


def _sum(x: Interval, y: Interval, dtype: torch.dtype) -> Interval:
    slack = 2 * _UNIT * (x.middle.abs() + y.middle.abs()) + _TINY  # a product may stay exact
    return _rounded(x.middle + y.middle, x.radius + y.radius + slack, dtype)


def _rotated(x: Interval, cos: Tensor, sin: Tensor) -> Interval:
    """x is [B, n, H, D]; cos and sin are [B, n, D]."""
    half, dtype = cos.shape[-1] // 2, cos.dtype
    turned = Interval(
        torch.cat([-x.middle[..., half:], x.middle[..., :half]], -1), x.radius.roll(half, -1)
    )
    cosine, sine = (_exactly(y.unsqueeze(2)) for y in (cos, sin))
    return _sum(_product(x, cosine, dtype), _product(turned, sine, dtype), dtype)


def _silu(x: Interval, dtype: torch.dtype) -> Interval:
    y = x.middle * torch.sigmoid(x.middle)
    return _rounded(y, 1.1 * x.radius + 8 * _UNIT * y.abs() + _TINY, dtype)


def norm_qkv_rope(
    x, norm, qkv, in_features, out_features, cos, sin, biases, head_norms, epsilon
) -> list[Interval]:
    """Of queries, keys and values."""
    parts = _norm(_exactly(x.unflatten(-1, (-1, norm.shape[-1]))), norm, epsilon)
    normed, out = Interval(*(part.flatten(-2) for part in parts)), []
    for i in range(3):
        bias = biases[i] if biases else None
        y = _linear(normed, qkv[i], in_features[i], out_features[i], bias)
        y = Interval(*(part.unflatten(-1, (-1, cos.shape[-1])) for part in y))
        if head_norms and i < 2:
            y = _norm(y, head_norms[i], epsilon)
        out.append(_rotated(y, cos, sin) if i < 2 else y)
    return out


def output_norm_mlp(
    attended, residual, norm, output, mlp, in_features, out_features, output_bias, biases, epsilon
) -> list[Interval]:
    """Of the hidden states after the layer."""
    dtype, bias = residual.dtype, biases or (None,) * 3
    sizes = list(zip(in_features, out_features, strict=True))
    h = _linear(_exactly(attended), output, *sizes[0], output_bias)
    h = _sum(h, _exactly(residual), dtype)
    normed = _norm(h, norm, epsilon)
    gate, up = (_linear(normed, mlp[i], *sizes[1 + i], bias[i]) for i in range(2))
    down = _linear(_product(_silu(gate, dtype), up, dtype), mlp[2], *sizes[3], bias[2])
    return [_sum(h, down, dtype)]
