"""The shape of a head, as its config.json states it in the published layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specdec_hf.arguments import Refused, check_integer, check_integers
from specdec_hf.heads.eagle_family.config import PairConfig, decoder_layer, fields_of, layer_like
from specdec_hf.heads.files import checked, checked_flag

ARCHITECTURE = "LlamaForCausalLMEagle3"
_DRAFT_SIZE = "draft_vocab_size"
# Variants of the published architecture that `Eagle3Head` does not compute.
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
_AFTER_NORM = "final_state_after_norm"  # which no other library writes
DEFAULT_LAYERS = 3


@dataclass(frozen=True)
class HeadConfig(PairConfig):
    """Sizes of an EAGLE-3 head.

    Attributes:
        layers: empty takes `default_layers` of the target, which are three.
        norm_before_residual: whether the residual of the decoder layer begins at the normalised
            hidden state.
        final_state_after_norm: whether the state after the target's last layer is the one after its
            final norm, as in training here. Elsewhere it is the one before that norm, which is not
            kept. Only targets of one or two layers have heads that read it.
    """

    norm_before_residual: bool = False
    final_state_after_norm: bool = False

    @classmethod
    def for_target(
        cls, model: Any, draft_vocab_size: int, layers: tuple[int, ...] | None = None
    ) -> HeadConfig:
        """A head whose decoder layer has the sizes of the target's own.

        Args:
            model: the target.
            draft_vocab_size: at most the size of its vocabulary.
            layers: None takes a low, a middle and a late one.

        Raises:
            ValueError: a target whose sizes are not those of a Llama layer, or layers it lacks.
        """
        layer = layer_like(model)
        config = model.config.get_text_config(decoder=True)
        total = config.num_hidden_layers
        chosen = default_layers(total) if layers is None else check_integers("layers", layers)
        if (
            not chosen
            or list(chosen) != sorted(set(chosen))
            or not 0 <= chosen[0] <= chosen[-1] <= total
        ):
            raise ValueError(f"layers must rise within [0, {total}], got {list(chosen)}")
        size = check_integer("draft_vocab_size", draft_vocab_size, 1, layer.vocab_size)
        last = chosen[-1] == total
        return cls(layer, config.hidden_size, size, tuple(chosen), final_state_after_norm=last)

    @property
    def features(self) -> int:
        """Numbers that the target's hidden states of a token have together."""
        return self.target_hidden_size * (len(self.layers) or DEFAULT_LAYERS)

    def for_layers(self, total: int) -> HeadConfig:
        """With the layers that the head reads in a target of ``total`` layers.

        Raises:
            ValueError: a target that lacks some, or whose state before the final norm is one.
        """
        layers = self.layers or default_layers(total)
        if len(layers) < DEFAULT_LAYERS and not self.layers:
            raise Refused(
                f"the head reads {DEFAULT_LAYERS} layers of a model of 7 or more, got {total}"
            )
        config = replace(self, layers=layers)
        if self.final_state_after_norm and max(layers) == total:
            return config
        return super(HeadConfig, config).for_layers(total)

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json in the published layout.

        The layers have two spellings: number n is the state before layer n in the field that vLLM
        reads, and the state after it in ``eagle_config``, which SGLang and SpecForge read.
        """
        given: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            **fields_of(self.layer),
            "target_hidden_size": self.target_hidden_size,
            _DRAFT_SIZE: self.draft_vocab_size,
            "norm_before_residual": self.norm_before_residual,
        }
        if self.final_state_after_norm:
            given[_AFTER_NORM] = True
        if self.layers:
            after = [layer - 1 for layer in self.layers]
            given[_LAYERS] = list(self.layers)
            given["eagle_config"] = {"use_aux_hidden_state": True, _LAYERS: after}
        return given

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> HeadConfig:
        """The config of a config.json in the published layout.

        Raises:
            ValueError: a field that is missing or of a wrong value, by name.
        """
        layer = decoder_layer(given, dict.fromkeys(_REFUSED, False))
        if _DRAFT_SIZE not in given:
            raise Refused(
                f"config.json of a head must hold {_DRAFT_SIZE}; heads of the first EAGLE, which "
                "drafter eagle reads, lack it"
            )
        draft = checked(_DRAFT_SIZE, given[_DRAFT_SIZE])
        size = checked("target_hidden_size", given.get("target_hidden_size") or layer.hidden_size)
        flags = {name: checked_flag(given, name) for name in ("norm_before_residual", _AFTER_NORM)}
        return cls(layer, size, draft, _layers_of(given), **flags)


def _layers_of(given: dict[str, Any]) -> tuple[int, ...]:
    """The layers of either spelling, that of vLLM before the other; empty where neither is."""
    other = given.get("eagle_config") or {}
    if not isinstance(other, dict):
        raise Refused(f"config.json: eagle_config must be an object, got {other!r}")
    if other.get("use_aux_hidden_state") is False:
        raise Refused("use_aux_hidden_state of a head must be True, got False")
    layers, shift = given.get(_LAYERS), 0
    if layers is None:
        layers, shift = other.get(_LAYERS), 1
    if layers is None:
        return ()
    if not isinstance(layers, list) or not layers:
        raise Refused(f"config.json: {_LAYERS} must list integers, got {layers!r}")
    return tuple(checked(_LAYERS, layer, -shift) + shift for layer in layers)


def default_layers(total: int) -> tuple[int, ...]:
    """The layers of a model of ``total`` that a head reads: a low, a middle and a late one."""
    return tuple(sorted({min(2, total), total // 2, max(total - 3, 0)}))
