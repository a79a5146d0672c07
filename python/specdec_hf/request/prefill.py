"""Inputs of the model beyond text: images, audio, token types, embeddings, positions.

The loop feeds a model token ids, positions and a mask. A call that has more inputs is prefilled by
the model's own methods, with exactly the arguments that ``model.generate`` would use. The loop
takes over the cache that this prefill filled, and starts its first round with the logits that it
gave.

Later rounds feed new tokens only; what they need beyond ids, positions and mask is in
runner/later_inputs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs
from transformers.generation.configuration_utils import GenerationMode

from specdec_hf.runner.choose import rollback_kinds
from specdec_hf.runner.encoded import counts_tokens
from specdec_hf.runner.fit import Comparison, Fit, compare, fits_of, tolerance_of
from specdec_hf.runner.handover import check_batch, take_over
from specdec_hf.runner.later_inputs import LaterInputs
from specdec_hf.runner.make import kind_reason
from specdec_hf.runner.plain_runner import PlainRunner, Prompt, copy_of
from specdec_hf.runner.protocol import CACHE_NAME, Lengths, Runner, rounded, vocab_size_of
from specdec_hf.runner.self_check import PASSING, check_fit, one_line, undisturbed

# The loop makes these itself, so they call for no prefill of the model's own.
MADE_BY_THE_LOOP = frozenset(
    {"attention_mask", "position_ids", CACHE_NAME, "cache_params", "use_cache"}
    | {"logits_to_keep", "output_attentions", "output_hidden_states"}
)
HOLED_MASK = "attention_mask with padding that is not on the left"
# Arguments of forward that plain generation would pass on, but that change what it returns or what
# the loop relies on.
REFUSED = frozenset(
    {"labels", "logits_to_keep", "num_logits_to_keep", "return_dict", "cache_params"}
    | {"cache_position", "encoder_outputs"}
)
PROBES = 3  # tokens that the first call of a kind feeds twice, to compare


@dataclass
class Prefill:
    """The arguments of the model's own prefill, as ``model.generate`` would hold them.

    Attributes:
        input_ids: [B, T] int64; T is 0 where the prompt is given as ``inputs_embeds`` alone.
        model_kwargs: keyword arguments of ``prepare_inputs_for_generation``.
        config: the complete generation config.
        names: the arguments that the loop cannot feed by itself.
    """

    input_ids: torch.Tensor
    model_kwargs: dict[str, Any]
    config: GenerationConfig
    names: list[str]


def _extra_inputs(model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``model_kwargs`` that the loop does not make itself.

    Raises:
        ValueError: an iterator, an argument of `REFUSED`, or a cache of the caller under another
            name than ``past_key_values``.
    """
    for name, value in model_kwargs.items():
        # ``model.generate`` sets logits_to_keep, and marks the caches that it did not make.
        made = name == "logits_to_keep" or (
            name == "cache_params" and not getattr(value, "_is_user_defined", False)
        )
        if name in REFUSED and value is not None and not made:
            raise ValueError(f"{name} is not supported")
        if isinstance(value, Iterator):
            raise ValueError(f"{name} is not supported: an iterator cannot be read twice")
    return {
        name: value
        for name, value in model_kwargs.items()
        if value is not None
        and name not in MADE_BY_THE_LOOP
        # Set for every call of a model with images, and empty without them.
        and not (name == "mm_encoder_outputs" and not value)
    }


def inputs_beyond_text(mask: NDArray[np.bool_], model_kwargs: dict[str, Any]) -> list[str]:
    """Names of the arguments for which the model itself must make the prefill.

    Args:
        mask: [B, P] bool.
        model_kwargs: the model's inputs, prepared by ``model.generate``.
    """
    names = sorted(_extra_inputs(model_kwargs))
    if not bool((mask[:, :-1] <= mask[:, 1:]).all()):
        # With padding on the right, or holes, plain generation counts positions from the last
        # column, be it a token or not.
        names.append(HOLED_MASK)
    position_ids = model_kwargs.get("position_ids")
    if position_ids is not None and _differ_from_text(position_ids, mask):
        names.append("position_ids")
    return names


def _differ_from_text(position_ids: torch.Tensor, mask: NDArray[np.bool_]) -> bool:
    """Whether positions [..., B, P] are other than the number of tokens before each."""
    held = torch.from_numpy(mask)
    text = (held.long().cumsum(-1) - 1).masked_fill(~held, 0)
    given = position_ids.cpu()
    return given.shape[-1] != text.shape[1] or not bool((given == text).all())


def given_prefill(
    model: Any,
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    config: GenerationConfig,
    names: list[str],
) -> Prefill:
    """The model's inputs that ``model.generate`` prepared, without the caller's own cache."""
    kwargs = dict(model_kwargs)
    past = kwargs.get(CACHE_NAME)
    if past is not None and getattr(past, "_is_user_defined", False):
        kwargs[CACHE_NAME] = _copied(past)
        check_batch(past.layers, len(input_ids))
    if kwargs.get("use_cache") is False:
        kwargs["use_cache"] = True
        model._prepare_cache_for_generation(
            config, kwargs, GenerationMode.GREEDY_SEARCH, len(input_ids), input_ids.shape[1]
        )
    return Prefill(input_ids, kwargs, config, names)


def _copied(past: Any) -> Any:
    """A cache that a forward may extend without changing the caller's."""
    if past is None:
        return None
    if not isinstance(past, DynamicCache):
        raise ValueError(
            "past_key_values must be a DynamicCache with inputs other than text, "
            f"got {type(past).__name__}"
        )
    return copy_of(past)


@torch.inference_mode()
def prefill(
    model: Any,
    made: Prefill,
    prompt: Prompt,
    capacity: int,
    kind: str,
    *,
    drafts: bool = True,
    tree: bool = False,
    self_check: bool = True,
    keep_states: bool = False,
) -> tuple[Runner, torch.Tensor, list[str]]:
    """Run the model's own prefill and hand its cache to the loop.

    The first time that a class and configuration of model has inputs of these names, the logits of
    a few tokens are compared with those of plain forwards, with the measure of runner/fit.py.

    Args:
        model: causal LM.
        made: the model's inputs.
        prompt: ids and mask of the columns of the prompt.
        capacity: slots to allocate.
        kind: "auto", "spec", "aligned" or "dynamic".
        drafts: whether tokens will have to be forgotten.
        tree: whether trees of drafts will be fed, which are checked on text.
        self_check: False makes no such comparison.
        keep_states: whether the runner keeps hidden states, from the prefill on.

    Returns:
        The runner, whose cache holds the whole prompt, logits [B, 1, V] of the token that follows,
        and notes for the statistics.

    Raises:
        ValueError: the loop cannot feed this model's later tokens as plain generation does.
    """
    outputs = model._prefill(made.input_ids, made.config, made.model_kwargs)
    past = outputs.get(CACHE_NAME)
    if past is None or not counts_tokens(past):
        raise ValueError(
            f"{_named(made.names)} not supported: {type(model).__name__} gives no cache"
        )
    logits = rounded(outputs.logits[:, -1:].clone())
    lengths = prompt.mask.sum(axis=1).astype(np.int64)
    kinds = rollback_kinds(kind, len(prompt.mask))
    faults: list[str] = []
    if tree and self_check:
        reason = check_fit(model, "spec", tree=True).reason
        if reason is not None:
            kinds, faults = [], [f"cache='spec' with a tree of drafts: {reason}"]

    def result(runner: Runner) -> tuple[Runner, torch.Tensor, list[str]]:
        if keep_states:
            runner.tap.open(first=outputs.hidden_states)
        ran = f"{type(model).__name__} runs with cache={runner.kind!r}"
        return runner, logits, [f"{ran}; {fault}" for fault in faults]

    try:
        later = LaterInputs(model, made.input_ids, made.model_kwargs, outputs, past, lengths)
    except ValueError as error:
        kinds, faults = [], [str(error)]
    for one in kinds:
        try:
            return result(
                _taken_over(model, made, prompt, outputs, later, capacity, one, self_check)
            )
        except ValueError as error:
            faults.append(str(error))
    if not drafts:
        return result(_continued(model, made, prompt, outputs, past, "plain"))
    raise ValueError(f"{_named(made.names)} not supported: {'; '.join(faults)}")


def _named(names: list[str]) -> str:
    """The subject of a message that refuses arguments."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _continued(
    model: Any, made: Prefill, prompt: Prompt, outputs: Any, past: Any, kind: str
) -> PlainRunner:
    """A runner that goes on from the prefill as plain generation does, token by token."""
    inputs = {k: v for k, v in made.model_kwargs.items() if k != CACHE_NAME}
    runner = PlainRunner(model, len(prompt.mask), kind, prompt=prompt, inputs=inputs, past=past)
    runner.begin_after(outputs)
    return runner


def _taken_over(
    model: Any,
    made: Prefill,
    prompt: Prompt,
    outputs: Any,
    later: LaterInputs,
    capacity: int,
    kind: str,
    self_check: bool,
) -> Runner:
    past = outputs[CACHE_NAME]
    config = model.config.get_text_config(decoder=True)
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if HOLED_MASK in made.names and layer_types != {"full_attention"}:
        raise ValueError("a sliding window counts the columns that the mask hides")
    runner: Runner
    if kind == "spec":
        runner = take_over(model, past, prompt.mask, capacity, later)
    else:
        reason = kind_reason(model, kind)
        if kind == "aligned" and layer_types != {"full_attention"}:
            # Such layers drop tokens, so the others of their sequence cannot be moved.
            reason = reason or f"layer types {sorted(layer_types)}"
        if kind == "dynamic" and len(prompt.mask) != 1:
            reason = reason or f"one prefill holds {len(prompt.mask)} sequences"
        # A sliding layer holds its last columns only.
        whole = [x for x in past.layers if not getattr(x, "is_sliding", False)]
        keys = [getattr(layer, "keys", None) for layer in whole]
        held = {x.shape[2] for x in keys if isinstance(x, torch.Tensor)}
        if len(held) > 1:
            reason = reason or "a layer holds no tokens of the text"
        if reason is not None:
            raise ValueError(f"cache={kind!r} cannot serve {type(model).__name__}: {reason}")
        runner = _continued(model, made, prompt, outputs, _copied(past), kind)
    if not self_check:
        return runner
    # Windows of a single sequence are never ragged, so they prove nothing for a batch.
    names, batch = tuple(made.names), len(prompt.mask) > 1
    key, known = ("prefill", kind, names, batch, bool(prompt.mask.all())), fits_of(model)
    if key not in known:
        try:
            with undisturbed(model):
                found = _compare(model, runner, past, later)
        except PASSING:
            raise
        except Exception as error:  # raised inside the model, which was not made for such inputs
            raise ValueError(
                f"cache={kind!r}: {type(model).__name__} cannot use it: {one_line(error)}"
            ) from error
        if found.fault is not None:
            raise ValueError(
                f"cache={kind!r}: logits of {type(model).__name__} differ from plain generation "
                f"{found.fault}"
            )
        # A fault may lie in the inputs of this call.
        known[key] = Fit(found.difference, found.tolerance)
    return runner


def _compare(model: Any, runner: Runner, past: Any, later: LaterInputs) -> Comparison:
    """Compare logits of ragged windows with those of plain forwards of probes.

    The cache of the loop is as before afterwards.
    """
    past = _copied(past)
    lengths: Lengths = runner.lengths.copy()
    batch_size = len(lengths)
    vocab_size = vocab_size_of(model)
    generator = torch.Generator("cpu").manual_seed(0)
    probes = torch.randint(1, vocab_size, (batch_size, PROBES), generator=generator, device="cpu")
    probes = probes.to(model.device)
    # Every second sequence keeps one token more of the first window, as if a draft was accepted.
    kept: NDArray[np.int64] = np.arange(batch_size) % 2
    runner.forward(probes[:, :2].contiguous(), lengths, 1)
    runner.truncate(lengths + kept)
    window = torch.stack([probes[b, k : k + 2] for b, k in enumerate(kept.tolist())])
    got = runner.forward(window, lengths + kept, 2)
    runner.truncate(lengths)
    plain = []
    for i in range(1, PROBES + 1):
        inputs = later.native(past, i, 1, probes[:, :i])
        plain.append(model(**inputs, return_dict=True).logits[:, -1])
    rows = torch.stack(plain, dim=1)  # [B, PROBES, V]
    want = torch.stack([rows[b, k : k + 2] for b, k in enumerate(kept.tolist())])
    return compare([got], [want], tolerance_of(model))
