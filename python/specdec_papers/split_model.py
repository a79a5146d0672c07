"""A causal language model that is run in two parts, which share its layers and its cache.

The first part ends within the model: it runs the first layers, keeps the hidden states after them,
and goes on to logits with some of the later layers, or with none; of a later layer it may leave out
the attention or the MLP. The second part runs all layers after those hidden states. Both are views:
modules of their own that hold the model's own layers, so neither the weights nor the model are
copied or changed.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence, Set
from typing import Any

import numpy as np
import torch
from specdec_hf.runner.comparison import CacheCheck, checks_of, compare, tolerance_of
from specdec_hf.runner.forwards import FIRST, SINGLE, ForwardPolicy
from specdec_hf.runner.packed.decoder_layer import LayerParts
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    Lengths,
    forward_arguments,
    num_parameters,
    rounded,
    to_device,
    vocab_size_of,
)
from specdec_hf.runner.self_check import one_line, undisturbed
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.runner.structure import layer_list_name, unknown_structure

_POSITIONS = "wpe"  # the name of a model's table of positions, where it has one
# The two sublayers of a decoder layer, and what classes of models call them.
SUBLAYERS: dict[str, tuple[str, ...]] = {
    "attention": ("self_attn", "attn", "attention"),
    "mlp": ("mlp", "feed_forward"),
}
# Sublayers that are left out: the number of a layer, counted from 0, and a name of `SUBLAYERS`.
Skipped = Set[tuple[int, str]]


class _Tap(torch.nn.Module):
    """Keeps the hidden states between two layers."""

    seen: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.seen = hidden_states
        return hidden_states


class _NoPositions(torch.nn.Module):
    """In the place of a table of positions, for states that hold their positions already."""

    def forward(self, position_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=position_ids.device)


class _NoSublayer(torch.nn.Module):
    """In the place of a sublayer: it adds nothing to the residual stream, and caches nothing.

    Args:
        pair: whether the layer also takes attention weights from it.
    """

    def __init__(self, pair: bool) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.zeros_like(hidden_states)
        return (nothing, None) if self.pair else nothing


def _reread_inputs(runner: SpecRunner, size: int) -> dict[str, Any]:
    """Model inputs to read the text that the cache holds once more, each token for itself.

    A token attends to those before it as the cache holds them, and to itself as this forward reads
    it. So a part of the model reads all tokens of a text in one forward as it would read each of
    them alone. Keys and values go beyond the text, where the next forward overwrites them.

    Args:
        runner: that of the text.
        size: tokens of each sequence: those of the longest text.
    """
    cache, lengths, device = runner.cache, runner.lengths, runner.device
    longest = int(lengths.max())
    visible = runner.policy.visible(longest + size)
    ends = to_device(lengths, device)
    cache.move_cursor(ends, longest, visible)
    order = torch.arange(size, device=device)
    queries, own = order[:, None], (ends[:, None] + order)[..., None]  # [n, 1], [B, n, 1]
    slots = torch.arange(visible, device=device)  # [S]

    def mask_of(sliding: int) -> torch.Tensor:
        before = slots < torch.minimum(queries, ends[:, None, None])
        if sliding:
            before = before & (slots > queries - sliding)
        return (before | (slots == own))[:, None]

    return {
        CACHE_NAME: cache,
        "position_ids": order.expand(len(lengths), -1),
        "attention_mask": runner.by_layer_type(mask_of),
    }


def run_inputs(model: Any, inputs: dict[str, Any], keep: int) -> torch.Tensor:
    """Logits [B, keep, V] of the last tokens of a forward with these inputs and no others."""
    if "logits_to_keep" in forward_arguments(model):
        inputs = {**inputs, "logits_to_keep": keep}
    logits: torch.Tensor = model(use_cache=True, return_dict=True, **inputs).logits
    return rounded(logits[:, -keep:])


def run_embeddings(
    model: Any, runner: Any, embeddings: torch.Tensor, starts: Lengths, keep: int
) -> torch.Tensor:
    """As `SpecRunner.forward`, for tokens given as embeddings [B, n, H]."""
    inputs = runner.window(starts, embeddings.shape[1])
    return run_inputs(model, {"inputs_embeds": embeddings, **inputs}, keep)


class SplitModel:
    """The two parts of a model; see above.

    Args:
        model: the causal language model, unmodified.
        shared: how many layers the first part shares with the second.
        resume: the first part goes on with this layer after them; the model's number of layers
            goes on with none, which exits to the final norm and the head.
        exit_module: called as a layer after the others of the first part, or None.
        skipped: sublayers that the first part leaves out from that layer on.

    Attributes:
        key: tells these two parts from others of the same model.

    Raises:
        ValueError: numbers out of range, or a model whose structure is not known.
    """

    def __init__(
        self,
        model: Any,
        shared: int,
        resume: int,
        exit_module: Any = None,
        skipped: Skipped = frozenset(),
    ) -> None:
        reason = unknown_structure(model)
        if reason is not None:
            raise ValueError(f"{type(model).__name__} cannot be run in two parts: {reason}")
        base, self._name = model.base_model, layer_list_name(model)
        layers = list(base._modules[self._name])
        if not 0 < shared <= resume <= len(layers) or (shared, resume) == (len(layers),) * 2:
            raise ValueError(
                f"layers must be in [1, {len(layers) - 1}] for {type(model).__name__} of "
                f"{len(layers)} layers, got {shared if shared == resume else (shared, resume)}"
            )
        outside = sorted(n for n, _ in skipped if not resume <= n < len(layers))
        if outside:
            raise ValueError(
                f"layers with skipped sublayers must be in [{resume}, {len(layers) - 1}] for "
                f"{type(model).__name__} of {len(layers)} layers, got {outside}"
            )
        self.model = model
        self.key = ("split", shared, resume, frozenset(skipped))
        self._tap = _Tap()
        types = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
        added = [self._tap] if exit_module is None else [self._tap, exit_module]
        without = {n: {name for m, name in skipped if m == n} for n in range(resume, len(layers))}
        later = [n for n, names in without.items() if names != SUBLAYERS.keys()]
        self._first = self._view(
            [*layers[:shared], *added, *(_without(layers[n], without[n]) for n in later)],
            [*types[:shared], *[types[shared - 1]] * len(added), *(types[n] for n in later)],
        )
        self._shared = self._view(
            [*layers[:shared], self._tap], [*types[:shared], types[shared - 1]]
        )
        self._second = self._view(layers[shared:], types[shared:], continues=True)

    @property
    def first_share(self) -> float:
        """Parameters of the first part by those of the model."""
        return num_parameters(self._first) / num_parameters(self.model)

    def first(
        self, runner: SpecRunner, tokens: torch.Tensor, starts: Lengths
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the first part over the next tokens, whose keys and values its layers cache.

        Args:
            runner: that of the model.
            tokens: [B, n] int64.
            starts: [B], position of each sequence's first token.

        Returns:
            Logits [B, 1, V] of the last token, and the hidden states [B, n, H] after the shared
            layers.
        """
        inputs = runner.window(starts, tokens.shape[1])
        logits = run_inputs(self._first, {"input_ids": tokens, **inputs}, 1)
        return logits, self._take_hidden()

    def first_drafts(self, runner: SpecRunner, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] of the first part after each token of a text that the cache holds.

        Row i is what `first` gives for token i over the cache of the tokens before it, as at the
        beginning of a round. What the cache holds is not changed.

        Args:
            runner: that of the model, which has read the text and nothing else.
            tokens: [B, n] int64, the tokens of the cache.
        """
        inputs = _reread_inputs(runner, tokens.shape[1])
        logits = run_inputs(self._first, {"input_ids": tokens, **inputs}, tokens.shape[1])
        self._take_hidden()
        return logits

    def shared(self, runner: SpecRunner, tokens: torch.Tensor, starts: Lengths) -> torch.Tensor:
        """The hidden states of `first` alone, without the layers and the head after them."""
        inputs = runner.window(starts, tokens.shape[1])
        self._shared.base_model(input_ids=tokens, use_cache=True, return_dict=True, **inputs)
        return self._take_hidden()

    def _take_hidden(self) -> torch.Tensor:
        hidden, self._tap.seen = self._tap.seen, None
        if hidden is None:
            raise RuntimeError("the forward of the model did not run its layers")
        return hidden

    def second(
        self, runner: SpecRunner, hidden: torch.Tensor, starts: Lengths, keep: int
    ) -> torch.Tensor:
        """Run the second part over hidden states; the model's logits [B, keep, V].

        What the layers after the shared ones cached in the first part is written anew.
        """
        return run_embeddings(self._second, runner, hidden, starts, keep)

    def _view(self, layers: list[Any], types: list[str], *, continues: bool = False) -> Any:
        """The model with other layers; ``continues`` if its inputs are hidden states."""
        view = with_layers(self.model, (self.model.base_model_prefix, self._name), layers, types)
        base = view.base_model
        if continues and _POSITIONS in base._modules:
            base._modules[_POSITIONS] = _NoPositions()
        return view


def with_layers(
    model: Any, path: Sequence[str], layers: Sequence[Any], types: Sequence[str] = ()
) -> Any:
    """A view of a model with other layers; all other modules are its own.

    Args:
        model: it is not changed.
        path: where its list of layers is.
        layers: in the place of its layers.
        types: of these layers; a config without types of layers needs none.
    """
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = len(layers)
    held = getattr(config, "layer_types", None)  # some follow from the number of layers
    if held and list(held) != list(types):
        config.layer_types = list(types)
    config._attn_implementation = model.config._attn_implementation

    def copied(module: Any, names: Sequence[str]) -> Any:
        if not names:
            return torch.nn.ModuleList(layers)
        view, (name, *rest) = copy.copy(module), names
        view._modules = {**module._modules, name: copied(module._modules[name], rest)}
        if hasattr(module, "config"):
            view.config = config
        return view

    return copied(model, path)


def _without(layer: Any, sublayers: Collection[str]) -> Any:
    """A view of a decoder layer without some of its sublayers, or the layer itself.

    Raises:
        ValueError: a layer that has no module of a known name in their place.
    """
    if not sublayers:
        return layer
    view = _unfused(layer)
    for sublayer in sublayers:
        names = SUBLAYERS[sublayer]
        name = next((one for one in names if one in layer._modules), None)
        if name is None:
            raise ValueError(
                f"{sublayer} of {type(layer).__name__} cannot be skipped: it has no module called "
                f"{' or '.join(names)}"
            )
        view._modules = {**view._modules, name: _NoSublayer(sublayer == "attention")}
    return view


@torch.inference_mode()
def check_split(model: Any, split: SplitModel) -> None:
    """Compare the two parts with the whole, once for each class and configuration of model.

    Raises:
        ValueError: logits that differ by more than rounding, or parts that do not run.
    """
    key, known = split.key, checks_of(model)
    if key not in known:
        try:
            with undisturbed(model):
                known[key] = _measure(model, split)
        except Exception as error:  # raised inside a model that was not made to be taken apart
            raise ValueError(
                f"{type(model).__name__} cannot be run in two parts: {one_line(error)}"
            ) from error
    if known[key].reason is not None:
        raise ValueError(f"{type(model).__name__} cannot be run in two parts: {known[key].reason}")


Rows = list[tuple[torch.Tensor, torch.Tensor]]


def _measure(model: Any, split: SplitModel) -> CacheCheck:
    """Compare logits of windows in two parts and in one."""
    rows = [*_ragged_windows(model, split), *_windows_alone(model, split)]
    found = compare([a for a, _ in rows], [b for _, b in rows], tolerance_of(model))
    reason = None if found.fault is None else f"its logits then differ {found.fault}"
    return CacheCheck(found.difference, found.tolerance, reason)


def _ragged_windows(model: Any, split: SplitModel) -> Rows:
    """Logits of two sequences of different lengths, in two parts and in one."""
    tokens, lengths = _tokens(model, 2), np.array([3, 5])
    runners = [SpecRunner(model, 2, 16) for _ in range(2)]
    for runner in runners:
        runner.forward(tokens[:, :5], lengths - 5, 1)
    window = tokens[:, 5:8]
    hidden = [split.first(runners[0], window[:, i : i + 1], lengths + i)[1] for i in range(2)]
    hidden.append(split.shared(runners[0], window[:, 2:], lengths + 2))
    rows = [
        (
            split.second(runners[0], torch.cat(hidden, dim=1), lengths, 3),
            runners[1].forward(window, lengths, 3),
        )
    ]
    # The next window reads what the two parts have cached.
    rows.append(
        tuple(  # type: ignore[arg-type]
            runner.forward(tokens[:, 8:10], lengths + 3, 2) for runner in runners
        )
    )
    return rows


def _windows_alone(model: Any, split: SplitModel) -> Rows:
    """Logits of one sequence: its first tokens, and single ones, in two parts without a mask."""
    tokens = _tokens(model, 1)
    without_mask = ForwardPolicy(omits_mask=frozenset((FIRST, SINGLE)))
    parts, whole = SpecRunner(model, 1, 16, without_mask), SpecRunner(model, 1, 16)
    rows = []
    for start, size in ((0, 4), (4, 1), (5, 1)):
        window, starts = tokens[:, start : start + size], np.array([start])
        hidden = split.first(parts, window, starts)[1]
        if start == 5:
            hidden = split.shared(parts, window, starts)
        rows.append(
            (
                split.second(parts, hidden, starts, size),
                whole.forward(window, starts, size),
            )
        )
    return rows


def _tokens(model: Any, rows: int) -> torch.Tensor:
    """[rows, 12] on the model's device."""
    generator = torch.Generator("cpu").manual_seed(0)
    tokens = torch.randint(1, vocab_size_of(model), (rows, 12), generator=generator, device="cpu")
    return tokens.to(model.device)


def _unfused(layer: Any) -> Any:
    """A second module over the modules of a decoder layer, which its own class runs one by one.

    Args:
        layer: of a packed model, fused or not, or of a user's model; it is not changed.
    """
    other = copy.copy(layer)
    if isinstance(vars(other).get("parts"), LayerParts):
        other.__class__ = type(layer).__base__
        del other.parts
    return other
