"""Drafts for models that keep a state, which snapshots roll back."""

import pytest
import torch
from specdec_hf import check_model, generate
from specdec_hf.cache import known_fits
from specdec_hf.cache.state_cache import StateCache
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.tiny_models.build import build
from bench.tiny_models.compare import OracleDrafter, compare, plain, prompts

ONE, BATCH = (9,), (9, 5, 11)
WAYS = ("draft", "custom", "dict")
NAMES = ("Qwen3NextForCausalLM", "Mamba2ForCausalLM", "BambaForCausalLM", "xLSTMForCausalLM")


@pytest.fixture(scope="module")
def models():
    return {}


def model_of(name, models):
    if name not in models:
        models[name] = build(name)
    return models[name]


@pytest.mark.parametrize("lengths", [ONE, BATCH], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_give_the_text_of_plain_generation(name, lengths, models):
    model = model_of(name, models)
    outcomes = dict(compare(model, prompts(lengths), WAYS))
    assert {way: outcome.status for way, outcome in outcomes.items()} == dict.fromkeys(
        WAYS, "equal"
    )


def drafted(model, inputs, **kwargs):
    want = plain(model, inputs, 30)
    drafter = OracleDrafter(want[:, inputs["input_ids"].shape[1] :].numpy())
    out = generate(
        model, **inputs, drafter=drafter, gamma=4, guard=False, max_new_tokens=30, do_sample=False,
        return_dict_in_generate=True, **kwargs,
    )  # fmt: skip
    return want, out


def test_rejected_drafts_are_forgotten_and_accepted_ones_read_again(models):
    model = model_of("Qwen3NextForCausalLM", models)
    want, out = drafted(model, prompts(ONE))
    assert out.sequences.tolist() == want.tolist()
    assert out.stats.cache == "snapshot"
    assert 0 < out.stats.accepted < out.stats.drafted
    assert out.stats.rounds < 15


@pytest.mark.parametrize("fault", ["no roll back", "accepted tokens are not read again"])
def test_a_wrong_roll_back_gives_other_text(fault, models, monkeypatch):
    """Negative controls."""
    model = model_of("Qwen3NextForCausalLM", models)
    right = StateCache.truncate

    def truncate(self, lengths):
        if fault == "no roll back":
            self.lengths = self._held = lengths.copy()
            return
        right(self, lengths)
        self.lengths = self.lengths - self._again.shape[1]
        self._again = self._again[:, :0]

    monkeypatch.setattr(StateCache, "truncate", truncate)
    known_fits.forget()
    with pytest.raises(
        ValueError, match=r"Qwen3NextForCausalLM cannot be used with drafts; cache='s"
    ):
        drafted(model, prompts(ONE))
    if fault == "no roll back":
        want, out = drafted(model, prompts(ONE), self_check=False)
        assert out.sequences.tolist() != want.tolist()
    known_fits.forget()


def test_the_returned_state_continues_in_plain_generation(models):
    model = model_of("Qwen3NextForCausalLM", models)
    want, out = drafted(model, prompts(ONE))
    options = {"max_new_tokens": 8, "do_sample": False}
    longer = plain(model, prompts(ONE), 38)
    assert out.sequences.tolist() == want.tolist()
    mask = out.attention_mask
    again = model.generate(
        out.sequences, attention_mask=mask, past_key_values=out.past_key_values, **options
    )
    assert again.tolist() == longer.tolist()


def test_a_given_state_is_not_changed(models):
    model, inputs = model_of("Qwen3NextForCausalLM", models), prompts(ONE)
    with torch.no_grad():
        past = model(inputs["input_ids"][:, :-2], use_cache=True).past_key_values
    for _ in range(2):
        want, out = drafted(model, inputs, past_key_values=past)
        assert out.sequences.tolist() == want.tolist()
        assert out.stats.accepted > 0


@pytest.mark.slow
def test_a_draft_model_may_keep_a_state(models):
    """It feeds one token after the other, and its state goes back to the last one accepted."""
    model, drafter = model_of("Qwen3NextForCausalLM", models), build("Mamba2ForCausalLM")
    want = plain(model, prompts(BATCH), 20)
    options = {"max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    for one in (drafter, model):
        out = generate(model, **prompts(BATCH), drafter=one, gamma=3, guard=False, **options)
        assert out.sequences.tolist() == want.tolist()
    assert out.stats.draft_acceptance_rate == 1.0


@pytest.mark.parametrize("name", ["MambaForCausalLM", "JambaForCausalLM"])
def test_a_state_that_reads_tokens_in_another_way_at_once_is_refused(name):
    model = build(name)
    with pytest.raises(
        ValueError, match=rf"{name} cannot be used with drafts; cache='snapshot': its"
    ):
        generate(model, **prompts(ONE), drafter="prompt_lookup", max_new_tokens=4)


def test_check_model_measures_snapshots(models):
    checked = check_model(model_of("Qwen3NextForCausalLM", models))
    assert checked.fitting() == ["snapshot"]
