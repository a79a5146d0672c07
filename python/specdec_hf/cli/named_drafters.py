"""What ``--drafter`` and ``--cascade`` name: made from its name, and checked against the model.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec_hf import plugins
from specdec_hf.cli.checks import Settings, parse_cascade
from specdec_hf.cli.terminal import fail
from specdec_hf.drafters.folders import other_tokenizer
from specdec_hf.drafters.model import ModelDrafter, own_sampling
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.drafting.parsed import parse_drafter, sampling_of
from specdec_hf.drafting.registry import AUTO, entry_named, make_drafter
from specdec_hf.model_paths import MissingModelError
from specdec_hf.runner.protocol import vocab_size_of


def named_drafter(
    name: str, config: Any, tokenizer: Any, refuse: Callable[[str, str], None]
) -> Any:
    """The drafter of a checked name; None for none, for models and where it is refused.

    "auto" remains a name: the loop chooses call by call.
    """
    if name == AUTO:
        return name
    try:
        drafter = make_drafter(name)
        if drafter is not None:
            drafter.check_config(config)
            drafter.check_tokenizer(tokenizer)
        return drafter
    except (OSError, ValueError) as error:
        refuse(name, str(error).removeprefix(f"drafter {name!r}: "))
        return None


def sampling_of_model(name: str) -> dict[str, Any]:
    """The sampling parameters that follow the name of a draft model."""
    if entry_named(name) is not None:  # its class reads them
        return {}
    try:
        return own_sampling(**sampling_of(parse_drafter(name).options))
    except ValueError as error:
        fail(f"--drafter {name}: {error}")


def own_tokenizer_of(
    settings: Settings, tokenizer: Any, config: Any, draft_path: Path, draft_config: Any
) -> Any:
    """The tokenizer of a draft model whose vocabulary is not the model's, else None."""
    wanted, got = (vocab_size_of(c) for c in (config, draft_config))
    # `OtherVocabularyDrafter` drafts chains and does not roll back.
    tree = settings.tree is not None and len(settings.drafter) == 1
    needs = "--tree" if tree else "--cascade" if settings.cascade else None
    rule = f"{needs} needs a drafter of the model's vocabulary of {wanted} tokens"
    if needs and wanted != got:
        fail(f"{rule}, got {got}")
    try:
        own = other_tokenizer(draft_path, draft_config, config, tokenizer)
    except MissingModelError as error:
        fail(f"--drafter: {error}")
    if needs and own is not None:
        fail(f"{rule}, got as many other tokens")
    return own


def check_cascaded(settings: Settings, named: list[Any]) -> None:
    """Refuse what cannot take drafts back below the first drafter, where drafts may be rejected."""
    for name, one in zip(settings.drafter[1:], named[1:], strict=True):
        if isinstance(one, Drafter) and not one.rolling_back().rolls_back:
            fail(
                "--cascade needs models, prompt_lookup, random or ngram:FILE after the first "
                f"--drafter, because others cannot take drafts back, got {name}"
            )


def make_cascade(settings: Settings, model: Any, tokenizer: Any, drafters: list[Any]) -> Any:
    """The cascade of ``--cascade``, whose drafters are loaded."""
    parsed = parse_cascade(settings)
    assert parsed is not None
    kind, counts = parsed
    for n, one in enumerate(drafters):
        if isinstance(one, Drafter):
            drafters[n] = one.rolling_back()
            drafters[n].check_tokenizer(tokenizer)
    try:
        if kind == "horizontal":
            return plugins.load("horizontal_cascade")(drafters, counts)
        models = [_model_of(one, model) for one in drafters[:-1]]
        last = drafters[-1]
        for one in reversed(models):
            last = plugins.load("vertical_cascade")(one, last)
        return last
    except (TypeError, ValueError) as error:
        fail(f"--cascade {kind}: {error}")


def _model_of(drafter: Any, target: Any) -> Any:
    """The model that a draft model of a vertical cascade is."""
    if isinstance(drafter, ModelDrafter) and drafter.sampling:
        fail(
            f"--cascade vertical: {', '.join(drafter.sampling)} of a model must not be given, "
            "because the models of a vertical cascade draft with the call's"
        )
    if isinstance(drafter, Drafter):
        drafter = drafter.for_target(target)
    return drafter.model if isinstance(drafter, ModelDrafter) else drafter
