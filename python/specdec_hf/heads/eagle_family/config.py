"""The sizes of heads over pairs, whose decoder layer is that of a Llama model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec_hf.arguments import Refused
from specdec_hf.heads.files import checked
from specdec_hf.runner.protocol import vocab_size_of

if TYPE_CHECKING:
    from typing_extensions import Self

# What a config.json says of a decoder layer, those of attention and network first.
SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip
# Transformers raises these for fields of wrong types and for rotary embeddings that it lacks.
_UNREADABLE = (
    StrictDataclassError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError,
)  # fmt: skip


@dataclass(frozen=True)
class PairConfig:
    """Sizes of a head over pairs.

    Attributes:
        layer: sizes and rotary embedding of its decoder layer, those of a Llama model.
        target_hidden_size: of the target's hidden states.
        draft_vocab_size: how many of the target's tokens it can draft.
        layers: after how many of the target's layers each hidden state is read; 0 is the
            embeddings. Empty: not known before the target is.
        qk_norm: whether queries and keys are normalised, as in the layers of Qwen3.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]
    qk_norm: bool = field(default=False, kw_only=True)

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        size: int = self.layer.vocab_size
        return size

    @property
    def features(self) -> int:
        """Numbers that the target's hidden states of a token have together."""
        return self.target_hidden_size * len(self.layers)

    def for_layers(self, total: int) -> Self:
        """For a target of ``total`` layers: the same.

        Raises:
            ValueError: a target that lacks some of the layers. The state after its last one, before
                the final norm, is not kept.
        """
        if max(self.layers) >= total:
            raise Refused(
                f"the head reads the states after {max(self.layers)} layers, and must read those "
                f"before the last of the model's {total}"
            )
        return self

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


def layer_like(model: Any) -> LlamaConfig:
    """A decoder layer of the sizes of a target's own.

    Raises:
        ValueError: a target whose sizes are not those of a Llama layer.
    """
    config = model.config.get_text_config(decoder=True)
    missing = [name for name in (*SIZES[:4], "rms_norm_eps") if not hasattr(config, name)]
    if missing:
        raise ValueError(
            f"model must have a decoder layer of the sizes of Llama, and {type(model).__name__}"
            f" has no {', '.join(missing)}"
        )
    head_dim = getattr(config, "head_dim", None)
    return LlamaConfig(
        **{name: getattr(config, name) for name in SIZES[:4]},
        num_hidden_layers=1,
        head_dim=head_dim or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        vocab_size=vocab_size_of(model),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(_rope_parameters(config)),
    )


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


def decoder_layer(given: dict[str, Any], refused: dict[str, Any]) -> LlamaConfig:
    """The sizes and the rotary embedding of the decoder layer of a head.

    Args:
        given: the fields of config.json.
        refused: the only values that other fields may have.

    Raises:
        ValueError: a field that is missing or of a wrong value, by name.
    """
    given = {"num_key_value_heads": given.get("num_attention_heads")} | given
    missing = [name for name in SIZES if name not in given]
    if missing:
        raise Refused(f"config.json of a head must hold {', '.join(missing)}")
    for name in SIZES:
        checked(name, given[name], 1)
    only = {"num_hidden_layers": 1, "hidden_act": "silu", "model_type": "llama", **refused}
    for name, wanted in only.items():
        if (value := given.get(name)) is not None and value != wanted:
            raise Refused(f"{name} of a head must be {wanted}, got {value!r}")
    epsilon = given.get("rms_norm_eps", 1e-6)
    number = isinstance(epsilon, int | float) and not isinstance(epsilon, bool)
    if not number or not 0 < epsilon < math.inf:
        raise Refused(f"config.json: rms_norm_eps must be above 0, got {epsilon!r}")
    if given.get("head_dim") is not None:
        checked("head_dim", given["head_dim"])
    layer: LlamaConfig = transformers_config(LlamaConfig, {**given, "num_hidden_layers": 1})
    try:
        LlamaRotaryEmbedding(layer)
    except _UNREADABLE as error:
        raise Refused(
            "config.json: rope_parameters must be a rotary embedding of Transformers, got "
            f"{layer.rope_parameters}: {_one_line(error)}"
        ) from error
    return layer


def transformers_config(kind: Any, fields: dict[str, Any]) -> Any:
    """A config of Transformers; raises ValueError for fields that it refuses."""
    try:
        return kind.from_dict(fields)
    except _UNREADABLE as error:
        raise Refused(f"config.json of a head: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _rope_parameters(config: Any) -> dict[str, Any]:
    given = getattr(config, "rope_parameters", None)
    return (
        given
        if isinstance(given, dict) and "rope_theta" in given
        else {"rope_theta": 10000.0, "rope_type": "default"}
    )
