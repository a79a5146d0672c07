"""Arguments of ``model.generate`` that the loop does not support and refuses by name."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

# Fields of GenerationConfig with the values that change nothing. Any other value is refused.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "guidance_scale": (None, 1, 1.0),
    "watermarking_config": (None,),
    "token_healing": (None, False),
    "cache_implementation": (None,),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "use_cache": (None, True),
    "prefill_chunk_size": (None,),
}
UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "typical_p": (None, 1, 1.0),
    "epsilon_cutoff": (None, 0, 0.0),
    "eta_cutoff": (None, 0, 0.0),
    "top_h": (None,),
}
INSTEAD = {
    "assistant_model": "pass drafter=",
    "prompt_lookup_num_tokens": "pass drafter='prompt_lookup' and num_assistant_tokens=",
}


def refuse_unsupported(config: GenerationConfig) -> None:
    """Raises ValueError for a field whose value asks for something that the loop does not do."""
    table = {**UNSUPPORTED, **(UNSUPPORTED_SAMPLING if config.do_sample else {})}
    for name, neutral in table.items():
        value = getattr(config, name, None)
        if not any(value is n or value == n for n in neutral):
            raise ValueError(f"{name}={value!r} is not supported" + instead(name))


def instead(name: str) -> str:
    """The end of a message: what to pass instead of an unsupported argument, or nothing."""
    return f"; {INSTEAD[name]}" if name in INSTEAD else ""
