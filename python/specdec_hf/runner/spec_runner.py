"""Forwards through a `SpecCache`: the unmodified model, with positions and masks made from lengths.

A mask hides the slots that hold padding or rejected drafts.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.nn.functional import pad
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_hf.runner.forwards import AS_THE_MODEL, FIRST, SINGLE, ForwardPolicy, is_long, padded
from specdec_hf.runner.packed.model import is_packed
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    DEFERRED,
    EPILOGUE,
    HiddenStateTap,
    Lengths,
    Runner,
    context_length,
    model_inside,
    rounded,
    to_device,
)
from specdec_hf.runner.spec_cache import SpecCache
from specdec_kernels import tree_attention

if TYPE_CHECKING:
    from specdec_hf.extras.later_inputs import LaterInputs

# A "dummy" layer has no cache of its own: it reads that of an earlier layer, or attends to nothing.
MASKED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "dummy"})

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Adds up the seconds of methods that are `timed`: masks, positions, roll back, compaction."""

    def __init__(self) -> None:
        self.seconds = 0.0


def timed(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Add the seconds of a method to the stopwatch of its object, ``watch``."""

    @functools.wraps(method)
    def measured(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        began = time.perf_counter()
        result = method(self, *args, **kwargs)
        self.watch.seconds += time.perf_counter() - began
        return result

    return measured  # type: ignore[return-value]  # mypy takes `self` for a named argument


class SpecRunner(Runner):
    """Runs a model over the next tokens of a batch whose sequences have different lengths.

    The forward gets explicit position ids and a 4-D mask made from the lengths: boolean for
    scaled-dot-product attention, additive for eager attention, and one per layer type where the
    model has several.

    A sequence alone needs no mask for its first tokens (`FIRST`), nor for a single one (`SINGLE`):
    the first are causal, and the single one sees every slot. There the policy may leave the mask
    out, as plain generation does, so that scaled-dot-product attention skips what a causal mask
    hides.

    Args:
        model: the causal language model, or its packed model.
        batch_size: number of sequences B.
        capacity: slots to allocate at first; see `SpecCache`.
        policy: how forwards run.
        later_inputs: what every forward needs beyond ids, positions and mask, or None.

    Attributes:
        cache: the keys and values, which it alone writes.
        policy: of the forwards to come.
        watch: measures all that is no forward of the model.

    Raises:
        ValueError: the model's attention or layer types cannot take such a mask.
    """

    kind = "spec"
    has_slots = True

    def __init__(
        self,
        model: Any,
        batch_size: int,
        capacity: int,
        policy: ForwardPolicy = AS_THE_MODEL,
        later_inputs: LaterInputs | None = None,
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        reason = unsupported_reason(model)
        if reason is not None:
            raise ValueError(f"cache='spec' cannot serve {type(model).__name__}: {reason}")
        self.model = model
        self._packed = is_packed(model)
        self.device: torch.device = model.device
        self.cache = SpecCache(config, batch_size, capacity, self.device)
        self.policy = policy
        self.later_inputs = later_inputs
        self.tap = HiddenStateTap()
        self.omitted: set[str] = set()
        self.watch = Stopwatch()
        self._was_empty = True
        context = context_length(model)
        self._last_position = None if context is None else context - 1
        self._sliding_window: int | None = getattr(config, "sliding_window", None)
        self._mask_types: list[str] | None = (
            sorted(set(config.layer_types)) if getattr(config, "layer_types", None) else None
        )
        self._additive: torch.dtype | None = (
            model.dtype if config._attn_implementation == "eager" else None
        )
        # With a mask, a single token's heads that share keys read them once. Without, torch 2.13
        # reads them for each head, and converts them if they are 16-bit.
        self._masked_is_faster = self.device.type == "cpu" and model.dtype != torch.float32
        # A model's forward may have been replaced by one that takes the same arguments.
        forward = type(model_inside(model)).forward
        self._takes_logits_to_keep = "logits_to_keep" in inspect.signature(forward).parameters

    @property
    def lengths(self) -> Lengths:
        """[B], committed tokens of each sequence that the cache holds."""
        return self.cache.lengths

    def forward(
        self, tokens: torch.Tensor, starts: Lengths, keep: int, epilogue: Any = None
    ) -> torch.Tensor:
        """Feed the next tokens, as in `Runner`; gives what an epilogue makes of the logits.

        It is one of extras/compiled, and needs a policy that compiles, and tokens in the cache.
        """
        size = tokens.shape[1]
        if epilogue is None and self.policy.one_by_one and not self.cache.lengths.any():
            from specdec_hf.extras.prompts_alone import read_alone  # noqa: PLC0415  # prompts only

            logits = read_alone(self, tokens, starts, keep)
            if logits is not None:
                return logits
        padding = self.policy.width(size) - size
        inputs = self.window(starts, size + padding, padding)
        if epilogue is not None:
            inputs[EPILOGUE] = epilogue
        return self._run(tokens, inputs, keep, padding)

    def forward_tree(
        self, tokens: torch.Tensor, roots: Lengths, parents: torch.Tensor
    ) -> torch.Tensor:
        """Run the model over a tree, or over its last nodes, as in `Runner`."""
        fed = tokens.shape[1]
        padding = self.policy.width(fed) - fed
        inputs = self.tree_window(
            roots, pad(parents, (0, padding), value=-1), parents.shape[1] + 1 - fed, padding
        )
        return self._run(tokens, inputs, fed, padding)

    @timed
    def window(self, starts: Lengths, size: int, padding: int = 0) -> dict[str, Any]:
        """Model inputs for ``size`` tokens per sequence, the first at position ``starts[b]``.

        A negative position is left padding: its key and value are not stored, and its logits are
        not used.

        Args:
            starts: [B], position of each sequence's first token.
            size: tokens per sequence in this forward.
            padding: how many of them, the last ones, are padding.

        Returns:
            The cache, ``position_ids`` [B, size] and ``attention_mask``, which may be None; or the
            function that makes these two of the cursor's starts, where the policy defers it.
        """
        cache = self.cache
        self._was_empty = not cache.lengths.any()
        visible = self.policy.visible(int(starts.max()) + size)
        cache.move_cursor(to_device(starts, self.device), int(starts.max()), visible)
        cache.extend(starts + size - padding)
        made = partial(self.made_for, size, visible, self._is_masked(starts, size, visible))
        if self.policy.defers and self.later_inputs is None and self.runs_compiled(size):
            return {CACHE_NAME: cache, DEFERRED: made}
        return {CACHE_NAME: cache, **made(cache.cursor.starts)}

    def made_for(self, size: int, slots: int, masked: bool, starts: torch.Tensor) -> dict[str, Any]:
        """Positions and mask of ``size`` tokens from ``starts`` [B] on, which see so many slots."""
        order = torch.arange(size, device=starts.device)
        # Sequences that have ended may go beyond the context, but not beyond the model's table.
        positions = (starts[:, None] + order).clamp(0, self._last_position)
        mask = self._mask(positions, slots) if masked else None
        return {"position_ids": positions, "attention_mask": mask}

    @timed
    def tree_window(
        self, roots: Lengths, parents: torch.Tensor, skip: int = 0, padding: int = 0
    ) -> dict[str, Any]:
        """Model inputs for a tree below each sequence's root, all at once or level by level.

        The root of sequence ``b`` goes to slot ``roots[b]`` and node ``n`` to slot
        ``roots[b] + 1 + n``. A node attends to the tokens before the root and to its own ancestors.

        Args:
            roots: [B], position of each sequence's root.
            parents: [B, N] int32 or int64, of the nodes; -1 is the root.
            skip: how many of [root, node 0, node 1, ...] are in the cache already.
            padding: how many of the nodes, the last ones, are padding.

        Returns:
            As `window`, for N + 1 - skip tokens per sequence.
        """
        self._was_empty = False
        longest = int(roots.max())
        visible = self.policy.visible(longest + parents.shape[1] + 1)
        lengths = to_device(roots, self.device)
        self.cache.move_cursor(lengths + skip, longest + skip, visible)
        tree = tree_attention(parents, lengths, slots=visible)

        def mask_of(sliding: int) -> torch.Tensor:
            mask = tree.mask
            if sliding:
                mask = tree_attention(parents, lengths, slots=visible, window=sliding).mask
            return mask[:, None, skip:]

        self.cache.extend(roots + parents.shape[1] + 1 - padding)
        return {
            CACHE_NAME: self.cache,
            "position_ids": tree.positions[:, skip:].clamp(0, self._last_position),
            "attention_mask": self.by_layer_type(mask_of),
        }

    @timed
    def compact(self, base: torch.Tensor, path: torch.Tensor) -> None:
        """Move an accepted path to the slots after the root; see `SpecCache.compact`."""
        self.cache.compact(base, path)

    @timed
    def truncate(self, lengths: Lengths) -> None:
        """Keep the first ``lengths[b]`` tokens of each sequence; see `SpecCache.truncate`."""
        self.cache.truncate(lengths)

    @timed
    def take(self, b: int, other: SpecRunner, index: int = 0, length: int | None = None) -> None:
        """Take over the cache of a sequence of another runner; see `SpecCache.take`."""
        self.cache.take(b, other.cache, index, length)

    def _run(
        self, tokens: torch.Tensor, inputs: dict[str, Any], keep: int, padding: int = 0
    ) -> torch.Tensor:
        """Logits of the last ``keep`` tokens [B, n], or of all where ``padding`` follows them."""
        size, wanted = tokens.shape[1], keep
        width = size + padding
        if padding or self.policy.keeps_all(width):
            keep = width  # the head too has one width
        if self.later_inputs is not None:
            inputs = self.later_inputs.add_to(inputs, width)
        if self._takes_logits_to_keep:
            inputs["logits_to_keep"] = keep
        if self.tap.is_open:
            inputs["output_hidden_states"] = True
        forward: Any = self.policy.compiled if self.runs_compiled(width) else self.model
        fed = padded(tokens, width)
        output = forward(input_ids=fed, use_cache=True, return_dict=True, **inputs)
        if self.tap.is_open:
            self.tap.add(output.hidden_states, slice(size))
        if EPILOGUE in inputs:
            made: torch.Tensor = inputs[EPILOGUE].of(output, self.cache.cursor.starts)
            return made
        return last_rows(output.logits, wanted, padding)

    def runs_compiled(self, size: int) -> bool:
        """Whether the forward under way runs compiled, as all but those of long prompts.

        Args:
            size: tokens of each sequence.
        """
        long_prompt = self._was_empty and is_long(size)
        return self.policy.compiled is not None and not long_prompt

    def _is_masked(self, starts: Lengths, size: int, visible: int) -> bool:
        kind = self._causal_kind(starts, size, visible)
        # A packed model attends by the mask, so that a token has the same bits in any forward.
        masked = self.runs_compiled(size) or self._packed or kind not in self.policy.omits_mask
        if not masked:
            self.omitted.add(kind)
        return masked

    def _mask(
        self, position_ids: torch.Tensor, visible: int
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        queries = position_ids[:, None, :, None]  # [B, 1, n, 1]
        slots = torch.arange(visible, device=position_ids.device)

        def mask_of(sliding: int) -> torch.Tensor:
            full = slots <= queries
            return full & (slots > queries - sliding) if sliding else full

        return self.by_layer_type(mask_of)

    def _causal_kind(self, starts: Lengths, size: int, visible: int) -> str:
        """The kind of a forward that needs no mask, or "" where it needs one or is faster with."""
        if len(starts) != 1 or self._additive is not None:
            return ""
        if self._sliding_window and visible >= self._sliding_window:
            return ""
        if starts[0] == 0:
            return FIRST if visible == size else ""
        return SINGLE if size == 1 and not self._masked_is_faster else ""

    def by_layer_type(
        self, mask_of: Callable[[int], torch.Tensor]
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """The mask in the form that the model takes.

        Args:
            mask_of: boolean mask [B, 1, n, S] for the size of a sliding window, 0 for none.
        """
        window = self._sliding_window or 0
        if self._mask_types is None:
            return self._encode(mask_of(window))
        return {
            layer_type: self._encode(mask_of(window if layer_type == "sliding_attention" else 0))
            for layer_type in self._mask_types
        }

    def _encode(self, mask: torch.Tensor) -> torch.Tensor:
        if self._additive is None:
            return mask
        zero = torch.zeros((), dtype=self._additive, device=mask.device)
        return torch.where(mask, zero, torch.finfo(self._additive).min)


def last_rows(logits: torch.Tensor, count: int, padding: int) -> torch.Tensor:
    """The last ``count`` rows of logits [B, n, V] before those of padding."""
    return rounded(logits[:, : logits.shape[1] - padding][:, -count:])


def unsupported_reason(model: Any) -> str | None:
    """Why `SpecRunner` cannot serve this model, or None if it can."""
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        return f"attn_implementation must be 'sdpa' or 'eager', got {attention!r}"
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if not layer_types <= MASKED_LAYER_TYPES:
        others = sorted(layer_types - MASKED_LAYER_TYPES)
        return f"layer types {others} have no rollback per sequence"
    return None
