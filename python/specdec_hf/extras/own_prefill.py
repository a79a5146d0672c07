"""The model's own prefill, where a call has inputs that the loop cannot feed.

The prefill runs with exactly the arguments that ``model.generate`` would use; see
extras/prefill.py. The loop takes over the cache that it filled, and starts its first round with
the logits that it gave. Later rounds feed new tokens only; what they need beyond ids, positions and
mask is in extras/later_inputs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, get_layer_types_and_kwargs

from specdec_hf.extras.handover import fill
from specdec_hf.extras.later_inputs import LaterInputs
from specdec_hf.extras.prefill import Prefill, copy_of_cache
from specdec_hf.loop.plan import Plan
from specdec_hf.request.inputs import HOLED_MASK
from specdec_hf.runner.cache_kinds import PLAIN, SPEC, CacheKind, rollback_kinds
from specdec_hf.runner.comparison import CacheCheck, Comparison, checks_of, compare, tolerance_of
from specdec_hf.runner.plain_runner import PlainRunner
from specdec_hf.runner.protocol import (
    CACHE_NAME,
    CacheRequest,
    Lengths,
    Prompt,
    Runner,
    counts_tokens,
    rounded,
    vocab_size_of,
)
from specdec_hf.runner.self_check import PASSING, check_cache, one_line, undisturbed
from specdec_hf.runner.spec_runner import SpecRunner

PROBES = 3  # tokens that the first call of a kind feeds twice, to compare


@torch.inference_mode()
def own_prefill(plan: Plan, capacity: int) -> tuple[Runner, torch.Tensor, list[str]]:
    """A runner whose cache holds the prompt, logits [B, 1, V] of the token that follows, and notes.

    The first time that a class and configuration of model has inputs of these names, the logits of
    a few tokens are compared with those of plain forwards, as runner/comparison.py measures. Trees
    are checked on text. A ValueError says why the loop cannot go on as plain generation does.
    """
    model, made, request, prompt = plan.model, plan.call.prefill, plan.request, plan.request.prompt
    assert made is not None
    assert prompt is not None
    outputs = model._prefill(made.input_ids, made.config, made.model_kwargs)
    past = outputs.get(CACHE_NAME)
    if past is None or not counts_tokens(past):
        raise ValueError(
            f"{_named(made.names)} not supported: {type(model).__name__} gives no cache"
        )
    logits = rounded(outputs.logits[:, -1:].clone())
    lengths = prompt.mask.sum(axis=1).astype(np.int64)
    kinds, faults = rollback_kinds(request), list[str]()
    if request.tree and request.self_check:
        reason = check_cache(model, SPEC, tree=True).reason
        if reason is not None:
            kinds, faults = [], [f"cache='spec' with a tree of drafts: {reason}"]

    def result(runner: Runner) -> tuple[Runner, torch.Tensor, list[str]]:
        if "hidden_states" in plan.call.output.per_token:
            runner.tap.open(first=outputs.hidden_states)
        ran = f"{type(model).__name__} runs with cache={runner.kind!r}"
        return runner, logits, [f"{ran}; {fault}" for fault in faults]

    try:
        later = LaterInputs(model, made.input_ids, made.model_kwargs, outputs, past, lengths)
    except ValueError as error:
        kinds, faults = [], [str(error)]
    for kind in kinds:
        try:
            return result(_taken_over(model, made, request, outputs, later, capacity, kind))
        except ValueError as error:
            faults.append(str(error))
    if not request.drafts:
        return result(_continued(model, made, prompt, outputs, past, PLAIN))
    raise ValueError(f"{_named(made.names)} not supported: {'; '.join(faults)}")


def _named(names: list[str]) -> str:
    """The subject of a message that refuses arguments."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _continued(
    model: Any, made: Prefill, prompt: Prompt, outputs: Any, past: Any, kind: CacheKind
) -> PlainRunner:
    """A runner that goes on from the prefill as plain generation does, token by token."""
    inputs = {k: v for k, v in made.model_kwargs.items() if k != CACHE_NAME}
    made_by = kind.runner_class()
    runner = made_by(model, len(prompt.mask), prompt=prompt, inputs=inputs, past=past)
    runner.begin_after(outputs)
    return runner


def _taken_over(
    model: Any,
    made: Prefill,
    request: CacheRequest,
    outputs: Any,
    later: LaterInputs,
    capacity: int,
    kind: CacheKind,
) -> Runner:
    assert request.prompt is not None
    past, prompt, batch_size = outputs[CACHE_NAME], request.prompt, request.batch_size
    config = model.config.get_text_config(decoder=True)
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if HOLED_MASK in made.names and layer_types != {"full_attention"}:
        raise ValueError("a sliding window counts the columns that the mask hides")
    reason = _why_not(model, past, kind, layer_types, batch_size)
    if reason is not None:
        raise ValueError(f"cache={kind.name!r} cannot serve {type(model).__name__}: {reason}")
    runner: Runner
    if kind.has_slots:
        runner = SpecRunner(model, batch_size, capacity, later_inputs=later)
        fill(runner.cache, past, prompt.mask)
    else:
        runner = _continued(model, made, prompt, outputs, copy_of_cache(past), kind)
    if not request.self_check:
        return runner
    # Windows of a single sequence are never ragged, so they prove nothing for a batch.
    full = bool(prompt.mask.all())
    key = ("prefill", kind.name, tuple(made.names), batch_size > 1, full)
    known = checks_of(model)
    if key not in known:
        try:
            with undisturbed(model):
                found = _compare(model, runner, past, later)
        except PASSING:
            raise
        except Exception as error:  # raised inside the model, which was not made for such inputs
            raise ValueError(
                f"cache={kind.name!r}: {type(model).__name__} cannot use it: {one_line(error)}"
            ) from error
        if found.fault is not None:
            raise ValueError(
                f"cache={kind.name!r}: logits of {type(model).__name__} differ from plain "
                f"generation {found.fault}"
            )
        # A fault may lie in the inputs of this call.
        known[key] = CacheCheck(found.difference, found.tolerance)
    return runner


def _why_not(
    model: Any, past: Any, kind: CacheKind, layer_types: set[str], batch_size: int
) -> str | None:
    """Why a kind of cache cannot take over that of a prefill, or None."""
    if kind.has_slots and not isinstance(past, DynamicCache):
        raise ValueError(f"past_key_values must be a DynamicCache, got {type(past).__name__}")
    reason = kind.refuses(model)
    if reason is not None or kind.has_slots:
        return reason
    if not kind.runs_separately and layer_types != {"full_attention"}:
        # Such layers drop tokens, so the others of their sequence cannot be moved.
        return f"layer types {sorted(layer_types)}"
    if kind.runs_separately and batch_size != 1:
        return f"one prefill holds {batch_size} sequences"
    # A sliding layer holds its last columns only.
    whole = [x for x in past.layers if not getattr(x, "is_sliding", False)]
    keys = [getattr(layer, "keys", None) for layer in whole]
    if len({x.shape[2] for x in keys if isinstance(x, torch.Tensor)}) > 1:
        return "a layer holds no tokens of the text"
    return None


def _compare(model: Any, runner: Runner, past: Any, later: LaterInputs) -> Comparison:
    """Compare logits of ragged windows with those of plain forwards of probes.

    The cache of the loop is as before afterwards.
    """
    past = copy_of_cache(past)
    lengths: Lengths = runner.lengths.copy()
    batch_size = len(lengths)
    vocab_size = vocab_size_of(model)
    generator = torch.Generator("cpu").manual_seed(0)
    probes = torch.randint(1, vocab_size, (batch_size, PROBES), generator=generator, device="cpu")
    probes = probes.to(model.device)
    # Every second sequence keeps one token more of the first window, as if a draft was accepted.
    kept: NDArray[np.int64] = np.arange(batch_size) % 2
    runner.forward(probes[:, :2].contiguous(), lengths, 1)
    runner.truncate(lengths + kept)
    window = torch.stack([probes[b, k : k + 2] for b, k in enumerate(kept.tolist())])
    got = runner.forward(window, lengths + kept, 2)
    runner.truncate(lengths)
    plain = []
    for i in range(1, PROBES + 1):
        inputs = later.native(past, i, 1, probes[:, :i])
        plain.append(model(**inputs, return_dict=True).logits[:, -1])
    rows = torch.stack(plain, dim=1)  # [B, PROBES, V]
    want = torch.stack([rows[b, k : k + 2] for b, k in enumerate(kept.tolist())])
    return compare([got], [want], tolerance_of(model))
