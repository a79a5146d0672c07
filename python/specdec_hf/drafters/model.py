"""Drafting a chain with a smaller causal language model of the same vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import PARAMETERS, check_value, shown
from specdec_hf.drafting.context import DraftContext, History, reads_draft
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS, Draft, Drafter, DraftOutcome
from specdec_hf.drafting.sampling import RowSampler, token_stats
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.choose import choose_kind, choose_runner
from specdec_hf.runner.compiled.compiled_call import compiles_on, pack_for, use_compiled
from specdec_hf.runner.encoded import Encoded, is_encoder_decoder
from specdec_hf.runner.protocol import (
    Lengths,
    context_length,
    num_parameters,
    rope_types,
    rounded,
    to_device,
    vocab_size_of,
)
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_kernels import SampledDraft

if TYPE_CHECKING:
    from typing_extensions import Self


class Stepper(Protocol):
    """What draws a chain token by token: a draft model, layers of the target, or a head.

    In a round `room` comes first, then `begin_round`, `catch_up` and `extend`.
    """

    device: torch.device
    sampler: RowSampler

    def room(self, history: History, limits: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft."""
        ...

    def begin_round(self, history: History) -> None:
        """Learn what is committed when a round begins; by default nothing is done.

        Active are the sequences that draft in it: the state of another one must not depend on them.
        """
        return

    def catch_up(self, history: History) -> torch.Tensor:
        """Feed what it lacks of the text; logits [B, V] after each sequence's last token."""
        ...

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Feed one token [B, 1] of each sequence at ``starts[b]``; logits [B, V] after it."""
        ...

    def truncate(self, lengths: Lengths) -> None:
        """Learn how many tokens of each sequence stay."""
        ...

    def read_ahead(self, history: History, size: int) -> int:
        """Feed the next tokens that `catch_up` would feed, but not the last; see `Drafter.read`."""
        return 0

    def adopt(self, b: int, other: Any, index: int) -> None:
        """As `Drafter.adopt`; only drafters with `Drafter.joins` need it."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} has a state that no other call can go on with")


class DrawingDrafter(Drafter):
    """Base class of drafters that draw a chain from one row of logits after the other.

    Override `start`, which sets ``_context`` and ``_draft``. A schedule that reads token statistics
    is asked after each token, and drafting ends where no sequence goes on.
    """

    draws = True
    rules = RULES_OF_DRAWN_DRAFTS
    _context: DraftContext
    _draft: Stepper

    def propose(self, history: History, limits: NDArray[np.int64]) -> Draft | None:
        draft, lengths = self._draft, history.lengths
        counts = draft.room(history, limits)
        gamma = int(counts.max())
        if gamma < 1:
            return None
        draft.begin_round(dataclasses.replace(history, active=counts > 0))
        logits = rounded(draft.catch_up(history))  # a head's are in the target's dtype
        positions = to_device(lengths, draft.device)
        with_distribution = reads_draft(self._context.rule)
        drawn: list[torch.Tensor] = []
        logits_of, sums, thresholds = [], [], []
        for i in range(gamma):
            if i:
                # A row of logits that is not finite draws -1. It is fed as token 0, and the
                # verification takes it as "no draft from here on".
                fed = drawn[-1].clamp(min=0)[:, None]
                logits = rounded(draft.extend(fed, lengths + i - 1))
            noise = self._context.noise_positions(positions, i)
            sampled = draft.sampler.sample(logits[:, None], noise[:, None])
            drawn.append(sampled.tokens[:, 0])
            if with_distribution:
                logits_of.append(logits)
                sums.append(sampled.logsumexp[:, 0])
                thresholds.append(sampled.threshold[:, 0])
            if self._context.continue_drafting is not None:
                ended = to_device(counts <= i, draft.device)
                stats = token_stats(
                    logits[:, None], sampled.tokens.masked_fill(ended[:, None], -1),
                    draft.sampler.sampling["temperature"], sampled.threshold,
                )  # fmt: skip
                continue_drafting = self._context.continue_drafting(i, stats[0])
                counts = np.where(continue_drafting, counts, np.minimum(counts, i + 1))
                if counts.max() == i + 1:
                    break
        tokens = torch.stack(drawn, dim=1)
        if not with_distribution:
            return Draft(tokens, counts=counts)
        target = self._context.model.device
        distribution = SampledDraft(
            torch.stack(logits_of, dim=1).to(target),
            torch.stack(sums, dim=1).to(target),
            torch.stack(thresholds, dim=1).to(target),
            self._context.temperature,
        )
        return Draft(tokens, distribution=distribution, counts=counts)

    def commit(self, outcome: DraftOutcome) -> None:
        self._draft.truncate(outcome.lengths + outcome.accepted)

    def read(self, history: History, size: int) -> int:
        has_room = self._draft.room(history, np.ones_like(history.lengths)).any()
        return self._draft.read_ahead(history, size) if has_room else 0

    def adopt(self, b: int, other: Self, index: int) -> None:
        self._draft.adopt(b, other._draft, index)


class ModelDrafter(DrawingDrafter):
    """Any causal LM; it may be on another device or in another dtype than the target.

    A draft comes with exactly the distribution it was drawn from. After a fully accepted draft the
    model's cache lacks the last drafted token, which the next round feeds first.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        cache: "auto", "spec", "aligned" or "dynamic", as in `generate`.
        temperature, top_k, top_p, min_p: of the drafts; None takes the call's. Lossless rules keep
            the target's distribution whatever they are. Temperature 0 drafts the most likely token,
            and greedy calls always do.

    Raises:
        TypeError: no model, or an argument of a wrong type.
        ValueError: a sampling parameter out of range.

    Source: Leviathan et al. 2023, section 6.
    """

    name = "model"
    rolls_back = True

    sampling: Mapping[str, float] = MappingProxyType({})  # in the place of the call's

    def __init__(
        self,
        model: Any,
        cache: str = "auto",
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
    ) -> None:
        check_language_model("model", model)
        if not isinstance(cache, str):
            raise TypeError(f"cache must be a string, got {shown(cache)}")
        self.model = model
        self.cache_kind = cache
        self.sampling = own_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def start(self, context: DraftContext) -> None:
        """Check the vocabulary and make an empty cache.

        Raises:
            ValueError: the two vocabularies differ in size.
        """
        self._context = context
        self._draft = draft = DraftModel(
            self.model, context, self.cache_kind, sampling=self.sampling
        )
        self.relative_cost = draft.relative_cost
        self.joins = type(self) is ModelDrafter and isinstance(draft.runner, SpecRunner)


def own_sampling(**sampling: float | None) -> dict[str, float]:
    """The checked sampling parameters that are not None."""
    own = {name: value for name, value in sampling.items() if value is not None}
    for name, value in own.items():
        if name not in PARAMETERS:
            raise TypeError(f"a draft model takes {', '.join(PARAMETERS)}, got {name}")
        check_value(name, value)
    return {name: type(PARAMETERS[name].neutral)(value) for name, value in own.items()}


class DraftModel(Stepper):
    """Any causal LM of the target's vocabulary; it may be on another device or in another dtype.

    It samples with the target's sampling parameters, so that its distribution is close to the one
    that its drafts are verified with, unless it is given some of its own.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        context: the call it serves.
        cache: "auto", "spec", "aligned" or "dynamic", as in `generate`; trees need "spec".
        tree: whether `feed` will be called.
        own_vocabulary: whether the model may have another vocabulary than the target.
        sampling: parameters in the place of the call's; see `RowSampler`.

    Raises:
        ValueError: the two vocabularies differ in size, or the cache cannot serve the model.
    """

    def __init__(
        self,
        model: Any,
        context: DraftContext,
        cache: str = "auto",
        *,
        tree: bool = False,
        own_vocabulary: bool = False,
        sampling: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        ours = vocab_size_of(model)
        theirs = vocab_size_of(context.model)
        if ours != theirs and not own_vocabulary:
            way = (
                "; give tokenizer=, the model's, and assistant_tokenizer=, the drafter's, and it "
                "drafts by the text"
            )
            raise ValueError(
                "drafter and model must share one vocabulary: "
                f"drafter has {ours} tokens, model has {theirs}{'' if tree else way}"
            )
        self.model = model
        self.device: torch.device = model.device
        self.context = context
        twin, packed = pack_for(model, context.compile)
        chosen = choose_kind(
            model,
            context.batch_size,
            cache,
            tree=tree,
            self_check=context.self_check,
            encoded=(encoded := self._encode(own_vocabulary)),
            twin=None if twin is None else twin.model,
        )
        self.runner, notes = choose_runner(
            model,
            context.batch_size,
            min(context.max_length, 1024) + context.max_draft + 1,
            chosen,
            encoded=encoded,
        )
        for note in notes:
            context.note(f"draft model {note}")
        if packed is not None:
            packed.refuse(chosen.unlike)
            context.report_packed(model, packed)
        if context.compile and compiles_on(model.device):
            made = use_compiled(
                model, self.runner, tree=tree, check=context.self_check, note=context.note,
                borrower=context.lease(),
            )  # fmt: skip
            context.report_compiled(f"draft model {type(model).__name__}", made)
        context.note_ropes(f"draft model {type(model).__name__}", rope_types(model))
        self.sampler = RowSampler(context, self.device, sampling)
        self._context_length = context_length(model)
        self._nodes_fed = 0

    def _encode(self, own_vocabulary: bool) -> Encoded | None:
        """What this model's own encoder makes of the input of the target's."""
        if not is_encoder_decoder(self.model):
            return None
        source = self.context.encoder
        if source is None or (own_vocabulary and source.reads_text):
            other = "" if source is None else " in its vocabulary"
            raise ValueError(
                f"drafter {type(self.model).__name__} has an encoder, and the call holds no input "
                f"for it{other}: the model must be an encoder-decoder whose encoder runs in this "
                "call and reads the same"
            )
        return source.encode(self.model)

    @property
    def relative_cost(self) -> float:
        """Its parameters by those of the target: about the cost of a forward, by memory traffic."""
        return num_parameters(self.model) / max(num_parameters(self.context.model), 1)

    def room(self, history: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft within its context."""
        return room_in(self._context_length, history, limits)

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens of this model's logits: the same."""
        return tokens

    def catch_up(self, history: History) -> torch.Tensor:
        """Feed the tokens that the cache lacks; logits [B, V] of each sequence's last token."""
        lengths = history.lengths
        # All sequences are fed as many tokens as the one that lacks most. Those that lack fewer
        # write the same keys and values into the same slots again, and the batch has no padding.
        missing = int((lengths - self.runner.lengths).max())
        tokens = to_device(history.last(missing), self.device)
        self._nodes_fed = 0
        logits = self.runner.forward(tokens, lengths - missing, 1)[:, -1]
        return self.sampler.at_own_temperature(logits)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Feed one token [B, 1] of each sequence at ``starts[b]``; logits [B, V] after it."""
        return self.sampler.at_own_temperature(self.runner.forward(tokens, starts, 1)[:, -1])

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Feed the next nodes of a tree below each sequence's last token; their logits [B, m, V].

        Args:
            tokens: [B, m] int64; absent nodes (-1) are fed as token 0, and have no children.
            lengths: [B] tokens of each sequence.
            parents: [B, k] of all nodes fed so far in this round, the m new ones last.
        """
        self._nodes_fed = parents.shape[1]
        runner = self.runner
        assert isinstance(runner, SpecRunner)
        logits = runner.forward_tree(tokens.clamp(min=0), lengths - 1, parents)
        return self.sampler.at_own_temperature(logits)

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Keep the committed path in the cache, down to its first node that was not fed.

        Args:
            lengths: [B] tokens of each sequence when it drafted.
            path: [B, P], numbers of nodes in the order they were fed, -1 for others.
        """
        in_cache = np.minimum.accumulate((path >= 0) & (path < self._nodes_fed), axis=1)
        if in_cache.any():
            assert isinstance(self.runner, SpecRunner)
            self.runner.compact(
                to_device(lengths, self.device),
                to_device(np.where(in_cache, path, -1), self.device),
            )
        self.truncate(lengths + in_cache.sum(axis=1))
        self._nodes_fed = 0

    def truncate(self, lengths: Lengths) -> None:
        """Keep ``lengths[b]`` tokens of each sequence, or all where the cache holds fewer."""
        self.runner.truncate(np.minimum(self.runner.lengths, lengths))

    def read_ahead(self, history: History, size: int) -> int:
        begin, last = int(self.runner.lengths[0]), int(history.lengths[0]) - 1
        end = min(begin + size, last)
        if begin < end:
            tokens = to_device(history.tokens[:, begin:end], self.device)
            self.runner.forward(tokens, self.runner.lengths, 1)
        return last - end

    def adopt(self, b: int, other: DraftModel, index: int) -> None:
        assert isinstance(self.runner, SpecRunner)
        assert isinstance(other.runner, SpecRunner)
        self.runner.adopt(b, other.runner, index)
        self.sampler.adopt(b, other.sampler, index)


def room_in(
    context_length: int | None, history: History, limits: NDArray[np.int64] | int
) -> NDArray[np.int64]:
    """[B], how many of ``limits`` tokens each sequence can draft within a model's context."""
    most = np.where(history.active, limits, 0)
    if context_length is None:
        return most
    return np.minimum(most, np.maximum(context_length - history.lengths, 0))
