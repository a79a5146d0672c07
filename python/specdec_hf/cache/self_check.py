"""The self-check: does a model say the same through a cache of the loop as it says alone?

A model may read its positions from the cache's length, make a mask of its own, or keep a state, and
a cache that does not fit it gives wrong text without an error. So the first time a model class and
configuration is used with a cache, two short sequences of different lengths go through it as a call
would send them: prompt and drafts, a roll back by different numbers of drafts, another window, and
where trees are used a tree of which one path is kept. What the model says there is compared with a
forward of each whole sequence alone, without cache or padding.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_hf.arguments import is_integer
from specdec_hf.cache.encoded import Encoded, is_encoder_decoder
from specdec_hf.cache.forward import forward_tree, forward_window
from specdec_hf.cache.make import kind_reason, make_cache
from specdec_hf.cache.own_logits import (
    PASSING,
    SHORT,
    WindowError,
    logits_alone,
    logits_as_generated,
    one_line,
    padded_prompt,
)
from specdec_hf.cache.protocol import Lengths, context_length, vocab_size_of
from specdec_hf.cache.spec_cache import FIRST, SINGLE, SpecCache
from specdec_hf.cache.undisturbed import undisturbed

# How far logits may lie apart, in units of their standard deviation over the vocabulary. The first
# is a bound on rounding, in multiples of the dtype's step; the measurements are in
# docs/design/loop.md.
STEPS = 50
LEAST_TOLERANCE = 2e-4
LARGEST_WINDOW = 192  # tokens; the self-check passes the end of sliding windows up to this size
_LONG, _DRAFTS = 7, 3
# Parents of the nodes of the checked tree. Of its two paths, the kept one is numbered last.
_PARENTS, _PATH = (-1, -1, 0, 1), (1, 3)
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")
# The loop itself names logits that are not finite.
_NOT_FINITE = "the model's logits are not finite or all equal"


@dataclass(frozen=True)
class Fit:
    """Whether a cache fits a model.

    Attributes:
        difference: largest root mean square over the vocabulary of the difference of two rows of
            logits, in units of the standard deviation of the model's own row; None if not measured.
        tolerance: the largest difference that rounding explains.
        reason: why the cache does not fit, or None.
        unchecked: why nothing could be measured, or None.
        remark: what the self-check does not cover, or None.
        omitted: the kinds of forwards without a mask that were compared, see `SpecCache`.
    """

    difference: float | None = None
    tolerance: float | None = None
    reason: str | None = None
    unchecked: str | None = None
    remark: str | None = None
    omitted: frozenset[str] = frozenset()

    @property
    def not_measured(self) -> str | None:
        """Why a cache that was not refused is not known to fit, or None."""
        return self.unchecked or (self.remark if self.difference is None else None)


known: dict[tuple[Any, ...], Fit] = {}
_checking = threading.RLock()  # a check changes the model while it runs


def check_fit(
    model: Any,
    kind: str,
    *,
    padded: bool = True,
    tree: bool = False,
    encoded: Encoded | None = None,
) -> Fit:
    """Compare a model with itself through a cache; the result is remembered for the process.

    The caller's random state, the model's attributes and buffers, and its training mode are as
    before afterwards, and hooks that the caller registered do not run.

    Args:
        model: a causal LM.
        kind: as in `make_cache`.
        padded: whether sequences will be padded, as those of a batch are. The check then takes two
            of different lengths. The decoders of an encoder-decoder begin alike, so that those of a
            batch may differ in length after the first round only.
        tree: whether a tree is checked too; kind "spec" only.
        encoded: what the decoder of an encoder-decoder reads of its encoder. Its first two
            sequences serve the check.

    Raises:
        torch.OutOfMemoryError, MemoryError: no memory for the check; the next call checks again.
    """
    reason = kind_reason(model, kind)
    if reason is not None or kind == "plain":
        return Fit(reason=reason)
    num_sequences, names = 1 + padded, tuple[str, ...]()
    if encoded is not None:
        names = tuple(sorted(encoded.inputs))
        if kind == "aligned":
            num_sequences = 2  # even without padding
        encoded = encoded.select([b % encoded.batch_size for b in range(num_sequences)])
    key = (*configuration(model), kind, padded, tree, names)
    with _checking:
        fit = known.get(key)
        if fit is None:
            with undisturbed(model), torch.inference_mode():
                fit = _measure(model, kind, _Plan(model, num_sequences, padded, tree), encoded)
            if fit.difference is not None or fit.reason is not None:
                known[key] = fit
    return fit


def forget() -> None:
    """Forget all results, so that the next use of each cache is checked again."""
    known.clear()


def configuration(model: Any) -> tuple[Any, ...]:
    """A hashable key of the model's class, modules and configuration.

    It holds neither weights nor the model.
    """
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        config.pop(name, None)
    # The classes of the modules tell apart quantized, adapted and patched models.
    modules = frozenset(type(module) for module in model.modules())
    patched = getattr(model.__dict__.get("forward"), "__code__", None)
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    return (
        type(model), modules, patched, attention, model.dtype, model.device.type,
        json.dumps(config, sort_keys=True, default=str),
    )  # fmt: skip


def _measure(model: Any, kind: str, plan: _Plan, encoded: Encoded | None) -> Fit:
    separate = kind in ("dynamic", "none", "snapshot")
    if plan.too_short:
        return Fit(unchecked=f"the model's context holds {plan.context} tokens")
    try:
        generated = logits_as_generated(
            model, plan.texts, plan.padded, encoded, singly=kind == "snapshot"
        )
        own = generated
        if not separate:
            own = [logits_alone(model, text, encoded, b) for b, text in enumerate(plan.texts)]
    except WindowError as error:
        return Fit(reason=f"its forward raised {error}")
    except PASSING:
        raise
    except Exception as error:
        return Fit(unchecked=f"a forward on text alone raised {one_line(error)}")
    spread = min(float(x.std(dim=-1).min()) for x in own)
    if not all(bool(x.isfinite().all()) for x in (*own, *generated)) or spread == 0:
        return Fit(remark=_NOT_FINITE)
    prompt = None
    if separate:
        prompt = padded_prompt([text[:n] for text, n in zip(plan.texts, plan.prompts, strict=True)])
    try:
        cache = make_cache(
            model, len(plan.prompts), plan.capacity, kind, prompt=prompt, encoded=encoded
        )
        omitted = frozenset[str]()
        if isinstance(cache, SpecCache) and not plan.padded:
            cache.omits_mask = frozenset((FIRST, SINGLE))
        seen = plan.run(cache)
        if isinstance(cache, SpecCache):
            omitted = frozenset(cache.omitted)
    except PASSING:
        raise
    except Exception as error:
        return Fit(reason=f"its forward raised {one_line(error)}")
    # A sequence must say the same alone, with padding, and as the continuation of a prompt.
    seen += [(b, i, row) for b, rows in enumerate(generated) for i, row in enumerate(rows)]
    difference = 0.0
    for b, position, row in seen:
        if row.shape != own[b][position].shape:
            return Fit(reason=f"its logits are {list(row.shape)}, not {list(own[b][0].shape)}")
        apart = distance(row, own[b][position])
        # NaN is a difference too, and max() would drop it.
        difference = float("inf") if bool(apart.isnan()) else max(difference, float(apart))
    if not math.isfinite(difference) and not bool(
        logits_alone(model, plan.fed, encoded).isfinite().all()
    ):
        return Fit(remark=_NOT_FINITE)  # a rejected draft did that, not the cache
    tolerance = tolerance_of(model)
    reason = None
    if difference > tolerance:
        reason = (
            f"its logits differ from the model's own by {difference:.2g} of their standard "
            f"deviation, where rounding explains {tolerance:.2g}"
        )
    return Fit(difference, tolerance, reason, remark=plan.remark, omitted=omitted)


class _Plan:
    """The tokens of the self-check, and in which steps they go through a cache."""

    def __init__(self, model: Any, num_sequences: int, padded: bool, tree: bool) -> None:
        self.model, self.padded, self.tree = model, padded, tree
        windows = sorted(_windows(model))
        prompt, self.remark = _LONG, None
        for window in windows:
            if window <= LARGEST_WINDOW:
                prompt = max(prompt, window + 2)
            else:
                self.remark = f"attention beyond a window of {window} tokens is not covered"
        self.context = context_length(model)
        extra = 2 * _DRAFTS + len(_PARENTS) + 3
        if self.context is not None:
            prompt = min(prompt, self.context - extra)
        self.too_short = prompt < SHORT
        lengths = [prompt, SHORT if padded else prompt]
        self.prompts: Lengths = np.array(lengths[:num_sequences], dtype=np.int64)
        self.capacity = max(prompt, _LONG) + extra
        # In the first window the first sequence keeps all drafts and the second keeps one; in the
        # second window the first keeps none and the second keeps all.
        self.kept = (
            np.array([_DRAFTS, 1][:num_sequences]), np.array([0, _DRAFTS][:num_sequences])
        )  # fmt: skip
        draw = torch.Generator("cpu").manual_seed(7)
        ids = _ordinary_ids(model)
        shape = (num_sequences, prompt + 3 * extra)
        self._ids = ids[torch.randint(len(ids), shape, generator=draw, device="cpu")]
        self._next = prompt
        self.texts: list[torch.Tensor] = []
        self._steps: list[Callable[[Any], Iterator[tuple[int, int, torch.Tensor]]]] = []
        self._write()

    def _take(self, size: int) -> torch.Tensor:
        """[B, size] tokens that were not used before."""
        self._next += size
        return self._ids[:, self._next - size : self._next]

    def _write(self) -> None:
        """The steps, and the whole text of each sequence."""
        sequences = range(len(self.prompts))
        texts = [self._ids[b, : self.prompts[b]] for b in sequences]
        for number, kept in enumerate((*self.kept, np.zeros_like(self.prompts))):
            lengths, counts = np.array([len(text) for text in texts]), kept
            window = self._take(_DRAFTS if number == 0 else _DRAFTS + 1)
            if number == 0:
                width = int(lengths.max())
                tokens = torch.zeros(len(texts), width, dtype=torch.int64, device="cpu")
                for b in sequences:
                    tokens[b, width - len(texts[b]) :] = texts[b]
                tokens, starts = torch.cat([tokens, window], dim=1), lengths - width
            else:
                tokens, starts = window, lengths
                counts = kept + 1  # the pending token
            texts = [torch.cat([texts[b], window[b, : counts[b]]]) for b in sequences]
            ends = np.array([len(text) for text in texts])
            self._steps.append(_window_step(self.model, tokens, starts, ends))
        if self.tree:
            roots = np.array([len(text) for text in texts])
            window = self._take(len(_PARENTS) + 1)
            self._steps.append(_tree_step(self.model, window, roots))
            kept_columns = [0, *(1 + node for node in _PATH)]
            texts = [torch.cat([texts[b], window[b, kept_columns]]) for b in sequences]
        ends = np.array([len(text) for text in texts])
        window = self._take(1)
        self._steps.append(_window_step(self.model, window, ends, ends + 1))
        texts = [torch.cat([texts[b], window[b]]) for b in sequences]
        self.texts = texts

    @property
    def fed(self) -> torch.Tensor:
        """All tokens [n] that the cache is fed with, those of rejected drafts included."""
        return self._ids[:, : self._next].flatten()

    def run(self, cache: Any) -> list[tuple[int, int, torch.Tensor]]:
        """Sequence, position and logits [V] of each row that the cache gave for a kept token."""
        return [row for step in self._steps for row in step(cache)]


def _window_step(model: Any, tokens: torch.Tensor, starts: Lengths, ends: Lengths) -> Any:
    """Feed ``tokens`` from ``starts`` on and keep what lies before ``ends``."""

    def step(cache: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
        keep = min(tokens.shape[1], _DRAFTS + 1)
        logits = forward_window(model, cache, tokens.to(model.device), starts, keep)
        last = starts + tokens.shape[1]
        for b in range(len(starts)):
            for position in range(int(last[b]) - keep, int(ends[b])):
                yield b, position, logits[b, position - int(last[b])].float()
        cache.truncate(ends)

    return step


def _tree_step(model: Any, tokens: torch.Tensor, roots: Lengths) -> Any:
    """Feed a root and its tree and keep one path."""

    def step(cache: Any) -> Iterator[tuple[int, int, torch.Tensor]]:
        assert isinstance(cache, SpecCache)
        device = model.device
        parents = torch.tensor(_PARENTS, device=device).expand(len(roots), -1)
        logits = forward_tree(model, cache, tokens.to(device), roots, parents)
        for b in range(len(roots)):
            for depth, column in enumerate([0, *(1 + node for node in _PATH)]):
                yield b, int(roots[b]) + depth, logits[b, column].float()
        path = torch.tensor(_PATH, device=device).expand(len(roots), -1)
        cache.compact(torch.from_numpy(roots + 1).to(device), path)
        cache.truncate(roots + 1 + len(_PATH))

    return step


def _windows(model: Any) -> set[int]:
    """Sizes of the local attention windows that a config names."""
    config, sizes = model.config.get_text_config(decoder=True), set[int]()
    for name in _WINDOW_NAMES:
        if name == "attention_window" and is_encoder_decoder(model):
            continue  # that of the encoder
        value = getattr(config, name, None)
        for size in value if isinstance(value, list | tuple) else [value]:
            if is_integer(size) and size > 0:
                sizes.add(size)
    return sizes


def _ordinary_ids(model: Any) -> torch.Tensor:
    """The ids of the vocabulary that the config does not name, such as image tokens."""
    special: set[int] = set()

    def collect(value: Any, name: str = "") -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                collect(inner, str(key))
        elif isinstance(value, list):
            for inner in value:
                collect(inner, name)
        elif isinstance(value, int) and ("token" in name or name.endswith("_id")):
            special.add(value)

    collect(model.config.to_dict())
    size = vocab_size_of(model)
    ids = [i for i in range(min(size, 4096)) if i not in special]
    return torch.tensor(ids or [0], device="cpu")


def distance(rows: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """`Fit.difference` of each row of logits [..., V]."""
    return (rows - own).square().mean(dim=-1).sqrt() / own.std(dim=-1)


def tolerance_of(model: Any) -> float:
    """The largest difference that rounding explains."""
    step = float(torch.finfo(model.dtype).eps)
    if model.device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        step = max(step, 2.0**-10)
    return max(LEAST_TOLERANCE, STEPS * step)
