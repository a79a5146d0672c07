"""Scores, logits and hidden states equal those of plain generation, token for token."""

import pytest
import torch
from specdec_hf import generate
from support import hf_models
from transformers import LogitsProcessorList

RAGGED = (9, 4, 12)
NEW = 12
WANTED = {
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
    "output_hidden_states": True,
}  # fmt: skip


def settings(**kwargs):
    return {"max_new_tokens": NEW, "do_sample": False, **WANTED, **kwargs}


def decode(entry, model, inputs, drafter, options=None, **kwargs):
    options = {"drafter": drafter, "guard": False, "gamma": 3, **(options or {})}
    if drafter is None or "tree" in options:
        del options["gamma"]
    return hf_models.through(entry, model, inputs, options, **kwargs)


def assert_close(got, want, mask):
    """The same tokens, and the same tuples up to rounding."""
    assert got.sequences.tolist() == want.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)
    # Plain generation has no meaningful values in the padding of the prompt, ours are 0.
    first, *rest = want.hidden_states
    first = tuple(x * mask[:, -x.shape[1] :, None] for x in first)
    torch.testing.assert_close(got.hidden_states, (first, *rest), rtol=1e-4, atol=1e-4)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_greedy_outputs_equal_those_of_model_generate(name, lengths, entry):
    model, inputs = hf_models.tiny(name), hf_models.prompts(lengths)
    want = model.generate(**inputs, **settings())
    for drafter in (None, "prompt_lookup", hf_models.perturbed(name)):
        got = decode(entry, model, inputs, drafter, **settings())
        assert_close(got, want, inputs["attention_mask"])
    assert got.stats.accepted > 0
    if name == "llama":
        for options in ({"cache": "aligned"}, {"cache": "dynamic"}, {"tree": (2, 1)}):
            got = decode(entry, model, inputs, drafter, options, **settings())
            assert_close(got, want, inputs["attention_mask"])
            assert got.stats.cache == options.get("cache", "spec")
            assert got.stats.accepted > 0


def ending_at_different_places(model, inputs):
    free = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[:, -NEW:]
    ends = [int(token) for token in free[:2, 3]]
    return settings(eos_token_id=ends, pad_token_id=5, repetition_penalty=1.3)


@pytest.mark.parametrize("cache", ["spec", "aligned", "dynamic"])
def test_a_sequence_that_ended_goes_on_with_padding(cache):
    """Processors see the padding too, as in plain generation."""
    model, inputs = hf_models.tiny("gpt2"), hf_models.prompts(RAGGED)
    kwargs = ending_at_different_places(model, inputs)
    want = model.generate(**inputs, **kwargs)
    new_tokens = (want.sequences[:, 12:] != 5).sum(dim=1).tolist()
    assert len(set(new_tokens)) > 1
    for drafter in (None, hf_models.perturbed("gpt2")):
        got = decode("generate", model, inputs, drafter, {"cache": cache}, **kwargs)
        assert_close(got, want, inputs["attention_mask"])


@pytest.mark.parametrize("rule", ["token", "match"])
def test_sampled_scores_are_those_of_the_filters(rule):
    """Plain sampling cannot be told to draw the same text, so its warpers run over the logits."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    filters = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    got = decode(
        "generate", model, inputs, hf_models.perturbed("llama"), {"rule": rule, "seed": 3},
        **settings(do_sample=True, **filters),
    )  # fmt: skip
    config, _ = model._prepare_generation_config(None, do_sample=True, **filters)
    warpers = model._get_logits_processor(config, logits_processor=LogitsProcessorList())
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, NEW), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(got.sequences, attention_mask=mask, position_ids=positions).logits
    for step, (scores, raw) in enumerate(zip(got.scores, got.logits, strict=True)):
        want = logits[:, 11 + step]
        torch.testing.assert_close(raw, want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(scores, warpers(got.sequences, want), rtol=1e-4, atol=1e-4)
        assert scores.isneginf().any()
        drawn = got.sequences[:, 12 + step, None]
        logprobs = scores.log_softmax(-1).gather(1, drawn)[:, 0]
        torch.testing.assert_close(logprobs, got.logprobs[:, step], rtol=1e-3, atol=1e-3)


def test_outputs_go_on_from_a_given_cache_or_a_prefill_of_the_models_own():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    shorter = {key: value[:, :-3] for key, value in inputs.items()}
    with torch.no_grad():
        past = [model(**shorter, use_cache=True).past_key_values for _ in range(2)]
    want = model.generate(**inputs, **settings(), past_key_values=past[0])
    drafts = {"drafter": "prompt_lookup", "gamma": 2}
    got = generate(model, **inputs, **settings(), past_key_values=past[1], **drafts)
    assert_close(got, want, inputs["attention_mask"])
    assert got.hidden_states[0][0].shape[1] == 3
    inputs = hf_models.prompts((9,))
    embeds = {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]).detach()}
    want = model.generate(**embeds, **settings())
    got = generate(model, **embeds, **settings(), **drafts)
    assert_close(got, want, inputs["attention_mask"])


@pytest.mark.parametrize("cache", ["spec", "aligned"])
def test_outputs_beyond_the_context_of_the_model_are_nan(cache):
    model, inputs = hf_models.build("gpt2", context=16), hf_models.prompts((9, 9))
    free = generate(model, **inputs, max_new_tokens=7, do_sample=False, drafter=None)[:, 9:]
    end = next(int(token) for token in free[1] if token not in free[0])
    got = generate(model, **inputs, **settings(eos_token_id=end), drafter=None, cache=cache)
    first, second = (one.new_tokens for one in got.stats.sequences)
    assert first == 7 > second
    finite = [bool(row.isfinite().all()) for row in torch.stack(got.scores)[:, 1]]
    assert finite == [step <= second or cache == "spec" for step in range(7)]
