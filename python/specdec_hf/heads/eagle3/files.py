"""EAGLE-3 heads on disk: config.json and one safetensors file, in either of two layouts.

The published one is that of the authors and of SpecForge, the other that of vLLM's library
speculators, whose config.json is nested, whose decoder layer is called ``layers.0``, and whose file
holds the embeddings and the output matrix of the target.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from specdec_hf.arguments import Refused
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.eagle_family.files import (
    EMBEDDINGS,
    OUTPUT,
    head_tensors,
    read_head,
    vocabulary_shapes,
)
from specdec_hf.heads.files import WEIGHTS, read_config, read_weights, write_head
from specdec_hf.heads.speculators import TYPE, check_kind, decoder_fields, outer_fields

_LAYER, _OTHER_LAYER = "midlayer.", "layers.0."
SPECULATIVE_TOKENS = 3  # how many tokens vLLM drafts where its user says nothing
_OUTER = (
    "draft_vocab_size", "norm_before_residual", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output")


def save_head(head: Eagle3Head, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head as `write_head` does, output matrix and embeddings only where they are own."""
    write_head(folder, head.config.to_dict(), head_tensors(head), dtype)


def save_as_speculators(
    head: Eagle3Head, folder: Path, model: Any, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head with the target's embeddings and output matrix, in the layout of speculators.

    Args:
        head, folder, dtype: as above.
        model: the target.

    Raises:
        ValueError: a target of other sizes.
    """
    tensors = head_tensors(head)
    if OUTPUT not in tensors:
        tensors[OUTPUT] = head.output_of(model)
    if EMBEDDINGS not in tensors:
        tensors[EMBEDDINGS] = model.get_input_embeddings().weight
    tensors = _renamed(tensors, _LAYER, _OTHER_LAYER)
    write_head(folder, to_speculators(head.config.to_dict(), model.config), tensors, dtype)


def _renamed(tensors: dict[str, torch.Tensor], layer: str, other: str) -> dict[str, torch.Tensor]:
    """With another name of the decoder layer."""
    return {
        other + name[len(layer) :] if name.startswith(layer) else name: tensor
        for name, tensor in tensors.items()
    }


def _renamed_too(name: str, tensors: Collection[str]) -> bool:
    """Whether a tensor is there under both names of the decoder layer."""
    return name.startswith(_LAYER) and _OTHER_LAYER + name[len(_LAYER) :] in tensors


def load_head(folder: str | Path) -> Eagle3Head:
    """A head from a folder, in float32 on the host.

    Raises:
        ValueError: a folder without a head, a pickled one, or one whose config, names or shapes are
            wrong, by name.
    """
    folder = Path(folder)
    given = read_config(folder)
    config = HeadConfig.from_dict(from_speculators(given) if is_speculators(given) else given)
    read = read_weights(folder, WEIGHTS)
    tensors = _renamed(read, _OTHER_LAYER, _LAYER)
    if len(tensors) < len(read):
        twice = sorted(name for name in read.keys() & tensors.keys() if _renamed_too(name, read))
        raise Refused(f"{folder / WEIGHTS} holds {', '.join(twice)} in two spellings")
    optional = {"t2d"}
    if config.target_hidden_size == config.layer.hidden_size:
        optional |= {OUTPUT, EMBEDDINGS}  # the target's will do
    if config.draft_vocab_size == config.vocab_size:
        optional.add("d2t")
    return read_head(
        lambda: Eagle3Head(config), tensors, vocabulary_shapes(config), optional, folder / WEIGHTS,
        "EAGLE-3 head",
    )  # fmt: skip


def is_speculators(given: dict[str, Any]) -> bool:
    """Whether a config.json has this layout."""
    return TYPE in given


def from_speculators(given: dict[str, Any]) -> dict[str, Any]:
    """The fields of the published layout.

    Raises:
        ValueError: another kind of head, or a field that is missing, by name.
    """
    check_kind(given, "eagle3")
    layer = decoder_fields(given)
    if "norm_before_residual" not in given:  # the library and vLLM differ in its default
        raise Refused("config.json of a head must hold norm_before_residual")
    return {**layer, **{name: given[name] for name in (*_OUTER, *_REFUSED) if name in given}}


def to_speculators(published: dict[str, Any], verifier: Any) -> dict[str, Any]:
    """The content of config.json.

    Args:
        published: that of the published layout.
        verifier: the target's config; its name says where vLLM finds it.
    """
    outer = {name: published[name] for name in _OUTER if name in published}
    inner = {
        name: value
        for name, value in published.items()
        if name not in (*_OUTER, "architectures", "eagle_config")
    }
    return {
        **outer_fields("eagle3", "Eagle3Speculator", inner, SPECULATIVE_TOKENS, verifier),
        **outer,
        **dict.fromkeys(_REFUSED, False),
        "embed_requires_grad": False,
    }
