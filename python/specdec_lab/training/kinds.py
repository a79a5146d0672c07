"""The kinds of heads that can be trained, and the draft model, which is trained as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from specdec_hf.heads import files
from specdec_hf.heads.base import Head
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_hf.runner.protocol import vocab_size_of
from specdec_papers import blockwise, medusa
from specdec_papers.blockwise import BlockwiseHeads
from specdec_papers.exit_head import ExitConfig, ExitHead, save_exit
from specdec_papers.medusa import MedusaHeads
from specdec_papers.parallel import ParallelConfig
from specdec_papers.pass_head import PassConfig, PassHead, save_pass

from specdec_lab.training.draft_model import (
    DraftLlama,
    DraftModelConfig,
    save_draft_model,
)
from specdec_lab.training.settings import DRAFT_MODEL, TrainingSettings
from specdec_lab.training.states import check_output

MEDUSA_BLOCKS = 1  # as in the published heads
CUTS = 16  # places of a text; with three embeddings each, 384 tokens become 432


@dataclass(frozen=True)
class Kind:
    """How heads of one kind are made and written.

    Attributes:
        title, source: for the model card.
        new: gives the head for a target and settings.
        save: writes one into a folder.
        weights: the file that it writes them to.
        load: reads a head whose training can go on on other texts; None where there is none.
        is_model: whether that folder is a causal LM with its tokenizer.
        single: whether the loss has one draft step.
        final_only: whether it reads no hidden state of the target but the final one.
        cuts: places of a text that a training step drafts at; 0 is all.
    """

    title: str
    source: str
    new: Callable[[Any, TrainingSettings], Head]
    save: Callable[[Any, Path], None]
    weights: str
    load: Callable[[Path], Eagle3Head] | None = None
    is_model: bool = False
    single: bool = False
    final_only: bool = False
    cuts: int = 0

    def make(self, model: Any, settings: TrainingSettings) -> Head:
        """The head for a target and settings.

        Raises:
            ValueError: no head of this kind fits the target, or its logits are not those of its
                output matrix alone; see `check_output`.
        """
        head = self.new(model, settings)
        check_output(model)
        return head

    def read(self, folder: Path, head: Head, model: Any) -> Eagle3Head:
        """A trained head, for another one that is to begin with its weights.

        The draft vocabulary may be another one, because the output matrix is the target's.

        Args:
            folder: of the trained head.
            head: that `make` gave for the target.
            model: the target.

        Raises:
            ValueError: this kind has no `load`, no head lies there, it has embeddings or an output
                matrix of its own, or it reads other layers or has other sizes.
        """
        if self.load is None:
            raise ValueError(f"resume must be a head of kind eagle3, and {self.title} are another")
        trained = self.load(folder)
        assert isinstance(head, Eagle3Head)
        if trained.own_lm_head or trained.embeddings is not None:
            raise ValueError(
                f"resume must be a head with the target's embeddings and output matrix, and "
                f"{folder} has its own"
            )
        total = model.config.get_text_config(decoder=True).num_hidden_layers
        ours, theirs = head.config, trained.config.for_layers(total)
        sizes = _shapes(head.state_dict()), _shapes(trained.state_dict())
        for name, wanted, given in (
            ("layers", ours.layers, theirs.layers),
            ("norm_before_residual", ours.norm_before_residual, theirs.norm_before_residual),
            ("rope_parameters", ours.layer.rope_parameters, theirs.layer.rope_parameters),
            ("sizes", *sizes),
        ):
            if wanted != given:
                raise ValueError(f"resume must be a head with {name} = {wanted}, got {given}")
        return trained


def _shapes(weights: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def _size(model: Any, settings: TrainingSettings) -> int:
    """The draft vocabulary's; the default is the whole vocabulary where that is smaller."""
    size, whole = settings.draft_vocab_size, vocab_size_of(model)
    if size > whole and size != TrainingSettings.draft_vocab_size:
        raise ValueError(f"draft_vocab_size must be at most {whole}, the target's, got {size}")
    return min(size, whole)


def _eagle3(model: Any, settings: TrainingSettings) -> Head:
    return Eagle3Head(HeadConfig.for_target(model, _size(model, settings)))


def _medusa(model: Any, settings: TrainingSettings) -> Head:
    size = _size(model, settings)
    return MedusaHeads(ParallelConfig.for_target(model, size, settings.draft_steps, MEDUSA_BLOCKS))


def _blockwise(model: Any, settings: TrainingSettings) -> Head:
    text = model.config.get_text_config(decoder=True)
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    size = _size(model, settings)
    return BlockwiseHeads(ParallelConfig.for_target(model, size, settings.draft_steps, inner))


def _exit(model: Any, settings: TrainingSettings) -> Head:
    total = model.config.get_text_config(decoder=True).num_hidden_layers
    layer = max(1, total // 3) if settings.layer is None else settings.layer
    return ExitHead(ExitConfig.for_target(model, layer))


def _pass(model: Any, settings: TrainingSettings) -> Head:
    return PassHead(PassConfig.for_target(model, settings.draft_steps))


def _draft_model(model: Any, settings: TrainingSettings) -> Head:
    return DraftLlama(
        DraftModelConfig.for_target(model, settings.width, settings.num_layers), model
    )


KINDS = {
    "eagle3": Kind(
        "EAGLE-3 head", "arXiv 2503.01840", _eagle3, save_head, files.WEIGHTS, load=load_head
    ),
    "medusa": Kind(
        "Medusa heads", "arXiv 2401.10774", _medusa, medusa.save_medusa,
        medusa.MEDUSA_WEIGHTS, final_only=True,
    ),
    "blockwise": Kind(
        "Heads of blockwise parallel decoding", "arXiv 1811.03115", _blockwise,
        blockwise.save_blockwise, files.WEIGHTS, final_only=True,
    ),
    "exit_head": Kind(
        "Early-exit head", "arXiv 2404.16710", _exit, save_exit, files.WEIGHTS, single=True
    ),
    "pass_head": Kind(
        "PaSS look-ahead embeddings", "arXiv 2311.13581", _pass, save_pass, files.WEIGHTS,
        final_only=True, cuts=CUTS,
    ),
    DRAFT_MODEL: Kind(
        "Draft model", "distilled as in arXiv 2310.08461", _draft_model, save_draft_model,
        files.WEIGHTS, is_model=True, single=True, final_only=True,
    ),
}  # fmt: skip
