"""A runner with an empty cache of a given kind, and why a model cannot use one."""

from __future__ import annotations

from typing import Any

from transformers import GenerationMixin
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from specdec_hf.runner.encoded import Encoded, decoder_cache, is_encoder_decoder
from specdec_hf.runner.plain_runner import PlainRunner, Prompt, SeparateRunner, copy_of
from specdec_hf.runner.policy import AS_THE_MODEL, ForwardPolicy
from specdec_hf.runner.protocol import Runner, keeps_cache
from specdec_hf.runner.spec_runner import SpecRunner, unsupported_reason
from specdec_hf.runner.state_runner import StateRunner

# In the order in which they are tried.
ROLLBACK_KINDS = ("spec", "aligned", "dynamic")


def make_runner(
    model: Any,
    batch_size: int,
    capacity: int,
    kind: str,
    *,
    prompt: Prompt | None = None,
    inputs: dict[str, Any] | None = None,
    past: Cache | None = None,
    encoded: Encoded | None = None,
    policy: ForwardPolicy = AS_THE_MODEL,
) -> Runner:
    """A runner of a model with an empty cache.

    Args:
        model: the model whose forward will fill the cache.
        batch_size: number of sequences B.
        capacity: slots to allocate at first; `SpecCache` grows beyond them.
        kind: "spec", "snapshot" (a `StateRunner`), or as in `PlainRunner`. "snapshot", "dynamic"
            and "none" run each sequence alone.
        prompt, inputs: as in `PlainRunner`; "spec" takes neither.
        past: the caller's cache, of one sequence or for kind "plain"; it is not changed.
        encoded: what the decoder of an encoder-decoder reads of its encoder.
        policy: of a `SpecRunner`.

    Raises:
        ValueError: a kind that this model cannot use.
    """
    reason = kind_reason(model, kind)
    if reason is not None:
        raise ValueError(f"cache={kind!r} cannot serve {type(model).__name__}: {reason}")
    if kind == "spec":
        return SpecRunner(model, batch_size, capacity, policy)
    layers: list[Any] = [] if past is None else decoder_cache(past).layers
    if kind == "aligned" and any(isinstance(x, DynamicSlidingWindowLayer) for x in layers):
        past = None  # such layers dropped tokens, so the prompt is read again
    past = None if past is None else copy_of(past)
    if kind == "snapshot" and batch_size == 1:
        return StateRunner(model, prompt=prompt, inputs=inputs, past=past)
    if kind in ("aligned", "plain") or batch_size == 1:
        return PlainRunner(
            model, batch_size, kind, prompt=prompt, inputs=inputs, past=past,
            encoded=encoded,
        )  # fmt: skip
    if inputs:
        raise ValueError(
            f"{', '.join(sorted(inputs))} of a batch need a cache that holds all its sequences, "
            f"and {type(model).__name__} only fits cache={kind!r}: pass one sequence at a time"
        )
    runners: list[PlainRunner] = []
    for b in range(batch_size):
        own = None
        if prompt is not None:
            own = Prompt(prompt.input_ids[b : b + 1], prompt.mask[b : b + 1])
        padded = prompt is not None and not bool(prompt.mask.all())
        of_sequence = None if encoded is None else encoded.select([b])
        if kind == "snapshot":
            runners.append(StateRunner(model, prompt=own, keep_mask=padded))
        else:
            runners.append(
                PlainRunner(model, 1, kind, prompt=own, keep_mask=padded, encoded=of_sequence)
            )
    return SeparateRunner(runners)


def kind_reason(model: Any, kind: str) -> str | None:
    """Why a model cannot use a kind of cache, or None; a `check_fit` knows the rest."""
    # A wrapper has the method of the model that it forwards to.
    if getattr(model._sample, "__func__", None) is not GenerationMixin._sample:
        return "it generates with a loop of its own"
    if kind == "plain":
        return None
    if kind == "snapshot":
        return None if model._is_stateful else "it keeps no state"
    reason = rollback_reason(model)
    if reason is not None:
        return reason
    if (kind == "none") == keeps_cache(model):
        return "its forward takes " + ("a cache" if kind == "none" else "no cache")
    if kind == "spec":
        if is_encoder_decoder(model):
            return "its decoder also caches the keys of cross-attention, which this cache lacks"
        # Its config may name a window that the self-check does not reach.
        if model.config.get_text_config(decoder=True).model_type == "gpt_neo":
            return "its local attention counts from the cache's length"
        return unsupported_reason(model)
    return None


def rollback_reason(model: Any) -> str | None:
    """Why no cache can forget a rejected draft of this model, or None."""
    if model._is_stateful:
        return "it keeps a state that cannot be rolled back to before a rejected draft"
    if keeps_cache(model) and not model._supports_default_dynamic_cache():
        return "it keeps a cache of its own kind, which cannot be rolled back"
    config = model.config.get_text_config(decoder=True)
    if "reference_sliding_attention" in (getattr(config, "layer_types", None) or ()):
        # The first forward fixes which tokens its layers keep for good; no roll back undoes that.
        return "its cache takes drafts of the first window for a part of the prompt"
    return None
