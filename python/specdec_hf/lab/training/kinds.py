"""The kinds of heads that can be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_hf.heads import blockwise, files, medusa
from specdec_hf.heads.base import Head
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.heads.exit_head import ExitConfig, ExitHead, save_exit
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.heads.parallel import ParallelConfig
from specdec_hf.heads.pass_head import PassConfig, PassHead, save_pass

MEDUSA_BLOCKS = 1  # as in the published heads
CUTS = 16  # places of a text; with three embeddings each, 384 tokens become 432


@dataclass(frozen=True)
class Kind:
    """How heads of one kind are made and written.

    Attributes:
        title, source: for the model card.
        make: gives the head for a target, a size of the draft vocabulary, a number of drafts and
            the layer of an early exit.
        save: writes one into a folder.
        weights: the file that it writes them to.
        single: whether the loss has one draft step.
        cuts: places of a text that a training step drafts at; 0 is all.
    """

    title: str
    source: str
    make: Callable[[Any, int, int, int | None], Head]
    save: Callable[[Any, Path], None]
    weights: str
    single: bool = False
    cuts: int = 0


def _eagle3(model: Any, size: int, drafts: int, layer: int | None) -> Head:
    return Eagle3Head(HeadConfig.for_target(model, size))


def _medusa(model: Any, size: int, drafts: int, layer: int | None) -> Head:
    return MedusaHeads(ParallelConfig.for_target(model, size, drafts, MEDUSA_BLOCKS))


def _blockwise(model: Any, size: int, drafts: int, layer: int | None) -> Head:
    text = model.config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return BlockwiseHeads(ParallelConfig.for_target(model, size, drafts, inner))


def _exit(model: Any, size: int, drafts: int, layer: int | None) -> Head:
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    return ExitHead(ExitConfig.for_target(model, max(1, total // 3) if layer is None else layer))


def _pass(model: Any, size: int, drafts: int, layer: int | None) -> Head:
    return PassHead(PassConfig.for_target(model, drafts))


KINDS = {
    "eagle3": Kind("EAGLE-3 head", "arXiv 2503.01840", _eagle3, save_head, files.WEIGHTS),
    "medusa": Kind(
        "Medusa heads", "arXiv 2401.10774", _medusa, medusa.save_medusa,
        medusa.MEDUSA_WEIGHTS,
    ),
    "blockwise": Kind(
        "Heads of blockwise parallel decoding", "arXiv 1811.03115", _blockwise,
        blockwise.save_blockwise, files.WEIGHTS,
    ),
    "exit_head": Kind(
        "Early-exit head", "arXiv 2404.16710", _exit, save_exit, files.WEIGHTS, single=True
    ),
    "pass_head": Kind(
        "PaSS look-ahead embeddings", "arXiv 2311.13581", _pass, save_pass, files.WEIGHTS, cuts=CUTS
    ),
}  # fmt: skip
