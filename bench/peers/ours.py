"""This project's providers.

The C++ and CUDA kernels are called through the public functions. The Triton kernels are called
directly, because on CUDA devices the public functions may be served by the CUDA kernels.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_kernels as sk
from bench.configs import Inputs, Turn
from bench.kv_configs import KvInputs
from bench.peers.base import Peer
from bench.tree_configs import TreeInputs
from bench.tree_configs import call as call_tree
from specdec_kernels._library import OPS
from specdec_kernels.arguments.tree import TreeOutputs


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
        kind="probs" if inputs.config.start == "probs" else "logits",
        temperature=inputs.temperature,
        top_k=inputs.top_k,
        top_p=inputs.top_p,
        seeds=turn.seeds,
        positions=inputs.positions,
    )


class _Arguments(TorchDispatchMode):
    """Records the arguments that a public function passes to its op, defaults included."""

    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op
        self.found: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.op:
            rest = func._schema.arguments[len(args) :]
            given = kwargs or {}
            self.found = [*args, *(given.get(a.name, a.default_value) for a in rest)]
        return func(*args, **(kwargs or {}))


def _dispatched(inputs: Inputs) -> Callable[[], Any]:
    draft, turns = _draft(inputs), itertools.cycle(inputs.turns)
    return lambda: _call(inputs, draft, next(turns))


def _tree(inputs: TreeInputs) -> Callable[[], Any]:
    turns = itertools.cycle(inputs.turns)
    return lambda: call_tree(inputs, next(turns))


def _compact(inputs: KvInputs) -> Callable[[], Any]:
    accepted = torch.full((inputs.config.batch,), inputs.config.accepted)

    def once() -> Any:
        sk.kv_compact_(inputs.caches, inputs.base, inputs.path)
        return accepted

    return once


def _triton(inputs: Any) -> Callable[[], Any]:
    """Call Triton's `verify_chain` with the arguments that the public function passes to the op."""
    dispatcher = torch.ops.specdec_kernels.verify_chain.default
    with _Arguments(dispatcher) as arguments:
        _dispatched(inputs)()
    names = [argument.name for argument in dispatcher._schema.arguments]
    tokens_at, seeds_at = names.index("draft_token_ids"), names.index("seeds")
    turns = itertools.cycle(inputs.turns)
    module = importlib.import_module(f"specdec_kernels.triton.{OPS['verify_chain']}")
    function = module.verify_chain

    def once() -> Any:
        arguments.found[tokens_at], arguments.found[seeds_at] = next(turns)
        return function(*arguments.found)

    return once


def _served(op: str, provider: str, on: str) -> Callable[[str], str]:
    def available(device: str) -> str:
        if device != on:
            return f"runs on {on}"
        served = sk.providers().get(op, {}).get(on, "none")
        return "" if served == provider else f"{op} on {on} is served by {served}"

    return available


def _triton_available(device: str) -> str:
    if device != "cuda":
        return "runs on cuda"
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    return "TRITON_INTERPRET is set" if os.environ.get("TRITON_INTERPRET") == "1" else ""


def _accepted(verdict: sk.TreeVerdict | TreeOutputs) -> torch.Tensor:
    return verdict.num_accepted


PEERS = (
    Peer("cpp", _served("verify_chain", "cpp", "cpu"), _dispatched, ours=True),
    Peer("cuda", _served("verify_chain", "cuda", "cuda"), _dispatched, ours=True),
    Peer("triton", _triton_available, _triton, ours=True),
)
TREE_PEERS = (
    Peer("cpp", _served("verify_tree", "cpp", "cpu"), _tree, _accepted, ours=True),
    Peer("cuda", _served("verify_tree", "cuda", "cuda"), _tree, _accepted, ours=True),
)
KV_PEERS = (
    Peer("cpp", _served("kv_compact_", "cpp", "cpu"), _compact, lambda n: n, ours=True),
    Peer("cuda", _served("kv_compact_", "cuda", "cuda"), _compact, lambda n: n, ours=True),
)
