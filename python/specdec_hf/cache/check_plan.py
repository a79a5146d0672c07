"""What the self-check feeds a cache: two short texts, their drafts, and in which windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from specdec_hf.arguments import is_integer
from specdec_hf.cache.encoded import is_encoder_decoder
from specdec_hf.cache.own_logits import SHORT
from specdec_hf.cache.protocol import Lengths, context_length, vocab_size_of
from specdec_hf.cache.spec_runner import SpecRunner

LARGEST_WINDOW = 192  # tokens; the self-check passes the end of sliding windows up to this size
_LONG, _DRAFTS = 7, 3
# Parents of the nodes of the checked tree. Of its two paths, the kept one is numbered last.
_PARENTS, _PATH = (-1, -1, 0, 1), (1, 3)
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size", "window_size", "attention_window")

# Sequence, position and logits [V] of a kept token.
Row = tuple[int, int, torch.Tensor]


class CheckPlan:
    """The tokens of the self-check, and in which steps they go through a cache.

    Args:
        model: that of the cache.
        num_sequences: 1 or 2.
        padded: whether the sequences differ in length.
        tree: whether a tree is fed.
        number: plans of other numbers have other tokens at other positions.
    """

    def __init__(
        self, model: Any, num_sequences: int, padded: bool, tree: bool, number: int = 0
    ) -> None:
        self.model, self.padded, self.tree = model, padded, tree
        windows = sorted(_attention_windows(model))
        prompt, self.remark = _LONG + number, None
        for window in windows:
            if window <= LARGEST_WINDOW:
                prompt = max(prompt, window + 2 + number)
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
        draw = torch.Generator("cpu").manual_seed(7 + number)
        ids = _ordinary_ids(model)
        shape = (num_sequences, prompt + 3 * extra)
        self._ids = ids[torch.randint(len(ids), shape, generator=draw, device="cpu")]
        self._next = prompt
        self.texts: list[torch.Tensor] = []
        self._steps: list[Callable[[Any], Iterator[Row]]] = []
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

    def run(self, runner: Any) -> list[Row]:
        """Sequence, position and logits [V] of each row that the runner gave for a kept token.

        A `SpecRunner` must not read prompts one by one: their padding is to be checked.
        """
        return [row for step in self._steps for row in step(runner)]


def _window_step(model: Any, tokens: torch.Tensor, starts: Lengths, ends: Lengths) -> Any:
    """Feed ``tokens`` from ``starts`` on and keep what lies before ``ends``."""

    def step(runner: Any) -> Iterator[Row]:
        keep = min(tokens.shape[1], _DRAFTS + 1)
        logits = runner.forward(tokens.to(model.device), starts, keep)
        last = starts + tokens.shape[1]
        for b in range(len(starts)):
            for position in range(int(last[b]) - keep, int(ends[b])):
                yield b, position, logits[b, position - int(last[b])].float()
        runner.truncate(ends)

    return step


def _tree_step(model: Any, tokens: torch.Tensor, roots: Lengths) -> Any:
    """Feed a root and its tree and keep one path."""

    def step(runner: Any) -> Iterator[Row]:
        assert isinstance(runner, SpecRunner)
        device = model.device
        parents = torch.tensor(_PARENTS, device=device).expand(len(roots), -1)
        logits = runner.forward_tree(tokens.to(device), roots, parents)
        for b in range(len(roots)):
            for depth, column in enumerate([0, *(1 + node for node in _PATH)]):
                yield b, int(roots[b]) + depth, logits[b, column].float()
        path = torch.tensor(_PATH, device=device).expand(len(roots), -1)
        runner.compact(torch.from_numpy(roots + 1).to(device), path)
        runner.truncate(roots + 1 + len(_PATH))

    return step


def _attention_windows(model: Any) -> set[int]:
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
