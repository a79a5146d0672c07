"""Forwards that leave no trace in a model: its attributes, buffers, modes and the random state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Hooks of these libraries make a model run at all; other hooks are the caller's.
_LIBRARIES = ("torch", "transformers", "accelerate", "peft")

changing = threading.RLock()  # held while a model is changed for its checks


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
