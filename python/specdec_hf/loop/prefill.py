"""The prefill of a call with inputs other than text, made by the model's own methods.

``model.generate`` turns images, audio, token types, embeddings and unusual masks or positions into
inputs of the first forward, model by model. The loop makes that forward in the same way, takes over
the cache that it filled, and starts its first round with the logits that it gave. Later rounds feed
new tokens only; what they need beyond ids, positions and mask is in runner/later_inputs.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import get_layer_types_and_kwargs

from specdec_hf.hf_arguments.call import Call
from specdec_hf.hf_arguments.model_inputs import HOLED_MASK, copied
from specdec_hf.runner.choose import rollback_kinds
from specdec_hf.runner.fit import Comparison, Fit, compare, fits_of, tolerance_of
from specdec_hf.runner.handover import take_over
from specdec_hf.runner.later_inputs import LaterInputs
from specdec_hf.runner.make import kind_reason
from specdec_hf.runner.plain_runner import PlainRunner, Prompt
from specdec_hf.runner.protocol import Lengths, Runner, vocab_size_of
from specdec_hf.runner.self_check import check_fit, one_line, undisturbed

PROBES = 3  # tokens that the first call of a kind feeds twice, to compare


@torch.inference_mode()
def prefill(
    model: Any,
    call: Call,
    capacity: int,
    kind: str,
    *,
    drafts: bool = True,
    tree: bool = False,
    self_check: bool = True,
) -> tuple[Runner, torch.Tensor, list[str]]:
    """Run the model's own prefill and hand its cache to the loop.

    The first time that a class and configuration of model has inputs of these names, the logits of
    a few tokens are compared with those of plain forwards, with the measure of runner/fit.py.

    Args:
        model: causal LM.
        call: its ``prefill`` holds the model's inputs.
        capacity: slots to allocate.
        kind: "auto", "spec", "aligned" or "dynamic".
        drafts: whether tokens will have to be forgotten.
        tree: whether trees of drafts will be fed, which are checked on text.
        self_check: False makes no such comparison.

    Returns:
        The runner, whose cache holds the whole prompt, logits [B, 1, V] of the token that follows,
        and notes for the statistics.

    Raises:
        ValueError: the loop cannot feed this model's later tokens as plain generation does.
    """
    made = call.prefill
    assert made is not None
    outputs = model._prefill(made.input_ids, made.config, made.model_kwargs)
    past = outputs.get("past_key_values")
    if past is None:
        raise ValueError(
            f"{named(made.names)} not supported: {type(model).__name__} gives no past_key_values"
        )
    logits = outputs.logits[:, -1:].clone()
    lengths = call.mask.sum(axis=1).astype(np.int64)
    kinds = rollback_kinds(kind, len(call.mask))
    faults: list[str] = []
    if tree and self_check:
        reason = check_fit(model, "spec", tree=True).reason
        if reason is not None:
            kinds, faults = [], [f"cache='spec' with a tree of drafts: {reason}"]

    def result(runner: Runner) -> tuple[Runner, torch.Tensor, list[str]]:
        if "hidden_states" in call.outputs:
            runner.tap.open(first=outputs.hidden_states)
        ran = f"{type(model).__name__} runs with cache={runner.kind!r}"
        return runner, logits, [f"{ran}; {fault}" for fault in faults]

    try:
        later = LaterInputs(model, made.input_ids, made.model_kwargs, outputs, past, lengths)
    except ValueError as error:
        kinds, faults = [], [str(error)]
    for one in kinds:
        try:
            return result(_taken_over(model, call, outputs, later, capacity, one, self_check))
        except ValueError as error:
            faults.append(str(error))
    if not drafts:
        return result(_continued(model, call, outputs, past, "plain"))
    raise ValueError(f"{named(made.names)} not supported: {'; '.join(faults)}")


def named(names: list[str]) -> str:
    """The subject of a message that refuses arguments."""
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _continued(model: Any, call: Call, outputs: Any, past: Any, kind: str) -> PlainRunner:
    """A runner that goes on from the prefill as plain generation does, token by token."""
    made = call.prefill
    assert made is not None
    inputs = {k: v for k, v in made.model_kwargs.items() if k != "past_key_values"}
    runner = PlainRunner(
        model, len(call.mask), kind, prompt=Prompt(call.prompt_ids, call.mask), inputs=inputs,
        past=past,
    )  # fmt: skip
    runner.begin_after(outputs)
    return runner


def _taken_over(
    model: Any,
    call: Call,
    outputs: Any,
    later: LaterInputs,
    capacity: int,
    kind: str,
    self_check: bool,
) -> Runner:
    assert call.prefill is not None
    past = outputs.past_key_values
    config = model.config.get_text_config(decoder=True)
    layer_types = set(get_layer_types_and_kwargs(config)[0])
    if HOLED_MASK in call.prefill.names and layer_types != {"full_attention"}:
        raise ValueError("a sliding window counts the columns that the mask hides")
    runner: Runner
    if kind == "spec":
        runner = take_over(model, past, call.mask, capacity, later)
    else:
        reason = kind_reason(model, kind)
        if kind == "aligned" and layer_types != {"full_attention"}:
            # Such layers drop tokens, so the others of their sequence cannot be moved.
            reason = reason or f"layer types {sorted(layer_types)}"
        if kind == "dynamic" and len(call.mask) != 1:
            reason = reason or f"one prefill holds {len(call.mask)} sequences"
        # A sliding layer holds its last columns only.
        whole = [x for x in past.layers if not getattr(x, "is_sliding", False)]
        keys = [getattr(layer, "keys", None) for layer in whole]
        held = {x.shape[2] for x in keys if isinstance(x, torch.Tensor)}
        if len(held) > 1:
            reason = reason or "a layer holds no tokens of the text"
        if reason is not None:
            raise ValueError(f"cache={kind!r} cannot serve {type(model).__name__}: {reason}")
        runner = _continued(model, call, outputs, copied(past), kind)
    if not self_check:
        return runner
    # Windows of a single sequence are never ragged, so they prove nothing for a batch.
    names, batch = tuple(call.prefill.names), len(call.mask) > 1
    key, known = ("prefill", kind, names, batch, bool(call.mask.all())), fits_of(model)
    if key not in known:
        try:
            with undisturbed(model):
                found = _compare(model, runner, past, later)
        except Exception as error:  # raised inside the model, which was not made for such inputs
            raise ValueError(
                f"cache={kind!r}: {type(model).__name__} cannot use it: {one_line(error)}"
            ) from error
        if found.fault is not None:
            raise ValueError(
                f"cache={kind!r}: logits of {type(model).__name__} differ from plain generation "
                f"{found.fault}"
            )
        # A fault may lie in the inputs of this call.
        known[key] = Fit(found.difference, found.tolerance)
    return runner


def _compare(model: Any, runner: Runner, past: Any, later: LaterInputs) -> Comparison:
    """Compare logits of ragged windows with those of plain forwards of probes.

    The cache of the loop is as before afterwards.
    """
    past = copied(past)
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
