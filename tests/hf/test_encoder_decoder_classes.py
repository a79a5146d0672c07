"""Classes of encoder-decoders: text, custom_generate and returned caches equal plain generation.

`python -m bench.model_table` compares every class of Transformers.
"""

import pytest
import torch
from specdec_hf import generate
from transformers import LogitsProcessor, LogitsProcessorList

from bench.model_table import WAYS
from bench.tiny_models import compare
from bench.tiny_models.build import build
from bench.tiny_models.inputs import own_inputs

LENGTHS = (7, 4)
# Of the others each repeats one of these, or is slow.
KINDS = (
    "M2M100ForConditionalGeneration", "UMT5ForConditionalGeneration",
    "T5GemmaForConditionalGeneration", "VisionEncoderDecoderModel",
    "Speech2TextForConditionalGeneration",
)  # fmt: skip
OTHERS = (
    "MBartForConditionalGeneration", "PegasusForConditionalGeneration", "MarianMTModel",
    "LEDForConditionalGeneration",
    "LongT5ForConditionalGeneration", "SwitchTransformersForConditionalGeneration",
    "EncoderDecoderModel", "UdopForConditionalGeneration",
    "SeamlessM4TForTextToText", "Pix2StructForConditionalGeneration",
    "MoonshineForConditionalGeneration",
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


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=str)
@pytest.mark.parametrize(
    "name", [*KINDS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)]
)
def test_text_with_drafts_that_are_partly_wrong_equals_plain_generation(name, lengths):
    found = outcomes(name, lengths)
    assert found.pop("tree") == "refused"
    assert set(found.values()) == {"equal"}, found


@pytest.mark.covering(test=0)
@pytest.mark.parametrize("name", WITHOUT_DRAFTS)
def test_a_decoder_that_takes_one_token_at_a_time_refuses_drafts_by_name(name):
    found = outcomes(name, LENGTHS)
    assert found.pop("none") == "equal"
    assert set(found.values()) == {"refused"}, found


class Pads(LogitsProcessor):
    """Makes the text hold the padding token here and there."""

    def __call__(self, input_ids, scores):
        forced = scores.clone()
        forced[:, 0] = 1e4
        return forced if input_ids.shape[1] in (4, 8) else scores


@pytest.mark.parametrize(
    "name",
    ["M2M100ForConditionalGeneration",
     pytest.param("SeamlessM4TForTextToText", marks=pytest.mark.full)],
)  # fmt: skip
def test_positions_after_padding_in_the_text_are_those_of_plain_generation(name):
    model, inputs = build(name), compare.prompts(LENGTHS)
    options = {
        "max_new_tokens": 12, "do_sample": False, "logits_processor": LogitsProcessorList([Pads()]),
        "return_dict_in_generate": True, "output_logits": True,
    }  # fmt: skip
    plain = model.generate(**inputs, **options)
    drafter = compare.OracleDrafter(plain.sequences[:, 1:].numpy(), first_wrong=99)
    out = generate(model, **inputs, **options, drafter=drafter, guard=False)
    assert out.stats.accepted > 0
    assert out.sequences.tolist() == plain.sequences.tolist()
    torch.testing.assert_close(out.logits, plain.logits, rtol=1e-4, atol=1e-4)
