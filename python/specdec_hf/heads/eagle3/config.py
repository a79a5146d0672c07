"""The shape of a head, as its config.json states it in the published layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_hf.arguments import check_integer, check_integers
from specdec_hf.heads.files import checked
from specdec_hf.runner.protocol import vocab_size_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
# What a config.json says of a decoder layer, those of attention and network first.
SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
_DRAFT_SIZE = "draft_vocab_size"
# Variants of the published architecture that `Eagle3Head` does not compute.
_REFUSED = ("norm_before_fc", "fc_norm", "norm_output", "attention_bias", "mlp_bias")
_LAYERS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_LAYERS = 3
# Transformers raises these for fields of wrong types and for rotary embeddings that it lacks.
_UNREADABLE = (
    StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError,
)  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head.

    Attributes:
        layer: sizes and rotary embedding of its decoder layer, those of a Llama model.
        target_hidden_size: of the target's hidden states.
        draft_vocab_size: how many of the target's tokens it can draft.
        layers: after how many of the target's layers each hidden state is read; 0 is the
            embeddings. Empty: `default_layers` of the target, which are three.
        norm_before_residual: whether the residual of the decoder layer begins at the normalised
            hidden state.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    norm_before_residual: bool = False

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
        config = model.config.get_text_config(decoder=True)
        missing = [name for name in (*SIZES[:4], "rms_norm_eps") if not hasattr(config, name)]
        if missing:
            raise ValueError(
                f"model must have a decoder layer of the sizes of Llama, and {type(model).__name__}"
                f" has no {', '.join(missing)}"
            )
        total = config.num_hidden_layers
        chosen = default_layers(total) if layers is None else check_integers("layers", layers)
        if (
            not chosen
            or list(chosen) != sorted(set(chosen))
            or not 0 <= chosen[0] <= chosen[-1] <= total
        ):
            raise ValueError(f"layers must rise within [0, {total}], got {list(chosen)}")
        head_dim = getattr(config, "head_dim", None)
        layer = LlamaConfig(
            **{name: getattr(config, name) for name in SIZES[:4]},
            num_hidden_layers=1,
            head_dim=head_dim or config.hidden_size // config.num_attention_heads,
            rms_norm_eps=config.rms_norm_eps,
            vocab_size=vocab_size_of(model),
            max_position_embeddings=config.max_position_embeddings,
            rope_parameters=dict(_rope_parameters(config)),
        )
        size = check_integer("draft_vocab_size", draft_vocab_size, 1, layer.vocab_size)
        return cls(layer, config.hidden_size, size, tuple(chosen))

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        size: int = self.layer.vocab_size
        return size

    @property
    def features(self) -> int:
        """Numbers that the target's hidden states of a token have together."""
        return self.target_hidden_size * (len(self.layers) or DEFAULT_LAYERS)

    def on(self, total: int) -> HeadConfig:
        """With the layers that the head reads in a target of ``total`` layers.

        Raises:
            ValueError: a target that lacks some.
        """
        layers = self.layers or default_layers(total)
        if len(layers) < DEFAULT_LAYERS and not self.layers:
            raise ValueError(
                f"the head reads {DEFAULT_LAYERS} layers of a model of 7 or more, got {total}"
            )
        if max(layers) > total:
            raise ValueError(
                f"the head reads the states after {max(layers)} layers, and the model has {total}"
            )
        return replace(self, layers=layers)

    @property
    def projected(self) -> tuple[int, int, int]:
        """Widths of queries, keys and values of all heads."""
        own = self.kv_heads * self.head_dim
        return self.layer.num_attention_heads * self.head_dim, own, own

    @property
    def head_dim(self) -> int:
        """Size of a query, key or value."""
        size: int = self.layer.head_dim  # type: ignore[assignment]  # set in the constructor
        return size

    @property
    def kv_heads(self) -> int:
        """How many keys and values each place has."""
        number: int = self.layer.num_key_value_heads  # type: ignore[assignment]
        return number

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
        layer = decoder_layer(given, (*SIZES, _DRAFT_SIZE), dict.fromkeys(_REFUSED, False))
        size = checked("target_hidden_size", given.get("target_hidden_size") or layer.hidden_size)
        before = given.get("norm_before_residual") or False
        if not isinstance(before, bool):
            raise ValueError(
                f"config.json: norm_before_residual must be true or false, got {before!r}"
            )
        layers = _layers_of(given)
        return cls(layer, size, given[_DRAFT_SIZE], layers, before)


def fields_of(layer: LlamaConfig) -> dict[str, Any]:
    """What a config.json says of a decoder layer."""
    names = ("head_dim", "rms_norm_eps", "hidden_act", "rope_parameters", "model_type")
    rope = dict(layer.rope_parameters)  # type: ignore[arg-type]  # set in the constructor
    scaled = rope.get("rope_type", "default") != "default"
    return {
        **{name: getattr(layer, name) for name in (*SIZES, *names)},
        # For readers of before rope_parameters, which would take the default without a word.
        "rope_theta": rope.pop("rope_theta"),
        "rope_scaling": rope if scaled else None,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
    }


def decoder_layer(
    given: dict[str, Any], sizes: Sequence[str], refused: dict[str, Any]
) -> LlamaConfig:
    """The sizes and the rotary embedding of the decoder layer of a head.

    Args:
        given: the fields of config.json.
        sizes: those that it must hold.
        refused: the only values that other fields may have.

    Raises:
        ValueError: a field that is missing or of a wrong value, by name.
    """
    given = {"num_key_value_heads": given.get("num_attention_heads")} | given
    missing = [name for name in sizes if name not in given]
    if missing:
        other = "; heads of the first EAGLE, which drafter eagle reads, lack it"
        raise ValueError(
            f"config.json of a head must hold {', '.join(missing)}"
            f"{other if missing == [_DRAFT_SIZE] else ''}"
        )
    for name in sizes:
        checked(name, given[name], 1)
    only = {"num_hidden_layers": 1, "hidden_act": "silu", "model_type": "llama", **refused}
    for name, wanted in only.items():
        if (value := given.get(name)) is not None and value != wanted:
            raise ValueError(f"{name} of a head must be {wanted}, got {value!r}")
    epsilon = given.get("rms_norm_eps", 1e-6)
    number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
    if not number or not 0 < epsilon < math.inf:
        raise ValueError(f"config.json: rms_norm_eps must be above 0, got {epsilon!r}")
    if given.get("head_dim") is not None:
        checked("head_dim", given["head_dim"])
    try:
        layer = LlamaConfig.from_dict({**given, "num_hidden_layers": 1})
    except _UNREADABLE as error:
        raise ValueError(f"config.json of a head: {_one_line(error)}") from error
    try:
        LlamaRotaryEmbedding(layer)
    except _UNREADABLE as error:
        raise ValueError(
            "config.json: rope_parameters must be a rotary embedding of Transformers, got "
            f"{layer.rope_parameters}: {_one_line(error)}"
        ) from error
    return layer


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _layers_of(given: dict[str, Any]) -> tuple[int, ...]:
    """The layers of either spelling, that of vLLM before the other; empty where neither is."""
    other = given.get("eagle_config") or {}
    if not isinstance(other, dict):
        raise ValueError(f"config.json: eagle_config must be an object, got {other!r}")
    if other.get("use_aux_hidden_state") is False:
        raise ValueError("use_aux_hidden_state of a head must be True, got False")
    layers, shift = given.get(_LAYERS), 0
    if layers is None:
        layers, shift = other.get(_LAYERS), 1
    if layers is None:
        return ()
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"config.json: {_LAYERS} must list integers, got {layers!r}")
    return tuple(checked(_LAYERS, layer, -shift) + shift for layer in layers)


def default_layers(total: int) -> tuple[int, ...]:
    """The layers of a model of ``total`` that a head reads: a low, a middle and a late one."""
    return tuple(sorted({min(2, total), total // 2, max(total - 3, 0)}))


def _rope_parameters(config: Any) -> dict[str, Any]:
    given = getattr(config, "rope_parameters", None)
    return (
        given
        if isinstance(given, dict) and "rope_theta" in given
        else {"rope_theta": 10000.0, "rope_type": "default"}
    )
