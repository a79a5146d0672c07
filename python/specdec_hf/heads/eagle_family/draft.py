"""A trained head over pairs in the place of a draft model, in one call."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafters.chain import Stepper, note_ropes, room_in
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import Cost
from specdec_hf.heads.eagle_family.cache import HeadCache
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.eagle_family.layer import HeadLayer
from specdec_hf.heads.eagle_family.step import PairStep, packed_step, takes
from specdec_hf.runner.forwards import CompileStats, compiles_on
from specdec_hf.runner.packed.blocks import DRAFT_WEIGHTS
from specdec_hf.runner.protocol import ROPES_BY_LENGTH, Lengths, context_length, to_device
from specdec_kernels import tree_attention


class Pairs(NamedTuple):
    """The pairs of one forward, which go into the cache.

    Attributes:
        tokens: [B, n] int64.
        hidden: [B, n, H], of the tokens before them.
        places: [B, n] int64.
        starts: [B] int64, slot of the first pair of each sequence.
        mask: [B, n, visible] bool; None lets a pair see those up to its own.
        visible: slots that the pairs see.
    """

    tokens: torch.Tensor
    hidden: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor
    mask: torch.Tensor | None
    visible: int


class StatesStepper(Stepper):
    """A head over the target's hidden states that drafts in one call.

    Its cache holds what the head made of committed tokens alone from one round to the next: that of
    drafts is made again from the target's states once the drafts are committed.

    Args:
        head: in the target's dtype, on its device.
        call: the call.

    Attributes:
        lengths: [B], committed tokens of which the cache holds something.
    """

    def __init__(self, head: Any, call: DrafterCall) -> None:
        self.head = head
        self.device: torch.device = call.device
        self.cost = Cost(head.share_of(call.model))
        self.lengths: Lengths = np.zeros(call.batch_size, dtype=np.int64)
        self._states = call.keep_states(head.config.layers)
        self._context_length = context_length(call.model)

    def room(self, texts: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft.

        None before it has states, which a prefill of the model's own does not give, and none beyond
        its context.
        """
        known = self.lengths + self._states.counts > 0
        return np.where(known, room_in(self._context_length, texts, limits), 0)

    def truncate(self, lengths: Lengths) -> None:
        """Do nothing: the cache holds nothing of drafts."""

    def take(self, b: int, other: Any, index: int) -> None:
        self.lengths[b] = other.lengths[index]
        self._states.take(b, other._states, index)


class PairStepper(StatesStepper):
    """A head over pairs, with the methods of a `DraftModel`; override `_run`."""

    def __init__(self, head: Any, call: DrafterCall) -> None:
        super().__init__(head, call)
        self.model = call.model
        self._hidden = torch.empty(0)  # [B, n, H] of the root and of the drafts fed in this round

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens of these logits, -1 as it is."""
        return tokens

    def catch_up(self, texts: History) -> torch.Tensor:
        """Feed the pairs of newly committed tokens; logits [B, V] after each pending token."""
        states, counts = self._states.pop()
        return self._feed_committed(texts, states, counts, counts)

    def read_ahead(self, texts: History, size: int) -> int:
        """Feed the first of these pairs, but not the last, whose hidden state begins the drafts."""
        waiting = self._states.counts
        if size > 0 and waiting.max() > 1:
            states, counts = self._states.pop_first(size)
            self._feed_committed(texts, states, counts, waiting)
        return max(int(self._states.counts.max()) - 1, 0)

    def _feed_committed(
        self,
        texts: History,
        states: torch.Tensor,
        counts: NDArray[np.int64],
        waiting: NDArray[np.int64],
    ) -> torch.Tensor:
        """Feed the first ``counts[b]`` of the last ``waiting[b]`` pairs; logits [B, V] of the last.

        Args:
            texts: the committed tokens.
            states: [B, n, layers * E], of which each sequence has ``counts[b]``.
            counts, waiting: [B].
        """
        size = states.shape[1]
        ids = following_tokens(texts, waiting, size, self.device)
        starts = to_device(self.lengths, self.device)
        places = starts[:, None] + torch.arange(size, device=self.device)
        visible = int(self.lengths.max()) + size
        mask, last = self._mask(places, visible), to_device(np.maximum(counts - 1, 0), self.device)
        pairs = Pairs(ids, self._fuse(states), places, starts, mask, visible)
        self._hidden, logits = self._run(pairs, last)
        self.lengths = self.lengths + counts
        return logits[:, 0]

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Feed the next nodes of a tree below each pending token; their logits [B, m, V].

        Args:
            tokens: [B, m] int64 of the target; absent nodes (-1) are fed as token 0.
            lengths: [B] tokens of each sequence.
            parents: [B, k] of all nodes fed so far in this round, the m new ones last.
        """
        count, total = tokens.shape[1], parents.shape[1]
        # The pair of the root is the last one in the cache, and nodes follow it.
        roots = to_device(self.lengths - 1, self.device)
        visible = int(self.lengths.max()) + total
        skip = total + 1 - count
        tree = tree_attention(parents, roots, slots=visible)
        above = (parents[:, total - count :] + 1)[:, :, None]
        before = self._hidden.gather(1, above.expand(-1, -1, self._hidden.shape[2]))
        # A graph is made again for other strides.
        places, mask = (
            x[:, skip:].clone(memory_format=torch.contiguous_format)
            for x in (tree.positions, tree.mask)
        )
        pairs = Pairs(tokens.clamp(min=0), before, places, roots + skip, mask, visible)
        hidden, logits = self._run(pairs)
        self._hidden = torch.cat([self._hidden, hidden], dim=1)
        return logits

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Feed the next token [B, 1] of a chain; its logits [B, V]."""
        fed = self._hidden.shape[1]
        chain = torch.arange(-1, fed - 1, device=self.device).expand(len(tokens), -1)
        return self.feed(tokens, starts, chain)[:, -1]

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Do nothing: the pairs of committed drafts are fed again, with the target's features."""

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, n, H] from features [B, n, layers * E]."""
        return features

    def _mask(self, places: torch.Tensor, visible: int) -> torch.Tensor | None:
        """[B, n, visible] bool, which slots the pairs of committed tokens see; None for causal."""
        return torch.arange(visible, device=self.device) <= places[:, :, None]

    def _run(
        self, pairs: Pairs, last: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [B, n, H] of pairs and their logits; of pair ``last[b]`` alone if given."""
        raise NotImplementedError


class HeadStepper(PairStepper):
    """A `PairHead` that drafts in one call, packed on a CPU and in graphs where `compile` is on.

    Args:
        head, call: as in `StatesStepper`.
        full_vocabulary: whether logits are those of the target's vocabulary, -inf where the head
            cannot draft a token, or of the draft vocabulary.
        draft_weights: "int8": on a CPU all its linear layers are rounded to int8 in blocks of 32
            where that pays, the target's output matrix among them. "float": as they are.

    Raises:
        ValueError: a target of other sizes than those that the head was trained for.
    """

    head: PairHead
    step: Any  # a `PairStep`, packed or compiled
    joins = True

    def __init__(
        self, head: PairHead, call: DrafterCall, *, full_vocabulary: bool = False,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:  # fmt: skip
        super().__init__(head, call)
        self._full = full_vocabulary
        self._embed = head.embed(call.model)
        self._cache = HeadCache(head.config, call.batch_size, head.lm_head)
        self._cosines = self._sines = torch.empty(0)  # [P, D]
        rope: Any = head.config.layer.rope_parameters
        self._rope_type: str = rope["rope_type"]
        note_ropes(call, "the head", [self._rope_type])
        if self._rope_type not in ROPES_BY_LENGTH:
            self._turns(256)
        else:  # it changes with the text, and other calls draft with the same head
            with torch.inference_mode(False):
                self._rotary = copy.deepcopy(head.rotary)
        self.step = PairStep(head)
        graphs, how = compiles_on(self.device), call.forwards
        if how.compile is not False and not graphs and self.device.type == "cpu":
            self.step, packed = packed_step(
                head, rounded=draft_weights == "int8", check=how.self_check, note=call.note
            )
            if how.packed is not None:
                how.packed.append(packed)
        self._compiled: Any = None  # `CompiledCall`
        if how.compile and graphs and self._rope_type in ROPES_BY_LENGTH:
            reason = f"angles of its rotary embedding {self._rope_type!r} depend on the text"
            call.report_compiled("head", CompileStats(eager=reason))
        elif how.compile and graphs:
            from specdec_hf.extras.compiled.head_step import (  # noqa: PLC0415  # CUDA alone
                borrow_graphs,
                compiled_step,
            )

            compiled = compiled_step(
                head, several=call.batch_size > 1, check=how.self_check, note=call.note
            )
            self.step = compiled.model
            call.report_compiled("head", compiled.stats)
            if not compiled.stats.eager:
                self._compiled = compiled
                self._cache = borrow_graphs(
                    compiled, head, self._cache, self, how.borrower, check=how.self_check
                )

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of draft tokens, where logits are those of the draft vocabulary."""
        return torch.where(tokens < 0, tokens, self.head.tokens[tokens.clamp(min=0)])

    def take(self, b: int, other: Any, index: int) -> None:
        super().take(b, other, index)
        self._cache.take(b, other._cache, index, int(self.lengths[b]))

    @property
    def runs_fused(self) -> bool:
        """Whether its layer runs in one op, at angles that do not change with the text."""
        own = isinstance(self.step.midlayer, HeadLayer) or self._compiled is not None
        return not own and self._rope_type not in ROPES_BY_LENGTH

    def waiting(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Hidden states [B, n, H] of the pairs that were not fed yet, and how many each has."""
        states, counts = self._states.pop()
        return self._fuse(states), counts

    def buffers(self, slots: int) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Cosines and sines [P, D], and keys and values, with room for so many slots and places."""
        return *self._turns(slots), self._cache.buffers(slots)

    def _fuse(self, features: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.step.fc(features)
        return fused

    def _mask(self, places: torch.Tensor, visible: int) -> torch.Tensor | None:
        size = places.shape[1]
        compiled = self._compiled is not None and takes(size, visible)
        if compiled or len(places) > 1 or size not in (1, visible):
            return super()._mask(places, visible)
        return None

    def _run(
        self, pairs: Pairs, last: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, hidden, places, starts, mask, visible = pairs
        if self._rope_type in ROPES_BY_LENGTH:
            cosines, sines = (x[:, 0].flatten(0, 1) for x in self.head.turns(places, self._rotary))
            places = torch.arange(places.numel(), device=self.device).view_as(places)
        else:
            cosines, sines = self._turns(visible)
        keys, values = self._cache.buffers(visible)
        inputs: dict[str, Any] = {
            "embeddings": self._embed(tokens), "hidden": hidden, "places": places,
            "cosines": cosines, "sines": sines, "keys": keys, "values": values, "starts": starts,
            "mask": mask,
        }  # fmt: skip
        if self._compiled is not None and takes(tokens.shape[1], visible):
            hidden, logits = self._compiled(**inputs)
            if last is None:
                return hidden, self._in_vocabulary(logits)
            return pick(hidden, last), self._in_vocabulary(pick(logits, last))
        hidden = self.step.states(**inputs, visible=visible if mask is None else None)
        if last is not None:
            hidden = pick(hidden, last)
        return hidden, self._in_vocabulary(self.step.logits(hidden))

    def _turns(self, visible: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A table of `PairHead.turns`, which saves twenty calls a step."""
        if visible > len(self._cosines):
            with torch.inference_mode(False), torch.no_grad():
                places = torch.arange(max(visible, 2 * len(self._cosines)), device=self.device)
                self._cosines, self._sines = (x[0, 0] for x in self.head.turns(places[None]))
        return self._cosines, self._sines

    def _in_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits of draft tokens, or of all the target's."""
        if not self._full:
            return logits
        return self.head.over_vocabulary(logits)


def following_tokens(
    texts: History, counts: NDArray[np.int64], size: int, device: torch.device
) -> torch.Tensor:
    """[B, size], the token after each of the last ``counts[b]`` before the pending one.

    The features of a token go with the token after it; the last of these is pending. What follows
    the first ``counts[b]`` has no meaning.
    """
    columns = (texts.lengths - counts)[:, None] + np.arange(size)
    columns = np.minimum(columns, texts.lengths[:, None] - 1)
    return to_device(np.take_along_axis(texts.tokens, columns, axis=1), device)


def pick(rows: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Row ``last[b]`` of each sequence's rows [B, n, ...], as [B, 1, ...]."""
    return rows.gather(1, last[:, None, None].expand(-1, -1, rows.shape[2]))
