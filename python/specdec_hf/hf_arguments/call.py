"""A generate call as the loop needs it: prepare.py and custom_generate.py read the arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from specdec_hf.hf_arguments.assistant import Assistant
from specdec_hf.hf_arguments.beams import BeamArguments, beam_arguments, num_beams_of
from specdec_hf.hf_arguments.encoder import EncoderSource
from specdec_hf.hf_arguments.model_inputs import Prefill
from specdec_hf.hf_arguments.sampling import Sampling, make_sampling, sequences_per_prompt
from specdec_hf.hf_arguments.unsupported import Origin
from specdec_hf.runner.encoded import Encoded

# Plain generation returns these for every new token.
TOKEN_OUTPUTS = ("scores", "logits", "hidden_states")


@dataclass
class Call:
    """The arguments of one generate call, which do not change while it runs.

    Attributes:
        input_ids: [B, T] int64 on the host, as given, padding included; T is 0 where the prompt is
            given as ``inputs_embeds`` alone.
        mask: [B, P] bool, columns of the prompt that hold a token; P is T, or the columns of
            ``inputs_embeds``.
        max_new_tokens: most new tokens of each sequence.
        eos: ids that end a sequence.
        pad: id that fills up sequences that ended early.
        sampling: parameters of the fused ops.
        do_sample: False is greedy.
        processors: one list per sequence, empty where nothing is to be applied.
        criteria: stopping criteria other than length and end-of-sequence.
        past: the caller's cache, which is never written to, or None.
        prefill: the model's own prefill of inputs other than text, or None.
        encoded: what the decoder of an encoder-decoder reads of its encoder; ``input_ids``,
            ``mask`` and ``past`` are then those of the decoder.
        encoder: what the encoder read, where that is known.
        assistant: the drafts that the arguments of ``model.generate`` ask for.
        return_dict: whether the caller wants the whole output.
        outputs: which of "scores", "logits" and "hidden_states" the caller wants.
        beams: arguments of beam search, or None.
        own_search: with ``beams``, the same search by the model's own ``generate``.
        num_return_sequences: how many sequences that follow one another continue one prompt.
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
    outputs: frozenset[str] = frozenset()
    beams: BeamArguments | None = None
    own_search: Callable[[], Any] | None = None
    num_return_sequences: int = 1
    prefill: Prefill | None = None
    encoded: Encoded | None = None
    encoder: EncoderSource | None = None
    assistant: Assistant = field(default_factory=Assistant)
    notes: list[str] = field(default_factory=list)

    @property
    def prompt_ids(self) -> NDArray[np.int64]:
        """[B, P], the ids of the prompt's columns; 0 where only their embeddings are known."""
        if self.input_ids.shape == self.mask.shape:
            return self.input_ids
        return np.zeros(self.mask.shape, dtype=np.int64)


def build_call(
    model: Any,
    ids: torch.Tensor,
    mask: NDArray[np.bool_],
    config: GenerationConfig,
    per_sequence: dict[str, Any],
    processors: list[LogitsProcessorList],
    criteria: StoppingCriteriaList,
    past: Any,
    prefill: Prefill | None,
    origin: Origin,
    assistant: Assistant,
    notes: list[str],
    *,
    encoded: Encoded | None = None,
    encoder: EncoderSource | None = None,
    own_search: Callable[[], Any] | None = None,
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
    num_beams, returned = num_beams_of(config), sequences_per_prompt(config)
    beams = beam_arguments(config, num_beams, returned)
    try:
        sampling = make_sampling(config, per_sequence, do_sample, len(mask), model.device, returned)
    except (TypeError, ValueError) as error:
        name = str(error).split()[0]
        raise type(error)(f"{error}{origin.of(name, getattr(config, name, None))}") from error
    return Call(
        input_ids=ids.numpy(),
        mask=mask,
        max_new_tokens=max_length - columns,
        eos=frozenset(eos),
        pad=int(pad) if pad is not None else 0,
        sampling=sampling,
        do_sample=do_sample,
        processors=processors,
        criteria=others,
        past=past,
        return_dict=bool(config.return_dict_in_generate),
        outputs=frozenset(
            name
            for name in TOKEN_OUTPUTS
            if config.return_dict_in_generate and getattr(config, f"output_{name}")
        ),
        beams=beams,
        own_search=own_search,
        num_return_sequences=returned,
        prefill=prefill,
        encoded=encoded,
        encoder=encoder,
        assistant=assistant,
        notes=notes,
    )
