"""Models whose own forwards run, because they may not be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm


def _halve(module: torch.nn.Module) -> None:
    module.register_forward_hook(
        lambda module, args, out: (out[0] / 2, *out[1:]) if isinstance(out, tuple) else out / 2
    )


# What a llama gets, and why its own forwards run then.
REFUSED = pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda model: setattr(model.lm_head, "forward", model.lm_head.forward), "was replaced"),
        (lambda model: model.train(), "it is in training mode"),
        (lambda model: _halve(model.model.layers[0]), "its module 'model.layers.0' has a hook"),
        (lambda model: _halve(model.lm_head), "its module 'lm_head' has a hook"),
        (lambda model: weight_norm(model.lm_head), "'lm_head' computes its weights from others"),
    ],
    ids=["patched", "training", "hook", "hook-of-linear", "weight-norm"],
)
# What makes another model of a llama.
CHANGES = pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "lm_head", torch.nn.Linear(32, 67, bias=False)),
        lambda model: model.resize_token_embeddings(80),
        lambda model: setattr(model.model.layers[0].self_attn, "scaling", 2.0),
        lambda model: setattr(model.config, "rms_norm_eps", 0.5),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.model.layers.insert(1, model.model.layers[1]),
    ],
    ids=["head", "embeddings", "attribute", "config", "attention", "layers"],
)


def leaving_out(names: Sequence[str], left_out: str) -> Callable[..., Any]:
    """A replay in which an input keeps the value of the recording, or outputs are not copied."""

    def replay(self: Any, inputs: Any) -> Any:
        pairs = zip(self._inputs, inputs, strict=True)
        tensors = [pair for pair in pairs if isinstance(pair[0], torch.Tensor)]
        for name, (own, given) in zip(names, tensors, strict=True):
            if name != left_out:
                own.copy_(given)
        self._replay()
        return self._outputs if left_out == "copies" else [x.clone() for x in self._outputs]

    return replay
