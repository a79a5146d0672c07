"""What is timed: a point of the grid, its inputs, and the bytes that its answer needs."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench import eager
from specdec_kernels.testing import noisy_draft, zipf_logits

# Name -> temperature, top-k, top-p of the target.
FILTERS = {
    "off": (1.0, 0, 1.0),
    "t.8": (0.8, 0, 1.0),
    "t.8-p.9": (0.8, 0, 0.9),
    "t.8-k50-p.9": (0.8, 50, 0.9),
}
STARTS = ("logits", "sampled", "probs")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

POOL = 24  # distinct rows; a larger batch repeats them at addresses of their own
# Eager filters keep about so many float32 copies of every row.
COPIES = 8
TURNS = 32  # drafts and seeds that calls go through, so that acceptance is averaged


@dataclass(frozen=True)
class Point:
    """One place of the grid.

    start: "logits" (raw logits of target and draft), "sampled" (the draft's logsumexp is there
        from its sampling; a peer without use for it starts from the logits) or "probs" (float32
        probabilities, filters applied).
    per_sequence: temperature and filters are tensors [B], not numbers.
    """

    batch: int = 8
    gamma: int = 5
    vocabulary: int = 49152
    dtype: str = "float32"
    filters: str = "off"
    acceptance: float = 0.8
    start: str = "logits"
    per_sequence: bool = False

    @property
    def id(self) -> str:
        words = [f"B{self.batch}", f"g{self.gamma}", f"V{self.vocabulary}", SHORT[self.dtype]]
        words += [self.filters, f"a{self.acceptance:g}", self.start]
        return "-".join([*words, *(["tensors"] if self.per_sequence else [])])

    @property
    def input_bytes(self) -> int:
        return self.batch * (2 * self.gamma + 1) * self.vocabulary * self.element

    @property
    def needed_bytes(self) -> int:
        rows = self.batch * (2 * self.gamma + 1)
        return self.input_bytes + COPIES * rows * self.vocabulary * 4

    @property
    def element(self) -> int:
        return 4 if self.start == "probs" else DTYPES[self.dtype].itemsize

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, **asdict(self)}


class Turn(NamedTuple):
    """What changes from call to call: tokens [B, gamma] drawn from the draft, seeds [B]; int64."""

    tokens: Tensor
    seeds: Tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors of a point: target [B, gamma+1, V] and draft [B, gamma, V]."""

    point: Point
    target: Tensor
    draft: Tensor
    turns: list[Turn]
    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    positions: Tensor  # [B] int64
    logsumexp: Tensor | None = None  # [B, gamma] float64, of the draft at its temperature

    @property
    def filtering(self) -> bool:
        return self.point.start != "probs" and FILTERS[self.point.filters][1:] != (0, 1.0)


@functools.lru_cache(maxsize=4)
def pool(v: int, acceptance: float) -> tuple[Tensor, Tensor]:
    """Logits [POOL, v] of target and draft."""
    g = torch.Generator().manual_seed(0)
    target = zipf_logits(POOL, v, g)
    return target, noisy_draft(target, acceptance, g)


def parameters(point: Any, device: str) -> dict[str, Any]:
    """Temperature, top-k and top-p of a point; off where its probabilities have them in."""
    values = FILTERS["off" if point.start == "probs" else point.filters]
    names, dtypes = ("temperature", "top_k", "top_p"), (torch.float32, torch.int32, torch.float32)
    found: dict[str, Any] = dict(zip(names, values, strict=True))
    if point.per_sequence and point.start != "probs":
        for name, dtype, off in zip(names, dtypes, (None, 0, 1.0), strict=True):
            if found[name] != off:
                found[name] = torch.full((point.batch,), found[name], dtype=dtype, device=device)
    return found


def build(point: Point, device: str = "cpu") -> Inputs:
    """The point's tensors; the same values on every device."""
    b, gamma, v = point.batch, point.gamma, point.vocabulary
    temperature, top_k, top_p = FILTERS[point.filters]
    target, draft = (rows.to(DTYPES[point.dtype]) for rows in pool(v, point.acceptance))
    q = eager.filtered(draft, temperature, 0, 1.0)
    pick = (torch.arange(b * (gamma + 1)) % POOL).view(b, gamma + 1)
    g = torch.Generator().manual_seed(1)
    draws = torch.multinomial(q, max(TURNS * b * gamma, 1), replacement=True, generator=g)
    nth = torch.arange(TURNS * b * gamma).view(TURNS, b, gamma)
    turns = [
        Turn(draws[pick[:, :gamma], at].to(device), (torch.arange(b) + b * i).to(device))
        for i, at in enumerate(nth)
    ]
    logsumexp = None
    if point.start == "probs":
        target, draft = eager.filtered(target, temperature, top_k, top_p), q
    elif point.start == "sampled":
        logsumexp = (draft.double() / temperature).logsumexp(-1)[pick[:, :gamma]].to(device)

    pick = pick.to(device)
    return Inputs(
        point=point,
        target=target.to(device)[pick],
        draft=draft.to(device)[pick[:, :gamma]],
        turns=turns,
        **parameters(point, device),
        positions=torch.full((b,), 100, device=device),
        logsumexp=logsumexp,
    )


def floor_bytes(point: Point, accepted: Tensor) -> float:
    """Bytes an exact rule cannot do without, mean over calls: every row it visits, once.

    accepted: [calls, B] drafts accepted. Raw logits need the whole target row and the whole draft
    row of each draft that is judged; with the draft's logsumexp saved, the draft row only where
    the residual is drawn; probabilities, two entries a draft and then the one residual.
    """
    n = accepted.double().reshape(-1, point.batch)
    rejected = (n < point.gamma).double()
    row = point.vocabulary * point.element
    draft_rows = (n + 1).clamp(max=point.gamma)
    by_start = {
        "logits": row * (n + 1 + draft_rows),
        "sampled": row * (n + 1 + rejected),
        "probs": row * (1 + rejected) + 2 * point.element * draft_rows,
    }
    return float(by_start[point.start].sum(-1).mean())


def touched_bytes(point: Point, accepted: Tensor) -> float:
    """Bytes our kernels read without filters: the residual's rows are read again for the draw.

    Passes that look for a filter's threshold are not in it: they find the row in a cache.
    """
    rejected = (accepted.reshape(-1, point.batch) < point.gamma).double().sum(-1).mean()
    again = {"logits": 2, "sampled": 1, "probs": 0}[point.start]
    return floor_bytes(point, accepted) + float(rejected) * again * point.vocabulary * point.element


BASE = {
    "cpu": Point(),
    "cuda": Point(32, 5, 151936, "bfloat16", "t.8", per_sequence=True),
}
_CUDA_PROBS = Point(1, 5, 128256, "float32", "t.8", start="probs")
# The points that issue 3 sets figures for come first: a budget that runs out costs others.
SHOWS = {
    "cpu": (
        Point(filters="t.8"),
        Point(filters="t.8-k50-p.9"),
        Point(batch=1, vocabulary=128256),
    ),
    "cuda": (
        BASE["cuda"],
        replace(BASE["cuda"], filters="t.8-k50-p.9"),
        replace(BASE["cuda"], batch=1),
        *(replace(_CUDA_PROBS, batch=b) for b in (1, 16, 256)),
    ),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "batch": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    "vocabulary": (32000, 49152, 128256, 151936, 262144),
    "gamma": (1, 2, 3, 5, 8, 16),
    "dtype": tuple(DTYPES),
    "filters": tuple(FILTERS),
    "acceptance": (0.5, 0.7, 0.8, 0.9, 0.95),
    "start": STARTS,
}
_QUICK: dict[str, dict[str, tuple[Any, ...]]] = {
    "cpu": {
        "batch": (1, 8),
        "vocabulary": (32000, 49152),
        "filters": ("off", "t.8-k50-p.9"),
        "dtype": ("float32", "bfloat16"),
    },
    "cuda": {
        "batch": (1, 4, 8, 16, 32, 64, 128, 256, 512),
        "vocabulary": FACTORS["vocabulary"],
        "gamma": (1, 5, 16),
        "filters": FACTORS["filters"],
        "dtype": ("float32", "bfloat16"),
        "start": STARTS,
    },
}


def grid(device: str, *, quick: bool = False) -> list[Point]:
    """One factor at a time around the base point, the points with a figure to reach first."""
    base, factors = BASE[device], _QUICK[device] if quick else FACTORS
    points = [*SHOWS[device], base]
    for name, values in factors.items():
        points += [replace(base, **{name: value}) for value in values]
    if not quick:
        filtered = replace(base, filters="t.8-k50-p.9")
        for name in ("batch", "vocabulary"):
            points += [replace(filtered, **{name: value}) for value in FACTORS[name]]
    return list(dict.fromkeys(points))
