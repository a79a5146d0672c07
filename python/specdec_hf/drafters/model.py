"""Drafting a chain with a smaller causal language model of the same vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.arguments import PARAMETERS, check_value, shown
from specdec_hf.drafters.chain import ChainState, Stepper, note_ropes, room_in
from specdec_hf.drafting.call import NOTHING, DrafterCall, Drawn
from specdec_hf.drafting.context import History
from specdec_hf.drafting.drafter import (
    RULES_OF_DRAWN_DRAFTS,
    Cost,
    Drafter,
    Round,
    State,
)
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.choose import choose_cache
from specdec_hf.runner.forwards import compiles_on, pack_for
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.packed.blocks import (
    DRAFT_WEIGHTS,
    blocks_pay,
    checked_draft_weights,
    rounded_to_int8,
)
from specdec_hf.runner.protocol import (
    CacheRequest,
    Lengths,
    context_length,
    is_encoder_decoder,
    num_parameters,
    rope_types,
    to_device,
    vocab_size_of,
)

if TYPE_CHECKING:
    from specdec_hf.extras.encoded import Encoded


class ModelDrafter(Drafter):
    """Any causal LM; it may be on another device or in another dtype than the target.

    A draft comes with exactly the distribution it was drawn from. After a fully accepted draft the
    model's cache lacks the last drafted token, which the next round feeds first.

    Args:
        model: the draft model. Neither it nor its configs are changed.
        cache: "auto", "spec", "aligned" or "dynamic", as in `generate`.
        temperature, top_k, top_p, min_p: of the drafts; None takes the call's. Lossless rules keep
            the target's distribution whatever they are. Temperature 0 drafts the most likely token,
            and greedy calls always do.
        draft_weights: "int8" or "float", see `DraftModel`.

    Raises:
        TypeError: no model, or an argument of a wrong type.
        ValueError: a sampling parameter out of range.

    Source: Leviathan et al. 2023, section 6.
    """

    name = "model"
    draws = True
    rules = RULES_OF_DRAWN_DRAFTS
    rolls_back = True
    is_model = True

    sampling: Mapping[str, float] = NOTHING  # in the place of the call's
    draft_weights: str = DRAFT_WEIGHTS[0]

    def __init__(
        self,
        model: Any,
        cache: str = "auto",
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:
        check_language_model("model", model)
        if not isinstance(cache, str):
            raise TypeError(f"cache must be a string, got {shown(cache)}")
        self.model = model
        self.cache_kind = cache
        self.draft_weights = checked_draft_weights(draft_weights)
        self.sampling = own_sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)

    def begin(self, call: DrafterCall) -> State:
        """Check the vocabulary and make an empty cache.

        Raises:
            ValueError: the two vocabularies differ in size.
        """
        return ChainState(call, self.drafting_model(call))

    def drafting_model(self, call: DrafterCall) -> DraftModel:
        """The draft model of a chain, with an empty cache."""
        return self._draft_model(call, self.cache_kind)

    def tree_model(self, call: DrafterCall, depth: int, number: int) -> DraftModel:
        """The draft model of trees of a fixed shape, the ``number``-th of those of a round."""
        return self._draft_model(call, "spec", tree=True)

    def _draft_model(self, call: DrafterCall, cache: str, *, tree: bool = False) -> DraftModel:
        return DraftModel(
            self.model, call, cache, tree=tree, sampling=self.sampling,
            draft_weights=self.draft_weights,
        )  # fmt: skip


def may_be_rounded(model: Any, target: Any) -> bool:
    """Whether a draft model has weights of its own, in a dtype for which blocks pay."""
    if not blocks_pay(model.dtype):
        return False
    own, others = ({x.data_ptr() for x in one.parameters()} for one in (model, target))
    return not own & others and record_of(model).blocks is None


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
        call: the call it serves.
        cache: "auto", "spec", "aligned" or "dynamic", as in `generate`; trees need "spec".
        tree: whether `feed` will be called.
        own_vocabulary: whether the model may have another vocabulary than the target.
        sampling: parameters in the place of the call's. Its logits are scaled so that the
            distribution at the call's temperature is the one at its own.
        draft_weights: "int8": on a CPU, linear layers of float32, or of bfloat16 where the
            processor multiplies it, are rounded to int8 in blocks of 32, which take 3.8 or 1.9
            times fewer bytes. Those of a model that shares weights with the target, or has the
            blocks of a GGUF file, stay as they are. "float": as they are.

    Raises:
        ValueError: the two vocabularies differ in size, or the cache cannot serve the model.
    """

    _draw_chain: Callable[..., Drawn | None] | None = None  # in one CUDA graph

    def __init__(
        self,
        model: Any,
        call: DrafterCall,
        cache: str = "auto",
        *,
        tree: bool = False,
        own_vocabulary: bool = False,
        sampling: Mapping[str, float] = NOTHING,
        draft_weights: str = DRAFT_WEIGHTS[0],
    ) -> None:
        ours = vocab_size_of(model)
        theirs = vocab_size_of(call.model)
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
        self.call = call
        rounds = draft_weights == "int8" and may_be_rounded(model, call.model)
        rounding = rounded_to_int8 if rounds else None
        packed_model, packed = pack_for(model, call.forwards.compile, rounding)
        request = CacheRequest(
            call.batch_size, cache, tree=tree, self_check=call.forwards.self_check,
            encoded=self._encode(own_vocabulary),
        )  # fmt: skip
        chosen = choose_cache(model, request, packed_model)
        self.runner = chosen.make(min(call.max_length, 1024) + call.max_draft + 1)
        for note in chosen.notes:
            call.note(f"draft model {note}")
        if packed is not None:
            packed.refuse(chosen.why_not_packed)
            if call.forwards.packed is not None:
                call.forwards.packed.append(packed)
            asked = call.forwards.compile is True
            packed.report(model, lambda note: call.note(f"draft model {note}"), asked=asked)
        if call.forwards.compile and compiles_on(model.device):
            self._compile(tree, sampling)
        note_ropes(call, f"draft model {type(model).__name__}", rope_types(model))
        # Its parameters by those of the target: about the cost of a forward, by memory traffic.
        self.cost = Cost(num_parameters(model) / max(num_parameters(call.model), 1))
        self._own_temperature = sampling.get("temperature")
        self.sampling = {name: sampling[name] for name in sampling if name != "temperature"}
        if self._own_temperature == 0:
            self.sampling["top_k"] = 1
        self.joins = self.runner.has_slots  # others share parts of the cache
        self._context_length = context_length(model)
        self._nodes_fed = self._last_gamma = 0

    def _compile(self, tree: bool, sampling: Mapping[str, float]) -> None:
        """Let forwards run as CUDA graphs, and all steps of a chain as one of them."""
        from specdec_hf.extras.compiled import draft_steps  # noqa: PLC0415  # CUDA alone
        from specdec_hf.extras.compiled.compiled_call import use_compiled  # noqa: PLC0415

        call, name = self.call, f"draft model {type(self.model).__name__}"
        made = use_compiled(
            self.model, self.runner, tree=tree, check=call.forwards.self_check, note=call.note,
            borrower=call.forwards.borrower,
        )  # fmt: skip
        call.report_compiled(name, made)
        if reason := draft_steps.refusal(call, self.runner, sampling):
            call.note(f"{name} drafts token by token: {reason}")
        else:
            self._draw_chain = draft_steps.draw_chain

    def _encode(self, own_vocabulary: bool) -> Encoded | None:
        """What this model's own encoder makes of the input of the target's."""
        if not is_encoder_decoder(self.model):
            return None
        source = self.call.encoder
        if source is None or (own_vocabulary and source.reads_text):
            other = "" if source is None else " in its vocabulary"
            raise ValueError(
                f"drafter {type(self.model).__name__} has an encoder, and the call holds no input "
                f"for it{other}: the model must be an encoder-decoder whose encoder runs in this "
                "call and reads the same"
            )
        return source.encode(self.model)

    def _at_own_temperature(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits [B, ...] whose distribution at the call's temperature is this model's own.

        So the drafts of several drafters have one temperature. Greedy sequences keep their logits.
        """
        own, temperature = self._own_temperature, self.call.sampling_on(self.device)["temperature"]
        if not own:
            return logits
        if isinstance(temperature, torch.Tensor):
            scale = torch.where(temperature > 0, temperature / own, 1.0)
            return logits.float() * scale.view(-1, *[1] * (logits.ndim - 1))
        return logits.float() * (temperature / own) if temperature > 0 else logits

    def room(self, texts: History, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
        """[B], how many of ``limits`` tokens each sequence can draft within its call."""
        return room_in(self._context_length, texts, limits)

    def target_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The target's ids of tokens of this model's logits: the same."""
        return tokens

    def catch_up(self, texts: History) -> torch.Tensor:
        """Feed the tokens that the cache lacks; logits [B, V] of each sequence's last token."""
        lengths = texts.lengths
        # All sequences are fed as many tokens as the one that lacks most. Those that lack fewer
        # write the same keys and values into the same slots again, and the batch has no padding.
        missing = int((lengths - self.runner.lengths).max())
        tokens = to_device(texts.last(missing), self.device)
        self._nodes_fed = 0
        logits = self.runner.forward(tokens, lengths - missing, 1)[:, -1]
        return self._at_own_temperature(logits)

    def extend(self, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """Feed one token [B, 1] of each sequence at ``starts[b]``; logits [B, V] after it."""
        return self._at_own_temperature(self.runner.forward(tokens, starts, 1)[:, -1])

    def draw_all(self, texts: History, logits: torch.Tensor, gamma: int) -> Drawn | None:
        again, self._last_gamma = gamma == self._last_gamma, gamma
        if self._draw_chain is None or not again or gamma < 2:  # a new length may not come again
            return None
        return self._draw_chain(self.call, self.runner, texts, logits, gamma, self.sampling)

    def feed(self, tokens: torch.Tensor, lengths: Lengths, parents: torch.Tensor) -> torch.Tensor:
        """Feed the next nodes of a tree below each sequence's last token; their logits [B, m, V].

        Args:
            tokens: [B, m] int64; absent nodes (-1) are fed as token 0, and have no children.
            lengths: [B] tokens of each sequence.
            parents: [B, k] of all nodes fed so far in this round, the m new ones last.
        """
        self._nodes_fed = parents.shape[1]
        logits = self.runner.forward_tree(tokens.clamp(min=0), lengths - 1, parents)
        return self._at_own_temperature(logits)

    def keep(self, lengths: Lengths, path: NDArray[np.int64]) -> None:
        """Keep the committed path in the cache, down to its first node that was not fed.

        Args:
            lengths: [B] tokens of each sequence when it drafted.
            path: [B, P], numbers of nodes in the order they were fed, -1 for others.
        """
        in_cache = np.minimum.accumulate((path >= 0) & (path < self._nodes_fed), axis=1)
        if in_cache.any():
            self.runner.compact(
                to_device(lengths, self.device),
                to_device(np.where(in_cache, path, -1), self.device),
            )
        self.truncate(lengths + in_cache.sum(axis=1))
        self._nodes_fed = 0

    def truncate(self, lengths: Lengths) -> None:
        """Keep ``lengths[b]`` tokens of each sequence, or all where the cache holds fewer."""
        self.runner.truncate(np.minimum(self.runner.lengths, lengths))

    def learn(self, texts: History, done: Round) -> None:
        """Learn of a round of trees: nothing, where no drafter is below it."""

    def end(self, texts: History) -> None:
        """End a call of trees."""

    def read_ahead(self, texts: History, size: int) -> int:
        begin, last = int(self.runner.lengths[0]), int(texts.lengths[0]) - 1
        end = min(begin + size, last)
        if begin < end:
            tokens = to_device(texts.tokens[:, begin:end], self.device)
            self.runner.forward(tokens, self.runner.lengths, 1)
        return last - end

    def take(self, b: int, other: DraftModel, index: int) -> None:
        self.runner.take(b, other.runner, index)
