"""Cases of the small tree ops for `testing`."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from specdec_kernels._cases import Args, Case, sliced

i32, i64 = torch.int32, torch.int64


def random_parents(b: int, n: int, g: Generator, shape: str = "random") -> Tensor:
    """[b, n] int64 parents: "random", "chain", "wide" (all below the root) or "faulty" (with
    parents out of range)."""
    node = torch.arange(n)
    if shape == "chain":
        return (node - 1).expand(b, n).clone()
    if shape == "wide":
        return torch.full((b, n), -1)
    parents = (torch.rand(b, n, generator=g) * (node + 1)).long() - 1
    if shape == "faulty":
        bad = torch.rand(b, n, generator=g) < 0.3
        parents[bad] = torch.randint(-(2**31), 2**31, (b, n), generator=g)[bad]
    return parents


def _spread(x: Tensor, layout: str) -> Tensor:
    """The same values; "sliced" in a wider tensor, "transposed" with the last stride not 1."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return sliced(x) if layout == "sliced" else x


def attention_case(
    b: int,
    n: int,
    slots: int,
    dtype: torch.dtype = i64,
    *,
    shape: str = "random",
    window: int = 0,
    layout: str = "dense",
) -> Case:
    """A case of `tree_attention`; some trees reach beyond the last slot."""

    def build(g: Generator) -> Args:
        parents = random_parents(b, n, g, shape).to(dtype)
        lengths = torch.randint(0, max(slots - n // 2, 1), (b,), generator=g)
        return _spread(parents, layout), lengths, slots, window

    words = [f"B{b}", f"N{n}", f"S{slots}", str(dtype)[6:], shape, f"w{window}", layout]
    return Case("tree_attention", "-".join(words), build)


CASES: tuple[Case, ...] = (
    attention_case(3, 7, 20),
    attention_case(2, 7, 20, i32, window=4),
    attention_case(3, 9, 31, shape="faulty", window=1),
    attention_case(2, 6, 11, i32, shape="chain", window=3, layout="transposed"),
    attention_case(2, 6, 40, shape="wide", layout="sliced"),
    attention_case(0, 4, 9),
    attention_case(2, 0, 5),
    attention_case(1, 1, 0),
    attention_case(2, 300, 517, i32),
)
