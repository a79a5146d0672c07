"""Drafts for models that keep a state, which snapshots roll back."""

import copy
import random
from functools import cache

import numpy as np
import pytest
import torch
from specdec_hf import generate
from specdec_hf.extras.state_runner import StateRunner
from specdec_hf.runner.protocol import Prompt
from support.hf_models import needs_class

from bench.tiny_models.build import build
from bench.tiny_models.compare import OracleDrafter, compare, plain, prompts

NEW = 12
ONE, BATCH = (9,), (9, 5, 11)
WAYS = ("draft", "custom")
NAMES = (
    "Qwen3NextForCausalLM",
    "Mamba2ForCausalLM",
    pytest.param("BambaForCausalLM", marks=pytest.mark.full),
    pytest.param("xLSTMForCausalLM", marks=pytest.mark.full),
)


model_of = cache(build)


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("Qwen3NextForCausalLM", BATCH), ("Mamba2ForCausalLM", ONE),
        pytest.param("BambaForCausalLM", BATCH, marks=pytest.mark.full),
        pytest.param("xLSTMForCausalLM", ONE, marks=pytest.mark.full),
    ],
    ids=str,
)  # fmt: skip
def test_drafts_give_the_text_of_plain_generation(name, lengths):
    model = model_of(name)
    outcomes = dict(compare(model, prompts(lengths), WAYS))
    assert {way: outcome.status for way, outcome in outcomes.items()} == dict.fromkeys(
        WAYS, "equal"
    )


def drafted(model, inputs, **kwargs):
    want = plain(model, inputs, NEW)
    drafter = OracleDrafter(want[:, inputs["input_ids"].shape[1] :].numpy())
    out = generate(
        model, **inputs, drafter=drafter, gamma=4, guard=False, max_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    return want, out


def test_rejected_drafts_are_forgotten_and_accepted_ones_read_again():
    """The state of the caller is not changed, and the one that is returned continues."""
    model, inputs = model_of("Qwen3NextForCausalLM"), prompts(ONE)
    with torch.no_grad():
        past = model(inputs["input_ids"][:, :-2], use_cache=True).past_key_values
    for given in ({}, {"past_key_values": past}, {"past_key_values": past}):
        want, out = drafted(model, inputs, **given)
        assert out.sequences.tolist() == want.tolist()
        assert out.stats.cache == "snapshot"
        assert 0 < out.stats.accepted < out.stats.drafted
        assert out.stats.rounds <= NEW // 2
    again = model.generate(
        out.sequences, attention_mask=out.attention_mask, past_key_values=out.past_key_values,
        max_new_tokens=8, do_sample=False,
    )  # fmt: skip
    assert again.tolist() == plain(model, inputs, NEW + 8).tolist()


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_after_any_cuts_are_those_of_the_text(name):
    """Some tokens are fed twice, others are not those of the text, and cuts follow each other."""
    model, text, draw = model_of(name), prompts((99,))["input_ids"], random.Random(0)
    expected, runner, length = model(text).logits, StateRunner(model), 0
    for _ in range(20):
        cuts = draw.choices((0, 0, 1, 2, 6), k=draw.randrange(4))
        begin, end = max(length - draw.randrange(3), 0), length + draw.randrange(1, 7)
        wrong = text[:, : draw.randrange(4) if cuts else 0]
        tokens, new = torch.cat([text[:, begin:end], wrong], dim=1), end - length
        rows = runner.forward(tokens, np.array([begin]), new + wrong.shape[1])[:, :new]
        torch.testing.assert_close(rows, expected[:, length:end], atol=1e-4, rtol=1e-4)
        length = end
        for cut in cuts:
            length = max(length - cut, 0)
            runner.truncate(np.array([length]))


@torch.inference_mode()
def test_the_state_reads_few_tokens_again():
    model, text = build("Qwen3NextForCausalLM"), prompts((20,))["input_ids"]
    padded = np.pad(text[:, :9].numpy(), ((0, 0), (2, 0)))
    runner, sizes = StateRunner(model, prompt=Prompt(padded, padded > 0)), []
    model.register_forward_pre_hook(
        lambda _, args, inputs: sizes.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )

    def feed(begin, end, kept, keep=1):
        sizes.clear()
        runner.forward(text[:, begin:end], np.array([begin]), keep)
        runner.truncate(np.array([kept]))
        return list(sizes)

    assert feed(0, 12, kept=9, keep=4) == [11, 3]  # the prompt is not read again
    assert feed(9, 10, kept=10) == [1]
    assert feed(10, 11, kept=10) == [1]
    assert feed(10, 14, kept=13) == [4]
    assert feed(13, 14, kept=13) == [3, 1]
    assert feed(13, 18, kept=15) == [5]
    assert feed(15, 18, kept=17) == [5]


@torch.inference_mode()
def test_a_released_state_has_read_the_tokens_that_were_kept():
    model, text = model_of("Qwen3NextForCausalLM"), prompts((20,))["input_ids"]
    runner = StateRunner(model)
    runner.forward(text[:, :14], runner.lengths, keep=1)
    runner.truncate(np.array([11]))
    rows = model(text[:, 11:], past_key_values=runner.release()).logits
    torch.testing.assert_close(rows, model(text).logits[:, 11:], atol=1e-4, rtol=1e-4)


def test_the_convolution_states_of_a_callers_cache_are_not_written():
    needs_class("Lfm3ForCausalLM")
    model = build("Lfm3ForCausalLM")
    ids = torch.randint(10, 100, (1, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        past = model(ids[:, :-1], use_cache=True).past_key_values
    states = [layer.conv_states for layer in past.layers if hasattr(layer, "conv_states")]
    before = copy.deepcopy(states)
    options = dict(max_new_tokens=12, do_sample=False)
    plain = model.generate(ids, past_key_values=copy.deepcopy(past), **options)
    for _ in range(2):  # a cache that was written would change the second text
        text = generate(model, ids, past_key_values=past, drafter="prompt_lookup", **options)
        assert text.tolist() == plain.tolist()
    assert states
    for now, then in zip(states, before, strict=True):
        assert all(torch.equal(now[i], then[i]) for i in then)
