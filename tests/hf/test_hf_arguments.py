"""Arguments of Hugging Face work as in ``model.generate``, or are refused by name.

So is every field of GenerationConfig: it is honoured, refused, or without effect.
"""

import copy
import re
from pathlib import Path

import pytest
import torch
from specdec_hf import EagleTree, PromptLookupDrafter, SpeculativeDecoder, Step, TreeSpec, generate
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


MODEL = hf_models.perturbed("llama")
SAMPLED = {"do_sample": True}
OF_TREES = {"tree": (2,), "drafter": MODEL}
OF_MODEL = {"num_assistant_tokens": 4, "drafter": MODEL}
LENIENT, TOP_BETA = {"rule": "lenient", "lenience": 0.2}, {"rule": "top_beta", "top_beta_rank": 5}
SEVERAL = {**SAMPLED, "num_return_sequences": 3}
BEAMS = {"num_beams": 3, "drafter": None}
# The message, and what is given.
REFUSED = {
    "drafter and prompt_lookup_num_tokens must not both be given": {
        "prompt_lookup_num_tokens": 3, "drafter": MODEL
    },
    "not used by the model: ['max_new_token']": {"max_new_token": 3},
    "rule must be 'auto'": {"rule": "synthetic"},
    "rule='greedy' needs do_sample=False": {**SAMPLED, "rule": "greedy"},
    "are the same argument": {"gamma": 2, "num_assistant_tokens": 3},
    "seed must be in [-2**63, 2**63), got 9223": {"seed": 2**63},
    "`max_length` is set to 5": {"max_length": 5, "max_new_tokens": None},
    "temperature must be finite": {**SAMPLED, "temperature": -0.5},
    "must be a scalar or have 1 entries, got 2": {**SAMPLED, "temperature": [0.5, 0.5]},
    "must be finite and >= 0 in float32, got 1e+39": {**SAMPLED, "temperature": 1e39},
    "top_p must be in (0, 1], got 0": {**SAMPLED, "top_p": 0.0},
    "top_p must be in (0, 1] in float32, got 1e-46": {**SAMPLED, "top_p": [1e-46]},
    "top_k must be an integer >= 0, got -1": {**SAMPLED, "top_k": -1},
    "min_p must be in [0, 1], got 1.5": {**SAMPLED, "min_p": 1.5},
    # Several sequences of a prompt.
    "different than 1 (got 3)": {**SEVERAL, "do_sample": False},
    "must be at least 1, got 0": {**SEVERAL, "num_return_sequences": 0},
    "seed must be an int or have 1 or 3 entries, got 4": {**SEVERAL, "seed": [1] * 4},
    "top_k must be a scalar or have 1 or 3 entries, got 4": {**SEVERAL, "top_k": [1] * 4},
    # Names.
    "'prompt_lookup' takes no value, got 'prompt_lookup:3'": {"drafter": "prompt_lookup:3"},
    "drafter must be prompt_lookup, got 'prompt_lookup:'": {"drafter": "prompt_lookup:"},
    "got 'magic'; drafters with a name are auto, prompt_lookup, ": {"drafter": "magic"},
    "got 'promt_lookup'; did you mean 'prompt_lookup'?": {"drafter": "promt_lookup"},
    "got 'Ngram:2'; did you mean 'ngram'?": {"drafter": "Ngram:2"},
    "'heuristik'; did you mean 'heuristic'?": {"num_assistant_tokens_schedule": "heuristik"},
    "got 'blocks'; did you mean 'block'?": {"rule": "blocks"},
    "gama is no argument of generate; did you mean 'gamma'": {"gama": 3},
    "drafter 'rest:no/a': No such file": {"drafter": "rest:no/a"},
    "drafter 'ngram:0': order must be an integer in [1": {"drafter": "ngram:0"},
    "drafter must be layers:N": {"drafter": "layers:x"},
    "compile must be None or False with num_beams=2, got True": {
        "compile": True, "drafter": None, "num_beams": 2
    },
    # Beams.
    "drafter must be None or a draft model with num_beams=3, got": {
        **BEAMS, "drafter": "prompt_lookup"
    },
    "do_sample must be False with num_beams=3, got True": {**BEAMS, **SAMPLED},
    "`num_return_sequences` (4) has to be smaller or equal to `num_beams` (3)": {
        **BEAMS, "num_return_sequences": 4
    },
    "rule must be 'auto' or 'greedy' with num_beams=3, got 'token'": {**BEAMS, "rule": "token"},
    "cache must be 'auto' or 'spec' with num_beams=3, got 'aligned'": {**BEAMS, "cache": "aligned"},
    "tree must be None with num_beams=3, got ": {**BEAMS, "tree": (2, 1), "drafter": MODEL},
    "num_assistant_tokens_schedule must be None": {
        **BEAMS, "num_assistant_tokens_schedule": "heuristic"
    },
    "num_assistant_beams must be at least num_beams=3, got 2": {**BEAMS, "num_assistant_beams": 2},
    "streamer must be None with num_beams=3": {**BEAMS, "streamer": Recorder()},
    "output_hidden_states must": {
        **BEAMS, "output_hidden_states": True, "return_dict_in_generate": True
    },
    "num_assistant_beams must be None without": {"num_beams": 1, "num_assistant_beams": 2},
    "`early_stopping` must be a boolean or 'never', but is soon": {
        **BEAMS, "early_stopping": "soon"
    },
    # Lossy rules.
    "rule 'lenient' needs lenience, which has no default": {**OF_MODEL, "rule": "lenient"},
    "lenience must be in (0, 1], got 2.0": {**OF_MODEL, "rule": "lenient", "lenience": 2.0},
    "in (0, 1] in float32, got 1e-50": {**OF_MODEL, "rule": "lenient", "lenience": 1e-50},
    "lenience is for rule 'lenient' alone, got 0.5 with rule 'a": {**OF_MODEL, "lenience": 0.5},
    "delta must be finite and at least 0, got": {
        **OF_MODEL, "rule": "typical", "typical_delta": -1
    },
    "needs top_beta_rank, which has no def": {
        **OF_MODEL, "rule": "top_beta", "top_beta_distance": 1
    },
    "top_beta_distance must be at least 0": {**OF_MODEL, **TOP_BETA, "top_beta_distance": -1},
    "'typical' with this drafter, got 'top_beta'": {**OF_TREES, **TOP_BETA},
    "'greedy', 'typical' with this drafter, got 'lenient'": {**OF_TREES, **LENIENT},
    # Trees.
    "must be given with tree, got None": {**OF_TREES, "drafter": None},
    "tree must be a TrieTree or None with drafter auto": {**OF_TREES, "drafter": "auto"},
    "must be a TrieTree or None with drafter lookahead": {**OF_TREES, "drafter": "lookahead"},
    "num_assistant_tokens must not be given with a drafter": {"drafter": "lookahead", "gamma": 3},
    "num_assistant_tokens must not be given with tree": {**OF_TREES, "gamma": 3},
    "_schedule must be 'constant' or 'optimal' with tree": {
        **OF_TREES, "num_assistant_tokens_schedule": "heuristic"
    },
    "cache must be 'auto' or 'spec' with tree, got 'dynamic'": {**OF_TREES, "cache": "dynamic"},
    "rule must be 'auto', 'multi_draft_wor', 'multi_draft', 'top_k_plus_": {
        **OF_TREES, **SAMPLED, **LENIENT
    },
    "with this drafter, got 'k_seq'": {
        **OF_TREES, **SAMPLED, "drafter": [MODEL, MODEL], "rule": "k_seq"
    },
    "drafter must be one draft model with tree=EagleTree": {
        "tree": EagleTree(), "drafter": "prompt_lookup"
    },
    "or one that drafts several chains": {**OF_TREES, "drafter": [MODEL, "prompt_lookup"]},
    "ranks of tree must be below 64, got 64": {**OF_TREES, "tree": TreeSpec((-1,), (64,))},
    "tree must have at most 1024 nodes over all draft models, got 540 for each of 2": {
        "tree": (60, 8), "drafter": [MODEL, MODEL]
    },
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_refused_arguments_are_named(message):
    model, given = hf_models.tiny("llama"), {"max_new_tokens": 4, **REFUSED[message]}
    with pytest.raises((TypeError, ValueError, FileNotFoundError)) as raised:
        generate(model, **hf_models.prompts((9,)), **given)
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
