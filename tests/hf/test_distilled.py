"""A draft model that learns between calls from the target's distributions at rejected drafts."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from specdec_hf import generate
from specdec_papers.distilled import DistilledDrafter, DistilledState
from support import hf_models
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.papers

TARGET = hf_models.tiny("llama")


def draft_model():
    return hf_models.with_noise(TARGET, 0.4)


def call(drafter, lengths=(9, 4, 12), prompts=1, new_tokens=16, **settings):
    arguments = {"do_sample": False, "max_new_tokens": new_tokens, "guard": False, **settings}
    return generate(
        TARGET, **hf_models.prompts(lengths, seed=prompts), drafter=drafter, gamma=4,
        return_dict_in_generate=True, **arguments,
    )  # fmt: skip


class Recording(DistilledDrafter):
    def begin(self, call):
        self.told = []
        return RecordingState(self, call)


class RecordingState(DistilledState):
    def learn(self, rejections):
        super().learn(rejections)
        self.drafter.told += zip(
            rejections.sequences.tolist(), rejections.lengths.tolist(), rejections.logits,
            strict=True,
        )  # fmt: skip

    def end(self, texts):
        self.drafter.history = texts
        super().end(texts)


@pytest.mark.parametrize("sampled", [False, True])
def test_it_is_told_the_targets_logits_where_drafts_were_rejected(sampled):
    drafter = Recording(draft_model())
    out = call(drafter, do_sample=sampled, seed=3)
    expected = []
    starts = np.array([9, 4, 12])
    for record in out.stats.round_log:
        for b, (drafted, accepted, emitted) in enumerate(
            zip(record.drafted, record.accepted, record.emitted, strict=True)
        ):
            if emitted > accepted < drafted:
                expected.append((b, int(starts[b] + accepted)))
            starts[b] += emitted
    assert [(b, n) for b, n, _ in drafter.told] == expected
    assert len(expected) > 5
    assert {b for b, _ in expected} == {0, 1, 2}
    history = drafter.history
    for b, n, logits in drafter.told:
        with torch.no_grad():
            wanted = TARGET(torch.from_numpy(history.tokens[b : b + 1, :n].copy())).logits[0, -1]
        torch.testing.assert_close(logits.clone(), wanted, rtol=1e-4, atol=1e-4)


def test_a_step_goes_down_the_divergence_where_drafts_were_rejected():
    """It is the step of AdamW by autograd on the definition, text by text."""
    drafter = Recording(draft_model(), learning_rate=1e-3)
    expected = copy.deepcopy(drafter.model)
    call(drafter)
    optimizer = torch.optim.AdamW(expected.parameters(), 1e-3, weight_decay=0.0)
    losses = []
    for b, n, logits in drafter.told:
        text = torch.from_numpy(drafter.history.tokens[b : b + 1, :n].copy())
        q = expected(text).logits[0, -1].log_softmax(dim=-1)
        losses.append(-(logits.clone().softmax(dim=-1) * q).sum())
    torch.stack(losses).mean().backward()
    torch.nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    optimizer.step()
    for (name, ours), theirs in zip(
        drafter.model.named_parameters(), expected.parameters(), strict=True
    ):
        # A gradient of nearly 0 has either sign.
        close = torch.isclose(ours, theirs, rtol=1e-3, atol=1e-5).double().mean()
        assert close > 0.99, name
    assert drafter.num_learnt == len(drafter.told)
    few = DistilledDrafter(draft_model(), max_positions=5)
    call(few)  # of three sequences, so that two rounds are needed
    assert few.num_learnt == 5 < drafter.num_learnt


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_seed_that_was_learnt_from_is_refused_where_the_rule_reads_q(rule):
    """The noise that decides a text would otherwise have changed the Q that it is compared with."""
    settings = {"do_sample": True, "temperature": 0.9, "rule": rule}
    drafter = DistilledDrafter(draft_model(), learning_rate=0.01)
    seeds = call(drafter, seed=4, **settings).stats.seeds
    learnt = drafter.num_learnt
    assert learnt > 0
    refused = f"seed must be none .* {rule} .* got {seeds[0]} again"
    for seed in (4, [7, 8, seeds[0]]):
        with pytest.raises(ValueError, match=refused):
            call(drafter, seed=seed, **settings)
    assert drafter.num_learnt == learnt
    for seed in (5, None, None):  # the control
        call(drafter, seed=seed, **settings)
    assert drafter.num_learnt > learnt
    with pytest.raises(ValueError, match=refused):
        call(drafter, seed=4, **settings)
    call(drafter, seed=4, **{**settings, "rule": "match"})


def test_calls_without_noise_teach_no_seed_and_repeat_any():
    """So seed 0, which greedy calls have, stays free for a sampled one."""
    drafter = DistilledDrafter(draft_model(), learning_rate=0.01)
    for rule in ("greedy", "greedy", "token", "token"):
        call(drafter, rule=rule)
    for sampled in (True, False):
        call(drafter, lengths=(9,), do_sample=sampled, rule="token", seed=0)


def test_a_call_of_rule_match_teaches_its_seed():
    drafter = DistilledDrafter(draft_model(), learning_rate=0.01)
    for _ in range(2):
        call(drafter, do_sample=True, rule="match", seed=4)
    with pytest.raises(ValueError, match="rule token reads its distribution, got 4 again"):
        call(drafter, do_sample=True, rule="token", seed=4)


def test_the_users_model_stays_and_what_was_learnt_is_saved_in_its_dtype(tmp_path):
    model = draft_model().to(torch.bfloat16)
    before = copy.deepcopy(model.state_dict())
    drafter = DistilledDrafter(model, learning_rate=0.01)
    call(drafter)
    assert drafter.num_learnt > 0
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    drafter.save(tmp_path)
    assert drafter.model.dtype == torch.float32
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert read.dtype == torch.bfloat16
    for ours, theirs in zip(drafter.model.parameters(), read.parameters(), strict=True):
        assert ours.bfloat16().equal(theirs)


def test_a_gradient_that_is_not_finite_changes_no_weight_and_the_call_says_so(monkeypatch):
    def broken(state, rejections):
        learn(state, dataclasses.replace(rejections, logits=rejections.logits * torch.nan))

    learn = DistilledState.learn
    monkeypatch.setattr(DistilledState, "learn", broken)
    drafter = DistilledDrafter(draft_model(), steps=3)
    before = copy.deepcopy(drafter.model.state_dict())
    told = "drafter distilled took 0 of 3 steps after the call: the gradient of the next"
    assert any(told in note for note in call(drafter).stats.notes)
    assert drafter.num_learnt == 0
    after = drafter.model.state_dict()
    assert all(weight.equal(before[name]) for name, weight in after.items())
