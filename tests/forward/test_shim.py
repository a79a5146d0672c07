"""The kernels for AVX-512, its products of bfloat16 and AMX, compiled over a shim of their
instructions, so that their logic is tested on any machine. A machine that has them runs
the other tests of this folder with them."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from pathlib import Path

import proofs
import pytest
import torch
from proofs import assert_bits, assert_close
from support.shared_build import built_once

from specdec_kernels import reference
from specdec_kernels.arguments import weight_blocks
from specdec_kernels.reference.forward import decoder_layer

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MACROS = ["__AVX2__", "__AVX512DQ__", "__AVX512BF16__", "__AMX_BF16__"]
SETS = {"avx512": MACROS[:2], "avx512_bf16": MACROS[:3], "amx_bf16": MACROS}
COMPILER = os.environ.get("CXX", "g++")

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(
        not CSRC.is_dir() or not shutil.which(COMPILER), reason="no sources, or no compiler"
    ),
]
by_set = pytest.mark.parametrize("which", SETS)
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@functools.cache
def kernels(which, file):
    def build(path):
        shim = ROOT / "tests/forward/shim"
        subprocess.run(
            [COMPILER, "-shared", "-fPIC", "-std=c++17", "-O0", "-w",
             *("-fsanitize=undefined", "-fno-sanitize-recover=all"),
             *(f"-D{name}" for name in SETS[which]), "-DSPECDEC_ISA=shim",
             *(f"-I{folder}" for folder in (shim, CSRC, CSRC / "include")),
             str(shim / f"{file}.cpp"), "-o", str(path)],
            check=True,
        )  # fmt: skip

    return ctypes.CDLL(str(built_once(f"{file}_{which}.so", build)))


@pytest.fixture(autouse=True)
def wide_panels(monkeypatch):
    """The reference packs for AVX-512."""
    monkeypatch.setattr(weight_blocks, "cpu_capability", lambda: "avx512")


def run(which, x, panels, k, n, bias, ranges=None, format=0):
    """y [M, N]; `ranges` are the panels of each call. format: the number of that of blocks."""
    y = torch.full((len(x), n), torch.nan).to(x.dtype)
    given = [ctypes.c_void_p(t.data_ptr() if t is not None else None) for t in (x, panels, bias, y)]
    numbers = [ctypes.c_int64(i) for i in (len(x), k, n)]
    for part in ranges or [(0, len(panels))]:
        kernels(which, "linear").packed_linear(
            *given, DTYPES.index(x.dtype), format, *numbers, *map(ctypes.c_int64, part)
        )
    return y


def drawn(m, n, k, dtype):
    x, weight = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    return x, reference.pack_linear(weight), k, n, torch.randn(n).to(dtype)


@by_set
@by_dtype
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 17), (70, 95), (64, 530)])
def test_agrees_with_the_specification(which, dtype, n, k):
    for m in (1, 5, 13, 17, 64):
        args = drawn(m, n, k, dtype)
        y, want = run(which, *args), reference.packed_linear(*args)
        ulp = max(torch.finfo(dtype).eps, 2.0**-18)
        assert_close("y", y, want, atol=ulp * (k**0.5 + 1), rtol=ulp)


@by_set
@by_dtype
@pytest.mark.parametrize(("n", "k"), [(33, 17), (70, 301), (200, 545)])
def test_a_row_has_the_same_bits_in_every_call_of_the_shim(which, dtype, n, k):
    x, *weight = drawn(64, n, k, dtype)
    alone = torch.cat([run(which, row[None], *weight) for row in x])
    order = torch.randperm(64)
    for m in (2, 3, 11, 12, 13, 15, 16, 17, 25, 31, 33, 48, 64):
        assert_close("y", run(which, x[order[:m]], *weight), alone[order[:m]])
    for filler in (torch.nan, torch.inf, 1e30):
        rows = torch.full((14, k), filler).to(dtype).index_copy(0, torch.tensor([9]), x[:1])
        assert_close("y", run(which, rows, *weight)[9], alone[0])
    for first in range(1, panels := len(weight[0])):
        parts = [(first, panels), (0, first)]
        assert_close("y", run(which, x[:33], *weight, ranges=parts), alone[:33])


@by_set
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
def test_blocks_give_the_bits_of_their_numbers_over_the_shim(which, dtype):
    for number, name in enumerate(weight_blocks.BLOCK_FORMATS, start=1):
        blocks = proofs.forward.blocks_of(
            33, 512, name, torch.Generator().manual_seed(number), 0.01
        )
        panels, x = reference.pack_blocks(blocks, number), torch.randn(17, 512).to(dtype)
        floats = reference.pack_linear(reference.unpack_blocks(panels, 512, 33).to(dtype))
        for m in (1, 2, 17):
            want = run(which, x[:m], floats, 512, 33, None)
            assert_bits(run(which, x[:m], panels, 512, 33, None, format=number), want)


def attended(args, ranges=None):
    """The output [B, n, H, D_v] of dense tensors; `ranges` are the rows of each call."""
    query, keys, values, mask, scale, soft_cap = args
    (b, h, n, d), (h_kv, s) = query.shape, keys.shape[1:3]
    out = torch.full((b, n, h, values.shape[3]), torch.nan).to(query.dtype)
    tensors = [query.contiguous(), keys.contiguous(), values.contiguous(), mask, out]
    given = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in tensors]
    sizes = (ctypes.c_int64 * 7)(b, h, h_kv, n, s, d, values.shape[3])
    numbers = [ctypes.c_float(d**-0.5 if scale is None else scale), ctypes.c_float(soft_cap or 0)]
    for part in ranges or [(0, b * h * n)]:
        kernels("avx512", "attention").cached_attention(
            *given, DTYPES.index(query.dtype), sizes, *numbers, *map(ctypes.c_int64, part)
        )
    return out


# tests/forward/test_attention.py compares the faulty ones.
ATTENTION = [case for case in proofs.cases("cached_attention") if "faulty" not in case.id]


@pytest.mark.parametrize("case", ATTENTION, ids=str)
def test_attention_agrees_with_the_specification(case):
    args = case.args()
    want = reference.cached_attention(*(a.double() if i < 3 else a for i, a in enumerate(args)))
    out = attended(args)
    ulp = 2e-6 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps
    assert_close("out", out.double(), want, atol=ulp, rtol=ulp)
    rows = range(out.shape[0] * out.shape[1] * out.shape[2])
    assert_close("out", attended(args, [(i, i + 1) for i in reversed(rows)]), out)


def by_kernel(name, y, *rest):
    """What a kernel of a decoder layer makes of y, whose memory goes on behind its end."""
    longer = torch.full((y.numel() + 20,), 77.0).to(y.dtype)
    longer[: y.numel()] = y.flatten()
    given = [ctypes.c_void_p(x.data_ptr()) if torch.is_tensor(x) else x for x in rest]
    out = ctypes.c_void_p(longer.data_ptr())
    given.insert(2 if name == "normalise" else 0, out)
    getattr(kernels("avx512", "decoder_layer"), name)(DTYPES.index(y.dtype), *given)
    assert (longer[y.numel() :] == 77).all()
    return longer[: y.numel()].view(y.shape)


@by_dtype
@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 31, 33, 64, 100, 577])
def test_a_decoder_layer_agrees_with_the_specification(dtype, n):
    x, z = (torch.randn(n).to(dtype) for _ in range(2))
    eps, size = torch.finfo(dtype).eps, ctypes.c_int64(n)
    y = by_kernel("normalise", torch.zeros_like(x), x, z, size, ctypes.c_float(0.25))
    want = decoder_layer.rms_norm(x, z, 0.25)
    assert_close("normalise", y, want, rtol=8 * eps if dtype == DTYPES[0] else eps)
    in_place = by_kernel("gate", x, z, size)
    want = torch.nn.functional.silu(x.double()).to(dtype) * z
    assert_close("gate", in_place, want, rtol=8 * eps if dtype == DTYPES[0] else eps)
    assert_close("add", by_kernel("add", x, z, size), x + z)


@by_dtype
@pytest.mark.parametrize("size", [2, 10, 32, 34, 80])
def test_heads_are_rotated_as_the_specification_says(dtype, size):
    x, cos, sin = torch.randn(3, size), torch.randn(size), torch.randn(size)
    x, cos, sin = (y.to(dtype) for y in (x, cos, sin))
    y = by_kernel("rotate", x, *map(ctypes.c_int64, x.shape), cos, sin)
    want = decoder_layer._rotated(x[None, None], cos[None, None], sin[None, None])[0, 0]
    assert_close("rotate", y, want, atol=4e-7 if dtype == DTYPES[0] else 0)
