"""Inputs for every op from a seed: one list for correctness, opcheck, compile and benchmarks.

`CASES` holds the inputs, `providers` the implementations that take them.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from specdec_kernels import reference
from specdec_kernels.reference import Law

Args = tuple[Any, ...]
Op = Callable[..., Any]

_TRITON = {"sample": "sample", "verify_chain": "chain"}
_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_OFF = (None, 1.0, None, 0, None, 1.0, None, 0.0)


@dataclass(frozen=True)
class Case:
    """Inputs of one op. `args` makes them anew, so that an op in place spoils nothing."""

    op: str
    id: str
    build: Callable[[Generator], Args]
    rows: int = 0  # vocabulary rows, and their entries
    vocabulary: int = 0

    @property
    def heavy(self) -> bool:
        """Too large for the races of the reference and for an interpreter."""
        return self.vocabulary >= 2**16

    def args(self, device: str | torch.device = "cpu") -> Args:
        """Arguments in the order of the op's schema."""
        return tuple(_to(a, device) for a in copy.deepcopy(_built(self)))

    def __str__(self) -> str:
        return self.id


@functools.cache
def _built(case: Case) -> Args:
    return case.build(torch.Generator().manual_seed(zlib.crc32(case.id.encode())))


def _to(value: Any, device: str | torch.device) -> Any:
    if isinstance(value, list):
        return [_to(v, device) for v in value]
    return value.to(device) if isinstance(value, Tensor) else value


def providers(op: str) -> dict[str, Op]:
    """Every implementation of an op on the CPU, with the op's own signature."""
    found: dict[str, Op] = {
        "reference": getattr(reference, op),
        "cpp": getattr(torch.ops.specdec_kernels, op).default,
    }
    name = f"specdec_kernels.triton.{_TRITON.get(op)}"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton")
    if op in _TRITON and interpreted and importlib.util.find_spec(name):
        found["triton"] = getattr(importlib.import_module(name), op)
    return found


def zipf_logits(n: int, v: int, generator: Generator, exponent: float = 1.5) -> Tensor:
    """[n, v] float32: Zipf's law over a random order of the tokens, with noise, as a model's."""
    ranks = torch.stack([torch.randperm(v, generator=generator) for _ in range(n)] or [_none(v)])
    logits = -exponent * torch.log1p(ranks.float())
    return (logits + 0.5 * torch.randn(logits.shape, generator=generator))[:n]


def _none(v: int) -> Tensor:
    return torch.zeros(v, dtype=torch.int64)


def noisy_draft(target: Tensor, acceptance: float, generator: Generator) -> Tensor:
    """Logits [n, v] whose `sum(min(P, Q))` against the target's is about `acceptance`."""
    noise = torch.randn(target.shape, generator=generator)
    some, some_noise = target[:4].double(), noise[:4].double()
    p = some.softmax(-1)
    low, high = 0.0, 16.0
    for _ in range(20 if len(target) else 0):
        sigma = (low + high) / 2
        overlap = torch.minimum(p, (some + sigma * some_noise).softmax(-1)).sum(-1).mean()
        low, high = (sigma, high) if overlap > acceptance else (low, sigma)
    return target + (low + high) / 2 * noise


def sliced(x: Tensor) -> Tensor:
    """The same values as a view into a wider, filled tensor: only the last stride is 1."""
    wide = torch.full((*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 5), 7, dtype=x.dtype)
    view = wide[(*(slice(0, n) for n in x.shape[:-1]), slice(2, 2 + x.shape[-1]))]
    view.copy_(x)
    return view


def _spaced(x: Tensor) -> Tensor:
    """A vector with stride 2."""
    return x.repeat_interleave(2)[::2]


def _seeds(n: int, g: Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=g)


def _positions(n: int, g: Generator) -> Tensor:
    return torch.randint(0, 2**34, (n,), generator=g)


def _filters(how: str, n: int, v: int, g: Generator) -> Args:
    """The eight sampling arguments: off, scalar, tensor (with greedy rows) or one filter alone."""
    k = max(1, v // 20)
    if how == "scalar":
        return (None, 0.8, None, k, None, 0.9, None, 0.02)
    if how == "tensor":
        temperature = 0.5 + torch.rand(n, generator=g)
        temperature[1::3] = 0.0
        return (
            *(temperature, 1.0),
            *(torch.randint(0, k + 1, (n,), generator=g, dtype=torch.int32), 0),
            *(1 - 0.4 * torch.rand(n, generator=g), 1.0),
            *(0.1 * torch.rand(n, generator=g), 0.0),
        )
    alone: dict[str, Args] = {
        "off": _OFF,
        "warm": (None, 1.7, *_OFF[2:]),
        "zero": (None, 0.0, *_OFF[2:]),
        "topk": (None, 1.0, None, k, *_OFF[4:]),
        "topp": (None, 1.0, None, 0, None, 0.8, None, 0.0),
        "minp": (*_OFF[:6], None, 0.05),
    }
    return alone[how]


def sample_case(
    r: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    *,
    filters: str = "off",
    stream: str = "draft",
    method: str = "cdf",
    layout: str = "dense",
) -> Case:
    """A case of `sample` with r rows of v logits."""

    def build(g: Generator) -> Args:
        logits = zipf_logits(r, v, g).to(dtype)
        seeds, positions = _seeds(r, g), _positions(r, g)
        if layout == "sliced":
            logits, seeds, positions = sliced(logits), _spaced(seeds), _spaced(positions)
        return (logits, *_filters(filters, r, v, g), seeds, positions, stream, method)

    words = [f"R{r}", f"V{v}", _SHORT[dtype], stream, method]
    words += [w for w in (filters, layout) if w not in ("off", "dense")]
    return Case("sample", "-".join(words), build, r, v)


def chain_case(
    b: int,
    gamma: int,
    v: int,
    dtype: torch.dtype = torch.float32,
    rule: str = "token",
    *,
    kind: str = "logits",
    draft: str = "full",
    filters: str = "off",
    layout: str = "dense",
    id_dtype: torch.dtype = torch.int64,
    acceptance: float = 0.8,
    limits: bool = False,
) -> Case:
    """A case of `verify_chain`.

    draft: "full" (a tensor), "none" (point mass), "sampled" (filtered, with its logsumexp and
        threshold, at temperatures of its own).
    layout: "dense", "sliced" (views into wider tensors) or "ragged" (with "ragged-padded", the
        draft stays [B, gamma, V]).
    limits: some sequences end by an end-of-sequence token or at `max_emit`.
    """

    def build(g: Generator) -> Args:
        rows = zipf_logits(b * (gamma + 1), v, g).view(b, gamma + 1, v)
        flat = noisy_draft(rows[:, :gamma].reshape(-1, v), acceptance, g)
        d = flat.view(b, gamma, v).to(dtype)
        target = rows.to(dtype)
        q_temperature = 1.0
        q = d.double().softmax(-1)
        logsumexp = threshold = temperatures = ids = columns = None
        if draft == "sampled":
            temperatures = 0.5 + torch.rand(b, generator=g)
            laws = [
                Law(row.double(), float(temperatures[i]), max(1, v // 4), 0.95, 0.0)
                for i in range(b)
                for row in d[i]
            ]
            q = _stack([law.probs for law in laws], v).view(b, gamma, v)
            logsumexp = _vector([law.logsumexp for law in laws], torch.float64).view(b, gamma)
            threshold = _vector([law.threshold for law in laws], torch.float32).view(b, gamma)
        if draft == "none" or rule != "token":
            tokens = target[:, :gamma].float().argmax(-1)
            wrong = torch.rand(b, gamma, generator=g) > acceptance
            tokens = torch.where(wrong, torch.randint(0, v, (b, gamma), generator=g), tokens)
        else:
            flat_q = q.reshape(-1, v).float()
            drawn = torch.multinomial(flat_q, 1, generator=g) if len(flat_q) else flat_q.long()
            tokens = drawn.view(b, gamma) if len(flat_q) else torch.zeros(b, gamma).long()
        if b >= 3 and gamma >= 2:
            tokens[2, gamma // 2 :] = -1
        tokens = tokens.to(id_dtype)
        if kind == "probs":
            target, d = target.float().softmax(-1).to(dtype), d.float().softmax(-1).to(dtype)
        seeds, positions = _seeds(b, g), _positions(b, g)
        cu_rows = None
        if layout.startswith("ragged"):
            lengths = torch.randint(0, gamma + 1, (b,), generator=g)
            lengths[:1] = gamma
            used = torch.arange(gamma + 1) <= lengths[:, None]
            target = target[used]
            if layout == "ragged":
                d = d[used[:, 1:]]
            cu_rows = torch.cat([torch.zeros(1), (lengths + 1).cumsum(0)]).to(torch.int32)
        if layout == "sliced":
            target, d, tokens = sliced(target), sliced(d), sliced(tokens)
            seeds, positions = _spaced(seeds), _spaced(positions)
        given = None if draft == "none" else d
        rates = torch.rand(gamma, generator=g) if rule == "synthetic" else None
        lenience = 0.6 if rule == "lenient" else 1.0
        eos_ids = max_emit = None
        if limits:
            eos_ids = tokens[-1:, :1].reshape(-1).long().clamp(min=0)
            max_emit = torch.randint(0, gamma + 2, (b,), generator=g)
        return (
            *(target, tokens, given, ids, columns, logsumexp, threshold, temperatures),
            *(q_temperature, kind, rule, *_filters(filters, b, v, g), seeds, positions, cu_rows),
            *(None, lenience, 0.09, 0.3, rates, eos_ids, max_emit, True, True),
        )

    words = [f"B{b}", f"g{gamma}", f"V{v}", _SHORT[dtype], rule, kind, draft, filters, layout]
    hidden = ("logits", "full", "off", "dense")
    words = words[:5] + [w for w in words[5:] if w not in hidden]
    words += ["i32"] if id_dtype == torch.int32 else []
    words += ["limits"] if limits else []
    return Case("verify_chain", "-".join(words), build, b * (gamma + 1), v)


def _stack(rows: list[Tensor], v: int) -> Tensor:
    return torch.stack(rows) if rows else torch.empty(0, v)


def _vector(values: list[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _caches(
    layers: int, b: int, s: int, dtype: torch.dtype, layout: str, g: Generator
) -> list[Tensor]:
    heads = [2 + i % 2 for i in range(layers)]
    made = [torch.randint(-100, 100, (b, h, s + h, 12), generator=g).to(dtype) for h in heads]
    return [sliced(c) for c in made] if layout == "sliced" else made


def append_case(
    b: int, s: int, n: int, dtype: torch.dtype = torch.float32, layout: str = "dense"
) -> Case:
    """A case of `kv_append_`: four caches, some slots outside [0, S)."""

    def build(g: Generator) -> Args:
        caches = _caches(4, b, s, dtype, layout, g)
        entries = [
            torch.randint(-100, 100, (b, c.shape[1], n, 12), generator=g).to(dtype) for c in caches
        ]
        entries = [sliced(e) for e in entries] if layout == "sliced" else entries
        return caches, entries, torch.randint(-n, s + 1, (b,), generator=g)

    name = f"B{b}-S{s}-n{n}-{str(dtype).removeprefix('torch.')}-{layout}"
    return Case("kv_append_", name, build)


def truncate_case(
    b: int, s: int, dtype: torch.dtype = torch.float32, *, fill: bool, layout: str = "dense"
) -> Case:
    """A case of `kv_truncate_`: new lengths below, at and above the old ones."""

    def build(g: Generator) -> Args:
        lengths = torch.randint(0, s + 1, (b,), generator=g)
        new = lengths + torch.randint(-4, 2, (b,), generator=g)
        return _caches(3, b, s, dtype, layout, g), lengths, new, fill

    name = f"B{b}-S{s}-{str(dtype).removeprefix('torch.')}-{'fill' if fill else 'keep'}-{layout}"
    return Case("kv_truncate_", name, build)


f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16

CASES: tuple[Case, ...] = (
    sample_case(5, 1031),
    sample_case(5, 1031, bf16, layout="sliced"),
    sample_case(4, 517, f16, filters="scalar"),
    sample_case(7, 517, filters="tensor"),
    sample_case(6, 1031, bf16, filters="tensor", stream="residual"),
    sample_case(3, 131, method="race"),
    sample_case(4, 131, bf16, stream="shared", method="race", layout="sliced"),
    sample_case(5, 131, filters="tensor", stream="shared", method="race"),
    sample_case(3, 1031, filters="topk"),
    sample_case(3, 1031, filters="topp"),
    sample_case(3, 1031, f16, filters="minp"),
    sample_case(3, 1031, filters="warm"),
    sample_case(3, 1031, filters="zero"),
    sample_case(0, 17),
    sample_case(3, 1),
    sample_case(3, 1, filters="scalar", stream="shared", method="race"),
    sample_case(2, 4097, bf16, filters="scalar"),
    sample_case(1, 131073, bf16),
    sample_case(2, 151936, filters="scalar"),
    chain_case(3, 5, 1031),
    chain_case(3, 5, 1031, bf16),
    chain_case(3, 5, 1031, f16, layout="sliced"),
    chain_case(4, 3, 517, kind="probs"),
    chain_case(4, 3, 517, bf16, kind="probs", layout="ragged"),
    chain_case(4, 3, 517, kind="probs", filters="scalar"),
    chain_case(4, 3, 517, kind="probs", draft="none"),
    chain_case(5, 4, 517, draft="none", id_dtype=torch.int32),
    chain_case(5, 4, 517, draft="none", filters="tensor", layout="ragged"),
    chain_case(4, 3, 517, draft="sampled"),
    chain_case(4, 3, 517, bf16, draft="sampled", filters="scalar"),
    chain_case(5, 3, 517, draft="sampled", filters="tensor", layout="ragged"),
    chain_case(5, 3, 517, f16, draft="sampled", layout="ragged-padded"),
    chain_case(5, 4, 517, layout="ragged", id_dtype=torch.int32),
    chain_case(7, 4, 517, filters="tensor"),
    chain_case(3, 4, 517, filters="warm"),
    chain_case(3, 4, 517, filters="zero"),
    chain_case(4, 4, 517, rule="greedy"),
    chain_case(4, 4, 517, bf16, rule="greedy", draft="none", layout="ragged"),
    chain_case(3, 4, 517, kind="probs", rule="greedy", id_dtype=torch.int32),
    chain_case(3, 4, 131, rule="match", draft="none"),
    chain_case(5, 3, 131, bf16, rule="match", draft="none", filters="tensor"),
    chain_case(4, 3, 131, rule="match", layout="ragged"),
    chain_case(3, 2, 131, kind="probs", rule="match", draft="none"),
    chain_case(0, 4, 17),
    chain_case(3, 0, 517),
    chain_case(3, 0, 517, draft="none", filters="scalar", layout="ragged"),
    chain_case(4, 3, 1),
    chain_case(4, 3, 1, rule="match", draft="none"),
    chain_case(2, 2, 4097, bf16, filters="scalar"),
    chain_case(2, 2, 67),
    chain_case(1, 2, 67, f16, draft="sampled", filters="scalar"),
    chain_case(1, 2, 67, kind="probs", filters="topp"),
    chain_case(2, 2, 67, bf16, kind="probs", layout="sliced", id_dtype=torch.int32),
    chain_case(2, 1, 67, draft="none", filters="tensor", layout="ragged"),
    chain_case(2, 2, 67, rule="greedy", draft="none", layout="ragged-padded"),
    chain_case(2, 2, 67, rule="match", draft="none", filters="warm"),
    chain_case(1, 1, 4097, draft="none", filters="topk"),
    chain_case(1, 3, 131073, bf16),
    chain_case(2, 4, 151936, filters="scalar", acceptance=0.7),
    append_case(3, 9, 4),
    append_case(2, 7, 3, bf16, "sliced"),
    append_case(2, 5, 1, torch.int8),
    append_case(0, 5, 2),
    append_case(3, 5, 0),
    truncate_case(4, 9, fill=False),
    truncate_case(4, 9, fill=True),
    truncate_case(3, 6, bf16, fill=True, layout="sliced"),
    truncate_case(3, 6, torch.int8, fill=True),
    truncate_case(0, 6, fill=True),
)


def cases(op: str, *, heavy: bool = False, rows: int | None = None) -> list[Case]:
    """The cases of one op; the heavy ones only when asked for, and at most so many rows."""
    return [
        c
        for c in CASES
        if c.op == op and (heavy or not c.heavy) and (rows is None or c.rows <= rows)
    ]
