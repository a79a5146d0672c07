"""The decoding loop behind Hugging Face's argument names.

`generate` is the whole of it. `specdec_hf.decoder.SpeculativeDecoder` is the same as an object.

This module is not called ``generate`` because importing a submodule of that name would put the
module in the place of the lazily loaded function ``specdec_hf.generate``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from specdec_hf import plugins
from specdec_hf.arguments import shown
from specdec_hf.drafting.registry import AUTO
from specdec_hf.loop.begin import begin
from specdec_hf.loop.rounds import run
from specdec_hf.loop.streaming import Streamer
from specdec_hf.options import Options, with_texts
from specdec_hf.request.call import Call
from specdec_hf.request.entry import (
    has_own_generate,
    prepare_call,
    rename_cache,
)
from specdec_hf.request.inputs import check_language_model, one_of
from specdec_hf.runner.protocol import is_encoder_decoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

    from specdec_hf.drafting.drafter import Drafter
    from specdec_hf.loop.streaming import Trace
    from specdec_hf.schedules.base import Schedule
    from specdec_hf.schedules.benefit_guard import BenefitGuard
    from specdec_hf.trees import EagleTree, TreeSpec, TrieTree


@with_texts
def generate(
    model: Any,
    inputs: torch.Tensor | None = None,
    *,
    input_ids: torch.Tensor | None = None,
    drafter: str | os.PathLike[str] | Module | Drafter | Sequence[Any] | None = AUTO,
    num_assistant_tokens: int | None = None,
    num_assistant_tokens_schedule: str | Schedule | None = None,
    rule: str | Callable[..., Any] = "auto",
    lenience: float | None = None,
    typical_epsilon: float | None = None,
    typical_delta: float | None = None,
    top_beta_rank: int | None = None,
    top_beta_distance: float | None = None,
    ablate: str | None = None,
    tree: TreeSpec | EagleTree | TrieTree | Sequence[int] | None = None,
    seed: int | Sequence[int] | NDArray[Any] | Tensor | None = None,
    guard: bool | BenefitGuard | None = None,
    compile: bool | None = None,
    gamma: int | None = None,
    num_speculative_tokens: int | None = None,
    num_assistant_beams: int | None = None,
    cache: str = "auto",
    self_check: bool = True,
    streamer: Streamer | None = None,
    trace: Trace | None = None,
    clock: Callable[[], float] = time.perf_counter,
    **kwargs: Any,
) -> Any:
    """Generate text speculatively with the unmodified ``model``, without loss.

    The named arguments are the options of the loop, which docs/loop.md#all-options describes. All
    others are those of ``model.generate`` and mean the same: ``attention_mask``,
    ``max_new_tokens``, ``max_length``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p`` (scalar, or one per sequence), ``logits_processor``, ``stopping_criteria``,
    ``stop_strings`` with ``tokenizer``, ``assistant_tokenizer`` with ``tokenizer`` (a drafter with
    another vocabulary), ``tokenizer`` alone (to check what drafters read from files),
    ``eos_token_id``, ``pad_token_id``, ``past_key_values``,
    ``generation_config``, ``return_dict_in_generate``, penalties. ``prediction`` is this library's:
    token ids of the text that is expected behind each prompt, which are then drafted; see
    docs/loop.md#predicted-outputs. Defaults come from ``model.generation_config``. Processors and
    criteria are called for one sequence at a time, also for prefixes that end in a draft which is
    then rejected. They must therefore be functions of their arguments; a processor that is not is
    refused where that shows.

    Args:
        model: causal LM or encoder-decoder, left on its device and in its dtype.
        inputs: alias of ``input_ids``, as in ``model.generate``, or what the encoder reads.
        input_ids: [B, T] int64 prompts, padded on the left; of an encoder-decoder the encoder's,
            padded on any side.

    Returns:
        [B, W] int64 token ids, or `SpecOutput` with ``return_dict_in_generate=True``.

    Raises:
        OSError: a file of a drafter that cannot be read.
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument unknown, unsupported or out of range, by name; a processor that
            answers otherwise when it is asked again.
        RuntimeError: logits that are not finite, by sequence and position.
    """
    given = locals()
    given = {option.name: given[option.name] for option in fields(Options)}
    check_language_model("model", model)
    check_stop_strings(kwargs.get("stop_strings"), kwargs.get("tokenizer"))
    if isinstance(cache, Cache):  # that of Transformers
        kwargs["cache"] = given.pop("cache")
    rename_cache(kwargs)
    options = Options(**given)
    if has_own_generate(model):
        from specdec_hf.extras.own_generate import by_own_generate  # noqa: PLC0415  # rare

        prompts = {"inputs": inputs, "input_ids": input_ids}
        if not is_encoder_decoder(model):
            prompts = {"input_ids": one_of(inputs, input_ids)}
        return by_own_generate(model, prompts, partial(decode, options=options), seed, kwargs)
    return decode(model, prepare_call(model, input_ids, inputs=inputs, **kwargs), options)


def decode(model: Any, call: Call, options: Options, seed: Any = None) -> Any:
    """The output of a call: the rounds of a session, or of a beam search."""
    if options.streamer is not None:
        _check_one_text(call)
    if call.beams is None:
        session = begin(model, call, options, seed)
        if options.streamer is not None:
            options.streamer.put(torch.from_numpy(call.input_ids))
        output = run(session, options.streamer)
    else:
        output = plugins.load("beam_search")(model, call, options)
        output = output if call.output.return_dict else output.sequences
    if call.output.return_dict and is_encoder_decoder(model) and has_own_generate(model):
        from specdec_hf.extras.own_generate import plain_output  # noqa: PLC0415  # rare

        return plain_output(output)
    return output


def _check_one_text(call: Call) -> None:
    """Raises ValueError for a call of several texts, which no streamer can tell apart."""
    batch_size = len(call.mask)
    if call.beams is not None:
        raise ValueError(f"streamer must be None with num_beams={call.beams.num_beams}")
    if batch_size != 1:
        raise ValueError(
            f"streamer needs batch size 1, got {batch_size}; use SpeculativeDecoder(...).stream"
        )


def check_stop_strings(stop_strings: Any, tokenizer: Any) -> None:
    """Raises TypeError for a wrong type, and ValueError for stop strings without a tokenizer."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be None or a tokenizer of Transformers, got {shown(tokenizer)}"
        )
    if stop_strings is None:
        return
    listed = stop_strings if isinstance(stop_strings, list | tuple) else [stop_strings]
    for one in listed:
        if not isinstance(one, str):
            raise TypeError(f"stop_strings must be a string or a list of them, got {shown(one)}")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings must come with a tokenizer, got {shown(stop_strings)} alone"
        )
