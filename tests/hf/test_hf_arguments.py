"""Arguments of Hugging Face work as in ``model.generate``, or are refused by name.

So is every field of GenerationConfig: it is honoured, refused, or without effect.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, Step, generate
from specdec_hf.request import unsupported
from support import hf_models
from support.hf_models import PROCESSED, RAGGED, Recorder, prefer_new
from transformers import (
    BatchEncoding,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

PAGE = Path(__file__).parents[2] / "docs" / "generation-config.md"
FIELDS_REFUSED = {**unsupported.UNSUPPORTED, **unsupported.UNSUPPORTED_SAMPLING}
NEW = {"max_new_tokens": 16, "do_sample": False}
entries = pytest.mark.parametrize("entry", ["generate", "custom_generate"])


def decode(entry, model, arguments, **options):
    return hf_models.through(entry, model, arguments, options)


def test_every_field_of_the_installed_transformers_is_in_one_table(monkeypatch):
    """One that no table knows is refused."""
    fields = set(GenerationConfig().__dict__)
    tables = [unsupported.HONOURED, unsupported.WITHOUT_EFFECT, set(FIELDS_REFUSED)]
    assert set().union(*tables) == fields
    assert sum(map(len, tables)) == len(fields)
    monkeypatch.setattr(unsupported, "HONOURED", unsupported.HONOURED - {"min_p"})
    with pytest.raises(ValueError, match=r"min_p=0.2 is not supported"):
        generate(hf_models.tiny("llama"), **hf_models.prompts((5,)), min_p=0.2, max_new_tokens=2)


@pytest.mark.skipif(not PAGE.is_file(), reason="the documentation is not beside the tests")
def test_the_page_lists_every_field_under_its_heading():
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.M)
    tables = (unsupported.HONOURED, set(FIELDS_REFUSED), unsupported.WITHOUT_EFFECT)
    for part, table in zip(parts[1:4], tables, strict=True):
        rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
        assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(table)


@pytest.mark.parametrize("name", FIELDS_REFUSED)
def test_a_refused_field_is_named(name):
    config = GenerationConfig(do_sample=True)
    setattr(config, name, 0.25)
    model = hf_models.tiny("llama")
    with pytest.raises(ValueError, match=rf"^{name}=0.25 is not supported$"):
        unsupported.refuse_unsupported(config, unsupported.ArgumentSource(model, {name}))


@entries
def test_a_value_of_the_models_own_config_is_named_as_such(entry):
    model, arguments = hf_models.build("llama"), {**hf_models.prompts((5,)), "max_new_tokens": 2}
    model.generation_config.penalty_alpha = 0.5
    message = "penalty_alpha=0.5 is not supported"
    with pytest.raises(ValueError, match=rf"{message} \(from model.generation_config\)"):
        decode(entry, model, arguments)
    with pytest.raises(ValueError, match=f"{message}$"):
        generate(model, **arguments, penalty_alpha=0.5)
    config = GenerationConfig(max_new_tokens=2, penalty_alpha=0.5)
    with pytest.raises(ValueError, match=f"{message}$"):
        generate(model, **hf_models.prompts((5,)), generation_config=config)


@entries
def test_arguments_of_assisted_generation_choose_the_drafter(entry):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    expected = model.generate(**inputs, **NEW)

    def stats_of(drafter=None, **arguments):
        arguments |= {**inputs, **NEW, "return_dict_in_generate": True}
        out = decode(entry, model, arguments, drafter=drafter, guard=False)
        assert out.sequences.equal(expected)
        return out.stats

    lookup = stats_of(prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    assert lookup.drafter == "prompt_lookup"
    assert lookup.drafted > 0
    early = stats_of(assistant_early_exit=1)
    assert (early.drafter, early.drafted > 0) == ("early_exit", True)
    with pytest.raises(ValueError, match="layers must be below the target's 2 with drafter ea"):
        stats_of(assistant_early_exit=2)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens and assistant_early_exit mu"):
        stats_of(assistant_early_exit=1, prompt_lookup_num_tokens=2)
    with pytest.raises(ValueError, match="drafter and assistant_early_exit must not both be given"):
        stats_of("prompt_lookup", assistant_early_exit=1)
    drafted = [
        stats_of(
            hf_models.perturbed("llama"),
            generation_config=GenerationConfig(num_assistant_tokens=number, **NEW),
        ).drafted
        for number in (1, 9)
    ]
    assert drafted[0] < drafted[1]


def test_prompt_lookup_by_the_arguments_of_transformers_copies_after_pairs_or_longer_ends():
    model = hf_models.build("llama", vocab_size=11)

    def drafted(**options):
        out = hf_models.decode(model, **options, max_new_tokens=40)
        return [record.drafted for record in out.stats.round_log]

    asked = drafted(drafter="auto", prompt_lookup_num_tokens=3, max_matching_ngram_size=5)
    by_pairs, by_three = (
        drafted(drafter=PromptLookupDrafter(5, least), num_assistant_tokens=3) for least in (2, 3)
    )
    assert asked == by_pairs != by_three


@entries
def test_the_growing_cache_of_plain_generation_may_be_asked_for_and_no_other(entry):
    given = {**hf_models.prompts((9, 4)), **NEW, "return_dict_in_generate": True}
    model = hf_models.tiny("llama")
    out = decode(entry, model, {**given, "cache_implementation": "dynamic"})
    assert torch.equal(out.sequences, model.generate(**given).sequences)
    assert type(out.past_key_values) is DynamicCache
    with pytest.raises(ValueError, match="cache_implementation='static' is not supported"):
        generate(model, **given, cache_implementation="static")


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


# Those of a processor that knows its batch, which is taken apart.
BY_SEQUENCE = {
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 3.0},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda b, ids: [t for t in range(1, 67) if t % 3 == b]
    },
}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("case", [*PROCESSED, *BY_SEQUENCE])
def test_logits_processors_see_the_prefix_of_one_sequence(case, lengths, drafter):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    kwargs = {**NEW, "pad_token_id": hf_models.PAD, **(PROCESSED | BY_SEQUENCE)[case]}
    expected = model.generate(**inputs, **kwargs)
    assert not expected.equal(model.generate(**inputs, **NEW)), "it changes nothing here"
    proposer = hf_models.drafter_for("llama", drafter)
    assert generate(model, **inputs, drafter=proposer, **kwargs).equal(expected)


def test_custom_generate_keeps_a_warper_of_the_caller():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    settings = {"max_new_tokens": 16, "do_sample": True, "top_k": 0}
    hooked = model.generate(
        **inputs, **settings, temperature=0.9, custom_generate=SpeculativeDecoder(None, seed=4),
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    )  # fmt: skip
    direct = generate(model, **inputs, **settings, temperature=0.5, drafter=None, seed=4)
    assert hooked.tolist() == direct.tolist()


def test_stream_yields_the_tokens_that_generate_returns():
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    streamed, ends = [[] for _ in RAGGED], []
    for step in SpeculativeDecoder(hf_models.perturbed("gemma2")).stream(model, **inputs, **NEW):
        assert isinstance(step, Step)
        assert len(step.tokens) == len(step.kinds) == len(step.from_draft) == len(step.logprobs)
        assert sorted(step.from_draft, reverse=True) == step.from_draft
        streamed[step.sequence] += step.tokens
        ends += [step.finished] if step.finished else []
    assert streamed == model.generate(**inputs, **NEW)[:, -16:].tolist()
    assert ends == ["length"] * 3
    assert not torch.is_inference_mode_enabled(), "the caller's code is between the steps"


def test_user_objects_are_not_changed():
    model, drafter = hf_models.build("gemma2"), hf_models.build("gemma2", seed=1)
    inputs = hf_models.prompts(RAGGED)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.8, top_k=9)
    processors, criteria = LogitsProcessorList([prefer_new]), StoppingCriteriaList()
    configs = [one for m in (model, drafter) for one in (m.config, m.generation_config)]
    before = copy.deepcopy([one.to_dict() for one in (*configs, config)])
    parameters = [*model.parameters(), *drafter.parameters()]
    weights = [one.clone() for one in parameters]
    given, state = copy.deepcopy(inputs), torch.get_rng_state()
    generate(
        model, **inputs, drafter=drafter, num_assistant_tokens_schedule="heuristic",
        generation_config=config, logits_processor=processors, stopping_criteria=criteria,
        guard=True, seed=1,
    )  # fmt: skip
    assert [one.to_dict() for one in (*configs, config)] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(inputs[name].equal(value) for name, value in given.items())
    assert (len(processors), len(criteria)) == (1, 0)
    assert all(now.equal(then) for now, then in zip(parameters, weights, strict=True))


REFUSED = {
    "prompt_lookup_num_tokens": (
        {"prompt_lookup_num_tokens": 3, "drafter": hf_models.perturbed("llama")},
        "drafter and prompt_lookup_num_tokens must not both be given",
    ),
    "unknown": ({"max_new_token": 3}, "not used by the model: ['max_new_token']"),
    "rule": ({"rule": "synthetic"}, "rule must be 'auto'"),
    "lossy greedy": ({"rule": "greedy", "do_sample": True}, "rule='greedy' needs do_sample=False"),
    "gammas": ({"gamma": 2, "num_assistant_tokens": 3}, "are the same argument"),
    "huge seed": ({"seed": 2**63}, "seed must be in [-2**63, 2**63), got 9223"),
    "max_length": ({"max_length": 5, "max_new_tokens": None}, "`max_length` is set to 5"),
}
REFUSED |= {
    name: ({"do_sample": True, name.partition(" ")[0]: value}, message)
    for name, value, message in (
        ("temperature", -0.5, "temperature must be finite"),
        ("temperature list", [0.5, 0.5], "temperature must be a scalar or have 1 entries, got 2"),
        ("temperature float32", 1e39, "temperature must be finite and >= 0 in float32, got 1e+39"),
        ("top_p", 0.0, "top_p must be in (0, 1], got 0"),
        ("top_p float32", [1e-46], "top_p must be in (0, 1] in float32, got 1e-46"),
        ("top_k", -1, "top_k must be an integer >= 0, got -1"),
        ("min_p", 1.5, "min_p must be in [0, 1], got 1.5"),
    )
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments_are_named(case):
    kwargs, message = REFUSED[case]
    with pytest.raises(ValueError) as raised:
        generate(
            hf_models.tiny("llama"), **hf_models.prompts((9,)), **{"max_new_tokens": 4, **kwargs}
        )
    assert message in str(raised.value)


def test_refused_inputs_are_named():
    model, one = hf_models.tiny("llama"), torch.ones(1, 4, dtype=torch.int64)
    refused = [
        ({"input_ids": None}, "input_ids is required"),
        ({"input_ids": one[0]}, r"input_ids must be \[B, T\], got shape \[4\]"),
        ({"input_ids": one[:, :0]}, r"input_ids is empty: shape \[1, 0\]"),
        ({"input_ids": one.float()}, "input_ids must be int32 or int64"),
        ({"input_ids": one + 96}, r"input_ids must be in \[0, 67\), got ids from 97 to 97"),
        ({"input_ids": one, "attention_mask": one[:, 1:]}, "attention_mask must have the shape"),
        (
            {"input_ids": one.repeat(2, 1), "attention_mask": torch.tensor([[1] * 4, [0] * 4])},
            "sequence 1 of input_ids is empty",
        ),
        ({"input_ids": one.expand(1, 4).repeat(1, 64)}, "has 256 tokens, but the model's context"),
        ({"input_ids": one.repeat(2, 1), "streamer": Recorder()}, "streamer needs batch size 1"),
        ({"inputs": one, "input_ids": one}, "inputs and input_ids are the same argument"),
        ({"input_ids": one, "stop_strings": "x"}, "stop_strings must come with a tokenizer"),
    ]
    of_types = [
        ({"inputs": "Once upon"}, r"must be a torch.Tensor, got str; pass \*\*tokenizer\("),
        ({"inputs": [[1, 2]]}, "must be a torch.Tensor, got list; pass a torch.tensor of it"),
        ({"inputs": BatchEncoding({"input_ids": one})}, "got BatchEncoding; pass its entries, as"),
        (
            {"inputs": one, "attention_mask": [[1] * 4]},
            "attention_mask must be a torch.Tensor, got",
        ),
        ({"inputs": one, "assistant_model": "x"}, "assistant_model must be a model, got 'x'"),
    ]
    for error, cases in ((ValueError, refused), (TypeError, of_types)):
        for kwargs, message in cases:
            with pytest.raises(error, match=message):
                generate(model, **kwargs, max_new_tokens=4)
