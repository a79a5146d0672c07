"""Tiny random models for the tests of the loop, and the embedded one, loaded once per process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import transformers
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, generate
from specdec_hf.cli.weights import load_embedded
from specdec_hf.drafters.layers import with_fewer_layers
from specdec_hf.profile import Profile, describe_conditions, describe_model, describe_versions
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.generation.streamers import BaseStreamer

from specdec_kernels.versions import SUPPORTED, release

VOCAB = 67


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: on several, tiny models mostly wait for each other.

    conftest.py restores the number of threads.
    """
    torch.set_num_threads(1)


PAD = 0
NAMES = ("llama", "gpt2", "qwen2", "qwen3", "gemma2")
CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gpt2": (GPT2Config, GPT2LMHeadModel),
}


def needs_class(name: str) -> None:
    """Skip a test of a model class that an older version of Transformers does not have."""
    older = release(transformers.__version__) < release(SUPPORTED["transformers"].newest)
    if older and not hasattr(transformers, name):
        pytest.skip(f"there is no {name} in Transformers {transformers.__version__}")


def build(
    name: str,
    seed: int = 0,
    vocab_size: int = VOCAB,
    context: int = 256,
    layers: int = 2,
    **more: Any,
) -> Any:
    """A small random model. It has no end-of-sequence token, so a test decides the lengths.

    ``more`` are fields of its config.
    """
    fields = {
        "vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD,
        "initializer_range": 0.3,
    }  # fmt: skip
    if name == "gpt2":
        fields |= {"n_positions": context, "n_embd": 32, "n_layer": layers, "n_head": 4}
    else:
        fields |= {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "max_position_embeddings": context,
        }  # fmt: skip
    if name == "gemma2":
        fields |= {"sliding_window": 6, "attn_implementation": "eager"}
    if name in ("gemma2", "gpt2"):
        fields["tie_word_embeddings"] = False
    config_class, model_class = CLASSES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config_class(**{**fields, **more})).eval()


@cache
def tiny(name: str, seed: int = 0) -> Any:
    """A tiny model that tests share and must not change."""
    return build(name, seed)


@cache
def perturbed(name: str, amount: float = 0.05) -> Any:
    """A drafter that often agrees with ``tiny(name)``: the same weights with some noise."""
    return with_noise(tiny(name), amount)


def with_noise(model: Any, amount: float) -> Any:
    """A copy of a model with some noise on its weights."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in copied.parameters():
            if weight.numel() > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(amount * weight.std() * noise.to(weight))
    return copied


def unlike(kind: str) -> Any:
    """A drafter for llama: of an "other architecture", in "bfloat16", or of a "short context"."""
    if kind == "other architecture":
        return tiny("gpt2")
    return build("llama", context=20) if kind != "bfloat16" else build("llama").to(torch.bfloat16)


def drafter_for(name: str, kind: str) -> Any:
    """The argument ``drafter`` of `generate` for kind "prompt_lookup" or "model"."""
    return perturbed(name) if kind == "model" else kind


def prompts(
    lengths: tuple[int, ...], seed: int = 1, vocab_size: int = VOCAB
) -> dict[str, torch.Tensor]:
    """Left-padded random prompts that repeat a phrase, so that prompt lookup finds matches."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        phrase = torch.randint(1, vocab_size, (max(3, length // 2),), generator=generator)
        ids[b, width - length :] = phrase.repeat(3)[:length]
        mask[b, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def profile_of(model: Any, options: dict[str, Any]) -> Profile:
    """A profile of a model, as of greedy calls of one sequence, that holds some options."""
    conditions = describe_conditions(model, 1, sampled=False)
    return Profile(options, describe_model(model, "tiny"), conditions, describe_versions(), {})


def decode(model: Any, lengths: tuple[int, ...] = (9,), **settings: Any) -> Any:
    """What `generate` returns for prompts of some lengths: by default greedily without drafts."""
    settings = {"max_new_tokens": 12, "do_sample": False, "guard": False, **settings}
    settings.setdefault("drafter", None)
    inputs = prompts(lengths, vocab_size=model.config.vocab_size)
    return generate(model, **inputs, return_dict_in_generate=True, **settings)


def decode_as_generate(model: Any, lengths: tuple[int, ...] = (9,), **settings: Any) -> Any:
    """What `decode` returns, after a comparison of its greedy text with that of the model."""
    out = decode(model, lengths, **settings)
    inputs = prompts(lengths, vocab_size=model.config.vocab_size)
    new_tokens = settings.get("max_new_tokens", 12)
    own = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    assert out.sequences.tolist() == own.tolist()
    return out


def through(
    entry: str, model: Any, inputs: dict[str, Any], options: dict[str, Any], **kwargs: Any
) -> Any:
    """A call of `generate`, or of the model's own ``generate`` with options of a decoder."""
    if entry == "generate":
        return generate(model, **inputs, **options, **kwargs)
    return model.generate(**inputs, **kwargs, custom_generate=SpeculativeDecoder(**options))


def outcome(out: Any) -> tuple[list[list[int]], int, int]:
    """The text, and how many tokens were drafted and accepted."""
    return out.sequences.tolist(), out.stats.drafted, out.stats.accepted


NEW = 24
RAGGED = (9, 4, 12)
SAMPLED: dict[str, Any] = {
    "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.95, "seed": 5,
}  # fmt: skip


def run(model: Any, inputs: dict[str, torch.Tensor], **settings: Any) -> Any:
    """`NEW` greedy tokens without drafts, unless the settings say otherwise."""
    given = {"max_new_tokens": NEW, "do_sample": False, "guard": False, "drafter": None}
    return generate(model, **inputs, return_dict_in_generate=True, **{**given, **settings})


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Every module of a model has the attributes at the end that it has at the beginning."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    yield
    for module, attributes in before:
        assert vars(module).keys() == attributes.keys()
        assert all(vars(module)[name] is value for name, value in attributes.items())


@lru_cache(maxsize=1)
def smollm() -> tuple[Any, Any, Any]:
    """The embedded model, its tokenizer, and a drafter of its first layers that shares weights."""
    model, tokenizer = load_embedded()
    return model, tokenizer, with_fewer_layers(model, 6)


class Recorder(BaseStreamer):
    """Remembers every call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value.tolist())

    def end(self) -> None:
        self.calls.append("end")


def prefer_new(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Forbids the last five tokens of the prefix."""
    scores = scores.clone()
    for b, ids in enumerate(input_ids):
        scores[b, ids[-5:]] = -float("inf")
    return scores


# Logits processors, as arguments of `generate`.
PROCESSED: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], [12], [33]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 40))},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(1, 30))},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[3, 5], 6.0]]},
    "custom": {"logits_processor": LogitsProcessorList([prefer_new])},
}


class Clock:
    """Advances by so many seconds a call, and by what a drafter adds to ``now``."""

    def __init__(self, step=1.0):
        self.now, self.step = 0.0, step

    def __call__(self):
        self.now += self.step
        return self.now


class SlowLookup(PromptLookupDrafter):
    """Prompt lookup that takes some seconds of a clock for every draft."""

    def __init__(self, clock, seconds):
        super().__init__(3, 1)
        self.clock, self.seconds = clock, seconds

    def timed(self, found):
        self.clock.now += 0.0 if found is None else self.seconds
        return found

    def propose(self, history, limits):
        return self.timed(super().propose(history, limits))
