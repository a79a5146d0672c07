"""`Case`, and what builds its inputs: rows like those of a model, memory layouts, parameters.

A case is one set of inputs of one op. Its id is also the seed of the inputs.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

Args = tuple[Any, ...]

SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
_OFF = (None, 1.0, None, 0, None, 1.0, None, 0.0)


@dataclass(frozen=True)
class Case:
    """One set of inputs of one op; `args` copies them, so that an op may write in place."""

    op: str
    id: str
    build: Callable[[Generator], Args]
    rows: int = 0  # number of vocabulary rows
    vocabulary: int = 0  # entries of each

    @property
    def heavy(self) -> bool:
        """Too large for an interpreter, and for the reference if it needs noise of all tokens."""
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


def zipf_logits(n: int, v: int, generator: Generator, exponent: float = 1.5) -> Tensor:
    """[n, v] float32: Zipf-distributed over a random order of the tokens, with Gaussian noise."""
    none = torch.zeros(v, dtype=torch.int64)
    ranks = torch.stack([torch.randperm(v, generator=generator) for _ in range(n)] or [none])
    logits = -exponent * torch.log1p(ranks.float())
    return (logits + 0.5 * torch.randn(logits.shape, generator=generator))[:n]


def noisy_draft(target: Tensor, acceptance: float, generator: Generator) -> Tensor:
    """Logits [n, v] that rule token accepts with probability `acceptance`, roughly."""
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
    """The same values as a view into a wider tensor filled with 7; only the last stride is 1."""
    wide = torch.full((*(n + 1 for n in x.shape[:-1]), x.shape[-1] + 5), 7, dtype=x.dtype)
    view = wide[(*(slice(0, n) for n in x.shape[:-1]), slice(2, 2 + x.shape[-1]))]
    view.copy_(x)
    return view


def spaced(x: Tensor) -> Tensor:
    """The same vector with stride 2."""
    return x.repeat_interleave(2)[::2]


def spread(x: Tensor, layout: str) -> Tensor:
    """The same values: "sliced" out of a wider tensor, or "transposed" (last stride not 1)."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return sliced(x) if layout == "sliced" else x


def any_seeds(n: int, g: Generator) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=g)


def any_positions(n: int, g: Generator) -> Tensor:
    return torch.randint(0, 2**34, (n,), generator=g)


def sampling(how: str, n: int, v: int, g: Generator) -> Args:
    """The eight sampling arguments of an op.

    how: "off", "scalar", "tensor" (every third sequence greedy), "warm" and "zero" (temperature
        alone), "topk", "topp" or "minp" (one filter alone).
    """
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


def ending_limits(tokens: Tensor, most: int, g: Generator) -> tuple[Tensor, Tensor]:
    """(eos_token_ids, max_new_tokens) that end some sequences; every other one has no maximum."""
    never_emitted = torch.tensor([-7])
    eos_token_ids = torch.cat([tokens[-1:, :1].reshape(-1).long().clamp(min=0), never_emitted])
    max_new_tokens = torch.randint(0, most, tokens.shape[:1], generator=g)
    max_new_tokens[1::2] = 2**40
    return eos_token_ids, max_new_tokens


def packed_bits(allowed: Tensor) -> Tensor:
    """[.., ceil(V/32)] int32 of [.., V] bool; bits beyond the vocabulary are set."""
    v = allowed.shape[-1]
    bits = torch.nn.functional.pad(allowed.long(), (0, -v % 32), value=1)
    words = (bits.unflatten(-1, (-1, 32)) << torch.arange(32)).sum(-1)
    return words.to(torch.int32)


def some_allowed(shape: tuple[int, ...], tokens: Tensor, g: Generator) -> Tensor:
    """[.., V] bool for rows of which the first follow `tokens`, most of which are allowed.

    Whole tiles are not allowed in some rows, and nothing is in the last but one row of the second
    sequence.
    """
    allowed = torch.rand(shape, generator=g) < torch.rand(shape[:-1], generator=g)[..., None]
    allowed[..., : shape[-1] // 2] &= torch.rand(shape[:-1], generator=g)[..., None] < 0.7
    kept = torch.rand(tokens.shape, generator=g) < 0.9
    inside = (tokens >= 0) & (tokens < shape[-1]) & kept
    b, i = inside.nonzero(as_tuple=True)
    allowed[b, i, tokens[b, i].long()] = True
    allowed[1:2, -2:-1] = False
    return allowed


def ragged(b: int, n: int, g: Generator) -> tuple[Tensor, Tensor]:
    """([B, n+1] bool, the rows that sequences of random lengths have; target_indptr)."""
    lengths = torch.randint(0, n + 1, (b,), generator=g)
    lengths[:1] = n
    target_indptr = torch.cat([torch.zeros(1), (lengths + 1).cumsum(0)]).to(torch.int32)
    return torch.arange(n + 1) <= lengths[:, None], target_indptr


def verify_id(sizes: list[str], words: list[str], **switches: bool) -> str:
    """The id of a case of `verify_chain` or `verify_tree`; defaults are left out."""
    defaults = ("logits", "full", "each", "off", "dense")
    words = [w for w in words if w not in defaults]
    return "-".join([*sizes, *words, *(w for w, on in switches.items() if on)])
