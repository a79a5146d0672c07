"""Specification of `pack_blocks` and `unpack_blocks`: weights as a GGUF file stores them.

A weight is scale * (q - bias) + minimum, in float32. Where a block has scales of its parts, its
scale and its minimum are multiplied by those of the part, and the minimum is subtracted.

Source: ggml, `ggml-quants.c`; the values are those of the package `gguf`, which Transformers reads
files with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...arguments.weight_blocks import FORMATS, BlockFormat, panel_width


class Fields(NamedTuple):
    """What blocks consist of: [N, M] float16, [N, M, parts] uint8 or int8, [N, M, inputs]."""

    scale: Tensor
    minimum: Tensor
    scales: Tensor
    minima: Tensor
    q: Tensor  # uint8; int8 in Q8_0


def pack_blocks(blocks: Tensor, format: int) -> Tensor:
    """The blocks of W outputs side by side, each of their fields in turn."""
    kind = FORMATS[format - 1]
    width, n = panel_width(), len(blocks)
    padding = blocks.new_zeros(-n % width, blocks.shape[1])
    fields = _read_file(torch.cat([blocks, padding]), kind)

    def side_by_side(x: Tensor) -> Tensor:
        """[P, M, bytes] of [P * W, M, count]."""
        x = x.unflatten(0, (-1, width)).permute(0, 2, 3, 1).contiguous()
        return x.view(torch.uint8).flatten(2)

    parts = [fields.scale, fields.minimum] if kind.has_minimum else [fields.scale]
    listed = [part[..., None] for part in parts]
    if kind.parts:
        listed += [fields.scales, fields.minima] if kind.has_minimum else [fields.scales]
    listed += [fields.q] if kind.bits == 8 else [_words(fields.q & 15, 4)]
    if 4 < kind.bits < 8:
        listed.append(_words(fields.q >> 4, kind.bits - 4))
    return torch.cat([side_by_side(x) for x in listed], -1)


def unpack_blocks(panels: Tensor, in_features: int, out_features: int) -> Tensor:
    """[N, K] float32, the weight that the panels hold."""
    width = panel_width()
    (kind,) = [f for f in FORMATS if f.bytes * width == panels.shape[2]]
    at = 0

    def read(count: int, dtype: torch.dtype) -> Tensor:
        """[P * W, M, count] of the next bytes."""
        nonlocal at
        size = count * width * dtype.itemsize
        field = panels[:, :, at : at + size].contiguous().view(dtype)
        at += size
        wide: Tensor = field.unflatten(2, (count, width))
        return wide.permute(0, 3, 1, 2).flatten(0, 1)

    none = panels.new_zeros(len(panels) * width, panels.shape[1], kind.parts)
    scale = read(1, torch.float16)[..., 0]
    minimum = read(1, torch.float16)[..., 0] if kind.has_minimum else torch.zeros_like(scale)
    signed = torch.uint8 if kind.has_minimum else torch.int8
    scales = read(kind.parts, signed) if kind.parts else none
    minima = read(kind.parts, signed) if kind.parts and kind.has_minimum else none
    if kind.bits == 8:
        q = read(kind.inputs, torch.int8)
    else:
        q = _numbers(read(kind.inputs // 8, torch.int32), 4)
        if kind.bits > 4:
            high = kind.bits - 4
            q += _numbers(read(kind.inputs * high // 32, torch.int32), high) << 4
    weight = _values(Fields(scale, minimum, scales, minima, q), kind)
    return weight[:out_features, :in_features].contiguous()


def _values(fields: Fields, kind: BlockFormat) -> Tensor:
    """[N, K] float32."""
    parts = max(kind.parts, 1)
    q = (fields.q.to(torch.int32) - kind.bias).float().unflatten(2, (parts, -1))
    scale, minimum = fields.scale.float()[..., None], fields.minimum.float()[..., None]
    if kind.parts:
        scale, minimum = scale * fields.scales, -(minimum * fields.minima)
    weight = scale[..., None] * q
    if kind.has_minimum:
        weight = weight + minimum[..., None]
    wide: Tensor = weight.flatten(1)
    return wide


def _words(q: Tensor, bits: int) -> Tensor:
    """Numbers of a few bits [..., inputs] in int32 [..., words], the first one lowest."""
    numbers = q.long().unflatten(-1, (-1, 32 // bits))
    words = (numbers << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _numbers(words: Tensor, bits: int) -> Tensor:
    """[..., inputs] int32: the reverse of `_words`."""
    numbers: Tensor = words[..., None].long() >> torch.arange(0, 32, bits) & 2**bits - 1
    return numbers.flatten(-2).int()


def _read_file(blocks: Tensor, kind: BlockFormat) -> Fields:
    x = blocks.unflatten(1, (-1, kind.file_bytes))
    none = x[..., :0]
    if kind.name == "Q6_K":
        low, high, scales = x[..., :128], x[..., 128:192], x[..., 192:208]
        low = torch.cat([low & 15, low >> 4], -1).unflatten(-1, (2, 2, 64)).transpose(-3, -2)
        high = high.unflatten(-1, (2, 1, 32)) >> torch.tensor([[0], [2], [4], [6]]) & 3
        q = (low.flatten(-3) | high.flatten(-3) << 4).to(torch.uint8)
        scale = _halves(x[..., 208:])[..., 0]
        return Fields(scale, scale, scales.view(torch.int8), none, q)
    halves = _halves(x[..., : 4 if kind.has_minimum else 2])
    scale, minimum, rest = halves[..., 0], halves[..., -1], x[..., 2 * halves.shape[-1] :]
    if kind.bits == 8:
        return Fields(scale, minimum, none, none, rest.view(torch.int8))
    scales = minima = none
    if kind.parts:
        first, second, last = rest[..., :4], rest[..., 4:8], rest[..., 8:12]
        scales = torch.cat([first & 63, last & 15 | first >> 6 << 4], -1)
        minima = torch.cat([second & 63, last >> 4 | second >> 6 << 4], -1)
        rest = rest[..., 12:]
    half = 32 if kind.parts else 16
    q = rest[..., -kind.inputs // 2 :].unflatten(-1, (-1, half))
    q = torch.stack([q & 15, q >> 4], -2).flatten(-3)
    if kind.bits == 5:
        bits = rest[..., : kind.inputs // 8]
        places = torch.arange(8)
        each = bits[..., None, :] >> places[:, None] if kind.parts else bits[..., None] >> places
        q = q | (each & 1).flatten(-2).to(torch.uint8) << 4
    return Fields(scale, minimum, scales, minima, q)


def _halves(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.float16)
