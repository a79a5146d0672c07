"""Cache tensors inside larger buffers, and the comparison of an op with the reference byte by byte.

A cache of these tests is a view of a larger buffer of random bytes, NaNs of every kind included. A
test compares the whole buffers, so that an op which writes beside its view fails.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from specdec_kernels import reference

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.int32),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
LAYOUTS = ("contiguous", "sliced", "padded", "transposed")
# Layouts whose strides and start are multiples of 16 bytes, except for the one that is named.
ODD_LAYOUTS = ("odd-sequence", "odd-head", "odd-slot", "odd-start")
# Every layout with one dtype, and every other dtype with some layout.
DTYPES_AND_LAYOUTS = [
    *((DTYPES[0], layout) for layout in LAYOUTS),
    *((dtype, LAYOUTS[i % len(LAYOUTS)]) for i, dtype in enumerate(DTYPES[1:], 1)),
]
VECTOR_BYTES = 16  # the widest load of the kernels
FILLER = 77  # between the elements of strided integer arguments
HUGE = 2**63 - 1


def embedded(size, dtype, layout, g):
    """A view [a, b, c, d] of random bytes inside a larger buffer, with the strides of a layout."""
    *_, b, c, d = size
    vector = VECTOR_BYTES // dtype.itemsize
    if layout in ODD_LAYOUTS:
        odd = ODD_LAYOUTS.index(layout)
        strides = [1, 1, 1, 1]
        for i, inner in ((2, d), (1, c), (0, b)):
            strides[i] = -(-inner * strides[i + 1] // vector) * vector + (i == odd)
        order, start, count = (0, 1, 2, 3), (0, 0, 0, int(odd == 3)), strides[0] * size[0]
    else:
        wide, order, start = _surrounding(size, vector, layout)
        strides = [1, 1, 1, 1]
        for i in (2, 1, 0):
            strides[i] = strides[i + 1] * wide[i + 1]
        count = strides[0] * wide[0]
    raw = torch.randint(0, 256, ((count + 16) * dtype.itemsize,), dtype=torch.uint8, generator=g)
    offset = sum(i * stride for i, stride in zip(start, strides, strict=True))
    return raw.view(dtype).as_strided(size, [strides[i] for i in order], offset)


def _surrounding(size, vector, layout):
    """(size of the buffer, order of its dimensions in the view, index of the first element)."""
    a, b, c, d = size
    if layout == "contiguous":
        return size, (0, 1, 2, 3), (0, 0, 0, 0)
    if layout == "sliced":  # odd offsets, so that kernels have to use the narrowest loads
        return (a + 1, b + 2, c + 3, d + 3), (0, 1, 2, 3), (1, 1, 2, 1)
    if layout == "padded":  # aligned rows, so that kernels may use the widest loads
        wide = (a + 1, b + 1, c + 1, -(-d // vector) * vector + vector)
        return wide, (0, 1, 2, 3), (0, 1, 1, 0)
    assert layout == "transposed"  # the output of a projection, [B, S, H, D]
    return (a, c, b, d), (0, 2, 1, 3), (0, 0, 0, 0)


def integers(values, shape, dtype=torch.int64, step=1):
    """An integer argument with `step` between elements, inside a larger buffer."""
    row = shape[-1] * step + (3 if step > 1 else 0)
    strides = (row, step) if len(shape) == 2 else (step,)
    count = shape[0] * (row if len(shape) == 2 else step) + 4
    view = torch.full((count,), FILLER, dtype=dtype).as_strided(shape, strides, 2)
    return view.copy_(torch.tensor(values, dtype=torch.int64).to(dtype).reshape(shape))


def whole_buffer(view):
    """All bytes of the memory that a view belongs to."""
    return torch.empty(0, dtype=torch.uint8, device=view.device).set_(view.untyped_storage())


def copied(view, device="cpu"):
    """The same view of a copy of its whole buffer."""
    buffer = whole_buffer(view).to(device, copy=True).view(view.dtype)
    return buffer.as_strided(view.shape, view.stride(), view.storage_offset())


def same(name, got, want):
    """Equal bit for bit, NaNs included; names the first element that differs."""
    got, want = (t.cpu().clone(memory_format=torch.contiguous_format) for t in (got, want))
    assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{name}: another shape or dtype"
    differ = got.view(torch.uint8) != want.view(torch.uint8) if got.dim() else got != want
    if differ.any():
        per_element = differ.view(*want.shape, -1).any(-1)
        at = per_element.nonzero()[0].tolist()
        raise AssertionError(
            f"{name}{at} is {got[tuple(at)].item()!r}, not {want[tuple(at)].item()!r} "
            f"({int(per_element.sum())} of {want.numel()} differ)"
        )


def _named_tensors(values):
    pairs, _ = tree_flatten_with_path(values)
    return {keystr(path): x for path, x in pairs if isinstance(x, torch.Tensor)}


def same_tensors(name, got, want):
    """`same` for all tensors in two nested structures, and for the buffers around them."""
    got, want = _named_tensors(got), _named_tensors(want)
    assert got.keys() == want.keys(), f"{name}: {sorted(got)}, not {sorted(want)}"
    for key, tensor in want.items():
        same(f"{name}{key}", got[key], tensor)


def same_buffers(name, got, want):
    """The buffers around all tensors in two nested structures are equal bit for bit."""
    got, want = _named_tensors(got), _named_tensors(want)
    assert got.keys() == want.keys()
    for key, tensor in want.items():
        same(f"{name}{key}", got[key], tensor)
        same(f"buffer of {name}{key}", whole_buffer(got[key]), whole_buffer(tensor))


def check(op, case, device="cpu"):
    """`op` leaves the same bytes in every buffer as the reference, and returns the same."""
    want = case.args()
    got = tree_map(lambda x: copied(x, device) if isinstance(x, torch.Tensor) else x, want)
    expected = getattr(reference, case.op)(*want)
    returned = op(*got)
    same_buffers(f"{case.op}{case} arguments", got, want)
    same_tensors(f"{case.op}{case} outputs", returned, expected)


def far_apart(device="cpu"):
    """A cache [2, 2, 3, 8] of int8 whose sequences are more than 2^31 elements apart.

    Only the pages of its rows take memory, because nothing else is written.
    """
    step = 2**31 + 2**20
    buffer = torch.empty(step + 2**12, dtype=torch.int8, device=device)
    view = buffer.as_strided((2, 2, 3, 8), (step, 64, 16, 1), 32)
    view.fill_(5)
    return view


def check_far_apart(append, truncate, device="cpu"):
    """kv_append_ and kv_truncate_ compute addresses in 64 bits."""
    view = far_apart(device)
    want = torch.full(view.shape, 5, dtype=torch.int8)
    new = torch.arange(32, dtype=torch.int8).view(2, 2, 1, 8)
    for values in ([1, 2], [2, 0]):
        positions = torch.tensor(values)
        reference.kv_append_([want], [new], positions)
        append([view], [new.to(device)], positions.to(device))
    same("cache", view, want)
    lengths, new_lengths = torch.tensor([3, 3]), torch.tensor([2, 1])
    truncate([view], lengths.clone().to(device), new_lengths.to(device), True)
    reference.kv_truncate_([want], lengths, new_lengths, True)
    same("cache", view, want)
