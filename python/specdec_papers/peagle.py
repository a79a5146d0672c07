"""P-EAGLE: an EAGLE-3 head that drafts at mask tokens, in one pass.

The text is read as EAGLE-3 reads it, a token beside the target's hidden states of the token before
it. In the place of each further draft stand a mask token and learnt hidden states, which follow the
text causally. The first decoder layer is EAGLE-3's, those after it are a language model's.

Source: P-EAGLE, arXiv 2602.01469; the layout is that of the library speculators.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from specdec_hf.drafting.context import History
from specdec_hf.heads.eagle3.head import DecoderLayer
from specdec_hf.heads.eagle_family.draft import following_tokens
from specdec_hf.heads.eagle_family.files import EMBEDDINGS, OUTPUT
from specdec_hf.heads.eagle_family.layer import Norm, StateLayer
from specdec_hf.heads.files import checked, checked_flag
from specdec_hf.heads.speculators import speculative_tokens
from specdec_hf.runner.protocol import to_device
from specdec_hf.schedules.base import MAX_DRAFT_LENGTH
from torch import nn
from torch.nn.functional import pad

from specdec_papers.mask_tokens.config import BlockConfig, sizes_from
from specdec_papers.mask_tokens.draft import BlockDrafter, BlockStepper
from specdec_papers.mask_tokens.files import read_block, write_block
from specdec_papers.mask_tokens.head import BlockHead

_LAYERS = "eagle_aux_hidden_state_layer_ids"
# The last has no effect on a pass: it is about states that a head would be given back.
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DEPTHS = 8  # that the library trains where nothing else is asked for


@dataclass(frozen=True)
class PEagleConfig(BlockConfig):
    """Sizes of a P-EAGLE head.

    Attributes:
        norm_before_residual: whether the residual of the first decoder layer begins at the
            normalised hidden state.
        norm_before_fc: whether the features are normalised together.
        fc_norm: whether the states of each of the target's layers are, one by one.
        norm_output: as in config.json; nothing reads it.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def to_dict(self, verifier: Any = None) -> dict[str, Any]:
        """The content of config.json; ``verifier`` is the target's config or None."""
        return {
            **self.fields("peagle", "PEagleSpeculator", _LAYERS, verifier),
            **{name: getattr(self, name) for name in _FLAGS},
            "embed_requires_grad": True,
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> PEagleConfig:
        """The config of a config.json of speculators.

        Raises:
            ValueError: another kind of head, or a field that is missing or wrong, by name.
        """
        sizes = sizes_from(given, "peagle", _LAYERS)
        flags: dict[str, Any] = {name: checked_flag(given, name) for name in _FLAGS}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise ValueError("norm_before_fc of a head must be false with fc_norm, got both true")
        tokens = speculative_tokens(given)
        drafts = checked(
            "speculative_tokens", _DEPTHS if tokens is None else tokens, maximum=MAX_DRAFT_LENGTH
        )
        return cls(**sizes, num_drafts=drafts, **flags)


class PEagleHead(BlockHead):
    """A P-EAGLE head.

    Args:
        config: its sizes.

    Attributes:
        mask_hidden: [1, 1, layers * H], what stands for the features of a token to be drafted.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        size, epsilon = config.layer.hidden_size, config.layer.rms_norm_eps
        first = DecoderLayer(config, norm_before_residual=config.norm_before_residual)
        others = [StateLayer(config) for _ in config.windows[1:]]
        fc = nn.Linear(config.features, size, bias=False)
        super().__init__(config, fc, [first, *others], Norm(size, epsilon))
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.features))
        self.input_norm = Norm(config.features, epsilon) if config.norm_before_fc else None
        norms = [Norm(size, epsilon) for _ in config.layers]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            chunks = features.chunk(len(self.fc_norm), dim=-1)
            both = zip(self.fc_norm, chunks, strict=True)
            features = torch.cat([norm(chunk) for norm, chunk in both], dim=-1)
        return super().fuse(features)


def save_peagle(
    head: PEagleHead, folder: Path, dtype: torch.dtype = torch.bfloat16, model: Any = None
) -> None:
    """Write a head in the layout of speculators, as `write_head` does.

    The target ``model``, if given, is named in config.json, and its embeddings and output matrix
    are written where the head has none of its own.
    """
    shared = {}
    if model is not None:
        rows = model.get_input_embeddings().weight
        shared = {OUTPUT: head.output_of(model), EMBEDDINGS: rows}
    write_block(head, folder, head.config.to_dict(model and model.config), dtype, **shared)


def load_peagle(folder: str | Path) -> PEagleHead:
    """A head from a folder; see `read_block`."""
    return read_block(folder, PEagleConfig.from_dict, PEagleHead, lambda config: ())


class PEagleStepper(BlockStepper[PEagleHead]):
    """A P-EAGLE head that drafts in one call."""

    def run(self, texts: History, states: torch.Tensor, counts: NDArray[np.int64]) -> torch.Tensor:
        head, size, masks = self.head, states.shape[1], self.size - 1
        starts, number = to_device(self.lengths, self.device), to_device(counts, self.device)
        columns = torch.arange(size + masks, device=self.device)
        # Masks follow the pairs of each sequence, and fill the columns that it has no pairs for.
        given = columns < number[:, None]
        ids = following_tokens(texts, counts, size, self.device)
        tokens = torch.where(given, pad(ids, (0, masks)), head.config.mask_token_id)
        learnt = head.fuse(head.mask_hidden)
        hidden = torch.where(given[..., None], pad(head.fuse(states), (0, 0, 0, masks)), learnt)
        places = starts[:, None] + columns
        turns = head.turns(places)
        slots = int(self.lengths.max()) + size + masks
        numbers, own = torch.arange(slots, device=self.device), places[:, :, None]
        last = (starts + number - 1)[:, None, None]  # the pair that the masks follow

        def mask(window: int) -> torch.Tensor | None:
            if not window and len(counts) == 1 and slots == size + masks:
                return None
            seen = numbers <= own
            if window:
                seen = seen & ((numbers > own - window) | (numbers >= last))
            return seen

        seen = self.masks(mask)
        projected = head.layers[0].project(self.embed(tokens), hidden, turns)
        hidden = self.through(0, projected, starts, seen[0], slots)
        for n in range(1, len(seen)):
            projected = head.layers[n].project_states(hidden, turns)
            hidden = self.through(n, projected, starts, seen[n], slots)
        rows = (number - 1).clamp(min=0)[:, None] + torch.arange(self.size, device=self.device)
        return hidden.gather(1, rows[..., None].expand(-1, -1, hidden.shape[2]))


class PEagleDrafter(BlockDrafter[PEagleHead], entry="peagle"):
    """A trained head that drafts at mask tokens in one pass; see `specdec_papers.peagle`.

    Its arguments and errors are those of `HeadDrafter`.

    Source: P-EAGLE, arXiv 2602.01469.
    """

    kind, load, stepper = PEagleHead, staticmethod(load_peagle), PEagleStepper
