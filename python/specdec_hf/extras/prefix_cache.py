"""Keys and values of texts that begin as a prompt does, so that these tokens are not read again.

Two kinds of texts give their keys and values: those that run in the batch, and those that a
`PrefixCache` keeps of sequences that have ended. A prompt takes them by `SpecCache.take`, by which
a sequence moves from one batch to another, too. Where a drafter reads hidden states of the target,
these are kept beside the keys, and the drafter gets them as if a forward had made them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import check_integer
from specdec_hf.drafting.context import CommittedStates
from specdec_hf.heads.base import state_of
from specdec_hf.loop.session import Session
from specdec_hf.runner.choose import has_exact_text
from specdec_hf.runner.module_copy import PLAIN, structure_of
from specdec_hf.runner.packed.model import OnlyPacked, PackedModel
from specdec_hf.runner.protocol import HiddenStates, Lengths
from specdec_hf.runner.spec_cache import SpecCache

MIN_TOKENS = 16  # of a prefix that a prompt takes of a kept text; a block of vLLM has as many
Layers = tuple[int, ...]


@dataclass
class Prefix:
    """The texts that a sequence may take a prefix of, and how much it took.

    Attributes:
        salt: it takes nothing of texts with another salt, and they take nothing of it.
        num_cached: the tokens of its prompt whose keys and values were copied; the batch counts.
    """

    salt: str = ""
    num_cached: int = 0


class StateLog(CommittedStates):
    """The hidden states of all tokens of each sequence that the cache holds.

    Attributes:
        texts: for each sequence, states [n, layers * H] that follow one another.
    """

    def __init__(self, layers: Sequence[int], known: Lengths) -> None:
        super().__init__(layers, known)
        self.texts: list[list[torch.Tensor]] = [[] for _ in known]

    @classmethod
    def of(cls, layers: Layers, states: torch.Tensor) -> StateLog:
        """The log of one sequence with these states [n, layers * H], for `take`."""
        count = np.array([len(states)])
        log = cls(layers, count)
        log.texts, log._rounds = [[states]], [(states[None], count)]
        return log

    def record(
        self, hidden: HiddenStates, lengths: Lengths, rows: NDArray[np.int64], scored: int
    ) -> None:
        super().record(hidden, lengths, rows, scored)
        if self._rounds:
            states, counts = self.pop()
            for b in np.flatnonzero(counts).tolist():
                self.texts[b].append(states[b, : counts[b]].clone())

    def take(self, b: int, other: CommittedStates, index: int) -> None:
        assert isinstance(other, StateLog)
        self.texts[b] = [*other.texts[index]]
        self._known[b] = other._known[index]


@dataclass(eq=False)
class Text:
    """A text whose keys and values are in a cache.

    Attributes:
        tokens: [n] int64.
        cache: that holds those of these tokens, as sequence ``index``.
        states: hidden states [n, layers * H], in parts that follow one another, by their layers.
    """

    tokens: NDArray[np.int64]
    cache: SpecCache
    index: int
    states: dict[Layers, list[torch.Tensor]]

    @classmethod
    def of(cls, session: Session, b: int) -> Text:
        """The tokens of sequence ``b`` of a session that the target has read."""
        runner: Any = session.runner
        states = {log.layers: log.texts[b] for log in _logs(session)}
        counts = [sum(map(len, parts)) for parts in states.values()]
        size = min([int(session.runner.lengths[b]), *counts])
        return cls(session.history.tokens[b, :size], runner.cache, b, states)

    @property
    def bytes_of_token(self) -> int:
        """The size of a token."""
        layers = (layer for layer in self.cache.spec_layers if layer.is_initialized)
        slots = [x[0, :, 0].nbytes for layer in layers for x in layer.buffers]
        return sum(slots) + sum(parts[0][0].nbytes for parts in self.states.values())


@dataclass(frozen=True, eq=False)
class _Kept:
    """A text of a store, whose cache is its own, and how much memory that takes."""

    text: Text
    salt: str
    nbytes: int


class PrefixCache:
    """Keys and values of texts that have ended, from which later prompts begin.

    Where there is no more memory, the text goes that was used the longest time ago. Of two texts
    one of which begins with the other, the longer one alone is kept. A text that takes more than
    the limit is kept as far as it fits. All go when the weights, modules or adapters of the model
    have changed. Nothing is kept where the bits of a token depend on the forward that reads it, as
    they do in 16 bits without packed weights. Any thread may read the counts and clear it.

    Args:
        max_bytes: of the keys, values and hidden states of all kept texts; 0 keeps none. They lie
            on the device of the model.

    Attributes:
        bytes: that they take.
        queries: how many prompts were looked up.
        hits: how many of them took something.
        reused_tokens: how many tokens these took.
        evictions: how many texts went for lack of memory.
        reason: why the last batch made no use of it, or "".

    Raises:
        ValueError, TypeError: ``max_bytes`` is no integer of at least 0.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = check_integer("max_bytes", max_bytes, 0)
        self.bytes = self.queries = self.hits = self.reused_tokens = self.evictions = 0
        self.reason = ""
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # the next to go comes first
        self._next = 0
        self._made_by: Hashable = None
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """How many texts are kept."""
        return len(self._kept)

    def clear(self) -> None:
        """Let all texts go."""
        with self._lock:
            self._kept.clear()
            self.bytes = 0

    def open(self, session: Session) -> bool:
        """Whether the batch of a session may use it; texts of other weights go."""
        packed, _ = session.plan.packing
        self.reason = ""
        if not has_exact_text(session.model, session.plan.chosen, packed):
            self.reason = (
                "the bits of a token depend on the forward that reads it, since the model's own "
                f"forwards run in {str(session.model.dtype).removeprefix('torch.')}"
            )
        elif self.max_bytes:
            made_by = session.stats.forwards, _state_of_model(session.model, packed)
            if made_by != self._made_by:
                self.clear()
            self._made_by = made_by
        return not self.reason and self.max_bytes > 0

    def find(self, prompt: NDArray[np.int64], salt: str, layers: set[Layers]) -> Text | None:
        """The text with the longest prefix of a prompt [n], where that is long enough.

        Args:
            prompt: without its last token.
            salt: that of the text.
            layers: of which it must have the hidden states.
        """
        self.queries += 1
        longest, best = MIN_TOKENS - 1, None
        with self._lock:
            for number, kept in self._kept.items():
                if kept.salt == salt and layers <= kept.text.states.keys():
                    common = length_of_prefix(kept.text.tokens, prompt)
                    if common > longest:
                        longest, best = common, number
            if best is None:
                return None
            self._kept.move_to_end(best)
            return self._kept[best].text

    def keep(self, text: Text, salt: str, config: Any) -> None:
        """Keep a copy of a text in the place of those with which it begins.

        Args:
            text: shorter ones than `MIN_TOKENS` are not kept.
            salt: that of the prompts that may take it.
            config: the model's.
        """
        if len(text.tokens) < MIN_TOKENS:
            return
        per_token = text.bytes_of_token
        # A cache has one slot more, which no forward sees.
        size = min(len(text.tokens), self.max_bytes // per_token - 1)
        if size < MIN_TOKENS:
            return
        tokens, nbytes = text.tokens[:size].copy(), (size + 1) * per_token
        with self._lock:
            if not self._make_room(tokens, salt, text.states.keys(), nbytes):
                return
            cache = SpecCache(config, 1, size + 1, text.cache.device)
            cache.take(0, text.cache, text.index, size)
            states = {name: [joined(parts, size).clone()] for name, parts in text.states.items()}
            self._kept[self._next] = _Kept(Text(tokens, cache, 0, states), salt, nbytes)
            self._next += 1
            self.bytes += nbytes

    def _make_room(
        self, tokens: NDArray[np.int64], salt: str, layers: AbstractSet[Layers], nbytes: int
    ) -> bool:
        """Let go what has to for a text; False where it is the beginning of another one."""
        for number, kept in list(self._kept.items()):
            if kept.salt != salt or kept.text.states.keys() != layers:
                continue
            common = length_of_prefix(kept.text.tokens, tokens)
            if common == len(tokens):
                self._kept.move_to_end(number)
                return False
            if common == len(kept.text.tokens):
                self._drop(number)
        while self.bytes + nbytes > self.max_bytes:
            self._drop(next(iter(self._kept)))
            self.evictions += 1
        return True

    def _drop(self, number: int) -> None:
        self.bytes -= self._kept.pop(number).nbytes


class SharedPrefixes:
    """Shares prefixes among the sequences of a batch, and with the texts that are kept.

    Args:
        store: which keeps texts; None keeps none.
        prefixes: those of the sequences, by their numbers in the batch.
    """

    def __init__(self, store: PrefixCache | None, prefixes: list[Prefix]) -> None:
        self.store, self.prefixes = store, prefixes

    def watch(self, session: Session) -> Session:
        """The session, whose hidden states are kept where a drafter reads them."""
        if self.store is not None:
            call = session.drafter_call
            for layers in sorted(_layers_read(session)):
                assert call is not None
                assert call.kept_states is not None
                call.kept_states.append(StateLog(layers, session.runner.lengths))
        return session

    @torch.inference_mode()
    def share(self, alone: Session, others: Sequence[Session]) -> None:
        """Take what a prompt has in common with a text that was read.

        The last token of the prompt is read for its logits. Where a drafter reads hidden states
        and nothing keeps them, the whole prompt is read.

        Args:
            alone: a session of one sequence.
            others: of sequences that run or are read.
        """
        layers = _layers_read(alone)
        if not alone.first_round or (layers and self.store is None):
            return
        prefix = self.prefixes[alone.sequences.numbers[0]]
        prompt = alone.history.tokens[0, : alone.sequences.prompt_lengths[0] - 1]
        began = held = int(alone.runner.lengths[0])
        best: Text | None = None
        if not held and self.store is not None:
            best = self.store.find(prompt, prefix.salt, layers)
            held = 0 if best is None else length_of_prefix(best.tokens, prompt)
        kept = best
        for other in others:
            for b in np.flatnonzero(other.history.active).tolist():
                text = Text.of(other, b)
                common = length_of_prefix(text.tokens, prompt)
                same = self.prefixes[other.sequences.numbers[b]].salt == prefix.salt
                if common > held and same:
                    held, best = common, text
        if best is None:
            return
        if best is kept and self.store is not None:
            self.store.hits += 1
            self.store.reused_tokens += held
        prefix.num_cached += held - began
        runner: Any = alone.runner
        runner.cache.take(0, best.cache, best.index, held)
        if layers:
            _give_states(alone, best, held)

    @torch.inference_mode()
    def move(self, into: Session, b: int, other: Session, index: int) -> None:
        """Go on with sequence ``index`` of another session as sequence ``b``."""
        into.take(b, other, index)
        for mine, its in zip(_logs(into), _logs(other), strict=True):
            mine.take(b, its, index)

    @torch.inference_mode()
    def keep(self, session: Session, b: int) -> None:
        """Keep the text of a sequence that has ended, but not where an error has ended it."""
        number = session.sequences.numbers[b]
        if self.store is None or session.stats.sequences[number].stop_reason == "error":
            return
        try:
            salt, config = self.prefixes[number].salt, session.model.config
            self.store.keep(Text.of(session, b), salt, config)
        except (MemoryError, torch.OutOfMemoryError):  # the others need not end for it
            self.store.clear()


def length_of_prefix(text: NDArray[np.int64], prompt: NDArray[np.int64]) -> int:
    """How many tokens at the beginning of two texts are the same."""
    size = min(len(text), len(prompt))
    unlike = np.flatnonzero(text[:size] != prompt[:size])
    return int(unlike[0]) if len(unlike) else size


def joined(parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """The first ``size`` rows of tensors [n, W] that follow one another."""
    return (parts[0] if len(parts) == 1 else torch.cat([*parts]))[:size]


def _kept_states(session: Session) -> list[CommittedStates]:
    return (session.drafter_call and session.drafter_call.kept_states) or []


def _logs(session: Session) -> list[StateLog]:
    return [one for one in _kept_states(session) if isinstance(one, StateLog)]


def _layers_read(session: Session) -> set[Layers]:
    """After which layers drafters read hidden states of the target."""
    return {one.layers for one in _kept_states(session)}


def _give_states(alone: Session, text: Text, held: int) -> None:
    """Let drafters have the states of the first tokens of a text, in the place of all before."""
    alone.runner.tap.pop()
    for one in _kept_states(alone):
        one.take(0, StateLog.of(one.layers, joined(text.states[one.layers], held)), 0)


def _state_of_model(model: Any, packed: PackedModel | None) -> Hashable:
    """A value that changes with anything that keys and values follow from.

    Writes to ``weight.data`` of a model that is not on a CPU are not seen.

    Args:
        model: the target.
        packed: its packed model, whose weights were compared when the batch began.
    """
    layers = [] if packed is None else packed.layers
    known = {copy.place: copy.digest for copy in (layer.copy_of_weight() for layer in layers)}
    tensors = [*model.parameters(), *model.buffers()]
    tensors += [module.panels for module in model.modules() if isinstance(module, OnlyPacked)]
    states: list[Any] = [known.get((x.data_ptr(), x.shape, x.dtype)) for x in tensors]
    rest = [n for n, state in enumerate(states) if state is None]
    for n, state in zip(rest, _digests([tensors[n] for n in rest]), strict=True):
        states[n] = state
    return structure_of(model), _settings(model), tuple(states)


def _digests(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Digests of tensors on a CPU; of others, where they lie and how often they were written to."""
    made: list[Any] = [state_of(x) for x in tensors]
    try:
        from specdec_host import digests  # noqa: PLC0415  # may have no module for this Python
    except ImportError:
        return made
    plain = [
        n for n, x in enumerate(tensors)
        if x.device.type == "cpu" and type(x.detach()) is torch.Tensor and x.is_contiguous()
    ]  # fmt: skip
    views = [tensors[n].detach().reshape(-1).view(torch.uint8).numpy() for n in plain]
    for n, digest in zip(plain, digests(views), strict=True):
        made[n] = digest
    return made


def _settings(model: Any) -> tuple[str, ...]:
    """The lists and dicts of numbers and names in the modules, as of the adapters that are on."""
    own = vars(torch.nn.Module()).keys()
    return tuple(
        f"{name}={value!r}"
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in own and isinstance(value, list | tuple | set | frozenset | dict)
        if all(isinstance(x, PLAIN) for x in (value.values() if isinstance(value, dict) else value))
    )
