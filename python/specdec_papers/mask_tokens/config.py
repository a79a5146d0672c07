"""The sizes of heads that draft a block of mask tokens, as speculators writes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specdec_hf.heads.eagle_family.config import (
    SIZES,
    PairConfig,
    decoder_layer,
    fields_of,
    transformers_config,
)
from specdec_hf.heads.files import checked, checked_size
from specdec_hf.heads.speculators import (
    DECODER,
    TYPE,
    check_kind,
    decoder_fields,
    outer_fields,
)
from specdec_hf.runner.protocol import ROPES_BY_LENGTH
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_LAYERS = {"llama": LlamaConfig, "qwen3": Qwen3Config}
_FULL, _SLIDING = "full_attention", "sliding_attention"
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}


@dataclass(frozen=True)
class BlockConfig(PairConfig):
    """Sizes of a head that drafts a block of mask tokens.

    Attributes:
        mask_token_id: the target's token whose embedding stands for a token to be drafted.
        windows: of each decoder layer, how many places back it sees; 0 is all of them.
        num_drafts: most tokens of a pass, those that it was trained for.
    """

    mask_token_id: int
    windows: tuple[int, ...]
    num_drafts: int

    def fields(self, kind: str, architecture: str, layers: str, verifier: Any) -> dict[str, Any]:
        """What `sizes_from` reads, with the fields that kinds share; see `outer_fields`."""
        return {
            **outer_fields(kind, architecture, self._decoder(), self.num_drafts, verifier),
            layers: list(self.layers),
            "draft_vocab_size": self.draft_vocab_size,
            "mask_token_id": self.mask_token_id,
        }

    def _decoder(self) -> dict[str, Any]:
        """The fields of the decoder layers in config.json."""
        return {
            **fields_of(self.layer),
            **_NO_BIAS,
            "model_type": "qwen3" if self.qk_norm else "llama",
            "num_hidden_layers": len(self.windows),
            "layer_types": [_SLIDING if window else _FULL for window in self.windows],
            "sliding_window": max(self.windows) or None,
            "use_sliding_window": any(self.windows),
        }


def sizes_from(given: dict[str, Any], kind: str, layers: str) -> dict[str, Any]:
    """The fields of a `BlockConfig` but ``num_drafts`` from a config.json of speculators.

    Args:
        given: its content.
        kind: what ``speculators_model_type`` must be.
        layers: the field that names the target's layers.

    Raises:
        ValueError: another kind or layout, or a field that is missing or wrong, by name.
    """
    if TYPE not in given:
        raise ValueError(
            f"config.json of a {kind} head must hold {TYPE}: only the layout of the library "
            "speculators is read, to which its command convert brings others"
        )
    check_kind(given, kind)
    inner = decoder_fields(given)
    layer, windows = _decoder(inner)
    size = layer.hidden_size
    if (given.get("target_hidden_size") or size) != size:
        raise ValueError(
            f"target_hidden_size of a {kind} head must be its hidden_size {size}, got "
            f"{given['target_hidden_size']!r}"
        )
    numbers = given.get(layers)
    if not isinstance(numbers, list) or not numbers or len(set(map(str, numbers))) < len(numbers):
        raise ValueError(f"config.json: {layers} must list different integers, got {numbers!r}")
    return {
        "layer": layer,
        "target_hidden_size": size,
        "draft_vocab_size": checked_size(given, "draft_vocab_size", maximum=layer.vocab_size),
        "layers": tuple(checked(layers, number, 0) for number in numbers),
        "qk_norm": inner.get("model_type", "qwen3") == "qwen3",
        "mask_token_id": checked_size(
            given, "mask_token_id", minimum=0, maximum=layer.vocab_size - 1
        ),
        "windows": windows,
    }


def _decoder(inner: dict[str, Any]) -> tuple[LlamaConfig, tuple[int, ...]]:
    """The sizes of a decoder layer, and the window of each of them."""
    model_type = inner.get("model_type", "qwen3")  # which is what the library takes it for
    if model_type not in _LAYERS:
        raise ValueError(
            f"config.json: model_type of {DECODER} must be llama or qwen3, got {model_type!r}"
        )
    number = checked_size(inner, "num_hidden_layers")
    whole = transformers_config(_LAYERS[model_type], inner)
    names = (*SIZES, *_NO_BIAS, "hidden_act")
    resolved = {name: getattr(whole, name) for name in ("head_dim", "rms_norm_eps")}
    given = {name: inner[name] for name in names if name in inner} | resolved
    layer = decoder_layer({**given, "rope_parameters": whole.rope_parameters}, _NO_BIAS)
    rope: Any = layer.rope_parameters
    turned = 2 * len(LlamaRotaryEmbedding(layer).inv_freq)
    if rope["rope_type"] in ROPES_BY_LENGTH or turned != layer.head_dim:
        raise ValueError(
            "config.json: rope_parameters must turn the whole of a head by angles that do not "
            f"depend on the text, got {rope}"
        )
    types = getattr(whole, "layer_types", None) or [_FULL] * number
    if len(types) != number or not {*types} <= {_FULL, _SLIDING}:
        raise ValueError(
            f"config.json: layer_types must hold {_FULL} or {_SLIDING} for each of {number} "
            f"layers, got {types}"
        )
    window = 0
    if _SLIDING in types:
        window = checked("sliding_window", getattr(whole, "sliding_window", None))
    return layer, tuple(window if one == _SLIDING else 0 for one in types)
