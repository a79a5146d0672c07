"""Encoder-decoders give the text of plain generation, and their encoders run once.

`python -m bench.model_table` compares every class of Transformers.
"""

import pytest
import torch
from specdec_hf import PromptLookupDrafter, SpeculativeDecoder, TrieTree, generate
from specdec_hf.drafters.copying import SuffixAutomatonDrafter
from specdec_hf.runner.plain_runner import RollbackRunner
from support import hf_models
from support.drafter_proof import with_states
from support.hf_models import inputs_for, perturbed, texts, tiny
from transformers.cache_utils import EncoderDecoderCache

from bench.model_table import WAYS
from bench.tiny_models import compare
from bench.tiny_models.build import build
from bench.tiny_models.inputs import own_inputs

NEW = 15
ONE, RAGGED = (9,), (9, 5, 7)
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
CALL = {**GREEDY, "guard": False, "return_dict_in_generate": True}
NAMES = ("t5", "bart", "whisper")


def plain(name, inputs, **options):
    """The text of plain generation; without the dict, Whisper leaves out prompt and padding."""
    options = {**GREEDY, "return_dict_in_generate": True, **options}
    output = tiny(name).generate(**inputs, **options)
    return output if "output_scores" in options else output.sequences


def new_tokens(sequences):
    return sequences[:, -NEW:]


@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_of_which_some_are_wrong_give_plain_text(name, lengths):
    inputs = inputs_for(name, lengths)
    expected = plain(name, inputs)
    drafter = compare.OracleDrafter(new_tokens(expected).numpy())
    out = generate(tiny(name), **inputs, **CALL, drafter=drafter)
    assert new_tokens(out.sequences).tolist() == new_tokens(expected).tolist()
    assert 0 < out.stats.accepted < out.stats.drafted
    cache = {"t5": "aligned", "bart": "dynamic", "whisper": "aligned"}[name]
    assert out.stats.cache == (cache if len(lengths) > 1 else "dynamic")
    assert out.stats.forwards == "packed"
    own = tiny(name).generate(**inputs, **GREEDY).tolist()
    assert generate(tiny(name), **inputs, **GREEDY, guard=False, drafter=drafter).tolist() == own
    decoder = SpeculativeDecoder(drafter, guard=False)
    assert tiny(name).generate(**inputs, **GREEDY, custom_generate=decoder).tolist() == own


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=str)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("drafter", [None, "prompt_lookup", "model", "another model", "decoder"])
def test_every_drafter_gives_plain_text(name, lengths, drafter):
    """A model without an encoder drafts from the text of the decoder alone."""
    drafters = {
        "model": perturbed(name),
        "another model": hf_models.encoder_decoder(name, seed=1),
        "decoder": hf_models.build("llama", vocab_size=hf_models.ENCODER_VOCAB),
    }
    inputs = inputs_for(name, lengths)
    out = generate(tiny(name), **inputs, **CALL, drafter=drafters.get(drafter, drafter))
    assert new_tokens(out.sequences).tolist() == new_tokens(plain(name, inputs)).tolist()
    assert out.stats.accepted > 0 or drafter != "model"
    assert out.stats.drafted > 0 or drafter != "decoder"


@pytest.mark.parametrize(
    ("name", "cache"), [("t5", "aligned"), ("whisper", "aligned"), ("bart", "dynamic")]
)
def test_the_encoder_runs_once_and_cross_attention_computes_its_keys_once(name, cache):
    model = hf_models.encoder_decoder(name)
    inputs = inputs_for(name, RAGGED)
    drafter = compare.OracleDrafter(new_tokens(plain(name, inputs)).numpy())
    generate(model, **inputs, **CALL, drafter=drafter, cache=cache)  # with the self-check
    counts = {"encoder": 0, "keys": 0}
    cross = "EncDecAttention.k" if name == "t5" else "encoder_attn.k_proj"

    def count(what):
        return lambda *_: counts.__setitem__(what, counts[what] + 1)

    model.get_encoder().register_forward_hook(count("encoder"))
    layers = [m for n, m in model.named_modules() if n.endswith(cross)]
    for layer in layers:
        layer.register_forward_hook(count("keys"))
    out = generate(model, **inputs, **CALL, drafter=drafter, cache=cache)
    assert out.stats.rounds > 3
    rows = 1 if cache == "aligned" else len(RAGGED)
    assert counts == {"encoder": 1, "keys": len(layers) * rows}


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("prompt", [[[7, 8, 9]], [[2, 7, 8, 9], [0, 0, 2, 8], [0, 2, 8, 9]]])
@pytest.mark.parametrize("name", hf_models.TEXT_MODELS)
def test_prompts_of_the_decoder_are_continued(name, prompt):
    inputs, prompt = texts(RAGGED[: len(prompt)]), torch.tensor(prompt)
    given = {"decoder_input_ids": prompt, "decoder_attention_mask": (prompt != 0).long()}
    if len(prompt) == 1:
        del given["decoder_attention_mask"]
    whole = plain(name, inputs, **given)
    assert (whole[:, 0] == hf_models.START).tolist() == (prompt[:, 0] != 0).tolist()
    out = generate(tiny(name), **inputs, **CALL, **given, drafter=perturbed(name))
    assert out.sequences.tolist() == whole.tolist()


@pytest.mark.parametrize("name", hf_models.TEXT_MODELS)
def test_outputs_of_the_encoder_may_be_given(name):
    inputs = texts(RAGGED)
    encoded = tiny(name).get_encoder()(**inputs)
    given = {"encoder_outputs": encoded, "attention_mask": inputs["attention_mask"]}
    out = generate(tiny(name), **given, **CALL, drafter="prompt_lookup")
    assert out.sequences.tolist() == plain(name, inputs).tolist()
    with pytest.raises(ValueError, match="has an encoder, and the call holds no input for it"):
        generate(tiny(name), **given, **CALL, drafter=perturbed(name))
    given = {**inputs, "encoder_outputs": (encoded.last_hidden_state,)}
    out = generate(tiny(name), **given, **CALL, drafter=perturbed(name))
    assert out.sequences.tolist() == plain(name, inputs).tolist()


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=str)
@pytest.mark.parametrize("name", hf_models.TEXT_MODELS)
def test_plain_generation_continues_what_was_returned(name, lengths):
    inputs = texts(lengths)
    whole = plain(name, inputs)
    first = generate(tiny(name), **inputs, **{**CALL, "max_new_tokens": 8}, drafter=perturbed(name))
    given = {
        "encoder_outputs": first.encoder_outputs, "attention_mask": inputs["attention_mask"],
        "decoder_input_ids": first.sequences, "decoder_attention_mask": first.attention_mask,
    }  # fmt: skip
    rest = {**CALL, "max_new_tokens": NEW - 8}
    if name == "bart" and len(lengths) > 1:
        assert first.past_key_values is None  # the sequences ran one by one
    else:
        assert isinstance(first.past_key_values, EncoderDecoderCache)
        given["past_key_values"] = first.past_key_values
    ours = generate(tiny(name), **given, **rest, drafter="prompt_lookup")
    assert ours.sequences.tolist() == whole.tolist()
    plainly = plain(name, given, max_new_tokens=NEW - 8)
    assert plainly.tolist() == whole.tolist()


@pytest.mark.parametrize("name", hf_models.TEXT_MODELS)
def test_each_sequence_of_a_prompt_is_drafted_from_that_prompt(name):
    """Drafts of the model itself are all accepted where its encoder read the same."""
    drafter, batches = hf_models.encoder_decoder(name), []
    drafter.get_encoder().register_forward_hook(lambda *given: batches.append(len(given[2][0])))
    options = {"do_sample": True, "num_return_sequences": 2, "rule": "match", "seed": 5}
    call = {**CALL, **options, "self_check": False}
    out = generate(tiny(name), **texts(RAGGED), **call, drafter=drafter)
    assert out.stats.draft_acceptance_rate == 1.0
    assert batches == [len(RAGGED)], "the encoder reads each prompt once"


@pytest.mark.parametrize("name", ["t5", pytest.param("bart", marks=pytest.mark.full)])
def test_processors_and_ends_are_those_of_plain_generation(name):
    inputs = texts(RAGGED)
    text = new_tokens(plain(name, inputs))
    options = {
        "eos_token_id": int(text[0, 6]), "pad_token_id": 0, "forced_bos_token_id": 11,
        "forced_eos_token_id": 12, "suppress_tokens": [int(text[1, 3])], "no_repeat_ngram_size": 3,
        "begin_suppress_tokens": [int(text[2, 0])], "encoder_no_repeat_ngram_size": 2,
        "repetition_penalty": 1.1, "encoder_repetition_penalty": 1.2, "min_new_tokens": 3,
    }  # fmt: skip
    out = generate(tiny(name), **inputs, **{**CALL, **options}, drafter=perturbed(name))
    assert out.sequences.tolist() == plain(name, inputs, **options).tolist()
    scores = {"output_scores": True, "output_logits": True}
    ours = generate(tiny(name), **inputs, **CALL, **scores, drafter=perturbed(name))
    theirs = plain(name, inputs, **scores)
    for field in ("scores", "logits"):
        torch.testing.assert_close(ours[field], theirs[field], rtol=1e-3, atol=1e-3)


def test_arguments_may_be_given_in_other_ways():
    model, inputs = tiny("t5"), texts(RAGGED)
    expected = plain("t5", inputs).tolist()
    ids, mask = inputs["input_ids"], {"attention_mask": inputs["attention_mask"]}
    options = {**GREEDY, "guard": False, "drafter": perturbed("t5")}
    assert generate(model, inputs=ids, **mask, **options).tolist() == expected
    embeds = {"inputs_embeds": model.get_input_embeddings()(ids).detach() / 2, **mask}
    got = generate(model, **embeds, **{**options, "drafter": "prompt_lookup"})
    assert got.tolist() == plain("t5", embeds).tolist()
    asked = {**inputs, **GREEDY, "guard": False, "assistant_model": perturbed("t5")}
    assert generate(model, **asked).tolist() == expected
    sampled = {"do_sample": True, "temperature": [0.5, 1.0, 0.0], "top_k": 0, "seed": 3}
    assert generate(model, **inputs, **{**options, **sampled})[2].tolist() == expected[2]


@pytest.mark.parametrize("kind", [PromptLookupDrafter, SuffixAutomatonDrafter])
def test_drafters_copy_from_what_the_encoder_read(kind):
    inputs, drafts = texts(RAGGED), []

    def watch(state, call):
        propose = state.propose
        state.propose = lambda *asked: drafts.append(propose(*asked)) or drafts[-1]

    source = inputs["input_ids"]
    given = {**inputs, "decoder_input_ids": source[:, :2]}

    def repeats(b, ids):
        """The decoder's text, which a start token precedes, begins as the encoder's does."""
        read = len(ids) - 1
        return [int(source[b, read])] if read < 5 else list(range(3, hf_models.ENCODER_VOCAB))

    call = {**given, **CALL, "prefix_allowed_tokens_fn": repeats}
    out = generate(tiny("t5"), **call, drafter=with_states(kind(), watch))
    assert drafts[0].tokens[:, :2].tolist() == source[:, 3:5].tolist()
    expected = plain("t5", given, prefix_allowed_tokens_fn=repeats)
    assert out.sequences.tolist() == expected.tolist()


def test_whisper_decodes_a_long_recording_in_several_texts():
    model = hf_models.encoder_decoder("whisper")
    config = model.generation_config
    config.no_timestamps_token_id, config.eos_token_id, config.is_multilingual = 60, 59, False
    inputs = {**hf_models.sounds(2, frames=96), "attention_mask": torch.ones(2, 96).long()}
    options = {"max_new_tokens": 10, "return_timestamps": True, "return_dict_in_generate": True}
    expected = model.generate(**inputs, **options)
    out = generate(model, **inputs, **options, drafter=perturbed("whisper"), guard=False)
    assert out["sequences"].tolist() == expected["sequences"].tolist()
    assert out["stats"].accepted > 0
    segments = options | {"return_dict_in_generate": False, "return_segments": True}
    assert list(generate(model, **inputs, **segments)) == ["sequences", "segments"]
    with pytest.raises(ValueError, match="seed must be None where the generate of Whisper"):
        generate(model, **inputs, **options, temperature=0.5, seed=1)


REFUSED = {
    "tree": (
        {"drafter": "prompt_lookup", "tree": TrieTree(2, 3)},
        "cannot be used with a tree of drafts; cache='spec': its decoder also caches the keys of",
    ),
    "spec": ({"drafter": "prompt_lookup", "cache": "spec"}, "cache='spec': its decoder also"),
    "positions": ({"decoder_position_ids": torch.ones(3, 1)}, "decoder_position_ids"),
    "states": ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
    "beams": (
        {"num_beams": 2, "drafter": hf_models.perturbed("t5")},
        "T5ForConditionalGeneration cannot be used with a tree of drafts",
    ),
    "mask": (
        {
            "decoder_input_ids": torch.full((3, 3), 2),
            "decoder_attention_mask": torch.tensor([[1, 0, 1]] * 3),
        },
        "decoder_attention_mask must hide columns on the left only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_encoder_decoder_cannot_serve_is_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        generate(tiny("t5"), **{**texts(RAGGED), **CALL, **options})


@pytest.mark.parametrize("fault", ["one token too many", "keys of cross-attention"])
def test_a_wrong_roll_back_is_found_by_the_self_check(fault, monkeypatch, forgetful):
    roll_back = RollbackRunner._roll_back

    def wrong(self, kept):
        roll_back(self, kept + (kept < self._held) * (fault == "one token too many"))
        if fault != "one token too many" and kept.any():
            for layer in self.cache.cross_attention_cache.layers:
                layer.crop(-1)

    monkeypatch.setattr(RollbackRunner, "_roll_back", wrong)
    with pytest.raises(ValueError, match="cannot be used with drafts"):
        generate(tiny("t5"), **texts(RAGGED), **CALL, drafter="prompt_lookup")


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


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("lengths", [LENGTHS[:1], LENGTHS], ids=str)
@pytest.mark.parametrize(
    "name",
    [*KINDS, *(pytest.param(one, marks=pytest.mark.full) for one in (*OTHERS, *WITHOUT_DRAFTS))],
)
def test_classes_of_encoder_decoders_give_plain_text_or_refuse_drafts(name, lengths):
    model = build(name)
    try:
        inputs = own_inputs(model, lengths) or compare.prompts(lengths)
    except ValueError:
        inputs = compare.prompts(lengths)
    found = {way: outcome.status for way, outcome in compare.compare(model, inputs, WAYS)}
    assert found.pop("tree") == "refused"
    if name in WITHOUT_DRAFTS:
        assert found.pop("none") == "equal"
    assert set(found.values()) == {"refused" if name in WITHOUT_DRAFTS else "equal"}, found


def test_a_cache_without_its_mask_is_refused_as_plain_generation_would_read_the_text_twice():
    inputs = texts(RAGGED)
    out = generate(tiny("t5"), **inputs, **{**CALL, "max_new_tokens": 4})
    with pytest.raises(ValueError, match="decoder_attention_mask must be given with past_key_val"):
        generate(
            tiny("t5"), **inputs, **CALL, decoder_input_ids=out.sequences,
            past_key_values=out.past_key_values,
        )  # fmt: skip
