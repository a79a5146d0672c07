"""Encoder-decoders: how the command loads them, and the time of their encoders.

An encoder runs once a call: it is the first block of a row of Figure 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from specdec_hf.cli.checks import Settings, Sources
from specdec_hf.cli.load import Loaded, Say, find_device
from specdec_hf.cli.sources import MissingModelError, Source
from specdec_hf.cli.terminal import fail
from specdec_hf.cli.weights import load_config, load_tokenizer
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.drafting.registry import SAMPLING, sampling_of, split_options
from specdec_hf.runner.encoded import is_encoder_decoder


def load_encoder_decoder(settings: Settings, sources: Sources, say: Say) -> Loaded | None:
    """The models of a command whose target is an encoder-decoder; None for other targets.

    Draft models are encoder-decoders too, and one line tells what is wrong with any of them. Other
    drafters remain names.

    Args:
        settings: checked options, of drafters alone.
        sources: the models that they name.
        say: called with a short text before each slow step.
    """
    source = sources.model
    if source.kind != "folder":
        return None
    try:
        config = load_config(source.path)
        if not getattr(config, "is_encoder_decoder", False):
            return None
        tokenizer = load_tokenizer(source.path)
    except MissingModelError as error:
        fail(str(error))
    if settings.system is not None and tokenizer.chat_template is None:
        fail(f"--system needs a chat template, which the tokenizer of {source.title} lacks")
    device = find_device(settings.device)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    model = _load(source, device, dtype, say)
    drafters: list[Any] = []
    for name, found in zip(settings.drafter, sources.drafters, strict=True):
        if found is None:
            drafters.append(name)
            continue
        draft_model = _load(found, device, model.dtype, say)
        try:
            sampling: dict[str, Any] = sampling_of(split_options(name, SAMPLING)[1])
            drafters.append(ModelDrafter(draft_model, **sampling))
        except ValueError as error:
            fail(f"--drafter {name}: {error}")
    return Loaded(model, tokenizer, drafters, source.title)


def _load(source: Source, device: str, dtype: Any, say: Say) -> Any:
    say(f"loading {source.title}")
    try:
        kind = load_config(source.path).model_type
        if source.kind != "folder" or kind not in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
            fail(
                f"{source.option}: {source.title} is of type {kind!r}, which Transformers does not "
                "list among encoder-decoders"
            )
        model: Any = AutoModelForSeq2SeqLM.from_pretrained(
            source.path, local_files_only=True, dtype=dtype
        )
    except (MissingModelError, OSError, ValueError) as error:
        fail(f"{source.option}: cannot load {source.title}: {error}")
    return model.to(device).eval()


@dataclass
class EncoderSeconds:
    """Seconds of the encoders of one call; 0 where there is none.

    Attributes:
        target: that of the target, which runs before the call's first round.
        drafter: that of the draft model, which runs as the drafter starts.
    """

    target: float = 0.0
    drafter: float = 0.0


@contextmanager
def timed_encoders(model: Any, drafter: Drafter | None = None) -> Iterator[EncoderSeconds]:
    """Count the seconds of the encoders while the body runs."""
    seconds = EncoderSeconds()
    with ExitStack() as stack:
        for name, one in (("target", model), ("drafter", getattr(drafter, "model", None))):
            if one is not None and is_encoder_decoder(one):
                stack.enter_context(_timed(one.get_encoder(), seconds, name))
        yield seconds


@contextmanager
def _timed(encoder: Any, seconds: EncoderSeconds, name: str) -> Iterator[None]:
    began: list[float] = []

    def before(module: Any, arguments: Any) -> None:
        began.append(perf_counter())

    def after(module: Any, arguments: Any, output: Any) -> None:
        took = perf_counter() - began.pop()
        setattr(seconds, name, getattr(seconds, name) + took)

    handles = [encoder.register_forward_pre_hook(before), encoder.register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
