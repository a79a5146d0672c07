"""Every field of GenerationConfig is honoured, refused by name, or without effect."""

import re
from pathlib import Path

import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.request import unsupported
from support import hf_models
from support.hf_models import Recorder, one_thread  # noqa: F401  # autouse here
from transformers import DynamicCache, GenerationConfig

PAGE = Path(__file__).parents[2] / "docs" / "generation-config.md"
REFUSED = {**unsupported.UNSUPPORTED, **unsupported.UNSUPPORTED_SAMPLING}
NEW = {"max_new_tokens": 16, "do_sample": False}
entries = pytest.mark.parametrize("entry", ["generate", "custom_generate"])


def decode(entry, model, arguments, **options):
    """The output of `generate`, or of ``model.generate`` with a decoder."""
    if entry == "generate":
        return generate(model, **arguments, **options)
    return model.generate(**arguments, custom_generate=SpeculativeDecoder(**options))


def test_every_field_of_the_installed_transformers_is_in_one_table():
    fields = set(GenerationConfig().__dict__)
    tables = [unsupported.HONOURED, unsupported.WITHOUT_EFFECT, set(REFUSED)]
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests")
def test_the_page_lists_every_field_under_its_heading():
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    for part, table in zip(
        parts[1:4], (unsupported.HONOURED, set(REFUSED), unsupported.WITHOUT_EFFECT), strict=True
    ):
        rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(table)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named(name):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, 0.25)
    model = hf_models.tiny("llama")
    with pytest.raises(ValueError, match=rf"^{name}=0.25 is not supported$"):
        unsupported.refuse_unsupported(config, unsupported.Origin(model, {name}))


@pytest.mark.parametrize("name", unsupported.UNSUPPORTED_SAMPLING)
def test_a_field_of_sampling_changes_no_greedy_text(name):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4))
    settings = {**NEW, name: 0.25}
    expected = model.generate(**inputs, **settings)
    assert expected.equal(model.generate(**inputs, **NEW))
    assert generate(model, **inputs, **settings, drafter="prompt_lookup").equal(expected)
    with pytest.raises(ValueError, match=f"{name}=0.25 is not supported"):
        generate(model, **inputs, **{**settings, "do_sample": True})


def test_a_field_that_no_table_knows_is_refused(monkeypatch):
    monkeypatch.setattr(unsupported, "HONOURED", unsupported.HONOURED - {"min_p"})
    inputs = hf_models.prompts((5,))
    with pytest.raises(ValueError, match=r"min_p=0.2 is not supported"):
        generate(hf_models.tiny("llama"), **inputs, min_p=0.2, max_new_tokens=2)


@entries
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("penalty_alpha", 0.5, "penalty_alpha=0.5 is not supported (from model.generation_config)"),
        ("guidance_scale", 2.0, "guidance_scale=2.0 is not supported"),
    ],
)
def test_a_value_of_the_models_own_config_is_named_as_such(field, value, message, entry):
    model, inputs = hf_models.build("llama"), hf_models.prompts((5,))
    setattr(model.generation_config, field, value)
    arguments = {**inputs, "max_new_tokens": 2}
    with pytest.raises(ValueError) as raised:
        decode(entry, model, arguments)
    assert message in str(raised.value)
    assert "(from model.generation_config)" in str(raised.value)
    if field == "penalty_alpha":
        with pytest.raises(ValueError, match=r"penalty_alpha=0.5 is not supported$"):
            decode(entry, model, {**arguments, "penalty_alpha": 0.5})
    model.generation_config = GenerationConfig()
    model.generation_config.top_p = 2.0
    with pytest.raises(ValueError, match=r"got 2.0 \(from model.generation_config\)$"):
        generate(model, **inputs, max_new_tokens=2, do_sample=True)


@entries
def test_arguments_of_assisted_generation_choose_the_drafter(entry):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    expected = model.generate(**inputs, **NEW)

    def stats_of(drafter=None, **arguments):
        arguments |= {**inputs, **NEW, "return_dict_in_generate": True}
        out = decode(entry, model, arguments, drafter=drafter, guard=False)
        assert out.sequences.equal(expected)
        return out.stats

    assert stats_of(assistant_model=hf_models.perturbed("llama")).drafter == "model"
    lookup = stats_of(prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    assert lookup.drafter == "prompt_lookup"
    assert lookup.drafted > 0
    # Endings of one token have other matches than the longer ones of the default.
    assert lookup.drafted != stats_of(prompt_lookup_num_tokens=3).drafted
    early = stats_of(assistant_early_exit=1)
    assert (early.drafter, early.drafted > 0) == ("early_exit", True)
    with pytest.raises(ValueError, match="assistant_early_exit must be at least 1, got 0"):
        stats_of(assistant_early_exit=0)
    with pytest.raises(
        ValueError, match="layers must be below the target's 2 with drafter early_e"
    ):
        stats_of(assistant_early_exit=2)
    with pytest.raises(
        ValueError, match="prompt_lookup_num_tokens and assistant_early_exit must no"
    ):
        stats_of(assistant_early_exit=1, prompt_lookup_num_tokens=2)
    drafted = [
        stats_of(
            hf_models.perturbed("llama"),
            generation_config=GenerationConfig(num_assistant_tokens=number, **NEW),
        ).drafted
        for number in (1, 9)
    ]
    assert drafted[0] < drafted[1]
    with pytest.raises(ValueError, match="drafter and assistant_model must not both be given"):
        stats_of("prompt_lookup", assistant_model=model)


def test_a_streamer_is_given_once_and_for_one_sequence():
    model, mine = hf_models.tiny("llama"), Recorder()
    both = SpeculativeDecoder(streamer=Recorder())
    with pytest.raises(ValueError, match=r"streamer must be given to .* got both"):
        model.generate(**hf_models.prompts((9,)), **NEW, streamer=mine, custom_generate=both)
    one = SpeculativeDecoder()
    with pytest.raises(ValueError, match="streamer needs batch size 1, got 2"):
        model.generate(**hf_models.prompts((9, 5)), **NEW, streamer=mine, custom_generate=one)
    with pytest.raises(ValueError, match="streamer must be None with stream"):
        list(both.stream(model, **hf_models.prompts((9,)), **NEW))


@pytest.mark.parametrize("outer", ["plain", "another model", "another decoder"])
def test_a_decoder_reads_only_the_generate_that_called_it(outer):
    """The frame of an outer ``generate`` holds a streamer that is not the decoder's."""
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    theirs, mine = Recorder(), Recorder()
    model.generate(**inputs, **NEW, streamer=theirs)
    inner, called = SpeculativeDecoder(None), []
    arguments = []

    def capture(*args, **kwargs):
        arguments.append((args, kwargs))
        return args[1]

    model.generate(**inputs, **NEW, custom_generate=capture)
    ((args, kwargs),) = arguments

    def process(ids, scores):
        if not called:
            called.append(inner(*args, **kwargs))
        return scores

    runs = hf_models.tiny("gpt2") if outer == "another model" else model
    options = {} if outer != "another decoder" else {"custom_generate": SpeculativeDecoder(None)}
    runs.generate(**inputs, **NEW, logits_processor=[process], streamer=mine, **options)
    assert len(called) == 1
    if runs is model:
        assert mine.calls == theirs.calls


BY_SEQUENCE = {
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda b, ids: [t for t in range(1, 67) if t % 3 == b]
    },
}


@pytest.mark.parametrize("case", BY_SEQUENCE)
def test_a_processor_that_knows_its_batch_is_taken_apart(case):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4, 12))
    kwargs = {**BY_SEQUENCE[case], **NEW}
    expected = model.generate(**inputs, **kwargs)
    assert not expected.equal(model.generate(**inputs, **NEW))
    drafter = hf_models.perturbed("llama")
    assert generate(model, **inputs, drafter=drafter, **kwargs).equal(expected)
    decoder = SpeculativeDecoder(drafter)
    assert model.generate(**inputs, **kwargs, custom_generate=decoder).equal(expected)
    assert torch.equal(expected[:, :12], inputs["input_ids"])


def test_processors_of_the_prompt_serve_all_sequences_of_a_prompt():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 12))
    kwargs = {"max_new_tokens": 8, "do_sample": True, "encoder_no_repeat_ngram_size": 1}
    kwargs |= {"num_return_sequences": 2, "return_dict_in_generate": False}
    direct = generate(model, **inputs, **kwargs, drafter=None, seed=3)
    decoder = SpeculativeDecoder(None, seed=3)
    assert model.generate(**inputs, **kwargs, custom_generate=decoder).equal(direct)
    for b, row in enumerate(direct.tolist()):
        assert not set(row[12:]) & set(inputs["input_ids"][b // 2].tolist())


@pytest.mark.covering(test=1)
@entries
@pytest.mark.parametrize("where", ["call", "config", "model"])
def test_the_growing_cache_of_plain_generation_may_be_asked_for(where, entry):
    model, inputs, settings = hf_models.build("llama"), hf_models.prompts((9, 4)), NEW
    expected = model.generate(**inputs, **NEW)
    if where == "call":
        settings = {**NEW, "cache_implementation": "dynamic"}
    elif where == "config":
        config = GenerationConfig(cache_implementation="dynamic", **NEW)
        settings = {"generation_config": config}
    else:
        model.generation_config.cache_implementation = "dynamic"
    out = decode(entry, model, {**inputs, **settings, "return_dict_in_generate": True})
    assert torch.equal(out.sequences, expected)
    assert out.stats.cache == "spec"
    assert type(out.past_key_values) is DynamicCache
    for name in ("static", "offloaded", "quantized"):
        with pytest.raises(ValueError, match=f"cache_implementation='{name}' is not supported"):
            generate(model, **inputs, **NEW, cache_implementation=name)


@pytest.mark.covering(test=1)
@entries
@pytest.mark.parametrize("mask", [[[1] * 6], [[1, 1, 0, 1, 1, 0]]])
def test_a_model_whose_own_config_switches_the_cache_off_runs_with_a_note(mask, entry):
    model = hf_models.build("gpt2")
    model.generation_config.use_cache = False
    made = {"input_ids": torch.ones(1, 6).long() * 7, "attention_mask": torch.tensor(mask)}
    settings = {**NEW, "return_dict_in_generate": True}
    expected = model.generate(**made, **settings).sequences
    out = decode(entry, model, {**made, **settings}, drafter=None)
    assert out.sequences.equal(expected)
    assert any(note.startswith("use_cache=False (from model") for note in out.stats.notes)
    with pytest.raises(ValueError, match=r"use_cache=False is not supported$"):
        generate(model, **made, **NEW, use_cache=False)
