"""Model classes of all families, and inputs other than text: the text equals plain generation.

`python -m bench.model_table` compares every class of Transformers.
"""

from functools import cache

import numpy as np
import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from specdec_hf.extras.later_inputs import LaterInputs
from specdec_hf.runner.comparison import forget_checks
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.runner.spec_runner import SpecRunner
from support import hf_models
from support.hf_models import needs_class, with_noise
from transformers.utils import ModelOutput

from bench.tiny_models import compare
from bench.tiny_models.build import build
from bench.tiny_models.config import CONTEXT
from bench.tiny_models.inputs import own_inputs

NEW = 10
BATCH = (7, 4)
QUICK = {"GemmaForCausalLM", "GPTNeoForCausalLM"}
KINDS = {
    "Gemma4ForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "OPTForCausalLM",
    "BartForCausalLM", "DeepseekV3ForCausalLM", "MambaForCausalLM", "XLNetLMHeadModel",
    "Kosmos2_5ForConditionalGeneration",
}  # fmt: skip
# They keep a state that several tokens at once change otherwise, or a cache that cannot be rolled
# back, or take no window of several tokens. tests/hf/test_state_cache.py has states that fit.
WITHOUT_DRAFTS = (
    "MambaForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "XLMWithLMHeadModel",
    "XLNetLMHeadModel", "ReformerModelWithLMHead", "BltForCausalLM", "ProphetNetForCausalLM",
)  # fmt: skip
ON_TEXT = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM",
    "Gemma2ForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "GPT2LMHeadModel",
    "GPTNeoForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "MptForCausalLM",
    "OPTForCausalLM", "BartForCausalLM", "MarianForCausalLM", "TrOCRForCausalLM",
    "DeepseekV3ForCausalLM", "MixtralForCausalLM", "PhiForCausalLM", "StableLmForCausalLM",
    "MllamaForConditionalGeneration", "RoFormerForCausalLM",
    "BlenderbotForCausalLM", "PLBartForCausalLM", "ImageGPTForCausalImageModeling",
    "WhisperForCausalLM", "Qwen3ASRForConditionalGeneration", "Lfm3VlForConditionalGeneration",
)  # fmt: skip
# No cache takes drafts for their left-padded batches.
ALONE = ("Kosmos2_5ForConditionalGeneration", "RwkvForCausalLM", "DeepseekV4ForCausalLM")
FIELDS = {"FalconForCausalLM": {"alibi": True}}


def marked(name):
    """`make test` runs a class of each kind of positions, attention and cache."""
    return name if name in QUICK | KINDS else pytest.param(name, marks=pytest.mark.full)


ways = pytest.mark.parametrize("way", ["generate", "custom_generate"])


@cache
def model_of(name):
    needs_class(name)
    return build(name, **FIELDS.get(name, {}))


@cache
def draft_of(name):
    return with_noise(model_of(name), 0.02)


@cache
def expected_of(name, lengths):
    return compare.plain(model_of(name), compare.prompts(lengths), NEW)


def oracle(inputs, expected):
    return compare.OracleDrafter(expected[:, inputs["input_ids"].shape[1] :].numpy())


def through(way, model, inputs, *, drafter, gamma=2, **kwargs):
    options = {"drafter": drafter, "num_assistant_tokens": gamma, "guard": False}
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    return hf_models.through(way, model, inputs, options, **kwargs)


@pytest.mark.covering(test=1)
@ways
@pytest.mark.parametrize("name", [marked(name) for name in ON_TEXT])
def test_text_with_drafts_that_are_partly_wrong_equals_plain_generation(name, way):
    for lengths in (BATCH[:1], BATCH):
        inputs, expected = compare.prompts(lengths), expected_of(name, lengths)
        for drafter in (oracle(inputs, expected), draft_of(name)):
            got = through(way, model_of(name), inputs, drafter=drafter)
            assert got.tolist() == expected.tolist(), (lengths, type(drafter).__name__)


@pytest.mark.covering(test=1)
@ways
@pytest.mark.parametrize("name", [marked(name) for name in (*WITHOUT_DRAFTS, *ALONE)])
def test_a_model_whose_drafts_fit_no_cache_runs_without_them_and_refuses_them_by_name(name, way):
    model = model_of(name)
    for lengths in (BATCH[:1], BATCH):
        inputs, expected = compare.prompts(lengths), expected_of(name, lengths)
        drafter = oracle(inputs, expected)
        got = through(way, model, inputs, drafter=None)
        assert got.tolist() == expected.tolist(), lengths
        if name in ALONE and len(lengths) == 1:
            assert through(way, model, inputs, drafter=drafter).tolist() == expected.tolist()
            continue
        with pytest.raises(ValueError, match=type(model).__name__):
            through(way, model, inputs, drafter=drafter)


@pytest.mark.parametrize(
    ("name", "more"), [("WhisperForCausalLM", 1), ("Qwen3ASRForConditionalGeneration", 0)]
)
def test_at_the_last_position_text_equals_plain_generation_or_its_stop_is_named(name, more):
    """Plain generation goes on; only where the config names the context does the loop stop."""
    model, inputs = model_of(name), compare.prompts((CONTEXT - 4,))
    expected = compare.plain(model, inputs, 5)
    options = {"max_new_tokens": 5, "return_dict_in_generate": True}
    got = through("generate", model, inputs, drafter=oracle(inputs, expected), **options)
    assert got.sequences.tolist() == expected[:, : CONTEXT + more].tolist()
    assert got.stats.sequences[0].stop_reason == ("length" if more else "context")


LENGTHS = (9, 6)
# Name -> class of a model that drafts serve, and arguments of `build`. Transformers has one class
# for PaliGemma and PaliGemma-2, which differ in their text model.
MODELS = {
    "llava": ("LlavaForConditionalGeneration", {}),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", {}),
    "gemma3": ("Gemma3ForConditionalGeneration", {}),
    "paligemma": ("PaliGemmaForConditionalGeneration", {"seed": 1}),
    "paligemma2": (
        "PaliGemmaForConditionalGeneration",
        {"seed": 1, "default": {"text_config": {"model_type": "gemma2"}}},
    ),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", {}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "bert": ("BertLMHeadModel", {}),
}
OTHERS = {
    "mllama": ("MllamaForConditionalGeneration", {}),
    "blip2": ("Blip2ForConditionalGeneration", {}),
}
GREEDY = {"max_new_tokens": 12, "do_sample": False}
WHOLE = {"return_dict_in_generate": True, **GREEDY}


@cache
def tiny(name):
    class_name, fields = {**MODELS, **OTHERS}[name]
    return build(class_name, **fields)


@cache
def perturbed(name):
    return with_noise(tiny(name), 0.05)


def inputs(name, lengths=LENGTHS):
    """Images, sounds or types of tokens for prompts that are padded on the left."""
    made = own_inputs(tiny(name), lengths)
    if made is None:
        made = compare.prompts(lengths)
        made["token_type_ids"] = torch.zeros_like(made["input_ids"])
        made["token_type_ids"][:, 5:] = 1
    return made


def text_of(made):
    return {key: made[key] for key in ("input_ids", "attention_mask")}


def decode(entry, model, made, settings, drafter=None, **options):
    return hf_models.through(entry, model, made, {"drafter": drafter, **options}, **settings)


def check_equal(name, made, entry="generate", **options):
    """With no drafter among the options, one drafts the right text with some wrong tokens."""
    expected = tiny(name).generate(**made, **GREEDY)
    if "drafter" not in options:
        options |= {"drafter": compare.OracleDrafter(expected[:, -12:].numpy()), "guard": False}
    out = decode(entry, tiny(name), made, WHOLE, **options)
    assert out.sequences.tolist() == expected.tolist()
    if options["drafter"] is not None:
        assert 0 < out.stats.accepted < out.stats.drafted
    return out.stats


class Carried:
    """A model whose forwards take an object, which stays, and a number, which is made anew."""

    device, kept = torch.device("cpu"), object()

    def _update_model_kwargs_for_generation(self, outputs, kwargs, **_):
        return kwargs

    def prepare_inputs_for_generation(self, ids, **_):
        return {"sizes": self.kept, "scale": float("2.5")}


def test_inputs_that_stay_from_token_to_token_are_taken():
    ids, lengths = torch.ones(1, 3, dtype=torch.int64), np.array([3])
    inputs = LaterInputs(Carried(), ids, {}, ModelOutput(), None, lengths).add_to(
        {CACHE_NAME: 0}, 1
    )
    assert inputs == {"sizes": Carried.kept, "scale": 2.5, CACHE_NAME: 0}


def test_prompts_may_have_more_padding_than_they_need():
    made = {
        name: torch.nn.functional.pad(x, (3, 0)) for name, x in compare.prompts(LENGTHS).items()
    }
    check_equal("gpt2", made, cache="aligned")


@pytest.fixture
def wrong_positions(monkeypatch, forgetful):
    """The model gets wrong positions after the prefill."""
    right = LaterInputs.add_to

    def wrong(self, inputs, size):
        made = right(self, inputs, size)
        made["position_ids"] = made["position_ids"] + 1
        return made

    monkeypatch.setattr(LaterInputs, "add_to", wrong)


# No cache takes drafts for padded batches of paligemma2.
ONCE = [("llava", LENGTHS), ("qwen2_vl", LENGTHS), ("gemma3", LENGTHS), ("bert", LENGTHS)]
CASES = [
    pytest.param(name, lengths, marks=[] if (name, lengths) in ONCE else pytest.mark.full)
    for name in MODELS
    for lengths in (LENGTHS[:1], LENGTHS)
    if (name, lengths) != ("paligemma2", LENGTHS)
]


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_text_after_inputs_of_its_own_equals_plain_generation(name, lengths, entry):
    made = inputs(name, lengths)
    plain = [tiny(name).generate(**given, **GREEDY) for given in (made, text_of(made))]
    assert not plain[0].equal(plain[1]), "the other inputs change nothing here"
    check_equal(name, made, entry, drafter=None)
    stats = check_equal(name, made, entry)
    # No fault of its inputs sent the call to a fallback.
    assert stats.cache == ("dynamic" if name == "paligemma2" else "spec")


def test_a_tree_and_every_cache_follow_positions_of_images():
    made = inputs("qwen2_vl")
    check_equal("qwen2_vl", made, drafter=perturbed("qwen2_vl"), tree=(3, 2, 1))
    for entry in ("generate", "custom_generate"):
        assert check_equal("qwen2_vl", made, entry, cache="aligned").cache == "aligned"
    assert check_equal("qwen2_vl", inputs("qwen2_vl", (9,)), cache="dynamic").cache == "dynamic"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
@pytest.mark.parametrize(("cache", "lengths"), [("dynamic", (9,)), ("aligned", LENGTHS)])
def test_all_drafts_of_a_round_have_the_type_of_the_last_token(name, cache, lengths):
    check_equal(name, inputs(name, lengths), cache=cache)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_layers_that_hold_an_image_in_the_cache_run_without_drafts(entry):
    made = inputs("mllama")
    plain = [tiny("mllama").generate(**x, max_new_tokens=12) for x in (made, text_of(made))]
    assert not plain[0].equal(plain[1])
    stats = check_equal("mllama", made, entry, drafter=None)
    assert stats.cache == "plain"
    with pytest.raises(ValueError, match=r"cross_attention_mask.* not supported: cache='spec'"):
        decode(entry, tiny("mllama"), made, WHOLE, drafter="prompt_lookup")


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
    expected = model.generate(**made, **GREEDY)
    for drafter in (None, hf_models.perturbed(name)):
        out = decode(entry, model, made, WHOLE, drafter=drafter, guard=False)
        assert out.sequences.tolist() == expected.tolist()
        # A row that stops being padded on the right has its positions from there on.
        assert out.attention_mask[:, :8].tolist() == mask.tolist()


def test_a_holed_mask_with_sliding_windows_runs_without_drafts_only():
    model, mask = hf_models.tiny("gemma2"), torch.tensor(HOLED["hole"])
    made = {"input_ids": torch.arange(1, 9)[None], "attention_mask": mask}
    expected = model.generate(**made, **GREEDY)
    assert generate(model, **made, **WHOLE, drafter=None).sequences.equal(expected)
    with pytest.raises(ValueError, match="padding that is not on the left is not supported"):
        generate(model, **made, **WHOLE, drafter="prompt_lookup")


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize("with_ids", [False, True])
def test_inputs_embeds_equal_plain_generation(with_ids, entry):
    model, made = hf_models.tiny("llama"), hf_models.prompts((9, 5))
    ids = made.pop("input_ids")
    made["inputs_embeds"] = model.get_input_embeddings()(ids.flip(0)).detach()
    if with_ids:
        made["input_ids"] = ids
    expected = model.generate(**made, **GREEDY)
    assert expected.shape[1] == 12 + (9 if with_ids else 0)
    for drafter in (None, "prompt_lookup", hf_models.perturbed("llama")):
        out = decode(entry, model, made, WHOLE, drafter=drafter, guard=False)
        assert out.sequences.tolist() == expected.tolist()
        assert out.attention_mask.shape == (2, 9 + 12)


def embedded(model, lengths):
    ids = hf_models.prompts(lengths)["input_ids"]
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


def test_a_model_that_gives_the_logits_of_the_whole_prompt_is_read_at_its_end(monkeypatch):
    model = hf_models.tiny("llama")
    monkeypatch.setattr(type(model), "_supports_logits_to_keep", lambda self: False)
    made = embedded(model, (9, 9))
    expected = model.generate(**made, **GREEDY)
    assert generate(model, **made, **GREEDY, drafter="prompt_lookup").equal(expected)


def test_a_cache_that_takes_all_sequences_for_the_first_is_found_with_prompts_of_one_length(
    monkeypatch,
):
    model, window = hf_models.build("llama", layers=3), SpecRunner.window

    def wrong(self, starts, size, padding=0):
        made = window(self, starts, size, padding)
        return made | {"position_ids": made["position_ids"][:1].expand(len(starts), -1)}

    monkeypatch.setattr(SpecRunner, "window", wrong)
    with pytest.raises(ValueError, match="logits of LlamaForCausalLM differ from plain"):
        generate(model, **embedded(model, (9, 9)), **GREEDY, drafter="prompt_lookup", cache="spec")


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


@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
def test_a_class_that_replaces_generate_prepares_its_inputs_itself(entry):
    model, made = tiny("blip2"), inputs("blip2")
    other = {**made, "pixel_values": -made["pixel_values"]}
    plain = [model.generate(**given, **GREEDY) for given in (made, other)]
    assert not plain[0].equal(plain[1])
    check_equal("blip2", made, entry, drafter=None)
    check_equal("blip2", made, entry)
    with pytest.raises(ValueError, match="temperature must be a scalar for Blip2"):
        generate(model, **made, do_sample=True, temperature=[1.0, 1.0])
    with pytest.raises(ValueError, match=r"Blip2ForCond.* has a generate method of its own"):
        list(SpeculativeDecoder().stream(model, made["input_ids"], max_new_tokens=2))


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", "custom_generate"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"attention_mask": torch.tensor([[1, 2, 1]])}, "attention_mask must hold 0 and 1"),
        ({"pixel_values": torch.ones(1)}, "pixel_values"),
        ({"cache_position": torch.arange(3)}, "cache_position"),
        ({"labels": torch.ones(1, 3)}, "labels is not supported"),
        ({"token_type_ids": iter([1])}, "token_type_ids is not supported: an iterator"),
    ],
)
def test_an_input_that_would_be_dropped_is_refused_by_name(given, message, entry):
    made = {"input_ids": torch.ones(1, 3, dtype=torch.int64), **given}
    with pytest.raises(ValueError, match=message):
        decode(entry, hf_models.tiny("gpt2"), made, {"max_new_tokens": 2})


def test_a_model_without_a_cache_says_so_where_one_is_asked_for():
    model, given = model_of("OpenAIGPTLMHeadModel"), compare.prompts((7,))
    out = generate(model, **given, **WHOLE, drafter="prompt_lookup", cache="spec")
    says = "OpenAIGPTLMHeadModel runs with cache='none'; cache='spec': its forward takes no cache"
    assert says in out.stats.notes


@pytest.mark.usefixtures("wrong_positions")
def test_the_first_call_of_a_kind_is_compared_with_plain_forwards():
    """Where the cache that was asked for is wrong it is refused, else another is taken."""
    call = {**WHOLE, "drafter": "prompt_lookup"}
    with pytest.raises(ValueError, match=r"logits of GPT2LMHeadModel differ from plain generation"):
        generate(tiny("gpt2"), **inputs("gpt2"), **call, cache="spec")
    model, made = tiny("llava"), inputs("llava", (9,))
    out = generate(model, **made, **call, guard=False)
    assert out.sequences.tolist() == model.generate(**made, **GREEDY).tolist()
    assert out.stats.cache == "dynamic"
    assert "runs with cache='dynamic'; cache='spec': logits of Llava" in out.stats.notes[0]
    forget_checks()
    assert generate(model, **made, **call, self_check=False).stats.cache == "spec"
