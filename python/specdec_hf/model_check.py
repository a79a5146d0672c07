"""The self-check on demand, for every kind of cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specdec_hf.extras.encoded import Encoded
from specdec_hf.extras.encoder import EncoderSource
from specdec_hf.request.inputs import check_language_model
from specdec_hf.runner.cache_kinds import kinds_to_try
from specdec_hf.runner.comparison import CacheCheck
from specdec_hf.runner.protocol import CacheRequest, is_encoder_decoder
from specdec_hf.runner.self_check import check_cache, undisturbed


@dataclass(frozen=True)
class ModelCheck:
    """The result of `check_model`; printing it gives a table.

    Attributes:
        model: name of the model's class.
        fits: a `CacheCheck` for each (cache, "chain" or "tree", "one sequence" or "batch").
    """

    model: str
    fits: dict[tuple[str, str, str], CacheCheck]

    def fitting(self, *, tree: bool = False, batch: bool = True) -> list[str]:
        """The caches that fit, in the order in which `generate` tries them."""
        what = ("tree" if tree else "chain", "batch" if batch else "one sequence")
        return [
            key[0]
            for key, fit in self.fits.items()
            if key[1:] == what and fit.reason is None and fit.not_measured is None
        ]

    def __str__(self) -> str:
        rows = [("cache", "drafts", "sequences", "difference", "verdict")]
        for (cache, drafts, sequences), fit in self.fits.items():
            difference = "" if fit.difference is None else f"{fit.difference:.1e}"
            rows.append((cache, drafts, sequences, difference, _verdict(fit)))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = [
            "  ".join([*(x.ljust(w) for x, w in zip(row, widths, strict=False)), row[4]]).rstrip()
            for row in rows
        ]
        return "\n".join([self.model, *lines])


def check_model(model: Any) -> ModelCheck:
    """Compare a model with itself through every kind of cache of `generate`, chains and trees.

    `generate` makes the same comparison for the cache that it is about to use, the first time that
    a model class and configuration is used with it. Differences are the largest root mean square
    over the vocabulary, in units of the standard deviation of the model's own logits.

    Args:
        model: the model; neither it nor its state is changed.

    Returns:
        A `ModelCheck`, which prints as a table.

    Raises:
        TypeError: not a language model.
        ValueError: a model with prompt tuning, or an encoder that reads no text.

    >>> from specdec_hf import check_model  # doctest: +SKIP
    >>> print(check_model(model))  # doctest: +SKIP
    """
    check_language_model("model", model)
    encoded = _encoded(model) if is_encoder_decoder(model) else None
    fits = {}
    for kind in kinds_to_try(model, CacheRequest(2)):
        for batch in (False, True)[kind.min_batch_size - 1 :]:
            name, sequences = kind.name, "batch" if batch else "one sequence"
            fits[name, "chain", sequences] = check_cache(model, kind, padded=batch, encoded=encoded)
            if kind.has_slots:
                fits[name, "tree", sequences] = check_cache(model, kind, padded=batch, tree=True)
    return ModelCheck(type(model).__name__, fits)


def _encoded(model: Any) -> Encoded:
    """What the encoder of an encoder-decoder makes of two short texts."""
    if model.main_input_name != "input_ids":
        raise ValueError(
            f"check_model must be given a model that reads text, got {type(model).__name__}, whose "
            f"encoder reads {model.main_input_name}; its first call of generate is checked"
        )
    ids = torch.arange(3, 17, device=model.device).view(2, 7)
    with undisturbed(model):
        return EncoderSource(ids, {"attention_mask": torch.ones_like(ids)}).encode(model)


def _verdict(fit: CacheCheck) -> str:
    if fit.reason is not None:
        return fit.reason
    if fit.not_measured is not None:
        return f"not checked: {fit.not_measured}"
    return "fits" if fit.remark is None else f"fits; {fit.remark}"
