"""Classes of encoder-decoders: text, custom_generate and returned caches equal plain generation.

`python -m bench.model_table` compares every class of Transformers.
"""

import pytest
from support.hf_models import one_thread  # noqa: F401  # autouse here

from bench.model_table import WAYS
from bench.tiny_models import compare
from bench.tiny_models.build import build
from bench.tiny_models.inputs import own_inputs

LENGTHS = (7, 4)
WITH_DRAFTS = (
    "MBartForConditionalGeneration", "PegasusForConditionalGeneration", "MarianMTModel",
    "M2M100ForConditionalGeneration", "LEDForConditionalGeneration", "UMT5ForConditionalGeneration",
    "LongT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    "T5GemmaForConditionalGeneration", "EncoderDecoderModel", "UdopForConditionalGeneration",
    "SeamlessM4TForTextToText", "VisionEncoderDecoderModel", "Pix2StructForConditionalGeneration",
    "Speech2TextForConditionalGeneration", "MoonshineForConditionalGeneration",
    "MoonshineStreamingForConditionalGeneration",
)  # fmt: skip
# Their decoders take one token at a time from a cache.
WITHOUT_DRAFTS = ("FSMTForConditionalGeneration", "ProphetNetForConditionalGeneration")


def outcomes(name, lengths):
    model = build(name)
    try:
        inputs = own_inputs(model, lengths) or compare.prompts(lengths)
    except ValueError:
        inputs = compare.prompts(lengths)
    return {way: outcome.status for way, outcome in compare.compare(model, inputs, WAYS)}


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=str)
@pytest.mark.parametrize("name", WITH_DRAFTS)
def test_text_with_drafts_that_are_partly_wrong_equals_plain_generation(name, lengths):
    found = outcomes(name, lengths)
    assert found.pop("tree") == "refused"
    assert set(found.values()) == {"equal"}, found


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_DRAFTS)
def test_a_decoder_that_takes_one_token_at_a_time_refuses_drafts_by_name(name):
    found = outcomes(name, LENGTHS)
    assert found.pop("none") == "equal"
    assert set(found.values()) == {"refused"}, found
