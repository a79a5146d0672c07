"""Cases of `pack_linear` and `packed_linear`."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from proofs.case import SHORT, Args, Case, spread
from specdec_kernels import reference

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


def numbers(shape: tuple[int, ...], g: Generator, kind: str) -> Tensor:
    """kind: "normal", or "faulty", where every 97th number is NaN, infinite, huge or subnormal."""
    x = torch.randn(shape, generator=g)
    if kind == "faulty":
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-42, -0.0])
        flat = x.view(-1)
        places = torch.arange(5, len(flat), 97)
        flat[places] = odd[torch.arange(len(places)) % len(odd)]
    return x


def pack_case(n: int, k: int, dtype: torch.dtype = f32) -> Case:
    """A case of `pack_linear`."""

    def build(g: Generator) -> Args:
        return (torch.randn(n, k, generator=g).to(dtype),)

    return Case("pack_linear", "-".join([f"N{n}", f"K{k}", SHORT[dtype]]), build)


def linear_case(
    lead: tuple[int, ...],
    n: int,
    k: int,
    dtype: torch.dtype = f32,
    *,
    bias: bool = True,
    kind: str = "normal",
    layout: str = "dense",
) -> Case:
    """A case of `packed_linear` on x [*lead, k]; `kind` is that of x."""

    def build(g: Generator) -> Args:
        x = spread(numbers((*lead, k), g, kind).to(dtype), layout)
        panels = reference.pack_linear(torch.randn(n, k, generator=g).to(dtype))
        return x, panels, k, n, torch.randn(n, generator=g).to(dtype) if bias else None

    words = ["x".join(map(str, lead)) or "vector", f"N{n}", f"K{k}", SHORT[dtype], kind, layout]
    return Case("packed_linear", "-".join([*words, *(["bias"] if bias else [])]), build)


CASES: tuple[Case, ...] = (
    pack_case(1, 1),
    pack_case(3, 17),
    pack_case(577, 33),
    pack_case(40, 259, bf16),
    pack_case(1, 1, bf16),
    pack_case(64, 64, f16),
    pack_case(17, 3, f16),
    linear_case((1,), 1, 1),
    linear_case((), 17, 3),
    linear_case((2, 3), 577, 33),
    linear_case((3, 1), 17, 577, bias=False, layout="sliced"),
    linear_case((4, 2), 33, 300, layout="transposed"),
    linear_case((5,), 40, 1025, kind="faulty"),
    linear_case((13,), 96, 576, bf16),
    linear_case((2, 2), 577, 33, bf16, layout="sliced"),
    linear_case((1,), 3, 1, bf16, bias=False),
    linear_case((7,), 19, 515, bf16, kind="faulty"),
    linear_case((2, 65), 31, 65, bf16),
    linear_case((13,), 96, 576, f16),
    linear_case((1,), 1, 17, f16, bias=False),
    linear_case((6,), 19, 515, f16, kind="faulty"),
    linear_case((64,), 130, 260, bias=False),
    linear_case((0,), 9, 5),
    linear_case((2, 0), 9, 5, bf16),
)
