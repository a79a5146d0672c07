"""Inputs other than text give the tokens of plain generation, or are refused by name."""

import numpy as np
import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.cache import known_fits
from specdec_hf.cache.later_inputs import LaterInputs
from specdec_hf.decode import prefill
from specdec_hf.drafters.drafter import Draft, Drafter
from support import hf_models, multimodal_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.multimodal_models import inputs, of_sequence, perturbed, tiny

NEW = 12
MODELS = sorted(multimodal_models.BUILDERS.keys() - {"mllama", "blip2"})
WHOLE = {"return_dict_in_generate": True, "max_new_tokens": NEW, "do_sample": False}


def decode(entry, model, made, settings, drafter=None, **options):
    """The output of one of the two entries."""
    if entry == "generate":
        return generate(model, **made, **settings, drafter=drafter, **options)
    decoder = SpeculativeDecoder(drafter, **options)
    return model.generate(**made, **settings, custom_generate=decoder)


def check_equal(name, made, entry="generate", **options):
    model = tiny(name)
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    out = decode(entry, model, made, WHOLE, **options)
    assert out.sequences.tolist() == expected.tolist()
    return out.stats


def shift_positions(monkeypatch):
    """Give the model wrong positions after the prefill, and measure again whether it fits."""
    right = LaterInputs.add_to

    def wrong(self, inputs, size):
        made = right(self, inputs, size)
        made["position_ids"] = made["position_ids"] + 1
        return made

    monkeypatch.setattr(LaterInputs, "add_to", wrong)
    known_fits.forget()


class Told(Drafter):
    """Drafts the right tokens, except at every fourth position: some are accepted, some not."""

    def __init__(self, new_tokens, prompt_lengths):
        self.new_tokens, self.prompt_lengths = new_tokens, prompt_lengths

    def propose(self, history, gamma):
        at = (history.lengths - self.prompt_lengths)[:, None] + np.arange(gamma)
        at = np.minimum(at, self.new_tokens.shape[1] - 1)
        tokens = np.take_along_axis(self.new_tokens, at, axis=1)
        return Draft(torch.from_numpy(np.where(at % 4 == 3, (tokens + 1) % 60, tokens)))


def told(name, made):
    lengths = made["attention_mask"].sum(dim=1).numpy()
    whole = tiny(name).generate(**made, max_new_tokens=NEW, do_sample=False)
    return Told(whole[:, -NEW:].numpy(), lengths)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("name", MODELS)
def test_a_batch_with_inputs_of_its_own_equals_plain_generation(name, entry):
    made = inputs(name)
    text = {key: made[key] for key in ("input_ids", "attention_mask")}
    plain = [tiny(name).generate(**x, max_new_tokens=NEW, do_sample=False) for x in (made, text)]
    assert not plain[0].equal(plain[1]), "the other inputs change nothing here"
    check_equal(name, made, entry)
    stats = check_equal(name, made, entry, drafter=told(name, made), guard=False)
    assert 0 < stats.accepted < stats.drafted
    assert stats.cache == "spec"  # no fault of its inputs sent the call to a fallback


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_sequence_with_inputs_of_its_own_equals_plain_generation(name):
    for b in (0, 1):
        made = of_sequence(inputs(name), b)
        stats = check_equal(name, made, drafter=told(name, made), guard=False)
        assert 0 < stats.accepted < stats.drafted


@pytest.mark.slow
def test_a_tree_and_a_dynamic_cache_follow_positions_of_images():
    made = inputs("qwen2_vl")
    stats = check_equal("qwen2_vl", made, drafter=perturbed("qwen2_vl"), tree=(3, 2, 1))
    assert 0 < stats.accepted < stats.drafted
    alone = of_sequence(made, 0)
    drafter = told("qwen2_vl", alone)
    check_equal("qwen2_vl", alone, drafter=drafter, cache="dynamic", guard=False)


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_layers_that_hold_an_image_in_the_cache_run_without_drafts(entry):
    made = inputs("mllama")
    text = {key: made[key] for key in ("input_ids", "attention_mask")}
    plain = [tiny("mllama").generate(**x, max_new_tokens=NEW) for x in (made, text)]
    assert not plain[0].equal(plain[1])
    stats = check_equal("mllama", made, entry)
    assert stats.cache == "plain"
    with pytest.raises(ValueError, match=r"cross_attention_mask.* not supported: cache='spec'"):
        decode(entry, tiny("mllama"), made, WHOLE, drafter="prompt_lookup")


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_a_batch_in_the_aligned_cache_follows_images_too(entry):
    made = inputs("qwen2_vl")
    options = {"drafter": told("qwen2_vl", made), "guard": False, "cache": "aligned"}
    stats = check_equal("qwen2_vl", made, entry, **options)
    assert stats.cache == "aligned"
    assert 0 < stats.accepted < stats.drafted


HOLED = {
    "right": [[1, 1, 1, 1, 1, 1, 0, 0]],
    "hole": [[1, 1, 0, 0, 1, 1, 1, 1]],
    "batch": [[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 1, 1]],
}


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", HOLED)
def test_a_mask_with_padding_anywhere_equals_plain_generation(case, name, entry):
    model, mask = hf_models.tiny(name), torch.tensor(HOLED[case])
    ids = torch.randint(1, 67, mask.shape, generator=torch.Generator().manual_seed(2))
    made = {"input_ids": ids, "attention_mask": mask}
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    for drafter in (None, hf_models.perturbed(name)):
        out = decode(entry, model, made, WHOLE, drafter=drafter, guard=False)
        assert out.sequences.tolist() == expected.tolist()
        # A row that stops being padded on the right has its positions from there on.
        assert out.attention_mask[:, :8].tolist() == mask.tolist()


def test_a_holed_mask_with_sliding_windows_runs_without_drafts_only():
    model, mask = hf_models.tiny("gemma2"), torch.tensor(HOLED["hole"])
    made = {"input_ids": torch.arange(1, 9)[None], "attention_mask": mask}
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    assert generate(model, **made, **WHOLE, drafter=None).sequences.equal(expected)
    with pytest.raises(ValueError, match="padding that is not on the left is not supported"):
        generate(model, **made, **WHOLE, drafter="prompt_lookup")


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_position_ids_of_the_caller_are_used(entry):
    model, made = hf_models.tiny("gpt2"), hf_models.prompts((9,))
    made["position_ids"] = torch.arange(20, 29)[None]
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    made_plainly = {k: v for k, v in made.items() if k != "position_ids"}
    assert not expected.equal(model.generate(**made_plainly, max_new_tokens=NEW, do_sample=False))
    out = decode(entry, model, made, WHOLE, drafter=hf_models.perturbed("gpt2"), guard=False)
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.accepted > 0


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds_equal_plain_generation(with_ids, entry):
    model, made = hf_models.tiny("llama"), hf_models.prompts((9, 5))
    ids = made.pop("input_ids")
    made["inputs_embeds"] = model.get_input_embeddings()(ids.flip(0)).detach()
    if with_ids:
        made["input_ids"] = ids
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    assert expected.shape[1] == NEW + (9 if with_ids else 0)
    for drafter in (None, "prompt_lookup", hf_models.perturbed("llama")):
        out = decode(entry, model, made, WHOLE, drafter=drafter, guard=False)
        assert out.sequences.tolist() == expected.tolist()
        assert out.attention_mask.shape == (2, 9 + NEW)


def test_a_second_turn_keeps_the_positions_of_the_images():
    model, made = tiny("qwen2_vl"), inputs("qwen2_vl")
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**made, **settings)
    mask = torch.cat([made["attention_mask"], torch.ones(2, 4).long()], dim=1)
    turn = {"input_ids": expected.sequences, "attention_mask": mask}
    plain = model.generate(**turn, past_key_values=expected.past_key_values, **settings)
    first = generate(model, **made, drafter=perturbed("qwen2_vl"), **settings)
    assert first.sequences.equal(expected.sequences)
    second = generate(
        model, **turn, past_key_values=first.past_key_values, drafter="prompt_lookup", **settings
    )
    assert second.sequences.tolist() == plain.sequences.tolist()


def test_the_first_call_of_a_kind_is_compared_with_plain_forwards(monkeypatch):
    shift_positions(monkeypatch)
    with pytest.raises(ValueError, match=r"logits of GPT2LMHeadModel differ from plain generation"):
        generate(
            tiny("gpt2"), **inputs("gpt2"), max_new_tokens=4, drafter="prompt_lookup", cache="spec"
        )


def test_several_sequences_of_a_prompt_share_its_image():
    model, made = tiny("llava"), inputs("llava")
    settings = {"do_sample": True, "max_new_tokens": 4, "seed": 5}
    out = generate(model, **made, **settings, drafter=None, num_return_sequences=2)
    hooked = model.generate(
        **made, custom_generate=SpeculativeDecoder(None, seed=5), do_sample=True, max_new_tokens=4,
        num_return_sequences=2,
    )  # fmt: skip
    assert out.shape[0] == 4
    assert hooked.equal(out)
    assert out[::2, :13].equal(made["input_ids"])
    one = {k: v.repeat_interleave(2, dim=0) for k, v in made.items()}
    greedy = {"max_new_tokens": 4, "do_sample": True, "top_k": 1, "seed": 5}
    assert generate(model, **one, **greedy, drafter=None).equal(
        generate(model, **made, **greedy, drafter=None, num_return_sequences=2)
    )


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_a_class_that_replaces_generate_prepares_its_inputs_itself(entry):
    model, made = tiny("blip2"), inputs("blip2")
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    other = {**made, "pixel_values": -made["pixel_values"]}
    assert not expected.equal(model.generate(**other, max_new_tokens=NEW, do_sample=False))
    for options in ({}, {"drafter": told("blip2", made), "guard": False}):
        out = decode(entry, model, made, WHOLE, **options)
        assert out.sequences.tolist() == expected.tolist()
    assert 0 < out.stats.accepted < out.stats.drafted
    if entry == "generate":
        with pytest.raises(ValueError, match="temperature must be a scalar for Blip2"):
            generate(model, **made, do_sample=True, temperature=[1.0, 1.0])
        with pytest.raises(ValueError, match=r"Blip2ForCond.* has a generate method of its own"):
            list(SpeculativeDecoder().stream(model, made["input_ids"], max_new_tokens=2))


def test_sampled_text_and_streams_follow_the_images_too():
    model, made = tiny("qwen2_vl"), inputs("qwen2_vl")
    settings = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "seed": [3, 4]}
    plain = generate(model, **made, drafter=None, rule="match", **settings)
    drafted = generate(model, **made, rule="match", drafter=perturbed("qwen2_vl"), **settings)
    assert drafted.equal(plain)
    streamed = [[], []]
    decoder = SpeculativeDecoder(perturbed("qwen2_vl"), rule="match", seed=[3, 4])
    for step in decoder.stream(model, **made, max_new_tokens=NEW, do_sample=True, temperature=0.8):
        streamed[step.sequence] += step.tokens
    assert streamed == plain[:, -NEW:].tolist()


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("gpt2", {"attention_mask": torch.tensor([[1, 2, 1]])}, "attention_mask must hold 0 and 1"),
        ("gpt2", {"pixel_values": torch.ones(1)}, "pixel_values"),
        ("gpt2", {"cache_position": torch.arange(3)}, "cache_position"),
        ("gpt2", {"labels": torch.ones(1, 3)}, "labels is not supported"),
        ("gpt2", {"token_type_ids": iter([1])}, "token_type_ids is not supported: an iterator"),
    ],
)
def test_an_input_that_would_be_dropped_is_refused_by_name(name, given, message, entry):
    made = {"input_ids": torch.ones(1, 3, dtype=torch.int64), **given}
    with pytest.raises(ValueError, match=message):
        decode(entry, tiny(name), made, {"max_new_tokens": 2})


@pytest.mark.parametrize("options", [{}, {"drafter": "prompt_lookup"}])
def test_an_unknown_cache_is_refused_with_other_inputs_too(options):
    embeds = tiny("gpt2").get_input_embeddings()(torch.ones(1, 3, dtype=torch.int64)).detach()
    with pytest.raises(ValueError, match=r"cache must be 'auto', 'spec', .*, got 'x'"):
        generate(tiny("gpt2"), inputs_embeds=embeds, cache="x", max_new_tokens=2, **options)


def test_a_fallback_from_a_prefill_leaves_a_note_and_self_check_false_measures_nothing(monkeypatch):
    model, made = tiny("llava"), of_sequence(inputs("llava"), 0)
    expected = model.generate(**made, max_new_tokens=NEW, do_sample=False)
    shift_positions(monkeypatch)
    out = generate(model, **made, **WHOLE, drafter="prompt_lookup", guard=False)
    assert out.sequences.tolist() == expected.tolist()
    assert out.stats.cache == "dynamic"
    assert "runs with cache='dynamic'; cache='spec': logits of Llava" in out.stats.notes[0]
    monkeypatch.setattr(prefill, "_difference", lambda *_: pytest.fail("measured"))
    known_fits.forget()
    out = generate(model, **made, **WHOLE, drafter="prompt_lookup", self_check=False)
    assert out.stats.cache == "spec"
