"""This project's providers: the public function, and Triton's kernels where another serves it."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels as sk
from bench.peers.base import Peer
from bench.points import Inputs, Turn


def _draft(inputs: Inputs) -> Any:
    if inputs.logsumexp is None:
        return inputs.draft
    nothing_cut = torch.full_like(inputs.logsumexp, -torch.inf, dtype=torch.float32)
    return sk.SampledDraft(inputs.draft, inputs.logsumexp, nothing_cut, inputs.temperature)


def _call(inputs: Inputs, draft: Any, turn: Turn) -> sk.Verdict:
    return sk.verify_chain(
        inputs.target,
        turn.tokens,
        draft,
        kind="probs" if inputs.point.start == "probs" else "logits",
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        seeds=turn.seeds,
        positions=inputs.positions,
    )


class _Arguments(TorchDispatchMode):
    """Notes what the public function passes to the op, with every default filled in."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.specdec_kernels.verify_chain.default:
            rest = func._schema.arguments[len(args) :]
            given = kwargs or {}
            self.found = [*args, *(given.get(a.name, a.default_value) for a in rest)]
        return func(*args, **(kwargs or {}))


def _dispatched(inputs: Inputs) -> Callable[[], Any]:
    draft, turns = _draft(inputs), itertools.cycle(inputs.turns)
    return lambda: _call(inputs, draft, next(turns))


def _triton(inputs: Inputs) -> Callable[[], Any]:
    from specdec_kernels.triton.chain import verify_chain  # noqa: PLC0415

    with _Arguments() as arguments:
        _call(inputs, _draft(inputs), inputs.turns[0])
    schema = torch.ops.specdec_kernels.verify_chain.default._schema
    names = [argument.name for argument in schema.arguments]
    tokens_at, seeds_at = names.index("draft_tokens"), names.index("seeds")
    turns = itertools.cycle(inputs.turns)

    def once() -> Any:
        arguments.found[tokens_at], arguments.found[seeds_at] = next(turns)
        return verify_chain(*arguments.found)

    return once


def _served(provider: str, on: str) -> Callable[[str], str]:
    def available(device: str) -> str:
        if device != on:
            return f"runs on {on}"
        served = sk.providers()["verify_chain"][on]
        return "" if served == provider else f"verify_chain on {on} is served by {served}"

    return available


def _triton_available(device: str) -> str:
    if device != "cuda":
        return "runs on cuda"
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    return "TRITON_INTERPRET is set" if os.environ.get("TRITON_INTERPRET") == "1" else ""


PEERS = (
    Peer("cpp", _served("cpp", "cpu"), _dispatched, ours=True),
    Peer("cuda", _served("cuda", "cuda"), _dispatched, ours=True),
    Peer("triton", _triton_available, _triton, ours=True),
)
