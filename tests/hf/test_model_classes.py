"""Model classes of all families of behaviour: the loop's text equals plain generation.

`python -m bench.model_table` compares every class of Transformers.
"""

import functools
import re
from pathlib import Path

import pytest
import transformers
from specdec_hf import SpeculativeDecoder, generate
from support.hf_models import with_noise

from bench.model_table import TABLES, WAYS, generating_classes
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
    "Kosmos2_5ForConditionalGeneration", "OpenAIGPTLMHeadModel",
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
# A light test each, where a class of ON_TEXT has much the same forward or the model is slow.
ALSO_ON_TEXT = (
    "BigBirdPegasusForCausalLM", "BlenderbotSmallForCausalLM", "MBartForCausalLM",
    "MvpForCausalLM", "PegasusForCausalLM", "OpenAIGPTLMHeadModel", "Dots3NoteForCausalLM",
    "Dots3NoteForConditionalGeneration", "PaliGemma2ForConditionalGeneration",
)  # fmt: skip
# No cache takes drafts for their left-padded batches.
ALONE = ("Kosmos2_5ForConditionalGeneration", "RwkvForCausalLM", "DeepseekV4ForCausalLM")
REFUSED = ("OpenAIGPTLMHeadModel", "XLNetLMHeadModel", "MllamaForConditionalGeneration")
# Transformers has one class for PaliGemma and PaliGemma-2, which differ in their text model.
CLASSES = {"PaliGemma2ForConditionalGeneration": "PaliGemmaForConditionalGeneration"}
FIELDS = {
    "FalconForCausalLM": {"alibi": True},
    "PaliGemma2ForConditionalGeneration": {"default": {"text_config": {"model_type": "gemma2"}}},
}


def marked(name):
    """`make test` runs a class of each kind of positions, attention and cache."""
    return name if name in QUICK | KINDS else pytest.param(name, marks=pytest.mark.full)


ways = pytest.mark.parametrize("way", ["generate", "custom_generate"])


@functools.cache
def model_of(name):
    return build(CLASSES.get(name, name), **FIELDS.get(name, {}))


@functools.cache
def draft_of(name):
    """The same model with some noise on its weights: a drafter that is often right."""
    return with_noise(model_of(name), 0.02)


@functools.cache
def expected_of(name, lengths):
    return compare.plain(model_of(name), compare.prompts(lengths), NEW)


def oracle(inputs, expected):
    return compare.OracleDrafter(expected[:, inputs["input_ids"].shape[1] :].numpy())


def through(way, model, inputs, *, drafter, gamma=2, **kwargs):
    """A call of `generate` or of ``custom_generate``."""
    kwargs = {"max_new_tokens": NEW, "do_sample": False, **kwargs}
    options = {"drafter": drafter, "num_assistant_tokens": gamma, "guard": False}
    if way == "generate":
        return generate(model, **inputs, **options, **kwargs)
    return model.generate(**inputs, custom_generate=SpeculativeDecoder(**options), **kwargs)


@pytest.mark.covering(test=1)
@ways
@pytest.mark.parametrize("name", [marked(name) for name in (*ON_TEXT, *ALSO_ON_TEXT)])
def test_text_with_drafts_that_are_partly_wrong_equals_plain_generation(name, way):
    for lengths in (BATCH[:1], BATCH):
        inputs, expected = compare.prompts(lengths), expected_of(name, lengths)
        drafters = [oracle(inputs, expected), *([draft_of(name)] if name in ON_TEXT else [])]
        for drafter in drafters:
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
    stopped = "stopped at the model's context length" in got.stats.notes
    reason = got.stats.sequences[0].stop_reason
    assert (reason, stopped) == (("length", False) if more else ("context", True))


@pytest.mark.full
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_fits_no_cache_is_equal_or_refused_by_name(name):
    model = model_of(name)
    for inputs in (compare.prompts(BATCH), own_inputs(model, BATCH)):
        for way, outcome in compare.compare(model, inputs, WAYS) if inputs else ():
            assert outcome.status in ("equal", "refused"), (way, outcome)
            if outcome.status == "refused":
                assert name in outcome.detail


def test_random_models_do_not_repeat_one_token():
    for name in QUICK:
        text = expected_of(name, BATCH)[:, -NEW:]
        assert min(len(row.unique()) for row in text) >= 3


def test_the_document_lists_every_class_of_its_version_of_transformers():
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    version = re.search(r"with Transformers (\S+)", text)[1]
    listed = re.findall(r"^\| (\w+) \| (?!classes)", text, re.MULTILINE)
    counts = {k: int(v) for k, v in re.findall(r"^\| ([\w ,]+) \| (\d+) \|$", text, re.MULTILINE)}
    listed = [name for name in listed if name not in ("outcome", "class", *counts)]
    assert sum(counts.values()) == len(listed)
    assert counts["WRONG"] == counts["CRASH"] == 0
    assert counts["equal"] >= 190
    if version == transformers.__version__:
        assert listed == generating_classes()
    else:
        # Another version has other classes, but the tables that name them must be found.
        assert set(listed) & set(generating_classes())
    assert len(TABLES) == 5
