"""A traced round shows what the verification compared, and tracing changes no text."""

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

from specdec_kernels.analysis import acceptance_uniforms

SAMPLED = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.3, "top_k": 0}


def traced(drafter, rule="token", trace=True, seed=3, **settings):
    """The rounds and the tokens of one sampled text."""
    rounds = []
    decoder = SpeculativeDecoder(
        drafter, num_assistant_tokens=3, rule=rule, seed=seed, guard=False,
        trace=rounds.append if trace else None,
    )  # fmt: skip
    inputs = hf_models.prompts((9,))
    steps = list(decoder.stream(hf_models.tiny("llama"), **inputs, **{**SAMPLED, **settings}))
    return rounds, [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_the_rounds_explain_every_token(kind):
    rounds, tokens = traced(hf_models.drafter_for("llama", kind))
    assert [t for r in rounds for step in r.steps for t in step.tokens] == tokens
    outcomes = set()
    for r in rounds:
        (step,) = r.steps
        size = int((r.draft_token_ids >= 0).sum())
        uniforms = acceptance_uniforms(r.seeds, torch.from_numpy(r.lengths), size, r.rule)[0]
        target = (r.logits[0].double() / SAMPLED["temperature"]).softmax(-1)
        for i, token in enumerate(r.draft_token_ids[0, :size].tolist()):
            q = 1.0
            if r.distribution is not None:
                rows = r.distribution.logits[0, i].double() / r.distribution.temperature
                q = float(rows.softmax(-1)[token])
            probability = min(1.0, float(target[i, token]) / q)
            assert float(r.accept_probs[0, i]) == pytest.approx(probability, rel=1e-4)
            accepted = float(uniforms[i]) < probability
            outcomes.add(accepted)
            if i < len(step.tokens):
                assert step.kinds[i] == ("accepted" if accepted else "recovered")
            if not accepted:
                break
    assert outcomes == {True, False}


def test_tracing_changes_no_text():
    drafter = hf_models.perturbed("llama")
    assert traced(drafter)[1] == traced(drafter, trace=False)[1]


def test_rounds_without_drafts_are_traced_too():
    rounds, tokens = traced(None, rule="auto")
    assert len(rounds) == len(tokens)
    assert all(r.draft_token_ids.shape == (1, 0) for r in rounds)
    assert all(r.logits.shape == (1, 1, hf_models.VOCAB) for r in rounds)


def test_trees_are_not_traced():
    decoder = SpeculativeDecoder("prompt_lookup", tree=(2, 2), trace=print)
    with pytest.raises(ValueError, match="trace must be None with tree"):
        next(decoder.stream(hf_models.tiny("llama"), **hf_models.prompts((5,)), max_new_tokens=2))
