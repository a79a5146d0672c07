"""A traced round shows what the verification compared, and tracing changes no text.

A step names the drafts that its recovered token replaces, traced or not.
"""

import math

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from support import hf_models

from specdec_kernels.analysis import acceptance_uniforms

SAMPLED = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.3, "top_k": 0}


def decoder_of(drafter, rule="token", trace=None, seed=3, tree=None):
    number = None if tree else 3
    return SpeculativeDecoder(
        drafter, num_assistant_tokens=number, tree=tree, rule=rule, seed=seed, guard=False,
        trace=trace,
    )  # fmt: skip


def traced(drafter, rule="token", trace=True, seed=3, tree=None, **settings):
    """The rounds and the tokens of one sampled text."""
    rounds = []
    decoder = decoder_of(drafter, rule, rounds.append if trace else None, seed, tree)
    inputs = hf_models.prompts((9,))
    steps = list(decoder.stream(hf_models.tiny("llama"), **inputs, **{**SAMPLED, **settings}))
    return rounds, [token for step in steps for token in step.tokens]


@pytest.mark.parametrize("kind", ["model", "prompt_lookup"])
def test_the_rounds_explain_every_token(kind):
    drafter = hf_models.drafter_for("llama", kind)
    rounds, tokens = traced(drafter)
    assert tokens == traced(drafter, trace=False)[1]
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


def test_rounds_without_drafts_are_traced_too():
    rounds, tokens = traced(None, rule="auto")
    assert len(rounds) == len(tokens)
    assert all(r.draft_token_ids.shape == (1, 0) for r in rounds)
    assert all(r.logits.shape == (1, 1, hf_models.VOCAB) for r in rounds)


@pytest.mark.parametrize("rule", ["multi_draft", "target_only", "traversal"])
def test_traced_trees_explain_every_token(rule):
    rounds, tokens = traced(hf_models.perturbed("llama"), rule=rule, tree=(2, 2))
    assert [t for r in rounds for step in r.steps for t in step.tokens] == tokens
    assert tokens == traced(hf_models.perturbed("llama"), rule, trace=False, tree=(2, 2))[1]
    first, *others = rounds
    assert (first.parents, first.path, first.draft_token_ids.shape) == (None, None, (1, 0))
    verdicts = set()
    for r in others:
        if r.parents is None:  # the last token is never drafted
            continue
        (step,), ids = r.steps, r.draft_token_ids[0].tolist()
        parents, path = r.parents[0].tolist(), [n for n in r.path[0].tolist() if n >= 0]
        assert r.logits.shape[1] == len(ids) + 1
        assert [parents[n] for n in path] == [-1, *path][: len(path)]
        accepted = [i for i, kind in enumerate(step.kinds) if kind == "accepted"]
        assert [ids[n] for n in path][: len(accepted)] == [step.tokens[i] for i in accepted]
        spelled = {-1: []}
        for n, parent in enumerate(parents):
            spelled[n] = [*spelled[parent], ids[n]]
        last = path[-1] if path else -1
        # Nodes that spell one path are one, but for traversal.
        ends = [n for n in spelled if spelled[n] == spelled[last]]
        ends = [last] if rule == "traversal" else ends
        children = [ids[n] for n, parent in enumerate(parents) if parent in ends and ids[n] >= 0]
        recovered = step.kinds[-1] == "recovered"
        assert step.rejected == (list(dict.fromkeys(children)) if recovered else [])
        assert not recovered or step.tokens[-1] not in children or rule != "target_only"
        verdicts.add(recovered)
        looked_at = [n for n, x in enumerate(r.accept_probs[0].tolist()) if not math.isnan(x)]
        if rule != "traversal":  # which looks at leaves first, and accepts all nodes before one
            assert set(path) <= set(looked_at)
        if rule == "target_only":
            target = (r.logits[0].double() / SAMPLED["temperature"]).softmax(-1)
            for n in looked_at:
                expected = float(target[parents[n] + 1, ids[n]])
                assert float(r.accept_probs[0, n]) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert verdicts == {True, False}


@pytest.mark.parametrize("batch", [(9,), (9, 5)], ids=str)
@pytest.mark.parametrize("rule", ["token", "greedy"])
def test_a_step_names_the_draft_that_its_recovered_token_replaces(batch, rule):
    """That is so in batches too, whose sequences draft as many tokens as they may."""
    rounds = []
    decoder = decoder_of(hf_models.perturbed("llama", 0.3), rule, rounds.append)
    settings = SAMPLED if rule == "token" else {"max_new_tokens": 24, "do_sample": False}
    inputs = hf_models.prompts(batch)
    steps = list(decoder.stream(hf_models.tiny("llama"), **inputs, **settings))
    seen = set()
    for r in rounds:
        for step in r.steps:
            recovered = step.kinds[-1:] == ["recovered"]
            draft = r.draft_token_ids[step.sequence, len(step.tokens) - 1 :][:1].tolist()
            assert step.rejected == (draft if recovered else [])
            assert not recovered or step.rejected != step.tokens[-1:]
            seen.add((step.sequence, recovered))
    assert {(b, True) for b in range(len(batch))} < seen
    assert steps == [step for r in rounds for step in r.steps]


@pytest.mark.parametrize("tree", [None, (2, 2)], ids=["chain", "tree"])
def test_a_text_that_ends_before_the_rejection_names_no_rejected_draft(tree):
    settings = {**SAMPLED, "max_new_tokens": 48}
    rule = "multi_draft" if tree else "token"

    def steps_of(**more):
        decoder = decoder_of(hf_models.perturbed("llama"), rule, tree=tree)
        inputs = hf_models.prompts((9,))
        return list(decoder.stream(hf_models.tiny("llama"), **inputs, **settings, **more))

    seen, ends = [], []
    for step in steps_of():
        seen += step.tokens
        if step.kinds[-2:] == ["accepted", "recovered"] and seen.index(seen[-2]) == len(seen) - 2:
            ends.append(seen[-2])
    end = ends[0]
    last = steps_of(eos_token_id=end)[-1]
    assert (last.tokens[-1], last.kinds[-1], last.finished) == (end, "accepted", "eos")
    assert last.rejected == []
