"""Drafters of native multi-token prediction, with the layers of the target's own checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from specdec_hf.drafters.chain import ChainState
from specdec_hf.drafters.growing_tree import (
    GrowingTreeDrafter,
    GrowingTreeState,
    call_for_tree,
)
from specdec_hf.drafting.call import DrafterCall
from specdec_hf.drafting.drafter import RULES_OF_DRAWN_DRAFTS
from specdec_hf.heads.placed import HeadDrafter, PlacedHead, check_sizes
from specdec_hf.runner.model_record import record_of
from specdec_hf.trees import EagleTree

from specdec_papers.mtp.draft import MtpStepper
from specdec_papers.mtp.files import find_checkpoint, folder_of, load_mtp
from specdec_papers.mtp.head import MtpHead

if TYPE_CHECKING:
    from typing_extensions import Self


class CheckpointHead(PlacedHead[MtpHead]):
    """Reads the layers in a checkpoint once for each target, which all of its calls share.

    Args:
        folder: of the checkpoint; None takes the one that the target was loaded from.
    """

    def __init__(self, folder: str | Path | None) -> None:
        self._folder = None if folder is None else Path(folder)

    def check_config(self, config: Any) -> None:
        find_checkpoint(self._folder or folder_of(config))

    def for_target(self, model: Any) -> MtpHead:
        found = find_checkpoint(self._folder or folder_of(model.config))
        weight = model.get_output_embeddings().weight
        key = found.state(), model.device, weight.dtype
        record = record_of(model)
        kept = record.mtp  # another thread may replace it
        if kept is None or kept[0] != key:
            # Weights made in inference mode would count no changes.
            with torch.inference_mode(False), torch.no_grad():
                head = load_mtp(found, weight.dtype).to(model.device)
                check_sizes(head.config, model.config)
                text = model.config.get_text_config(decoder=True)
                head.config = head.config.for_layers(text.num_hidden_layers)
                head.share_with(model)
            record.mtp = kept = key, head
        placed: MtpHead = kept[1]
        placed.borrow(model)
        return placed


class _MtpDrafter(HeadDrafter[MtpHead]):
    kind, load = MtpHead, staticmethod(load_mtp)

    def __init__(self, head: MtpHead | PlacedHead[MtpHead] | str | Path | None) -> None:
        if head is None or isinstance(head, str | Path):
            head = CheckpointHead(head)
        super().__init__(head)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """With the layers of the checkpoint in a folder, or of the target's own."""
        return cls(text or None)


class MtpDrafter(_MtpDrafter, entry="mtp"):
    """The target's own layers of multi-token prediction draft a chain, each token with its
    distribution.

    Draft step k is drafted by layer k, and by the last layer from its own output where there are
    more steps than layers.

    Args:
        head: None reads the checkpoint that the target was loaded from, where Transformers leaves
            these layers out; or the folder of that checkpoint, or an `MtpHead`, which is not
            changed.

    Raises:
        TypeError: no head.
        ValueError: when a call starts, a checkpoint of an unknown model type, without such layers,
            or with missing, unknown or quantised tensors, by name.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2.
    """

    rules = RULES_OF_DRAWN_DRAFTS

    def __init__(self, head: MtpHead | PlacedHead[MtpHead] | str | Path | None = None) -> None:
        super().__init__(head)

    def state_with(self, head: MtpHead, call: DrafterCall) -> ChainState:
        return ChainState(call, MtpStepper(head, call))


class MtpTreeDrafter(_MtpDrafter, GrowingTreeDrafter, entry="mtp_tree"):
    """The target's own layer of multi-token prediction drafts trees, which grow as EAGLE-2's do.

    Args:
        head: as in `MtpDrafter`, with one layer.
        layout: size of the tree.

    Raises:
        TypeError: no head.
        ValueError: as in `MtpDrafter`; several layers.

    Source: DeepSeek-V3, arXiv 2412.19437, section 2.2; EAGLE-2, arXiv 2406.16858.
    """

    def __init__(
        self,
        head: MtpHead | PlacedHead[MtpHead] | str | Path | None = None,
        layout: EagleTree | None = None,
    ) -> None:
        super().__init__(head)
        GrowingTreeDrafter.__init__(self, EagleTree() if layout is None else layout)

    def state_with(self, head: MtpHead, call: DrafterCall) -> GrowingTreeState:
        if len(head.blocks) > 1:
            raise ValueError(
                "drafter mtp_tree needs one layer of multi-token prediction, got "
                f"{len(head.blocks)}: drafter mtp drafts chains with several"
            )
        stepper = MtpStepper(head, call_for_tree(call, self.layout))
        return GrowingTreeState(call, self.layout, stepper)
