"""FlashInfer's kernels, of its version 0.7.4, without its package: see `bench.carried`.

From probabilities its kernel for chains is called alone. From logits it needs probabilities of all
rows: the pipeline is that of an engine, by its softmax, top-k and top-p.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.carried import FLASHINFER
from bench.configs import FILTERS, Inputs
from bench.peers.base import Peer, Unsupported

SCRATCH = 2**20  # bytes, as FlashInfer's Python allocates
Row = Callable[[], Tensor]


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(FLASHINFER))


@functools.cache
def _scratch(use: str) -> Tensor:
    return torch.zeros(SCRATCH, dtype=torch.uint8, device="cuda")


def _call(name: str, *values: Tensor | int) -> None:
    """Call a function of the library on the current stream."""
    given = [
        ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else ctypes.c_uint32(x)
        for x in values
    ]
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    status = getattr(_library(), f"flashinfer_{name}")(*given, stream)
    if status != 0:
        raise RuntimeError(f"flashinfer_{name} returned cudaError {status}")


def _filled(value: float, rows: int, dtype: torch.dtype) -> Tensor:
    return torch.full((rows,), value, dtype=dtype, device="cuda")


def softmax(rows: Tensor, temperature: Tensor) -> Tensor:
    """[R, V] float32, of rows / temperature [R]."""
    logits = rows.float()
    probs, scratch = torch.empty_like(logits), _scratch("softmax")
    given = [ctypes.c_void_p(x.data_ptr()) for x in (logits, probs, temperature, scratch)]
    sizes = ctypes.c_size_t(SCRATCH), *map(ctypes.c_uint32, logits.shape)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    if status := _library().flashinfer_softmax(*given, *sizes, stream):
        raise RuntimeError(f"flashinfer_softmax returned cudaError {status}")
    return probs


def _chain(draft: Tensor, drafted: Tensor, target: Tensor, noise: tuple[Tensor, Tensor]) -> Tensor:
    b, gamma, vocabulary = draft.shape
    tokens = torch.empty(b, gamma + 1, dtype=torch.int32, device=target.device)
    counts = torch.zeros(2, b, dtype=torch.int32, device=target.device)
    _call("chain", draft, drafted, target, tokens, *counts, b, gamma, vocabulary, *noise)
    return tokens


def _turns(inputs: Inputs) -> Any:
    offset = torch.zeros(1, dtype=torch.int64, device=inputs.target.device)
    return itertools.cycle([(t.tokens.int(), (t.seeds[:1], offset)) for t in inputs.turns])


def of_probs(inputs: Inputs) -> Row:
    if inputs.config.start != "probs":
        raise Unsupported("takes probabilities")
    turns = _turns(inputs)

    def once() -> Tensor:
        drafted, noise = next(turns)
        return _chain(inputs.draft, drafted, inputs.target, noise)

    return once


def of_logits(inputs: Inputs) -> Row:
    config = inputs.config
    if config.start == "probs":
        raise Unsupported("starts from logits")
    temperature, top_k, top_p = FILTERS[config.filters]
    v, turns = config.vocabulary, _turns(inputs)
    rows = config.batch * (config.gamma + 1)
    heat = _filled(temperature, rows, torch.float32)
    k, p = _filled(top_k, rows, torch.int32), _filled(top_p, rows, torch.float32)
    target, draft = inputs.target.view(rows, v), inputs.draft.view(-1, v)

    def once() -> Tensor:
        drafted, noise = next(turns)
        probs = softmax(target, heat)
        if top_k:
            given, probs = probs, torch.empty_like(probs)
            _call("top_k_renorm", given, probs, k, _scratch("top_k"), rows, v)
        if top_p < 1:
            given, probs = probs, torch.empty_like(probs)
            _call("top_p_renorm", given, probs, p, rows, v)
        q = softmax(draft, heat)
        return _chain(q.view_as(inputs.draft), drafted, probs.view_as(inputs.target), noise)

    return once


def samplers(logits: Tensor, temperature: float, top_k: int, top_p: float) -> dict[str, Row]:
    """What draws a token of each row [R, V], by FlashInfer's two orders of top-k and top-p."""
    rows, v = logits.shape
    heat = _filled(temperature, rows, torch.float32)
    k, p = _filled(top_k or v, rows, torch.int32), _filled(top_p, rows, torch.float32)
    noise = torch.zeros(2, 1, dtype=torch.int64, device="cuda")

    def joint() -> Tensor:
        tokens = torch.empty(rows, dtype=torch.int32, device="cuda")
        _call("top_k_top_p_sample", softmax(logits, heat), k, p, tokens, rows, v, *noise)
        return tokens

    def top_k_first() -> Tensor:
        values = logits.float() / temperature
        ids = torch.empty(rows, top_k, dtype=torch.int32, device="cuda")
        largest, tokens = torch.empty_like(ids, dtype=torch.float32), torch.empty_like(ids[:, 0])
        _call("top_k", values, ids, largest, _scratch("top_k"), rows, top_k, v)
        _call("top_p_sample", largest.softmax(-1), p, tokens, rows, top_k, *noise)
        return ids.gather(1, tokens[:, None].long())[:, 0]

    return {"flashinfer-joint": joint, **({"flashinfer-top_k_first": top_k_first} if top_k else {})}


def available(device: str) -> str:
    """Why the kernels do not run on a device, or ""."""
    if device != "cuda":
        return "runs on cuda"
    return "" if FLASHINFER.exists() else "not compiled: python -m bench.carried"


def _accepted(tokens: Tensor) -> Tensor:
    """Accepted drafts of each sequence: all tokens but the last one, without the padding of -1."""
    return (tokens >= 0).sum(-1) - 1


PEERS = (
    Peer("flashinfer", available, of_probs, _accepted),
    Peer("flashinfer-pipeline", available, of_logits, _accepted),
)
