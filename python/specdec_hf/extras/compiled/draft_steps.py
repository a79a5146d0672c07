"""All steps of a draft model in one CUDA graph: draws, and the forwards between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from specdec_hf.drafting.call import DrafterCall, Drawn
from specdec_hf.drafting.context import History
from specdec_hf.extras.compiled.compiled_call import CompiledCall
from specdec_hf.extras.compiled.cuda_graphs import RecordedCache
from specdec_hf.extras.compiled.forward import CompiledForward
from specdec_hf.request.sampling import Sampling
from specdec_hf.runner.protocol import rounded
from specdec_hf.runner.spec_runner import SpecRunner


class _Lengths(History):
    """In the place of the texts of a round while its draws are recorded."""

    def __init__(self, lengths: torch.Tensor) -> None:
        vars(self)["lengths"] = lengths

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        held: torch.Tensor = vars(self)["lengths"]
        return held


def refusal(call: DrafterCall, runner: Any, sampling: Mapping[str, float]) -> str:
    """Why the steps of a draft model are graphs of their own, or ""; "" too where none is.

    Args:
        call: that of the drafter.
        runner: of the draft model.
        sampling: parameters in the place of the call's.
    """
    if not isinstance(runner, SpecRunner) or not runner.policy.defers:
        return ""
    if call.asks.continue_drafting is not None:
        return "the schedule reads each token"
    if "temperature" in sampling:
        return "it has a temperature of its own"
    return "it has inputs of its own" if runner.later_inputs is not None else ""


def draw_chain(
    call: DrafterCall,
    runner: SpecRunner,
    texts: History,
    logits: torch.Tensor,
    gamma: int,
    sampling: Mapping[str, Any],
) -> Drawn | None:
    """Draw ``gamma`` tokens of each sequence, as `ChainState` does step by step.

    Args:
        call: that of the drafter.
        runner: of the draft model, which has read the texts.
        texts: of the round.
        logits: [B, V] after each sequence's last token.
        gamma: at least 2.
        sampling: parameters in the place of the call's.

    Returns:
        None where no graph can be replayed.
    """
    compiled = runner.policy.compiled
    if not isinstance(compiled, CompiledCall) or compiled.stats.eager or runner.tap.is_open:
        return None
    forward, cache, lengths = compiled.forward, runner.cache, texts.lengths
    assert isinstance(forward, CompiledForward)
    kept = runner.lengths.copy()
    runner.window(lengths, gamma - 1)  # buffers and cursor for all steps
    visible, placed = cache.cursor.visible, call.sampling_on(logits.device)
    given = {"logits": logits, "lengths": cache.cursor.starts, **placed}
    more = ("chain", gamma, visible, call.rule == "match", call.first_draft_index)

    def steps(run: Callable[..., Any], given: dict[str, Any]) -> list[torch.Tensor]:
        rows, starts, seeds = (given.pop(name) for name in ("logits", "lengths", "seeds"))
        own = dataclasses.replace(call, seeds=seeds, sampling=Sampling(**given))
        before, drawn = _Lengths(starts), list[Drawn]()
        for i in range(gamma):
            if i:
                fed, at = drawn[-1].tokens.clamp(min=0), starts + (i - 1)
                recorded = RecordedCache(at, visible, cache.spec_layers)
                inputs = runner.made_for(1, visible, True, at)
                output = run(recorded, input_ids=fed, use_cache=True, return_dict=True, **inputs)
                rows = rounded(output.logits[:, -1])
            drawn.append(own.draw(before, rows[:, None], i, sampling=sampling))
        joined = Drawn.join(drawn, rows.device)
        return [joined.logits, joined.tokens, joined.logsumexp, joined.threshold]

    outputs = forward.replay(steps, cache, given, *more, *sorted(sampling.items()))
    compiled.count(outputs is not None)
    if outputs is None:
        runner.truncate(kept)
        return None
    call.draw_once(texts, list(range(gamma)))
    rows, tokens, sums, threshold = outputs
    return Drawn(tokens, rows, sums, threshold)
