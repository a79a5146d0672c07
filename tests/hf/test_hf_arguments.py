"""Hugging Face arguments work as in ``model.generate``, are refused by name, and never changed."""

import copy

import pytest
import torch
from specdec_hf import SpeculativeDecoder, Step, generate
from support import hf_models
from support.hf_models import Recorder, one_thread  # noqa: F401  # autouse here
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
)

NEW = 16
RAGGED = (9, 4, 12)


class PreferNew(LogitsProcessor):
    """Forbids the last five tokens of the prefix."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for b, ids in enumerate(input_ids):
            scores[b, ids[-5:]] = -float("inf")
        return scores


PROCESSED = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "bad_words_ids": {"bad_words_ids": [[5], [7, 8], [12], [33]]},
    "suppress_tokens": {"suppress_tokens": list(range(20, 40))},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": list(range(1, 30))},
    "forced_eos_token_id": {"forced_eos_token_id": 4},
    "sequence_bias": {"sequence_bias": [[[9], 4.0], [[3, 5], 6.0]]},
    "custom": {"logits_processor": LogitsProcessorList([PreferNew()])},
}


@pytest.mark.slow
@pytest.mark.covering(test=1)
@pytest.mark.parametrize("drafter", ["prompt_lookup", "model"])
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("case", PROCESSED)
def test_logits_processors_see_the_prefix_of_one_sequence(case, lengths, drafter):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(lengths)
    kwargs = {"max_new_tokens": NEW, "pad_token_id": hf_models.PAD, **PROCESSED[case]}
    expected = model.generate(**inputs, do_sample=False, **kwargs)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)
    assert expected.tolist() != plain.tolist(), "the processor changes nothing here"
    proposer = hf_models.drafter_for("llama", drafter)
    got = generate(model, **inputs, do_sample=False, drafter=proposer, **kwargs)
    assert got.tolist() == expected.tolist()


def test_rule_match_with_processors_equals_plain_sampling():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts(RAGGED)
    kwargs = {
        "max_new_tokens": NEW, "do_sample": True, "temperature": 0.8, "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 3, "rule": "match", "seed": 11,
    }  # fmt: skip
    plain = generate(model, **inputs, **kwargs, drafter=None)
    for drafter in ("prompt_lookup", hf_models.perturbed("llama")):
        assert generate(model, **inputs, drafter=drafter, **kwargs).tolist() == plain.tolist()


def test_defaults_come_from_the_generation_config():
    model = hf_models.build("llama")
    model.generation_config = GenerationConfig(
        max_new_tokens=6, repetition_penalty=1.6, eos_token_id=[40, 41], pad_token_id=0
    )
    inputs = hf_models.prompts((9,))
    got = generate(model, **inputs, drafter="prompt_lookup")
    assert got.tolist() == model.generate(**inputs).tolist()
    mine = GenerationConfig(max_new_tokens=9, do_sample=False, no_repeat_ngram_size=2)
    got = generate(model, **inputs, drafter="prompt_lookup", generation_config=mine)
    assert got.tolist() == model.generate(**inputs, generation_config=mine).tolist()


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [(9,), RAGGED], ids=str)
@pytest.mark.parametrize("sampled", [False, True])
def test_custom_generate_equals_generate(lengths, sampled):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(lengths)
    drafter = hf_models.perturbed("gemma2")
    settings = {"max_new_tokens": NEW, "do_sample": sampled}
    if sampled:
        settings |= {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    options = {"drafter": drafter, "seed": 4, "gamma": 3}
    direct = generate(model, **inputs, **settings, **options)
    hooked = model.generate(**inputs, **settings, custom_generate=SpeculativeDecoder(**options))
    assert hooked.tolist() == direct.tolist()
    whole = model.generate(
        **inputs, **settings, custom_generate=SpeculativeDecoder(**options),
        return_dict_in_generate=True,
    )  # fmt: skip
    assert whole.sequences.tolist() == direct.tolist()
    assert whole.stats.accepted > 0


def test_custom_generate_keeps_a_warper_of_the_caller():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    settings = {"max_new_tokens": NEW, "do_sample": True, "top_k": 0}
    hooked = model.generate(
        **inputs, **settings, temperature=0.9, custom_generate=SpeculativeDecoder(None, seed=4),
        logits_processor=LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    )  # fmt: skip
    direct = generate(model, **inputs, **settings, temperature=0.5, drafter=None, seed=4)
    assert hooked.tolist() == direct.tolist()


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_streamer_is_called_as_by_plain_generate(entry):
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts((9,))
    kwargs = {"max_new_tokens": NEW, "do_sample": False}
    theirs, mine = Recorder(), Recorder()
    model.generate(**inputs, **kwargs, streamer=theirs)
    drafter = hf_models.perturbed("gemma2")
    if entry == "generate":
        generate(model, **inputs, **kwargs, drafter=drafter, streamer=mine)
    else:
        decoder = SpeculativeDecoder(drafter, streamer=mine)
        model.generate(**inputs, **kwargs, custom_generate=decoder)
    assert mine.calls == theirs.calls


def test_stream_yields_the_tokens_that_generate_returns():
    model, inputs = hf_models.tiny("gemma2"), hf_models.prompts(RAGGED)
    decoder = SpeculativeDecoder(hf_models.perturbed("gemma2"), gamma=3)
    streamed = [[] for _ in RAGGED]
    ends = []
    for step in decoder.stream(model, **inputs, max_new_tokens=NEW, do_sample=False):
        assert isinstance(step, Step)
        assert len(step.tokens) == len(step.kinds) == len(step.from_draft) == len(step.logprobs)
        assert sorted(step.from_draft, reverse=True) == step.from_draft
        streamed[step.sequence] += step.tokens
        ends += [step.finished] if step.finished else []
    expected = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    assert streamed == expected[:, -NEW:].tolist()
    assert ends == ["length"] * 3
    # The caller's code between the steps must not run in inference mode.
    assert not torch.is_inference_mode_enabled()


def test_user_objects_are_not_changed():
    model, drafter = hf_models.build("gemma2"), hf_models.build("gemma2", seed=1)
    inputs = hf_models.prompts(RAGGED)
    config = GenerationConfig(max_new_tokens=8, do_sample=True, temperature=0.8, top_k=9)
    processors, criteria = LogitsProcessorList([PreferNew()]), StoppingCriteriaList()
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


def test_results_may_be_written_into():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    for cache in ("spec", "dynamic"):
        out = generate(
            model, **inputs, max_new_tokens=4, do_sample=False, cache=cache,
            drafter="prompt_lookup", return_dict_in_generate=True,
        )  # fmt: skip
        out.sequences[0, 0] = 1
        out.past_key_values.layers[0].keys.mul_(1.0)


REFUSED = {
    "prompt_lookup_num_tokens": (
        {"prompt_lookup_num_tokens": 3, "drafter": hf_models.perturbed("llama")},
        "drafter and prompt_lookup_num_tokens must not both be given",
    ),
    "assistant_early_exit": (
        {"assistant_early_exit": 1, "drafter": "prompt_lookup"},
        "drafter and assistant_early_exit must not both be given",
    ),
    "max_matching_ngram_size": (
        {"max_matching_ngram_size": 3},
        "max_matching_ngram_size=3 needs drafter='prompt_lookup'",
    ),
    "assistant_tokenizer": (
        {"assistant_tokenizer": "x"},
        "assistant_tokenizer needs a draft model as drafter or assistant_model, got drafter='auto'",
    ),
    "assistant_model": ({"assistant_model": "x"}, "assistant_model must be a model, got 'x'"),
    "unknown": ({"max_new_token": 3}, "unknown or unsupported arguments: max_new_token"),
    "gamma": ({"gamma": -1}, "num_assistant_tokens must be an integer in [0, 1024]"),
    "huge gamma": ({"gamma": 10**20}, "num_assistant_tokens must be an integer in [0, 1024]"),
    "gammas": ({"gamma": 2, "num_assistant_tokens": 3}, "are the same argument"),
    "schedule": (
        {"num_assistant_tokens_schedule": "best", "drafter": "prompt_lookup"},
        "num_assistant_tokens_schedule must be",
    ),
    "rule": ({"rule": "synthetic"}, "rule must be 'auto'"),
    "lossy greedy": (
        {"rule": "greedy", "do_sample": True},
        "rule='greedy' needs do_sample=False",
    ),
    "drafter": ({"drafter": "best"}, "drafter must be None, the name of a drafter"),
    "seed": ({"seed": [1, 2]}, "seed must be an int or have 1 entries, got 2"),
    "huge seed": ({"seed": 2**63}, "seed must be in [-2**63, 2**63), got 9223"),
    "hot": ({"temperature": "hot", "do_sample": True}, "temperature must be finite and >= 0"),
    "temperature": ({"temperature": -0.5, "do_sample": True}, "temperature must be finite"),
    "temperatures": (
        {"temperature": [0.5, 0.5], "do_sample": True},
        "temperature must be a scalar or have 1 entries, got 2",
    ),
    "top_p": ({"top_p": 0.0, "do_sample": True}, "top_p must be in (0, 1], got 0"),
    "temperature in float32": (
        {"temperature": 1e39, "do_sample": True},
        "temperature must be finite and >= 0 in float32, got 1e+39",
    ),
    "top_p in float32": (
        {"top_p": [1e-46], "do_sample": True},
        "top_p must be in (0, 1] in float32, got 1e-46",
    ),
    "top_k": ({"top_k": -1, "do_sample": True}, "top_k must be an integer >= 0, got -1"),
    "min_p": ({"min_p": 1.5, "do_sample": True}, "min_p must be in [0, 1], got 1.5"),
    "max_length": ({"max_length": 5, "max_new_tokens": None}, "`max_length` is set to 5"),
}
WRONG_TYPES = ("assistant_model", "hot")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_arguments_are_named(case):
    kwargs, message = REFUSED[case]
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    with pytest.raises(TypeError if case in WRONG_TYPES else ValueError) as raised:
        generate(model, **inputs, **{"max_new_tokens": 4, **kwargs})
    assert message in str(raised.value)


def test_refused_inputs_are_named():
    model, one = hf_models.tiny("llama"), torch.ones(1, 4, dtype=torch.int64)
    cases = [
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
    ]
    for kwargs, message in cases:
        with pytest.raises(ValueError, match=message):
            generate(model, **kwargs, max_new_tokens=4)
    for wrong, message in (
        ("Once upon", r"input_ids must be a torch.Tensor, got str; pass \*\*tokenizer\("),
        (["Once"], r"input_ids must be a torch.Tensor, got list; pass \*\*tokenizer\("),
        ([[1, 2]], r"input_ids must be a torch.Tensor, got list; pass a torch.tensor of it"),
        (BatchEncoding({"input_ids": one}), r"got BatchEncoding; pass its entries, as in generate"),
        ({"input_ids": one}, r"input_ids must be a torch.Tensor, got dict; pass its entries"),
    ):
        with pytest.raises(TypeError, match=message):
            generate(model, wrong, max_new_tokens=4)
    with pytest.raises(ValueError, match="inputs and input_ids are the same argument"):
        generate(model, one, input_ids=one, max_new_tokens=4)
    with pytest.raises(TypeError, match=r"attention_mask must be a torch.Tensor, got list"):
        generate(model, one, attention_mask=[[1] * 4], max_new_tokens=4)
    with pytest.raises(ValueError, match="stop_strings must come with a tokenizer"):
        SpeculativeDecoder(stop_strings="x")
    with pytest.raises(ValueError, match="tree must have at least one entry, got none"):
        SpeculativeDecoder(tree=())
