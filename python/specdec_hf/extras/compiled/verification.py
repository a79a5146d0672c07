"""Verification in the CUDA graph of the target's forward.

A round then replays the drafts, replays the forward with the verification, and reads one tensor.
Its logits stay in the memory of the graph, so a round that needs them verifies beside it: `refusal`
names what does.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import torch

from specdec_hf.arguments import PARAMETERS
from specdec_hf.drafting.call import reads_draft
from specdec_hf.extras.compiled.compiled_call import CompiledCall
from specdec_hf.extras.compiled.cuda_graphs import Epilogue
from specdec_hf.extras.compiled.forward import CompiledForward
from specdec_hf.loop.commit import packed
from specdec_hf.loop.drafted import DraftedRound
from specdec_hf.loop.session import Session
from specdec_hf.rules import CUSTOM_RULE
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_kernels import SampledDraft, verify_chain


def refusal(session: Session) -> str:
    """Why rounds of a session verify outside of the target's graphs, or ""."""
    needs = None if session.drafter is None else session.drafter.needs
    reasons = {
        "trees are verified": session.drafts_trees,
        "the rule is a function": session.rule == CUSTOM_RULE,
        "a part of the verification is left out": session.options.ablate is not None,
        "logits are processed": any(session.processors),
        "the call keeps outputs of each token": session.outputs is not None,
        "rounds are traced": session.options.trace is not None,
        "the likeliest tokens are asked for": any(
            count is not None
            for call, _ in session.sequences.calls
            for count in call.output.num_top_logprobs
        ),
        "the drafter reads logits of the target": needs is not None
        and (needs.candidates > 0 or needs.rejections),
        "the drafter makes forwards of the target": needs is not None and needs.target_forward,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def verify_in_graph(session: Session, drafted: DraftedRound) -> torch.Tensor | None:
    """Feed the drafts of a round to the target, and verify them in the same graph.

    Returns:
        The verdict as `packed` gives it, or None where nothing was fed: the round reads a prompt,
        replays no graph, or needs the logits.
    """
    runner = session.runner
    if not isinstance(runner, SpecRunner) or runner.policy.compiled is None:
        return None
    compiled = runner.policy.compiled
    assert isinstance(compiled, CompiledCall)
    assert isinstance(compiled.forward, CompiledForward)
    graphs, stats = compiled.forward.cuda_graphs, compiled.stats
    if graphs is None or stats.eager or stats.without_cuda_graphs:
        return None
    if (drafted.lengths - runner.lengths).max() > 1 or not runner.lengths.all():
        return None
    if reason := refusal(session) or graphs.with_epilogue.reason:
        stats.verified_apart = reason
        return None
    sampling = {
        name: _per_sequence(name, value, session.sequences.seeds)
        for name, value in session.sampling.to_dict().items()
    }
    drawn = None
    if drafted.draft is not None and reads_draft(session.rule):
        drawn = drafted.draft.drawn
    inputs = {
        "read": drafted.to_read(None),
        "drawn": drawn and (drawn.logits, drawn.logsumexp, drawn.threshold),
        "seeds": session.sequences.seeds,
        "rule": session.rule,
        **sampling,
        **session.plan.rule_parameters,
    }
    kept = drafted.tokens.shape[1] + 1
    epilogue = Epilogue(_packed_verdict, inputs, (kept, runner.policy.width(kept) - kept))
    verdict = drafted.forward(partial(runner.forward, epilogue=epilogue))
    stats.verified += epilogue.replayed
    return verdict


def _packed_verdict(
    logits: torch.Tensor,
    starts: torch.Tensor,
    *,
    read: dict[str, torch.Tensor],
    drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    **arguments: Any,
) -> torch.Tensor:
    draft = None if drawn is None else SampledDraft(*drawn, arguments["temperature"])
    tokens, positions = read["tokens"], starts + 1  # the pending token is fed before the drafts
    return packed(verify_chain(logits, tokens, draft, positions=positions, **arguments), read)


def _per_sequence(name: str, value: Any, seeds: torch.Tensor) -> Any:
    """A sampling parameter [B], so that calls with other values replay the same graph.

    One that changes nothing stays a number: the op then launches no filters.
    """
    if isinstance(value, torch.Tensor) or value in (0, PARAMETERS[name].neutral):
        return value
    return _filled(value, len(seeds), seeds.device)


@functools.lru_cache(maxsize=64, typed=True)
def _filled(value: float, size: int, device: torch.device) -> torch.Tensor:
    if isinstance(value, int):
        return torch.full((size,), min(value, 2**31 - 1), dtype=torch.int32, device=device)
    return torch.full((size,), value, dtype=torch.float32, device=device)
