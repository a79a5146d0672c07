"""Every field of ``GenerationConfig``: honoured, refused by name, or without effect.

docs/generation-config.md lists them, and a test compares these tables with the installed
Transformers. A field that is in none of them is refused where it is not None.
"""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from specdec_hf.arguments import check_integer, check_number, shown

HONOURED = frozenset(
    {"max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"}
    | {"do_sample", "temperature", "top_k", "top_p", "min_p", "num_return_sequences"}
    | {"repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size"}
    | {"encoder_no_repeat_ngram_size", "bad_words_ids", "renormalize_logits"}
    | {"forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"}
    | {"exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"}
    | {"sequence_bias", "return_dict_in_generate", "pad_token_id", "eos_token_id"}
    | {"num_beams", "early_stopping", "length_penalty"}
    | {"output_scores", "output_logits", "output_hidden_states"}
    | {"num_assistant_tokens", "num_assistant_tokens_schedule", "decoder_start_token_id"}
    | {"assistant_confidence_threshold", "assistant_early_exit"}
    | {"prompt_lookup_num_tokens", "max_matching_ngram_size"}
)
# Transformers compares these fields with numbers and does not look at their types. The loop checks
# the other numbers where it reads them.
INTEGERS = (
    "max_length", "max_new_tokens", "min_length", "min_new_tokens", "num_return_sequences",
    "num_beams", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "pad_token_id", "assistant_early_exit",
)  # fmt: skip
NUMBERS = (
    "max_time", "length_penalty", "repetition_penalty", "encoder_repetition_penalty",
    "assistant_confidence_threshold",
)  # fmt: skip
# They have no effect on plain generation of one kind either: they belong to contrastive search, to
# static or quantized caches, to other entry points, or are bookkeeping.
WITHOUT_EFFECT = frozenset(
    {"low_memory", "bos_token_id"}
    | {"cache_config", "max_cache_len", "compile_config", "disable_compile"}
    | {"continuous_batching_config", "transformers_version", "_from_model_config"}
)
# The values of the other fields that change nothing. Any other value is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beam_groups": (None, 1),
    "diversity_penalty": (None, 0),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None, "dynamic"),
    "output_attentions": (None, False),
    "is_assistant": (None, False),
    "assistant_lookbehind": (None, 10),
    "target_lookbehind": (None, 10),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "prefill_chunk_size": (None,),
}
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (None, 1),
    "epsilon_cutoff": (None, 0),
    "eta_cutoff": (None, 0),
    "top_h": (None,),
}


class ArgumentSource:
    """Says in messages where a value of the generation config comes from.

    Args:
        model: its ``generation_config`` holds the defaults.
        names: of the arguments of the call.
    """

    def __init__(self, model: Any, names: set[str]) -> None:
        self.defaults = model.generation_config
        self.names = names

    def of(self, name: str, value: Any) -> str:
        """The end of a message about a value: the model's own config, or nothing."""
        default = getattr(self.defaults, name, None)
        own = name not in self.names and default is not None and _same(default, value)
        return " (from model.generation_config)" if own else ""


def check_types(arguments: dict[str, Any], *configs: Any) -> None:
    """Raise TypeError for a field of `INTEGERS` or `NUMBERS` that is none, by name and value.

    Args:
        arguments: of the call.
        configs: generation configs or None; each gives what those before it leave open.
    """
    for names, check in ((INTEGERS, check_integer), (NUMBERS, check_number)):
        for name in names:
            given = (arguments.get(name), *(getattr(config, name, None) for config in configs))
            value = next((value for value in given if value is not None), None)
            if value is not None:
                check(name, value)


def refuse_unsupported(config: GenerationConfig, origin: ArgumentSource) -> list[str]:
    """Notes about a complete generation config, in which the loop may set ``use_cache``.

    Raises:
        ValueError: a field whose value asks for something that the loop does not do.
    """
    notes = []
    if config.use_cache is False and origin.of("use_cache", False):
        # Files of some models say so. The text does not depend on it.
        config.use_cache = True
        notes.append("use_cache=False (from model.generation_config) has no effect")
    table = {**UNSUPPORTED, **(UNSUPPORTED_SAMPLING if config.do_sample else {})}
    known = HONOURED | WITHOUT_EFFECT | UNSUPPORTED_SAMPLING.keys()
    # Entries that Transformers itself does not know come from files of models and are never read.
    for name in GenerationConfig().__dict__:
        if name in known and name not in table:
            continue
        value = getattr(config, name, None)
        if not any(_same(value, neutral) for neutral in table.get(name, (None,))):
            raise ValueError(f"{name}={shown(value)} is not supported{origin.of(name, value)}")
    return notes


def refuse_synced_gpus(model: Any, synced_gpus: Any = None) -> None:
    """Raises ValueError where ranks that share layers must make the same number of forwards.

    With None Transformers decides, which asks for it under FSDP and ZeRO-3.
    """
    if synced_gpus is None:
        decided = model._extract_generation_mode_kwargs(None, {}, None, None, None)
        if decided.get("synced_gpus"):
            raise ValueError(
                "synced_gpus=True is not supported, and Transformers chooses it for "
                f"{type(model).__name__}, whose layers are shared by several ranks"
            )
    elif synced_gpus is not False:
        raise ValueError(f"synced_gpus={shown(synced_gpus)} is not supported")


def _same(value: Any, other: Any) -> bool:
    return value is other or bool(type(value) is not bool and value == other)
