"""EAGLE heads of the first paper: one decoder layer over the target's final hidden states.

The layer reads a token's embedding beside the final hidden state of the token before it, which one
matrix joins. Its output predicts the next final hidden state: the target's output matrix makes
logits of it, and the next draft reads it in the place of the target's own.

Source: EAGLE, arXiv 2401.15077.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from specdec_hf.heads.eagle_family.config import PairConfig, decoder_layer, fields_of, layer_like
from specdec_hf.heads.eagle_family.drafter import PairChainDrafter, PairTreeDrafter
from specdec_hf.heads.eagle_family.files import EMBEDDINGS, published_weights, read_published
from specdec_hf.heads.eagle_family.head import PairHead
from specdec_hf.heads.eagle_family.layer import HeadLayer
from specdec_hf.heads.files import (
    WEIGHTS,
    check_tensors,
    checked_flag,
    read_config,
    read_weights,
    write_head,
)
from torch import nn

_UNUSED = "layers.0.self_attn.rotary_emb.inv_freq"  # made from the config
# Fields of other heads, and what reads them.
_OTHERS = {
    "draft_vocab_size": "EAGLE-3, which drafter eagle3 reads",
    "speculators_model_type": "the library speculators, which eagle3, peagle or dflash reads",
}


@dataclass(frozen=True)
class EagleConfig(PairConfig):
    """Sizes of an EAGLE head, which drafts the whole vocabulary.

    Attributes:
        bias: whether the matrix that joins embedding and hidden state has a bias.
        qkv_bias: whether the projections to queries, keys and values have one.
    """

    bias: bool = True
    qkv_bias: bool = False

    @classmethod
    def like(cls, model: Any) -> EagleConfig:
        """A head whose decoder layer has the sizes of the target's own.

        Raises:
            ValueError: a target whose sizes are not those of a Llama layer.
        """
        layer = layer_like(model)
        return cls(layer, layer.hidden_size, layer.vocab_size, ())

    @property
    def features(self) -> int:
        """Numbers of a final hidden state."""
        return self.target_hidden_size

    def for_layers(self, total: int) -> EagleConfig:
        """With the final hidden state of a target of ``total`` layers, which follows its norm."""
        return replace(self, layers=(total,))

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the published layout."""
        return {
            "architectures": ["LlamaForCausalLM"], **fields_of(self.layer),
            "bias": self.bias, "qkv_bias": self.qkv_bias,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> EagleConfig:
        """The config of a config.json in the published layout.

        Raises:
            ValueError: a field that is missing, of a wrong value or of another head, by name.
        """
        for name, whose in _OTHERS.items():
            if name in given:
                raise ValueError(f"config.json holds {name}: it belongs to a head of {whose}")
        layer = decoder_layer(given, {"attention_bias": False, "mlp_bias": False})
        defaults = {"bias": True, "qkv_bias": False}
        flags = {name: checked_flag(given, name, default=one) for name, one in defaults.items()}
        return cls(layer, layer.hidden_size, layer.vocab_size, (), **flags)


class EagleLayer(HeadLayer):
    """A layer without a norm before its attention, behind the matrix that joins its inputs."""

    def __init__(self, config: EagleConfig) -> None:
        size = config.layer.hidden_size
        super().__init__(config, size, bias=config.qkv_bias)
        self.fc = nn.Linear(2 * size, size, bias=config.bias)

    def combine(
        self, embeddings: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        joined: torch.Tensor = self.fc(torch.cat([embeddings, hidden], dim=-1))
        return joined, joined


class EagleHead(PairHead):
    """An EAGLE head.

    Args:
        config: its sizes.
    """

    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, nn.Identity(), EagleLayer(config), nn.Identity())

    def borrow(self, model: Any) -> None:
        """Take the target's output matrix itself.

        Raises:
            ValueError: a target of other sizes.
        """
        self.lm_head = self.rows_of(model)


def save_eagle(head: EagleHead, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a head in the published layout, as `write_head` does."""
    tensors = {_published(name): weight for name, weight in published_weights(head).items()}
    if head.embeddings is not None:
        tensors[EMBEDDINGS] = head.embeddings
    write_head(folder, head.config.to_dict(), tensors, dtype)


def load_eagle(folder: str | Path) -> EagleHead:
    """A head from a folder, in float32 on the host.

    Raises:
        ValueError: a folder without a head, a pickled one, one of EAGLE-3, or one whose config,
            names or shapes are wrong, by name.
    """
    folder = Path(folder)
    config = EagleConfig.from_dict(read_config(folder))
    read = read_weights(folder, WEIGHTS)
    read.pop(_UNUSED, None)
    with torch.random.fork_rng(devices=[]):  # the weights that replace these are no random ones
        head = EagleHead(config)
    own = {name: list(weight.shape) for name, weight in published_weights(head).items()}
    expected = {_published(name): shape for name, shape in own.items()}
    expected[EMBEDDINGS] = [config.vocab_size, config.layer.hidden_size]
    check_tensors(read, expected, {EMBEDDINGS}, folder / WEIGHTS, "EAGLE head")
    read_published(head, {name: read[_published(name)] for name in own})
    if EMBEDDINGS in read:
        head.embeddings = read[EMBEDDINGS].float()
    return head.eval()


def _published(name: str) -> str:
    """The name of a weight in a file; what joins the inputs is a part of the layer here."""
    _, fc, kind = name.partition("midlayer.fc.")
    return f"fc.{kind}" if fc else name.replace("midlayer.", "layers.0.")


class EagleDrafter(PairTreeDrafter[EagleHead], entry="eagle"):
    """A trained head that predicts the target's final hidden states; see `specdec_papers.eagle`.

    Its arguments and errors are those of `PairTreeDrafter`.

    Source: EAGLE, arXiv 2401.15077.
    """

    kind, load = EagleHead, staticmethod(load_eagle)


class EagleChainDrafter(PairChainDrafter[EagleHead], entry="eagle_chain"):
    """Such a head that drafts token by token, each with the distribution it was drawn from.

    Its arguments and errors are those of `HeadDrafter`.

    Source: EAGLE, arXiv 2401.15077.
    """

    kind, load = EagleHead, staticmethod(load_eagle)
