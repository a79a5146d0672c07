"""DFlash: a block of mask tokens that attends to keys and values made of the target's states.

The hidden states of a token after several of the target's layers, joined by one matrix and
normalised, become its keys and values in every decoder layer; nothing else is computed for the
text. One pass then reads the pending token and mask tokens after it. Inside the block attention
goes both ways, so that a pass always has the whole block; layers with a sliding window look back
only, unless the config says otherwise.

Source: DFlash, arXiv 2602.06036; the layout is that of the library speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.context import History
from specdec_hf.heads.eagle_family.files import EMBEDDINGS, OUTPUT
from specdec_hf.heads.eagle_family.layer import Norm, StateLayer
from specdec_hf.heads.files import checked_flag, checked_size
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from torch import nn

from specdec_kernels import kv_append_
from specdec_papers.mask_tokens.config import BlockConfig, sizes_from
from specdec_papers.mask_tokens.draft import BlockDrafter, BlockStepper
from specdec_papers.mask_tokens.files import read_block, write_block
from specdec_papers.mask_tokens.head import BlockHead

_LAYERS = "aux_hidden_state_layer_ids"
_FLAGS = {"sample_from_anchor": "from_anchor", "sliding_window_non_causal": "both_ways"}


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """Sizes of a DFlash head, whose queries and keys are normalised.

    Attributes:
        from_anchor: whether the pending token's own place drafts the first token, and not the mask
            token after it.
        both_ways: whether attention inside the block goes both ways under a sliding window, too.
    """

    from_anchor: bool = False
    both_ways: bool = False

    @property
    def block_size(self) -> int:
        """Places of a pass: the pending token and the mask tokens."""
        return self.num_drafts + (not self.from_anchor)

    def to_dict(self, verifier: Any = None) -> dict[str, Any]:
        """The content of config.json; ``verifier`` is the target's config or None."""
        return {
            **self.fields("dflash", "DFlashSpeculator", _LAYERS, verifier),
            **{name: getattr(self, own) for name, own in _FLAGS.items()},
            "block_size": self.block_size,
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> DFlashConfig:
        """The config of a config.json of speculators.

        Raises:
            ValueError: another kind of head, or a field that is missing or wrong, by name.
        """
        sizes = sizes_from(given, "dflash", _LAYERS)
        flags: dict[str, Any] = {own: checked_flag(given, name) for name, own in _FLAGS.items()}
        skipped = 0 if flags["from_anchor"] else 1  # places that draft nothing
        block = checked_size(
            given, "block_size", minimum=1 + skipped, maximum=MAX_DRAFT_LENGTH + skipped
        )
        return cls(**{**sizes, "qk_norm": True}, num_drafts=block - skipped, **flags)


class DFlashHead(BlockHead):
    """A DFlash head; its embeddings are the target's.

    Args:
        config: its sizes.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        size, epsilon = config.layer.hidden_size, config.layer.rms_norm_eps
        fc = nn.Linear(config.features, size, bias=False)
        layers = [StateLayer(config) for _ in config.windows]
        super().__init__(config, fc, layers, Norm(size, epsilon))
        self.hidden_norm = Norm(size, epsilon)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        fused: torch.Tensor = self.hidden_norm(self.fc(features))
        return fused


def save_dflash(
    head: DFlashHead, folder: Path, dtype: torch.dtype = torch.bfloat16, model: Any = None
) -> None:
    """Write a head in the layout of speculators, as `write_head` does.

    The target ``model``, if given, is named in config.json, and gives the rows of a draft
    vocabulary's output matrix.
    """
    rows = {}
    if model is not None and head.config.draft_vocab_size < head.config.vocab_size:
        rows = {OUTPUT: head.output_of(model)}
    write_block(head, folder, head.config.to_dict(model and model.config), dtype, **rows)


def load_dflash(folder: str | Path) -> DFlashHead:
    """A head from a folder; see `read_block`.

    Embeddings are always the target's, as is the output matrix of the whole vocabulary.
    """

    def target_owns(config: BlockConfig) -> tuple[str, ...]:
        whole = config.draft_vocab_size == config.vocab_size
        return (EMBEDDINGS, OUTPUT) if whole else (EMBEDDINGS,)

    return read_block(folder, DFlashConfig.from_dict, DFlashHead, target_owns)


class DFlashStepper(BlockStepper[DFlashHead]):
    """A DFlash head that drafts in one call."""

    def run(self, texts: History, states: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
        head, config, size = self.head, self.head.config, states.shape[1]
        block = config.block_size
        starts, anchors = (to_device(x, self.device) for x in (self.lengths, self.lengths + counts))
        slots = int((self.lengths + counts).max()) + block
        # Rows without a meaning may reach beyond the block; they are overwritten or not seen.
        buffers = self.buffers(max(slots, int(self.lengths.max()) + size))
        text, turns = head.fuse(states), self._turns(starts, size)
        made = [layer.keys_and_values(text, turns) for layer in head.layers]
        kv_append_([x for two in buffers for x in two], [x for two in made for x in two], starts)

        tokens = torch.full((len(anchors), block), config.mask_token_id, device=self.device)
        tokens[:, 0] = to_device(texts.last(1)[:, 0], self.device)
        hidden, turns = self.embed(tokens), self._turns(anchors, block)
        numbers = torch.arange(slots, device=self.device)
        first, own = anchors[:, None, None], torch.arange(block, device=self.device)[:, None]

        def mask(window: int) -> torch.Tensor:
            ends = block if not window or config.both_ways else own + 1
            seen = numbers < first + ends
            if window:
                seen = seen & (numbers >= first - window)
            return seen.expand(-1, block, -1)

        for n, seen in enumerate(self.masks(mask)):
            projected = head.layers[n].project_states(hidden, turns)
            hidden = self.through(n, projected, anchors, seen, slots)
        skipped = 0 if config.from_anchor else 1
        out: torch.Tensor = hidden[:, skipped : skipped + self.size]
        return out

    def _turns(self, starts: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head.turns(starts[:, None] + torch.arange(size, device=self.device))


class DFlashDrafter(BlockDrafter[DFlashHead], entry="dflash"):
    """A trained head that drafts a block in one pass; see `specdec_papers.dflash`.

    Its arguments and errors are those of `HeadDrafter`.

    Source: DFlash, arXiv 2602.06036.
    """

    kind, load, stepper = DFlashHead, staticmethod(load_dflash), DFlashStepper
