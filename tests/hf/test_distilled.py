"""A draft model that learns between calls from the target's distributions at rejected drafts."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from specdec_hf import DistilledDrafter, Draft, Drafter, ModelDrafter, generate
from support import hf_models
from transformers import AutoModelForCausalLM

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
    """Keeps what it is told, and the texts."""

    def start(self, context):
        super().start(context)
        self.told = []

    def learn_rejections(self, rejections):
        super().learn_rejections(rejections)
        self.told += zip(
            rejections.sequences.tolist(), rejections.lengths.tolist(), rejections.logits,
            strict=True,
        )  # fmt: skip

    def finish(self, history):
        self.history = history
        super().finish(history)


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


def test_drafts_behind_the_end_of_a_text_are_not_rejected():
    """The draft model is the target, and its text ends within a draft."""
    text = call(None, lengths=(9,)).sequences[0, 9:].tolist()
    drafter = Recording(TARGET)
    ends = [text[n] for n in (5, 6, 7, 8)]
    outs = [call(drafter, lengths=(9,), eos_token_id=end) for end in ends]
    last = [out.stats.round_log[-1] for out in outs]
    assert any(one.emitted == one.accepted for one in last), "no text ends within a draft"
    assert drafter.num_learnt == 0
    assert drafter.told == []


@pytest.mark.parametrize("tree", [(2, 1), None])
def test_the_places_of_a_custom_drafter_of_any_shape_are_where_its_path_ends(tree):
    """Of trees too: the row of the last accepted node, or of the root."""

    class Trees(Drafter):
        size, depth, reads_rejections = 3, 2, True
        seen = 0

        def propose(self, history, limits):
            tokens = torch.from_numpy(history.last(1)) + torch.tensor([1, 2, 3])
            tokens = (tokens % 60).masked_fill(torch.from_numpy(limits < 2)[:, None], -1)
            parents = torch.tensor([-1, 0, -1]) if tree else torch.tensor([-1, 0, 1])
            return Draft(tokens, parents=parents.expand_as(tokens))

        def learn_rejections(self, rejections):
            self.pending = rejections

        def commit(self, outcome):
            told = getattr(self, "pending", None)
            if told is not None:
                ends = outcome.lengths + outcome.accepted
                assert told.lengths.tolist() == ends[told.sequences].tolist()
                self.seen += len(told.sequences)
                self.pending = None

    drafter = Trees()
    generate(
        TARGET, **hf_models.prompts((9, 4)), drafter=drafter, do_sample=False, max_new_tokens=12,
        guard=False,
    )  # fmt: skip
    assert drafter.seen > 5


def divergence(model, drafter, told):
    """The mean KL(P || Q) at what a call has told, and at T = 1."""
    found = []
    for b, n, logits in told:
        text = torch.from_numpy(drafter.history.tokens[b : b + 1, :n].copy())
        with torch.no_grad():
            q = model(text).logits[0, -1].log_softmax(dim=-1)
        p = logits.clone().log_softmax(dim=-1)
        found.append((p.exp() * (p - q)).sum())
    return torch.stack(found).mean().item()


def test_a_step_goes_down_the_divergence_where_drafts_were_rejected():
    """It is the step of AdamW by autograd on the definition, text by text."""
    drafter = Recording(draft_model(), learning_rate=1e-3)
    before = copy.deepcopy(drafter.model)
    call(drafter)
    expected = copy.deepcopy(before)
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
    first = Recording(draft_model(), max_positions=3)
    call(first)
    assert first.num_learnt == 3 < len(first.told)
    told = drafter.told
    assert divergence(drafter.model, drafter, told) < 0.9 * divergence(before, drafter, told)


class OfOtherTokens(DistilledDrafter):
    """Learns what the target said of each token for the next one."""

    def learn_rejections(self, rejections):
        wrong = rejections.logits.roll(1, dims=-1)
        super().learn_rejections(dataclasses.replace(rejections, logits=wrong))


@pytest.mark.parametrize(
    "kind", [DistilledDrafter, pytest.param(OfOtherTokens, marks=pytest.mark.full)]
)
def test_on_a_stream_of_calls_more_is_accepted(kind):
    """The acceptance rate on texts of which it learns nothing, sum(min(P, Q)), before and after."""
    held_out = [call(None, prompts=n, new_tokens=30).sequences for n in (91, 92, 93)]
    texts = torch.cat(held_out)

    @torch.no_grad()
    def alpha(model):
        p, q = (one(texts).logits.softmax(dim=-1) for one in (TARGET, model))
        return torch.minimum(p, q).sum(dim=-1)[:, 12:].mean().item()

    drafter = kind(hf_models.with_noise(TARGET, 0.2), learning_rate=3e-3, steps=8)
    before = alpha(drafter.model)
    for number in range(10):
        call(drafter, prompts=number)
    assert drafter.num_learnt > 100
    gained = alpha(drafter.model) - before
    assert gained > 0.03 if kind is DistilledDrafter else gained < 0


def test_within_a_call_the_text_follows_from_the_seed():
    settings = {"do_sample": True, "rule": "token", "seed": 4}
    texts = [call(DistilledDrafter(draft_model(), 0.05), **settings).sequences for _ in range(2)]
    assert texts[0].equal(texts[1])
    assert texts[0].equal(call(ModelDrafter(draft_model()), **settings).sequences)


def test_the_users_model_is_left_as_it_was():
    model = draft_model().to(torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    drafter = DistilledDrafter(model, learning_rate=0.01)
    assert drafter.model.dtype == torch.float32
    call(drafter)
    assert drafter.num_learnt > 0
    after = model.state_dict()
    assert all(after[name].equal(weight) for name, weight in before.items())


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


def test_what_was_learnt_is_saved_in_the_dtype_of_the_given_model(tmp_path):
    drafter = DistilledDrafter(draft_model().to(torch.bfloat16), learning_rate=0.01)
    call(drafter)
    drafter.save(tmp_path)
    assert drafter.model.dtype == torch.float32
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert read.dtype == torch.bfloat16
    for (name, ours), theirs in zip(
        drafter.model.named_parameters(), read.parameters(), strict=True
    ):
        assert ours.bfloat16().equal(theirs), name


class Broken(DistilledDrafter):
    """Its gradient is not a number from the step after the first ``finite`` ones on."""

    finite = 0

    def finish(self, history):
        self._optimizer.register_step_post_hook(self.after_step)
        if not self.finite:
            self.spoil()
        super().finish(history)

    def after_step(self, *_):
        self.finite -= 1
        if not self.finite:
            self.spoil()

    def spoil(self):
        for rejected in self.current.values():
            rejected.logits[:] = [logits * torch.nan for logits in rejected.logits]

    def learn_rejections(self, rejections):
        super().learn_rejections(rejections)
        self.current = self._rejected


@pytest.mark.parametrize("finite", [0, 1])
def test_the_note_counts_the_steps_before_a_gradient_that_is_not_finite(finite):
    drafter = Broken(draft_model(), steps=3)
    drafter.finite = finite
    before = copy.deepcopy(drafter.model.state_dict())
    out = call(drafter)
    told = f"drafter distilled took {finite} of 3 steps after the call: the gradient of the next"
    assert [note for note in out.stats.notes if told in note]
    assert (drafter.num_learnt > 0) == (finite > 0)
    after = drafter.model.state_dict()
    assert all(weight.equal(before[n]) for n, weight in after.items()) == (finite == 0)
    assert all(weight.isfinite().all() for weight in after.values())
