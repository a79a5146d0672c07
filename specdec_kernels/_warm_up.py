"""`warm_up`: the first launch of every op, which has no place in a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._library import providers
from .arguments.values import shown
from .ops.apply_penalties import apply_penalties_
from .ops.expand_tree import expand_tree
from .ops.kept_tokens import kept_tokens
from .ops.kv import (
    kv_append_,
    kv_compact_,
    kv_realign_,
    kv_truncate_,
    ring_truncate_,
)
from .ops.ngram_propose import ngram_propose
from .ops.paged import paged_append_, paged_compact_, paged_truncate_
from .ops.sample import sample
from .ops.tree_layout import build_trie, rerank_tree, tree_attention
from .ops.verify_chain import verify_chain
from .ops.verify_tree import Tree, verify_tree

_BATCH = 3
# The cache ops have another kernel for more caches than fit one small table of pointers.
_MANY_CACHES = 65


def warm_up(device: torch.device | str | None = None) -> None:
    """Launch the kernels of every op once on a CUDA device, and wait for them.

    The first launch of a kernel loads its code and asks the driver how much of it the device runs
    at once, either of which can end the capture of a CUDA graph. Call this before you capture ops
    that have not run yet. It also tells whether the kernels run here at all: a library that was
    built for another driver or another GPU is imported without complaint.

    Ops that Triton serves (see `providers`) are compiled for the dtypes of their arguments, so that
    a call with other dtypes or options compiles again: make such a call yourself before you capture
    it.

    Args:
        device: the CUDA device; None is the current one.

    Raises:
        ValueError: the device is no CUDA device.
        RuntimeError: torch sees no CUDA device, no op has kernels for one, a capture is under way,
            or an op does not run. The message names the op, and for a failed launch the CUDA
            versions of the driver and of the kernels.

    >>> warm_up("cuda")  # doctest: +SKIP
    """
    try:
        where = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError):  # torch lists its devices or its overloads
        raise ValueError(f"device must be a CUDA device, got {shown(device)}") from None
    if where.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {where}")
    if not torch.cuda.is_available():
        raise RuntimeError(f"device is {where}, but torch sees no CUDA device")
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("warm_up must be called before the capture of a CUDA graph, not in it")
    served = {op: by_device["cuda"] for op, by_device in providers().items()}
    ops = [op for op, provider in served.items() if provider != "none"]
    if {*served.values()} <= {"indexing", "none"}:
        raise RuntimeError(
            f"no op runs on {where}: _C.so has no CUDA kernels, and Triton is not installed"
        )
    for op in ops:
        _launch(op, where)


def _launch(op: str, where: torch.device) -> None:
    try:
        for number in (1, _MANY_CACHES):
            _calls(where, number)[op]()
        torch.cuda.synchronize(where)
    except RuntimeError as error:
        raise RuntimeError(f"{op} does not run on {where}: {error}") from error


def _calls(where: torch.device, number: int) -> dict[str, Callable[[], object]]:
    """A small call of each op; those of the cache ops have `number` caches."""
    zeros = functools.partial(torch.zeros, dtype=torch.int64, device=where)
    counts, ids = zeros(_BATCH), zeros(_BATCH, 4)
    noise: dict[str, Any] = {"seeds": counts, "positions": counts}
    rows = torch.zeros(_BATCH, 5, 1031, device=where)
    tables, scores = ids.to(torch.int32), rows[:, 0, :4]
    seen = torch.ones(_BATCH, 1031, dtype=torch.int32, device=where)

    def caches() -> list[Tensor]:
        return [torch.zeros(_BATCH, 2, 8, 12, device=where) for _ in range(number)]

    return {
        "sample": lambda: sample(rows[:, 0], **noise),
        "apply_penalties_": lambda: apply_penalties_(rows.clone(), ids, token_counts=seen),
        "kept_tokens": lambda: kept_tokens(rows, rows=ids, max_kept=4, top_k=2),
        "verify_chain": lambda: _verify_chains(rows, ids, noise),
        "verify_tree": lambda: verify_tree(rows, Tree(ids, ids - 1), rule="greedy", **noise),
        "kv_append_": lambda: kv_append_(caches(), caches(), counts),
        "kv_truncate_": lambda: kv_truncate_(caches(), counts, counts, zero_fill=True),
        "kv_compact_": lambda: kv_compact_(caches(), counts, ids),
        "kv_realign_": lambda: kv_realign_(caches(), counts, counts, counts),
        "ring_truncate_": lambda: ring_truncate_(caches(), counts, counts, 4, zero_fill=True),
        "paged_append_": lambda: paged_append_(caches(), caches(), tables, counts),
        "paged_compact_": lambda: paged_compact_(caches(), tables, counts, ids),
        "paged_truncate_": lambda: paged_truncate_(tables, counts, counts, 4),
        "tree_attention": lambda: tree_attention(ids - 1, counts, slots=8),
        "rerank_tree": lambda: rerank_tree(ids, ids - 1, scores, size=3),
        "build_trie": lambda: build_trie(ids[:, None], size=3),
        "expand_tree": lambda: expand_tree(rows, rows[:, :, 0], width=4),
        "ngram_propose": lambda: ngram_propose(ids, counts, gamma=4),
    }


def _verify_chains(rows: Tensor, ids: Tensor, noise: dict[str, Any]) -> None:
    """Calls for each CUDA kernel of verify_chain: from logits, from probabilities, with filters."""
    probs = torch.full_like(rows, 1 / rows.shape[-1])
    verify_chain(rows, ids, rows[:, 1:], **noise)
    verify_chain(probs, ids, probs[:, 1:], kind="probs", **noise)
    verify_chain(rows, ids, rows[:, 1:], top_k=2, **noise)
