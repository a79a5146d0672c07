"""Random tensors: sizes, contents, memory layouts, and tensors that fit no argument.

Every function takes a `Source`, which a seed and the number of a call determine.
"""

from __future__ import annotations

import random

import torch

FLOATS = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
DTYPES = (*FLOATS, *IDS, torch.float64, torch.bool, torch.int8, torch.complex64)
# Around the widths of vectors, strips and tiles of the kernels.
VOCABULARIES = (1, 2, 3, 5, 15, 16, 17, 19, 31, 33, 63, 64, 65, 100, 129, 257, 1000)
LONG_VOCABULARIES = (4095, 4096, 4097, 8191, 8193, 12_345)
ODD = (float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, -1e-45, -0.0, -1.0, 6e4)
INTEGERS = (-(2**63), -(2**31) - 1, -(2**31), -100, -2, -1, 0, 1, 2, 3, 64, 65, 2**31 - 1, 2**31,
            2**32 + 1, 2**62, 2**63 - 1)  # fmt: skip
# As a size, these are either small or cannot be allocated.
SIZES = tuple(n for n in INTEGERS if n < 2**16 or n > 2**48)


class Source(random.Random):
    """Random numbers of one call, with a generator for tensors."""

    def __init__(self, seed: int, call: int) -> None:
        super().__init__(f"{seed} {call}")
        self.tensors = torch.Generator().manual_seed(self.getrandbits(63))

    def happens(self, probability: float) -> bool:
        return self.random() < probability


def size(r, most):
    """0 to `most`; small numbers are likelier, and 0 is rare."""
    return 0 if r.happens(0.04) else min(r.randint(1, most), r.randint(1, most))


def vocabulary(r):
    return r.choice(LONG_VOCABULARIES if r.happens(0.06) else VOCABULARIES)


def normal(r, *shape):
    return torch.randn(shape, generator=r.tensors)


def integers(r, low, high, shape, dtype=torch.int64):
    """In [low, high), which may be empty."""
    return torch.randint(low, max(high, low + 1), shape, generator=r.tensors).to(dtype)


def any_int64(r, n):
    """[n] seeds or positions."""
    return torch.tensor([r.choice(INTEGERS) if r.happens(0.2) else r.getrandbits(40)
                         for _ in range(n)], dtype=torch.int64)  # fmt: skip


def logits(r, shape, dtype):
    """Rows of several characters: spread, peaked, tied, almost all -inf."""
    x = normal(r, *shape) * r.choice((0.0, 0.1, 1.0, 5.0, 40.0))
    how = r.random()
    if how < 0.2:
        x = x.round()
    elif how < 0.35:
        x[torch.rand(shape, generator=r.tensors) < r.choice((0.5, 0.9, 1.0))] = float("-inf")
        if shape[-1]:
            x[..., r.randrange(shape[-1])] = 0.0
    elif how < 0.45:
        x += r.choice((-1e30, 1e4, 3e38, -100.0))
    return odd(r, x.to(dtype))


def probabilities(r, shape, dtype):
    """Normalised rows, sometimes of few tokens, with zeros of either sign."""
    x = (normal(r, *shape) * r.choice((0.1, 1.0, 5.0))).softmax(-1)
    if r.happens(0.4):
        gone = torch.rand(shape, generator=r.tensors) < r.choice((0.3, 0.9))
        x = torch.where(gone, r.choice((0.0, -0.0)), x)
    return odd(r, x.to(dtype))


def odd(r, x):
    """The same with a few values that no honest caller would pass, one time in five."""
    if x.numel() and r.happens(0.2):
        flat = x.view(-1)
        for _ in range(r.choice((1, 1, 3, 20))):
            flat[r.randrange(len(flat))] = torch.tensor(r.choice(ODD)).to(x.dtype)
    return x


def rows(r, kind, shape, dtype):
    return (logits if kind == "logits" else probabilities)(r, shape, dtype)


def ids(r, low, high, shape, dtype, wrong=0.05):
    """In [low, high), and with a small probability anything."""
    x = integers(r, low, high, shape, dtype)
    if x.numel() and r.happens(wrong * 4):
        flat = x.view(-1)
        for _ in range(1 + len(flat) // 8):
            bits = 31 if dtype == torch.int32 else 63
            value = r.choice((low - 1, high, high + 7, -2, 2**bits - 1, -(2**bits)))
            flat[r.randrange(len(flat))] = value
    return x


def laid_out(r, x):
    """The same values in another layout; the last dimension stays contiguous.

    A tensor in memory of its own ends where a sanitizer sees the next byte. The others are views:
    into a wider tensor, with the leading dimensions in another order, or with a stride of 0.
    """
    how = r.random()
    if how < 0.5 or x.dim() == 0:
        return x
    if how < 0.65:  # the end of a longer allocation
        start = r.choice((1, 2, 3, 5, 8))
        flat = x.new_zeros(start + x.numel())
        flat[start:] = x.reshape(-1)
        return flat[start:].view(x.shape)
    if how < 0.85:
        before, after = r.randrange(3), r.randrange(1, 4)
        wide = x.new_zeros([n + 1 for n in x.shape[:-1]] + [before + x.shape[-1] + after])
        view = wide[(*(slice(0, n) for n in x.shape[:-1]), slice(before, before + x.shape[-1]))]
        view.copy_(x)
        return view
    if how < 0.93 and x.dim() >= 3:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if x.dim() >= 2 and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    return x.repeat_interleave(2, 0)[::2] if x.dim() == 1 else x


def spoiled_tensor(r, x, may_enlarge=True):
    """A tensor that differs from x in one way: it may not fit, or fit with other contents."""
    if x.numel() > 2**24 or x.device.type != "cpu":
        return x
    choices = [
        lambda: x.to(r.choice(DTYPES)),
        lambda: x[None],
        x.flatten,
        lambda: x.new_zeros(()),
        lambda: x.new_zeros([0] * x.dim()),
        lambda: x.new_zeros([n + r.choice((-1, 1)) if n else n for n in x.shape]),
        lambda: x.transpose(0, -1) if x.dim() else x,
        lambda: torch.stack([x, x], -1)[..., 0],
        lambda: x.to("meta"),
        lambda: enlarged(r, x) if may_enlarge else x[:0] if x.dim() else x,
        lambda: x.clone().requires_grad_() if x.is_floating_point() else x,
    ]
    return r.choice(choices)()


def enlarged(r, x):
    """One dimension repeated with stride 0, in no memory."""
    if not x.dim() or not x.numel():
        return x
    shape, stride, i = list(x.shape), list(x.stride()), r.randrange(x.dim())
    shape[i], stride[i] = r.choice((2**50, 2**61)), 0
    try:
        return x.as_strided(shape, stride)
    except RuntimeError:
        return x


def number(r):
    return r.choice((*ODD, *SIZES, 0.5, 1.0, True, None, "x"))


def spoiled(r, value):
    """Something else in place of any argument."""
    if isinstance(value, torch.Tensor) and r.happens(0.85):
        return spoiled_tensor(r, value)
    if isinstance(value, list) and value and r.happens(0.8):
        i, item = r.randrange(len(value)), None
        if isinstance(value[i], torch.Tensor):  # zeroing the heads of a huge cache would never end
            item = spoiled_tensor(r, value[i], may_enlarge=False)
        return [*value[:i], spoiled(r, value[i]) if item is None else item, *value[i + 1 :]]
    if isinstance(value, tuple) and value and r.happens(0.9):
        i = r.randrange(len(value))
        changed = [*value[:i], spoiled(r, value[i]), *value[i + 1 :]]
        return type(value)(*changed) if hasattr(value, "_fields") else tuple(changed)
    if isinstance(value, int) and r.happens(0.8):
        return r.choice(SIZES)
    if isinstance(value, (float, int)) and r.happens(0.8):
        return number(r)
    return r.choice((None, 0, 1, -1, 2**63 - 1, 0.5, float("nan"), True, "", "token", [], (),
                     torch.zeros(3), [torch.zeros(2, 3)]))  # fmt: skip
