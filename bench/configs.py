"""Configs of `verify_chain`: the grid, the inputs of a config, and the bytes it has to read."""

from __future__ import annotations

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from proofs import noisy_draft, zipf_logits
from torch import Tensor

from bench import eager

# Name -> (temperature, top_k, top_p) of the target.
FILTERS = {
    "off": (1.0, 0, 1.0),
    "t.8": (0.8, 0, 1.0),
    "t.8-p.9": (0.8, 0, 0.9),
    "t.8-k50-p.9": (0.8, 50, 0.9),
}
STARTS = ("logits", "sampled", "probs")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

POOL = 24  # distinct rows; a larger batch holds copies of them
COPIES = 8  # float32 copies of every row that eager filters hold at their peak, about
TURNS = 32  # turns of a config


@dataclass(frozen=True)
class BaseConfig:
    """One setting of a benchmark."""

    @property
    def id(self) -> str:
        """The name of the setting in results and test ids."""
        raise NotImplementedError

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, **asdict(self)}


@dataclass(frozen=True)
class Config(BaseConfig):
    """One setting of `verify_chain`.

    start: what verification starts from. "logits": raw logits of target and draft. "sampled": raw
        logits and the draft's logsumexp, which its sampling has computed; a peer that cannot use
        it starts from the logits. "probs": float32 probabilities with the filters applied.
    per_sequence: whether temperature and filters are tensors [B] instead of numbers.
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


class Turn(NamedTuple):
    """Arguments that change from call to call: tokens [B, gamma] drawn from the draft, seeds [B].

    Both are int64. The tokens of a tree are [B, N].
    """

    tokens: Tensor
    seeds: Tensor


@dataclass(frozen=True)
class Inputs:
    """Tensors of a config; target is [B, gamma+1, V], draft is [B, gamma, V]."""

    config: Config
    target: Tensor
    draft: Tensor
    turns: list[Turn]
    temperature: float | Tensor
    top_k: int | Tensor
    top_p: float | Tensor
    positions: Tensor  # [B] int64
    logsumexp: Tensor | None = None  # [B, gamma] float64, the draft's at its temperature

    @property
    def filtering(self) -> bool:
        return self.config.start != "probs" and FILTERS[self.config.filters][1:] != (0, 1.0)


@functools.lru_cache(maxsize=4)
def pool(v: int, acceptance: float) -> tuple[Tensor, Tensor]:
    """(target, draft) logits, each [POOL, v]."""
    g = torch.Generator().manual_seed(0)
    target = zipf_logits(POOL, v, g)
    return target, noisy_draft(target, acceptance, g)


def parameters(config: Any, device: str) -> dict[str, Any]:
    """Temperature, top_k and top_p of a config; off if its probabilities are filtered already."""
    values = FILTERS["off" if config.start == "probs" else config.filters]
    names, dtypes = ("temperature", "top_k", "top_p"), (torch.float32, torch.int32, torch.float32)
    found: dict[str, Any] = dict(zip(names, values, strict=True))
    if config.per_sequence and config.start != "probs":
        for name, dtype, off in zip(names, dtypes, (None, 0, 1.0), strict=True):
            if found[name] != off:
                found[name] = torch.full((config.batch,), found[name], dtype=dtype, device=device)
    return found


def build(config: Config, device: str = "cpu") -> Inputs:
    """The inputs of a config, with the same values on every device."""
    b, gamma, v = config.batch, config.gamma, config.vocabulary
    temperature, top_k, top_p = FILTERS[config.filters]
    target, draft = (rows.to(DTYPES[config.dtype]) for rows in pool(v, config.acceptance))
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
    if config.start == "probs":
        target, draft = eager.filtered(target, temperature, top_k, top_p), q
    elif config.start == "sampled":
        logsumexp = (draft.double() / temperature).logsumexp(-1)[pick[:, :gamma]].to(device)

    pick = pick.to(device)
    return Inputs(
        config=config,
        target=target.to(device)[pick],
        draft=draft.to(device)[pick[:, :gamma]],
        turns=turns,
        **parameters(config, device),
        positions=torch.full((b,), 100, device=device),
        logsumexp=logsumexp,
    )


def floor_bytes(config: Config, accepted: Tensor) -> float:
    """Bytes that a rule of this algorithm has to read: each visited row once. The mean over calls.

    accepted: [calls, B], the number of accepted drafts.

    From raw logits, each tested draft needs its whole target row and its whole draft row. If the
    draft's logsumexp is known, a draft row is needed only where the residual is drawn from. From
    probabilities, each tested draft needs two entries, and the recovered or bonus token needs the
    rows that it is drawn from.
    """
    n = accepted.double().reshape(-1, config.batch)
    rejected = (n < config.gamma).double()
    row = config.vocabulary * config.element
    draft_rows = (n + 1).clamp(max=config.gamma)
    by_start = {
        "logits": row * (n + 1 + draft_rows),
        "sampled": row * (n + 1 + rejected),
        "probs": row * (1 + rejected) + 2 * config.element * draft_rows,
    }
    return float(by_start[config.start].sum(-1).mean())


def visited_bytes(config: Config, accepted: Tensor) -> float:
    """Bytes that this project's kernels read: the floor, and the residual's rows a second time.

    Passes that look for a filter's threshold are not counted, because they find the row in a cache.
    """
    rejected = (accepted.reshape(-1, config.batch) < config.gamma).double().sum(-1).mean()
    again = {"logits": 2, "sampled": 1, "probs": 0}[config.start]
    row = config.vocabulary * config.element
    return floor_bytes(config, accepted) + float(rejected) * again * row


BASE = {
    "cpu": Config(),
    "cuda": Config(32, 5, 151936, "bfloat16", "t.8", per_sequence=True),
}
_CUDA_PROBS = Config(1, 5, 128256, "float32", "t.8", start="probs")
# Configs with a performance target come first in the grid: a budget that runs out costs others.
HEADLINE = {
    "cpu": (
        Config(filters="t.8"),
        Config(filters="t.8-k50-p.9"),
        Config(batch=1, vocabulary=128256),
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


def grid(device: str, *, quick: bool = False) -> list[Config]:
    """The headline configs, then the base config with one factor changed at a time."""
    base, factors = BASE[device], _QUICK[device] if quick else FACTORS
    configs = [*HEADLINE[device], base]
    for name, values in factors.items():
        configs += [replace(base, **{name: value}) for value in values]
    if not quick:
        filtered = replace(base, filters="t.8-k50-p.9")
        for name in ("batch", "vocabulary"):
            configs += [replace(filtered, **{name: value}) for value in FACTORS[name]]
    return list(dict.fromkeys(configs))
