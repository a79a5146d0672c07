"""Drafting with the target itself over a small part of its keys and values.

Over a long text a forward reads more keys and values than weights. A draft reads the weights, but
of the cache only the first tokens (attention sinks), the last ones, and the chunks between them
that the target attends to. Their keys and values are copies of the target's own.

Sources: Sun et al. 2024, "TriForce", arXiv 2404.11912; Chen et al. 2024, "MagicDec", arXiv
2408.11049; Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", arXiv
2309.17453.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.arguments import check_integer, read_number, shown, split_options
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import CommittedStates, History
from specdec_hf.drafting.drafter import Cost, State
from specdec_hf.drafting.registry import entry_for, usage
from specdec_hf.runner.packed.decoder_layer import FAMILIES
from specdec_hf.runner.packed.linear import bytes_of
from specdec_hf.runner.packed.model import OnlyPacked
from specdec_hf.runner.protocol import Lengths, to_device

from specdec_papers.own_layers import OwnCacheDrafter, OwnCacheState, OwnCacheStepper
from specdec_papers.retrieval import (
    ChunkMeans,
    chunk_scores,
    queries_of,
    scale_of,
    unserved_reason,
)
from specdec_papers.sparse_runner import SparseRunner, bytes_of_cache

if TYPE_CHECKING:
    from typing_extensions import Self

MAX_TOKENS = 2**31 - 1  # that a number of the drafter may be; no text is longer
NEVER = -(2**40)  # tokens of a text when chunks were chosen, where none were


@dataclass(frozen=True)
class SparsePattern:
    """Which tokens of a long text a sparse cache holds; see `SparseCacheDrafter`."""

    budget: int
    chunk: int
    sinks: int
    recent: int
    interval: int

    @property
    def num_chunks(self) -> int:
        """Chunks that are held of a long text."""
        return (self.budget - self.sinks - self.recent) // self.chunk


class SparseCacheStepper(OwnCacheStepper):
    """The target over a sparse cache in one call.

    Args:
        call: the call.
        pattern: what the sparse cache holds.

    Attributes:
        runner: of the sparse cache. That of the target is ``target``.
    """

    runner: SparseRunner

    def __init__(self, call: DrafterCall, pattern: SparsePattern) -> None:
        super().__init__(call)
        self.target = call.runner
        self.pattern = pattern
        # Between two choices a sequence grows by what it commits, but no more is held than the text
        # has tokens, for which the target's cache has the slots; and a round grows by its drafts.
        slots = min(
            pattern.budget + pattern.interval, call.max_length, self.target.cache.cursor.capacity
        )
        self.runner = SparseRunner(self.target, slots + 2 * (call.max_draft + 1))
        self.cost = Cost(self._relative_cost(), reads_prompt=False)
        self._means = ChunkMeans(self.target, pattern.sinks, pattern.chunk)
        self._chosen_at = np.full(call.batch_size, NEVER, dtype=np.int64)
        self._states: CommittedStates | None = None
        self._num_layers = len(self.target.cache.spec_layers)

    def _relative_cost(self) -> float:
        """Bytes of weights, keys and values that a draft reads by those that the target reads."""
        max_length = self.call.max_length
        config = self.model.config
        weights = sum(p.numel() * p.element_size() for p in self.call.model.parameters())
        weights += bytes_of(m for m in self.call.model.modules() if isinstance(m, OnlyPacked))
        heads, size = config.num_key_value_heads, self.model.base_model.layers[0].self_attn.head_dim
        token = 2 * config.num_hidden_layers * heads * size * self.model.dtype.itemsize
        cost: float = (weights + token * min(self.pattern.budget, max_length)) / (
            weights + token * max_length
        )
        return cost

    @property
    def nbytes(self) -> int:
        """Bytes of the sparse cache and of the means of chunks."""
        return self.runner.nbytes + self._means.means.nbytes

    def room(self, texts: History, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """As `OwnCacheStepper.room`; none where the call has inputs other than text."""
        if self.target.later_inputs is not None:
            return np.zeros_like(limits)
        return super().room(texts, limits)

    def begin_round(self, texts: History) -> None:
        """Copy what was committed, and choose chunks anew where that is due."""
        lengths, pattern = self.target.lengths, self.pattern
        states, known = self._last_states()
        due = texts.active & (lengths > pattern.budget)
        due &= lengths - self._chosen_at >= pattern.interval
        if due.any():
            self._choose(np.flatnonzero(due), texts, states, known)
        self.runner.copy_committed()

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        return self.runner.forward(tokens, starts, 1)[:, -1]

    def truncate(self, lengths: Lengths) -> None:
        """Keep ``lengths[b]`` tokens of each sequence, or all where the cache holds fewer."""
        self.runner.truncate(np.minimum(self.runner.lengths, lengths))
        pattern = self.pattern
        if self._states is None and pattern.num_chunks and self.call.max_length > pattern.budget:
            # Once the prompt is read, and not when a sequence first drafts, which in a batch may be
            # another one.
            self._states = self.call.keep_states(range(self._num_layers))
        self._last_states()  # rounds without drafts would pile them up

    def _choose(
        self,
        sequences: NDArray[np.int64],
        texts: History,
        states: torch.Tensor | None,
        known: NDArray[np.bool_],
    ) -> None:
        """Hold the sinks, the chunks of the highest scores and the end of some sequences' texts.

        Args:
            sequences: [R], each longer than the budget.
            texts: the committed tokens.
            states: [B, N, H], which the layers read at the last committed token that they read.
            known: [B], whether the sequence has such states.
        """
        pattern, first = self.pattern, bool((self._chosen_at == NEVER).all())
        lengths = self.target.lengths[sequences]
        # Whole chunks lie between the sinks and the recent tokens, which are at most ``recent``.
        counts = -(-(lengths - pattern.sinks - pattern.recent) // pattern.chunk)
        recent = pattern.sinks + counts * pattern.chunk  # where they begin
        ends = recent[:, None] + np.arange(int((lengths - recent).max()))
        np.minimum(ends, lengths[:, None] - 1, out=ends)
        heads = self.target.cache.spec_layers[0].buffers[0].shape[1]
        shape = self._num_layers, len(sequences), heads, -1
        parts = [torch.arange(pattern.sinks, device=self.device).expand(shape)]
        if pattern.num_chunks:
            chosen = self._chunks(sequences, counts, texts, states, known)
            inside = torch.arange(pattern.chunk, device=self.device)
            parts.append((pattern.sinks + chosen[..., None] * pattern.chunk + inside).flatten(3))
        parts.append(to_device(ends, self.device)[None, :, None].expand(shape))
        size = pattern.sinks + pattern.num_chunks * pattern.chunk
        self.runner.hold(sequences, torch.cat(parts, dim=3), size + lengths - recent)
        self._chosen_at[sequences] = lengths
        if first:
            whole, ours, means = (
                f"{size / 2**20:.3g} MiB"
                for size in (
                    bytes_of_cache(self.target), self.runner.nbytes, self._means.means.nbytes
                )
            )  # fmt: skip
            self.call.note(
                f"drafter sparse_cache holds {ours} of keys and values and {means} of their means, "
                f"beside the {whole} of the target's cache"
            )

    def _chunks(
        self,
        sequences: NDArray[np.int64],
        counts: NDArray[np.int64],
        texts: History,
        states: torch.Tensor | None,
        known: NDArray[np.bool_],
    ) -> torch.Tensor:
        """[N, R, H, k] int64, the chunks of the highest scores, in order, out of ``counts`` [R]."""
        positions = self.target.lengths - 1
        if states is None or not known[sequences].all():
            asked = self._ask_target(texts)
            unknown = to_device(~known, self.device)[:, None, None]
            states = asked if states is None else torch.where(unknown, asked, states)
            positions = positions + ~known
        rows = to_device(sequences, self.device)
        model = self.model
        queries = queries_of(model, states[rows], to_device(positions[sequences], self.device))
        wanted = self._means.counts.copy()
        wanted[sequences] = counts
        self._means.extend(wanted)
        means = self._means.means
        if len(sequences) < means.shape[1]:  # or else no copy is made
            means = means[:, rows]
        means = means[:, :, :, : int(counts.max())]
        scores = chunk_scores(queries, means, to_device(counts, self.device), scale_of(model))
        # Of equal scores the earlier chunk wins, whatever the other sequences are.
        order = scores.sort(dim=-1, descending=True, stable=True).indices
        return order[..., : self.pattern.num_chunks].sort(dim=-1).values

    def _last_states(self) -> tuple[torch.Tensor | None, NDArray[np.bool_]]:
        """The states [B, N, H] at the last token that the target read in its last round.

        And [B], whether a sequence has them; None where no sequence has.
        """
        batch_size = self.call.batch_size
        if self._states is None or not self._states.counts.any():
            return None, np.zeros(batch_size, dtype=np.bool_)
        states, counts = self._states.pop()
        last = to_device(np.maximum(counts - 1, 0), self.device)
        rows = torch.arange(batch_size, device=self.device)
        return states[rows, last].unflatten(-1, (self._num_layers, -1)), counts > 0

    def _ask_target(self, texts: History) -> torch.Tensor:
        """The states [B, N, H] at the pending tokens, where no verification has read any token."""
        before = self.target.lengths.copy()
        pending = to_device(texts.last(1), self.device)
        self.target.forward(pending, before, 1)
        self.target.truncate(before)
        states = self.target.tap.pop()
        return torch.stack([states[n][:, -1] for n in range(self._num_layers)], dim=1)


class SparseCacheDrafter(OwnCacheDrafter, entry="sparse_cache"):
    """The target over the first tokens, the last tokens and the most attended chunks of the text.

    A text of at most ``budget`` tokens is held whole, and drafts are the target's own tokens. Of a
    longer one each layer and each head of keys holds its own chunks: those whose mean key has the
    highest scores for the query of the last token that a verification has read (`chunk_scores`).
    In the first round of a call no verification has read single tokens, so one more forward of the
    target gives the query of the pending token.

    It needs cache "spec" and a model of Llama, Mistral, Qwen2 or Qwen3 whose window, if it has one,
    no text exceeds. In a `VerticalCascade` a smaller drafter drafts for it.

    Args:
        budget: tokens that are held of a long text when chunks have just been chosen.
        chunk: tokens of a chunk.
        sinks: tokens that are held of the beginning.
        recent: tokens that are held of the end, at least a chunk; a fourth of the budget by
            default. What the others leave of the budget is held in chunks; without any, drafts
            see the beginning and the end alone.
        interval: tokens that a sequence commits before its chunks are chosen anew. Tokens that were
            committed since the last choice are held beside the budget.

    Raises:
        TypeError: an argument that is no integer.
        ValueError: a number out of range, of which none may exceed 2**31 - 1; and, when a call
            begins, another cache or model.

    Sources: Sun et al. 2024, "TriForce", arXiv 2404.11912; Chen et al. 2024, "MagicDec", arXiv
    2408.11049.

    Attributes:
        pattern: these numbers.

    >>> SparseCacheDrafter(512, chunk=8, sinks=4, recent=128).pattern.num_chunks
    47
    """

    def __init__(
        self,
        budget: int = 512,
        *,
        chunk: int = 8,
        sinks: int = 4,
        recent: int | None = None,
        interval: int = 16,
    ) -> None:
        check = partial(check_integer, maximum=MAX_TOKENS)
        pattern = self.pattern = SparsePattern(
            check("budget", budget, 1),
            check("chunk", chunk, 1),
            check("sinks", sinks, 0),
            max(chunk, budget // 4) if recent is None else check("recent", recent, 1),
            check("interval", interval, 1),
        )
        if pattern.recent < pattern.chunk:
            raise ValueError(f"recent must be at least chunk = {chunk}, got {recent}")
        minimum = pattern.sinks + pattern.recent
        if pattern.budget < minimum:
            raise ValueError(f"budget must be at least sinks + recent = {minimum}, got {budget}")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Numbers by their names, such as ``budget=512,chunk=8``."""
        names = ("budget", *entry_for(cls.name).options)
        rest, options = split_options(text, names)
        if rest:
            raise ValueError(
                f"drafter must be {usage(cls.name)} with numbers for {', '.join(names)}, "
                f"got {shown(text)}"
            )
        owner = f"drafter {cls.name}"
        numbers: dict[str, Any] = {
            name: read_number(name, owner, number, integer=True) for name, number in options.items()
        }
        return cls(**numbers)

    def check_config(self, config: Any) -> None:
        if config.model_type not in {name.lower() for name in FAMILIES.values()}:
            raise ValueError(
                f"drafter {self.name} drafts for models of {', '.join(FAMILIES.values())}, got "
                f"{config.model_type!r}"
            )

    def stepper(self, call: DrafterCall) -> SparseCacheStepper:
        """The target over an empty sparse cache.

        Raises:
            ValueError: a cache or a model that this does not go with.
        """
        self._check_cache(call)
        reason = unserved_reason(call.model, call.max_length)
        if reason is not None:
            raise ValueError(
                f"drafter {self.name} cannot draft for {type(call.model).__name__}: {reason}"
            )
        return SparseCacheStepper(call, self.pattern)

    def begin(self, call: DrafterCall) -> State:
        """Check the call and make an empty cache.

        Raises:
            ValueError: a cache or a model that this does not go with.
        """
        return OwnCacheState(call, self.stepper(call), self.name)
