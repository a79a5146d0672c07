"""The weights of a head over pairs by the names of published files."""

from __future__ import annotations

import torch

from specdec_hf.heads.pairs.config import PairConfig
from specdec_hf.heads.pairs.head import PairHead

EMBEDDINGS = "embed_tokens.weight"
# Layers of a head -> the published layers whose rows they hold together.
_FUSED = {
    "midlayer.qkv_proj": [f"midlayer.self_attn.{x}_proj" for x in "qkv"],
    "midlayer.gate_up_proj": [f"midlayer.mlp.{x}_proj" for x in ("gate", "up")],
    "midlayer.o_proj": ["midlayer.self_attn.o_proj"],
    "midlayer.down_proj": ["midlayer.mlp.down_proj"],
}


def published_weights(head: PairHead) -> dict[str, torch.Tensor]:
    """The weights of a head by published names, those of its decoder layer as in ``midlayer``."""
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in head.state_dict().items():
        parts = _parts(name, head.config)
        sizes = [rows or len(weight) for rows in parts.values()]
        tensors |= dict(zip(parts, weight.split(sizes), strict=True))
    return tensors


def read_published(head: PairHead, tensors: dict[str, torch.Tensor]) -> None:
    """Set the weights of a head from tensors as `published_weights` gives them."""
    head.load_state_dict(
        {
            name: torch.cat([tensors[part].float() for part in _parts(name, head.config)])
            for name in head.state_dict()
        }
    )


def _parts(name: str, config: PairConfig) -> dict[str, int]:
    """Published names of what a weight consists of, and the rows of each; 0 is all of them."""
    layer, _, kind = name.rpartition(".")
    parts = [f"{part}.{kind}" for part in _FUSED.get(layer, [layer])]
    sizes = {3: list(config.projected), 2: [config.layer.intermediate_size] * 2}
    return dict(zip(parts, sizes.get(len(parts), [0]), strict=True))
