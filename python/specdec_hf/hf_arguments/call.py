"""From Hugging Face arguments to what the loop needs: one `Call` per generate call.

Temperature and filters become parameters of the fused ops; every other logits processor and
stopping criterion stays Hugging Face's own object, called with one row's prefix at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdec_hf.hf_arguments.support import (
    for_row,
    instead,
    is_per_row,
    refuse_unsupported,
    row_processor,
    warper_value,
)


class Parameter(NamedTuple):
    """A sampling parameter: the value that changes nothing, and what it may be."""

    neutral: float | int
    rule: str
    holds: Callable[[Any], bool]


PARAMETERS = {
    "temperature": Parameter(1.0, "finite and >= 0", lambda x: math.isfinite(x) and x >= 0),
    "top_k": Parameter(0, "an integer >= 0", lambda x: x >= 0 and x == int(x)),
    "top_p": Parameter(1.0, "in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": Parameter(0.0, "in [0, 1]", lambda x: 0 <= x <= 1),
}


@dataclass
class Sampling:
    """Sampling parameters of the fused ops: a scalar, or a tensor [B] on the model's device."""

    temperature: float | torch.Tensor
    top_k: int | torch.Tensor
    top_p: float | torch.Tensor
    min_p: float | torch.Tensor

    def to_dict(self) -> dict[str, Any]:
        """As keyword arguments of the ops."""
        return {name: getattr(self, name) for name in PARAMETERS}


@dataclass
class Call:
    """Everything about one generate call that does not change while it runs.

    Attributes:
        input_ids: [B, T] int64 on the host, as given, padding included.
        mask: [B, T] bool, columns that hold a token.
        max_new_tokens: new tokens per row at most.
        eos: ids that end a row.
        pad: id that fills finished rows.
        sampling: parameters of the fused ops.
        do_sample: False is greedy.
        processors: one list per row, empty lists when there is nothing to apply.
        criteria: stopping criteria other than length and end-of-sequence.
        past: a given cache, never written to.
        return_dict: whether the caller wants the whole output.
        notes: remarks for the statistics.
    """

    input_ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    max_new_tokens: int
    eos: frozenset[int]
    pad: int
    sampling: Sampling
    do_sample: bool
    processors: list[LogitsProcessorList]
    criteria: StoppingCriteriaList
    past: Any
    return_dict: bool
    notes: list[str] = field(default_factory=list)


def prepare_call(
    model: Any,
    input_ids: torch.Tensor | None,
    *,
    attention_mask: torch.Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Any = None,
    tokenizer: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Call:
    """Read Hugging Face arguments as ``model.generate`` would, without touching any of them.

    Raises:
        ValueError: an argument that is unknown, unsupported or out of range, by name.
    """
    ids = check_input_ids(model, input_ids)
    batch_size, columns = ids.shape
    per_row = {name: kwargs.pop(name) for name in PARAMETERS if is_per_row(kwargs.get(name))}
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    for name in ("assistant_model", "negative_prompt_ids", "synced_gpus", "inputs_embeds"):
        if kwargs.pop(name, False) is not False:
            raise ValueError(f"{name} is not supported" + instead(name))
    kwargs.pop("trust_remote_code", None)
    has_default_max_length = (
        all(
            getattr(config, "max_length", None) is None
            for config in (generation_config, model.generation_config)
        )
        and "max_length" not in kwargs
    )
    config, unknown = model._prepare_generation_config(generation_config, **kwargs)
    if unknown:
        raise ValueError(f"unknown or unsupported arguments: {', '.join(sorted(unknown))}")
    refuse_unsupported(config)
    model._prepare_special_tokens(
        config, attention_mask is not None, device="cpu", batch_size=batch_size
    )
    mask = _check_mask(model, ids, attention_mask, config)
    if config.max_new_tokens is not None:
        has_default_max_length = has_default_max_length or config.max_length is None
    config = model._prepare_generated_length(
        generation_config=config,
        has_default_max_length=has_default_max_length,
        has_default_min_length=True,
        model_input_name="input_ids",
        inputs_tensor=ids,
        input_ids_length=columns,
    )
    criteria = model._get_stopping_criteria(
        generation_config=config,
        stopping_criteria=StoppingCriteriaList(stopping_criteria or []),
        tokenizer=tokenizer,
    )
    # Warpers become op parameters: with do_sample off, Hugging Face builds processors only.
    do_sample = bool(config.do_sample)
    config.do_sample = False
    processors = [
        model._get_logits_processor(
            generation_config=config,
            input_ids_seq_length=columns,
            encoder_input_ids=ids[b : b + 1].to(model.device),
            prefix_allowed_tokens_fn=for_row(prefix_allowed_tokens_fn, b),
            logits_processor=LogitsProcessorList(logits_processor or []),
            device=model.device,
            model_kwargs={"attention_mask": torch.from_numpy(mask[b : b + 1]).to(model.device)},
        )
        for b in range(batch_size)
    ]
    config.do_sample = do_sample
    return build_call(
        model,
        ids,
        mask,
        config,
        per_row,
        processors,
        criteria,
        past_key_values,
        max_length_required=True,
    )


def call_from_hugging_face(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> Call:
    """The same `Call` from what ``model.generate`` hands to a ``custom_generate`` callable."""
    ids = check_input_ids(model, input_ids)
    refuse_unsupported(generation_config)
    mask = np.ones(tuple(ids.shape), dtype=bool)
    if model_kwargs.get("attention_mask") is not None:
        mask = model_kwargs["attention_mask"].cpu().numpy() != 0
    _check_rows(mask)
    per_row: dict[str, Any] = {}
    kept = []
    for processor in logits_processor:
        # generate() has built warpers from the config: those are the ops' parameters. One that
        # differs from the config is the user's own and stays a processor, its parameter neutral.
        warper = warper_value(processor)
        if warper is None:
            kept.append(processor)
        elif warper[1] != getattr(generation_config, warper[0]):
            kept.append(processor)
            per_row[warper[0]] = PARAMETERS[warper[0]].neutral
    processors = [
        LogitsProcessorList(row_processor(p, b) for p in kept) for b in range(ids.shape[0])
    ]
    past = model_kwargs.get("past_key_values")
    if past is not None and past.get_seq_length() == 0:
        past = None
    return build_call(
        model, ids, mask, generation_config, per_row, processors, stopping_criteria, past
    )


def build_call(
    model: Any,
    ids: torch.Tensor,
    mask: NDArray[np.bool_],
    config: GenerationConfig,
    per_row: dict[str, Any],
    processors: list[LogitsProcessorList],
    criteria: StoppingCriteriaList,
    past: Any,
    max_length_required: bool = False,
) -> Call:
    """Assemble a `Call` from a complete generation config."""
    columns = ids.shape[1]
    max_length = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
    if columns >= max_length:
        raise ValueError(
            f"input_ids has {columns} columns, but generation is limited to {max_length}"
        )
    eos: set[int] = set()
    others = StoppingCriteriaList()
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos.update(criterion.eos_token_id.flatten().tolist())
        elif type(criterion) is not MaxLengthCriteria:
            others.append(criterion)
    pad = config._pad_token_tensor
    do_sample = bool(config.do_sample)
    return Call(
        input_ids=ids.numpy(),
        mask=mask,
        max_new_tokens=max_length - columns,
        eos=frozenset(eos),
        pad=int(pad) if pad is not None else 0,
        sampling=make_sampling(config, per_row, do_sample, len(mask), model.device),
        do_sample=do_sample,
        processors=processors,
        criteria=others,
        past=past,
        return_dict=bool(config.return_dict_in_generate),
    )


def make_sampling(
    config: GenerationConfig,
    given: dict[str, Any],
    do_sample: bool,
    batch_size: int,
    device: torch.device,
) -> Sampling:
    """Checked sampling parameters; greedy is temperature 0 without filters.

    Raises:
        ValueError: a value out of range, by name.
    """
    checked: dict[str, Any] = {}
    for name, parameter in PARAMETERS.items():
        value: Any = given.get(name, getattr(config, name, None))
        if isinstance(value, torch.Tensor | np.ndarray):
            value = value.tolist()
        if value is None:
            value = parameter.neutral
        per_row = isinstance(value, list | tuple)
        listed = list(value) if per_row else [value]
        if per_row and len(listed) != batch_size:
            raise ValueError(
                f"{name} must be a scalar or have {batch_size} entries, got {len(listed)}"
            )
        for x in listed:
            try:
                valid = parameter.holds(x)
            except (TypeError, ValueError, OverflowError):  # not a number, or not a finite one
                valid = False
            if not valid:
                raise ValueError(f"{name} must be {parameter.rule}, got {x!r}")
        kind = type(parameter.neutral)
        dtype = torch.int32 if kind is int else torch.float32
        if per_row and kind is int:
            listed = [min(int(x), 2**31 - 1) for x in listed]  # more keeps every token anyway
        checked[name] = torch.tensor(listed, dtype=dtype, device=device) if per_row else kind(value)
    return Sampling(**checked) if do_sample else Sampling(0.0, 0, 1.0, 0.0)


def check_input_ids(model: Any, input_ids: torch.Tensor | None) -> torch.Tensor:
    """[B, T] int64 on the host.

    Raises:
        ValueError: encoder-decoder model, missing or empty prompt, wrong shape or id.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"encoder-decoder models are not supported, got {type(model).__name__}")
    if input_ids is None:
        raise ValueError("input_ids is required")
    if input_ids.ndim != 2:
        raise ValueError(f"input_ids must be [B, T], got shape {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"input_ids must be int32 or int64, got {input_ids.dtype}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids is empty: shape {list(input_ids.shape)}")
    ids = input_ids.detach().to("cpu", torch.int64)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ValueError(
            f"input_ids must be in [0, {vocab_size}), "
            f"got ids from {int(ids.min())} to {int(ids.max())}"
        )
    return ids


def row_seeds(seed: Any, batch_size: int) -> list[int]:
    """One seed per row: an int serves all rows, because no result depends on the batch slot.

    Raises:
        ValueError: not an int of 64 bits, nor as many of them as there are rows.
    """
    if isinstance(seed, torch.Tensor | np.ndarray):
        seed = seed.tolist()
    per_row = isinstance(seed, list | tuple)
    listed = list(seed) if per_row else [seed]
    if not all(isinstance(s, Integral) and not isinstance(s, bool) for s in listed):
        raise ValueError(f"seed must be an int or one int per row, got {seed!r}")
    if per_row and len(listed) != batch_size:
        raise ValueError(f"seed must be an int or have {batch_size} entries, got {len(listed)}")
    for s in listed:
        if not -(2**63) <= s < 2**63:
            raise ValueError(f"seed must be in [-2**63, 2**63), got {s}")
    return [int(s) for s in listed] * (1 if per_row else batch_size)


def _check_mask(
    model: Any, ids: torch.Tensor, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> NDArray[np.bool_]:
    if attention_mask is None:
        attention_mask = model._prepare_attention_mask_for_generation(ids, config, {})
    if attention_mask.shape != ids.shape:
        raise ValueError(
            f"attention_mask must have the shape of input_ids {list(ids.shape)}, "
            f"got {list(attention_mask.shape)}"
        )
    mask: NDArray[np.bool_] = attention_mask.detach().cpu().numpy() != 0
    _check_rows(mask)
    return mask


def _check_rows(mask: NDArray[np.bool_]) -> None:
    for b in np.flatnonzero(~mask.any(axis=1)):
        raise ValueError(f"row {b} of input_ids is empty: attention_mask hides all of it")
