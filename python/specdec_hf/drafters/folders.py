"""Draft models and heads that a user names by their folders, here and on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_hf import plugins
from specdec_hf.arguments import shown
from specdec_hf.drafters.fingerprint import same_vocabulary
from specdec_hf.drafters.model import ModelDrafter, own_sampling
from specdec_hf.drafting.parsed import parse_drafter, sampling_of, with_name_of_head
from specdec_hf.drafting.registry import entry_named, make_drafter
from specdec_hf.model_files import holds_tokenizer, load_config, load_model, load_tokenizer
from specdec_hf.model_paths import HUB_ID, MissingModelError, model_path, state_of_files
from specdec_hf.runner.model_record import record_of
from specdec_hf.runner.protocol import vocab_size_of


def read_folders(drafter: Any, target: Any, tokenizer: Any = None) -> Any:
    """An argument ``drafter`` in which heads and draft models stand in the place of their folders.

    A draft model is read once for a target, and again where its files were changed.

    Args:
        drafter: as in `generate`; what names no folder and no GGUF file stays as it is.
        target: the model, on whose device and in whose dtype a draft model is.
        tokenizer: the target's; None takes that of the folder that the target was loaded from.

    Raises:
        ValueError: a path without a head and without a model, one that cannot be read, or a model
            of another vocabulary where the target has no tokenizer.
    """
    if isinstance(drafter, list | tuple):
        return [read_folders(one, target, tokenizer) for one in drafter]
    if not isinstance(drafter, str | os.PathLike):
        return drafter
    text = with_name_of_head(os.fspath(drafter))
    if entry_named(text) is not None:
        return make_drafter(text) if isinstance(drafter, os.PathLike) else text
    parts = parse_drafter(text)
    try:
        path = model_path(parts.value)
        if path is None:
            if isinstance(drafter, os.PathLike) or os.sep in text:
                hub = isinstance(drafter, str) and HUB_ID.fullmatch(parts.value)
                hint = "; a hub id is not looked up: give the folder of its files" if hub else ""
                raise ValueError(f"folder {parts.value} does not exist{hint}")
            return drafter
        sampling = own_sampling(**sampling_of(parts.options))
        return _read(path, sampling, target, tokenizer)
    except (MissingModelError, ValueError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"cannot read {error.filename or path}: {error.strerror or error}"
        raise ValueError(f"drafter {shown(os.fspath(drafter))}: {reason}") from error


def _read(path: Path, sampling: Mapping[str, float], target: Any, given: Any) -> Any:
    place = path.resolve(), target.device, target.dtype
    key, kept = (state_of_files(path), given), record_of(target).drafters
    if kept.get(place, (None,))[0] != key:
        tokenizer, own, config = given or _tokenizer_of(target), None, load_config(path)
        ours, theirs = vocab_size_of(config), vocab_size_of(target)
        if tokenizer is not None:
            own = other_tokenizer(path, config, target.config, tokenizer)
        elif ours != theirs:
            raise ValueError(
                f"its vocabulary has {ours} tokens and the model's {theirs}: give tokenizer=, the "
                "model's, and it drafts by the text"
            )
        model = load_model(path, device=target.device, dtype=target.dtype)
        kept[place] = key, (model, own, tokenizer)
    model, own, tokenizer = kept[place][1]
    return as_drafter(model, own, tokenizer, sampling)


def _tokenizer_of(target: Any) -> Any:
    """The tokenizer of the folder that a model was loaded from, or None."""
    folder = Path(getattr(target.config, "_name_or_path", None) or "")
    known = folder.name and folder.is_dir() and holds_tokenizer(folder)
    return load_tokenizer(folder) if known else None


def other_tokenizer(path: Path, config: Any, target_config: Any, tokenizer: Any) -> Any:
    """The tokenizer of a draft model whose vocabulary is not the target's, else None.

    Args:
        path, config: folder or file of the draft model, and its configuration.
        target_config, tokenizer: the target's.

    Raises:
        MissingModelError: the draft model has another vocabulary, and no tokenizer.
    """
    if vocab_size_of(config) == vocab_size_of(target_config):
        if not holds_tokenizer(path):  # weights alone are of the target's vocabulary
            return None
        own = load_tokenizer(path)
        return None if same_vocabulary(tokenizer, own) else own
    return load_tokenizer(path)


def as_drafter(model: Any, own: Any, tokenizer: Any, sampling: Mapping[str, Any]) -> Any:
    """A draft model as the argument ``drafter`` of `generate`.

    Args:
        model: the draft model.
        own: its tokenizer where its vocabulary is not the target's, else None.
        tokenizer: the target's.
        sampling: parameters of its drafts, in the place of those of the call.

    Raises:
        ValueError: parameters for a model of another vocabulary.
    """
    if own is None:
        return ModelDrafter(model, **sampling) if sampling else model
    if sampling:
        raise ValueError(
            f"{', '.join(sampling)} cannot be given: a draft model of another vocabulary drafts "
            "its most likely tokens"
        )
    return plugins.load("other_vocabulary")(model, own, tokenizer)
