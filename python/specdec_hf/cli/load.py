"""Loading for the commands: everything about the models is checked before their weights are read.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from specdec_hf.cli.checks import Settings, Sources, refuse_drafter
from specdec_hf.cli.devices import find_device
from specdec_hf.cli.named_drafters import (
    check_cascaded,
    make_cascade,
    named_drafter,
    own_tokenizer_of,
    sampling_of_model,
)
from specdec_hf.cli.sources import Source
from specdec_hf.cli.terminal import fail
from specdec_hf.cli.weights import embedded_folder
from specdec_hf.drafters.folders import as_drafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.resolve import resolve_drafter
from specdec_hf.model_files import load_config, load_model, load_tokenizer
from specdec_hf.model_paths import MissingModelError
from specdec_hf.runner.packed.model import pack_for_call
from specdec_hf.runner.protocol import context_length

Say = Callable[[str], None]


@dataclass(frozen=True)
class DraftingModel:
    """A language model that drafts.

    Attributes:
        model, tokenizer: of the texts that it writes alone.
        sampling: its own parameters, in the place of those of the call.
        shares_vocabulary: whether its vocabulary is the target's.
    """

    model: Any
    tokenizer: Any
    sampling: Mapping[str, float]
    shares_vocabulary: bool


@dataclass
class Loaded:
    """The models that a command uses, in eval mode on one device, and the tokenizer.

    Attributes:
        model, tokenizer: the target's.
        drafters: those that draft; ``--cascade`` makes one of all.
        title: name of the target.
        levels: the drafters of the cascade; empty without one.
    """

    model: Any
    tokenizer: Any
    drafters: list[Any]
    title: str
    levels: list[Any] = field(default_factory=list)

    @property
    def drafter(self) -> Any:
        """The argument ``drafter`` of `generate`."""
        return self.drafters if len(self.drafters) > 1 else self.drafters[0]

    def draft_models(self) -> list[DraftingModel | None]:
        """The model of each ``--drafter``; None where it has none that could write a text alone."""
        found: list[DraftingModel | None] = []
        for one in self.levels or self.drafters:
            drafter = resolve_drafter(one, None, self.model)
            own: Any = getattr(drafter, "assistant_tokenizer", None)
            if own is not None:
                model = drafter.model  # type: ignore[union-attr]
                found.append(DraftingModel(model, own, {}, shares_vocabulary=False))
            elif isinstance(drafter, ModelDrafter):
                given = self.tokenizer, drafter.sampling
                found.append(DraftingModel(drafter.model, *given, shares_vocabulary=True))
            else:
                found.append(None)
        return found

    @property
    def dtype(self) -> str:
        """Dtype of the model's weights."""
        return str(self.model.dtype).removeprefix("torch.")


def load(
    settings: Settings,
    sources: Sources,
    say: Say,
    check_tokenizer: Callable[[Any, Any], None] = lambda tokenizer, config: None,
    refuse: Callable[[str, str], None] = refuse_drafter,
) -> Loaded:
    """The models of a command, or one line about what is wrong with them.

    Args:
        settings: checked options.
        sources: the models that they name.
        say: called with a short text before each slow step.
        check_tokenizer: called with tokenizer and config before any weight is read; it may refuse
            prompts that do not fit.
        refuse: called before that with each drafter that does not fit the model, and the reason.
            Where it returns, None stands in the place of the drafter.
    """
    device = find_device(settings.device)
    dtype = settings.dtype if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        return _load(settings, sources, say, check_tokenizer, refuse, device, dtype)
    except MissingModelError as error:
        if sources.model.kind != "embedded":
            fail(str(error))
    try:  # the converted model may be damaged
        embedded_folder(again=True, progress=say)
        return _load(settings, sources, say, check_tokenizer, refuse, device, dtype)
    except MissingModelError as error:
        fail(str(error))


def _load(
    settings: Settings,
    sources: Sources,
    say: Say,
    check_tokenizer: Callable[[Any, Any], None],
    refuse: Callable[[str, str], None],
    device: str,
    dtype: Any,
) -> Loaded:
    say(f"reading {sources.model.title}")
    path, config = read_config(sources.model, say, encoder_decoders=True)
    tokenizer = load_tokenizer(path)
    if settings.system is not None and tokenizer.chat_template is None:
        fail(f"--system needs a chat template, which the tokenizer of {sources.model.title} lacks")
    drafts = []
    for found in filter(None, sources.drafters):
        draft_path, draft_config = read_config(found, say, encoder_decoders=True)
        own_tokenizer = None
        if draft_path != path:
            own_tokenizer = own_tokenizer_of(settings, tokenizer, config, draft_path, draft_config)
        drafts.append((draft_path, own_tokenizer))
    named = [named_drafter(name, config, tokenizer, refuse) for name in settings.drafter]
    if settings.cascade is not None:
        check_cascaded(settings, named)
    samplings = [sampling_of_model(name) for name in settings.drafter]
    check_tokenizer(tokenizer, config)
    say(f"loading {sources.model.title}")
    model = load_model(path, device=device, dtype=dtype, progress=say)
    drafters: list[Any] = []
    for source, made, sampling in zip(sources.drafters, named, samplings, strict=True):
        if source is not None:
            say(f"loading {source.title}")
            path, own_tokenizer = drafts.pop(0)
            drafter = load_model(path, device=device, dtype=model.dtype, progress=say)
            try:
                drafters.append(as_drafter(drafter, own_tokenizer, tokenizer, sampling))
            except ValueError as error:
                fail(f"--drafter {source.title}: {error}")
        else:
            drafters.append(made)
    if settings.compile is not False:
        models = [x.model if isinstance(x, ModelDrafter) else x for x in drafters]
        for loaded in (model, *(x for x in models if isinstance(x, PreTrainedModel))):
            if loaded.device.type == "cpu":
                say("packing weights")
                pack_for_call(loaded)  # what it could not pack is said by the first answer
    levels: list[Any] = []
    if settings.cascade is not None:
        levels, drafters = drafters, [make_cascade(settings, model, tokenizer, drafters)]
    return Loaded(model, tokenizer, drafters, sources.model.title, levels)


def read_config(source: Source, say: Say, *, encoder_decoders: bool = False) -> tuple[Path, Any]:
    """Folder or file of a model, and its configuration.

    Args:
        source: of the model.
        say: as in `load`.
        encoder_decoders: whether it may be one.
    """
    path = embedded_folder(progress=say) if source.kind == "embedded" else source.path
    config = load_config(path)
    known, kinds = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "causal language models"
    if config.is_encoder_decoder and encoder_decoders:
        known, kinds = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, "encoder-decoders of text"
    if config.model_type not in known:
        fail(
            f"{source.option}: {source.title} is of type {config.model_type!r}, which Transformers "
            f"does not list among {kinds}"
        )
    return path, config


def check_length(length: int, config: Any) -> None:
    """Refuse a ``--length`` of texts that are longer than a model's context."""
    context = context_length(SimpleNamespace(config=config))
    if context is not None and length > context:
        fail(f"--length must be at most {context}, the model's context, got {length}")
