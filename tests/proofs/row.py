"""Cases of `sample`."""

from __future__ import annotations

import torch
from torch import Generator

from proofs.case import (
    SHORT,
    Args,
    Case,
    any_positions,
    any_seeds,
    packed_bits,
    sampling,
    sliced,
    some_allowed,
    spaced,
    zipf_logits,
)
from specdec_kernels.arguments.rules import METHODS, NOISES

bf16, f16 = torch.bfloat16, torch.float16


def sample_case(
    r,
    v,
    dtype=torch.float32,
    *,
    filters="off",
    noise="draft",
    method="cdf",
    layout="dense",
    mask=False,
) -> Case:
    """A case of `sample` with r rows of v logits."""

    def build(g: Generator) -> Args:
        logits = zipf_logits(r, v, g).to(dtype)
        seeds, positions = any_seeds(r, g), any_positions(r, g)
        bitmask = None
        if mask:
            allowed = some_allowed((r, 2, v), torch.empty(r, 0, dtype=torch.int64), g)[:, 0]
            logits, bitmask = logits.where(allowed, torch.nan), packed_bits(allowed)
        if layout == "sliced":
            logits, seeds, positions = sliced(logits), spaced(seeds), spaced(positions)
            bitmask = None if bitmask is None else sliced(bitmask)
        return (
            logits,
            *sampling(filters, r, v, g),
            bitmask,
            seeds,
            positions,
            NOISES.index(noise),
            METHODS.index(method),
        )

    words = [f"R{r}", f"V{v}", SHORT[dtype], noise, method]
    words += [w for w in (filters, layout) if w not in ("off", "dense")] + ["mask"] * mask
    return Case("sample", "-".join(words), build, r, v)


CASES: tuple[Case, ...] = (
    sample_case(5, 1031), sample_case(5, 1031, bf16, layout="sliced"),
    sample_case(4, 517, f16, filters="scalar"), sample_case(7, 517, filters="tensor"),
    sample_case(6, 1031, bf16, filters="tensor", noise="residual"),
    sample_case(3, 131, method="gumbel"),
    sample_case(4, 131, bf16, noise="shared", method="gumbel", layout="sliced"),
    sample_case(5, 131, filters="tensor", noise="shared", method="gumbel"),
    sample_case(3, 1031, filters="topk"), sample_case(3, 1031, filters="topp"),
    sample_case(3, 1031, f16, filters="minp"), sample_case(3, 1031, filters="warm"),
    sample_case(3, 1031, filters="zero"), sample_case(0, 17), sample_case(3, 1),
    sample_case(3, 1, filters="scalar", noise="shared", method="gumbel"),
    sample_case(2, 4097, bf16, filters="scalar"), sample_case(1, 131073, bf16),
    sample_case(2, 151936, filters="scalar"), sample_case(5, 1031, mask=True),
    sample_case(5, 1031, bf16, mask=True, filters="tensor", layout="sliced"),
    sample_case(4, 131, f16, mask=True, noise="shared", method="gumbel"),
    sample_case(3, 67, mask=True, filters="zero"), sample_case(2, 131073, bf16, mask=True),
)  # fmt: skip
