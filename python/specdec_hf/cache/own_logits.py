"""The model's own forwards, for the self-check to compare with.

They use no cache of the loop, and leave no trace in a model: its attributes, buffers, modes and the
random state stay as they were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from specdec_hf.cache.encoded import Encoded
from specdec_hf.cache.plain import PlainRunner, Prompt

SHORT, PADDING = 3, 4  # tokens of the shorter prompt, and how many more the other has
PASSING = (torch.OutOfMemoryError, MemoryError)  # which say nothing about the model
# Hooks of these libraries make a model run at all; other hooks are the caller's.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")

changing = threading.RLock()  # held while a model is changed for its checks


def logits_alone(
    model: Any, tokens: torch.Tensor, encoded: Encoded | None = None, b: int = 0
) -> torch.Tensor:
    """Logits [n, V] of one sequence, read as plain ``generate`` reads a prompt, without a cache."""
    ids = tokens.numpy()[None]
    prompt = Prompt(ids, np.ones(ids.shape, dtype=bool))
    own = None if encoded is None else encoded.select([b])
    runner = PlainRunner(model, 1, "none", prompt=prompt, encoded=own)
    return runner.forward(tokens[None].to(model.device), np.array([0]), keep=len(tokens))[0].float()


class WindowError(Exception):
    """A model that has read a prompt cannot be fed several tokens at once."""


def logits_as_generated(
    model: Any,
    texts: list[torch.Tensor],
    padded: bool,
    encoded: Encoded | None,
    *,
    singly: bool = False,
) -> list[torch.Tensor]:
    """Logits [n, V] of each text that plain ``generate`` continues from a prompt, in one batch.

    Some models treat a prompt otherwise than what follows it, or drop from their own cache what a
    forward without one sees. Those that keep a state may read several tokens at once in another way
    than one after the other, as plain generation does, so ``singly`` feeds them that way.
    """
    sizes = (SHORT + PADDING, SHORT if padded else SHORT + PADDING)
    prompts = [text[:n] for text, n in zip(texts, sizes, strict=False)]
    prompt = padded_prompt(prompts)
    width = prompt.mask.shape[1]
    rest = max(len(text) - len(start) for text, start in zip(texts, prompts, strict=True))
    ids = torch.zeros(len(texts), width + rest, dtype=torch.int64, device="cpu")
    ids[:, :width] = torch.from_numpy(prompt.input_ids)
    for b, text in enumerate(texts):
        follows = text[len(prompts[b]) :]
        ids[b, width : width + len(follows)] = follows
    runner = PlainRunner(model, len(texts), "plain", prompt=prompt, encoded=encoded)
    first = np.array([len(start) - width for start in prompts])
    rows = []
    last = width + rest - 1
    windows = [(0, width), (width, last), (last, last + 1)]
    if singly:
        windows[1:2] = [(i, i + 1) for i in range(width, last)]
    for start, end in (window for window in windows if window[0] < window[1]):
        fed = ids[:, start:end].to(model.device)
        try:
            rows.append(runner.forward(fed, first + start, keep=end - start))
        except Exception as error:
            if start == 0 or isinstance(error, PASSING):
                raise
            raise WindowError(one_line(error)) from error
    logits = torch.cat(rows, dim=1).float()
    return [logits[b, -n:][: len(texts[b])] for b, n in enumerate((width + rest + first).tolist())]


def padded_prompt(texts: list[torch.Tensor]) -> Prompt:
    """Texts on the host, left-padded to one length."""
    width = max(len(text) for text in texts)
    ids = np.zeros((len(texts), width), dtype=np.int64)
    for b, text in enumerate(texts):
        ids[b, width - len(text) :] = text.numpy()
    lengths = np.array([[len(text)] for text in texts])
    return Prompt(ids, np.arange(width) >= width - lengths)


def one_line(error: Exception) -> str:
    """The type of an error and the first 120 characters of its message, for messages of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Run forwards that leave no trace in the model or in the random state.

    Two threads would restore each other's changes, so one of them waits.
    """
    with changing:
        yield from _undisturbed(model)


def _undisturbed(model: Any) -> Iterator[None]:
    kept = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            for module, _, _ in kept:
                module.training = False
                module._forward_hooks = _library_hooks(module._forward_hooks)
                module._forward_pre_hooks = _library_hooks(module._forward_pre_hooks)
            yield
        finally:
            for module, attributes, buffers in kept:
                for name in vars(module).keys() - attributes.keys():
                    del vars(module)[name]
                vars(module).update(attributes)
                module._buffers.clear()
                module._buffers.update(buffers)


def _library_hooks(hooks: Any) -> Any:
    kept = type(hooks)()
    for number, hook in hooks.items():
        home = getattr(hook, "__module__", None) or type(hook).__module__
        if home.split(".")[0] in _LIBRARIES:
            kept[number] = hook
    return kept
