"""The shape of a head, as its config.json states it in the published layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

from specdec_hf.arguments import check_integer, check_integers
from specdec_hf.cache.protocol import vocab_size_of

ARCHITECTURE = "LlamaForCausalLMEagle3"
_SIZES = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size",
    "draft_vocab_size", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of an EAGLE-3 head.

    Attributes:
        layer: sizes and rotary embedding of its decoder layer, those of a Llama model.
        target_hidden_size: of the target's hidden states.
        draft_vocab_size: how many of the target's tokens it can draft.
        layers: after how many of the target's layers each hidden state is read; 0 is the
            embeddings.
    """

    layer: LlamaConfig
    target_hidden_size: int
    draft_vocab_size: int
    layers: tuple[int, ...]

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
        missing = [name for name in (*_SIZES[:4], "rms_norm_eps") if not hasattr(config, name)]
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
            **{name: getattr(config, name) for name in _SIZES[:4]},
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
        """The content of config.json."""
        names = ("head_dim", "rms_norm_eps", "hidden_act", "rope_parameters", "model_type")
        sizes = {name: getattr(self.layer, name) for name in (*_SIZES, *names) if name != _SIZES[5]}
        return {
            "architectures": [ARCHITECTURE],
            **sizes,
            "num_hidden_layers": 1,
            "target_hidden_size": self.target_hidden_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> HeadConfig:
        """The config of a config.json.

        Raises:
            ValueError: a field that is missing or of a wrong value, by name.
        """
        missing = [name for name in _SIZES if name not in given]
        if missing:
            raise ValueError(f"config.json of a head must hold {', '.join(missing)}")
        for name in _SIZES:
            try:
                check_integer(name, given[name], 1)
            except TypeError as error:
                raise ValueError(f"config.json: {error}") from None
        if given.get("num_hidden_layers", 1) != 1:
            raise ValueError(
                f"num_hidden_layers of a head must be 1, got {given['num_hidden_layers']}"
            )
        layers = given.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        if layers is None:
            raise ValueError(
                "config.json of a head must hold eagle_config.eagle_aux_hidden_state_layer_ids, "
                "the target's layers that it reads"
            )
        return cls(
            LlamaConfig.from_dict({**given, "num_hidden_layers": 1}),
            given.get("target_hidden_size", given["hidden_size"]),
            given["draft_vocab_size"],
            check_integers("eagle_aux_hidden_state_layer_ids", layers),
        )


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
