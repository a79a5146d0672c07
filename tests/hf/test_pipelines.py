"""Transformers' text-generation pipeline with a decoder, given as an object or as a folder."""

import shutil

import pytest
from specdec_hf import SpeculativeDecoder
from support import cli_models, hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT
from transformers import dynamic_module_utils, pipeline

HUB = ROOT / "examples" / "hub"
PROMPTS = ["the cat sat on the cat", "abc", "x y x y x"]
CHAT = [{"role": "user", "content": "the cat sat"}]
GREEDY = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "temperature": 0.8}
END = cli_models.END

pytestmark = pytest.mark.skipif(not HUB.is_dir(), reason="the examples are not here")


@pytest.fixture
def model():
    return hf_models.build("llama", vocab_size=END + 1)


@pytest.fixture
def pipe(model):
    return pipeline("text-generation", model=model, tokenizer=cli_models.tokenizer(), device="cpu")


@pytest.fixture(params=["object", "folder"])
def arguments(request, monkeypatch, tmp_path):
    """Makes the arguments by which a pipeline calls a decoder of some options."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    hub = shutil.copytree(HUB, tmp_path / "hub")

    def made(**options):
        if request.param == "object":
            return {"custom_generate": SpeculativeDecoder(**options)}
        return {"custom_generate": str(hub), "trust_remote_code": True, **options}

    return made


@pytest.mark.slow
@pytest.mark.covering(test=1)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_batches_give_the_text_of_plain_generation(pipe, arguments, size):
    expected = [pipe(prompt, **GREEDY)[0] for prompt in PROMPTS]
    drafts = arguments(drafter=hf_models.with_noise(pipe.model, 0.05), guard=False)
    got = pipe(PROMPTS, batch_size=size, **GREEDY, **drafts)
    assert [one["generated_text"] for (one,) in got] == [one["generated_text"] for one in expected]


@pytest.mark.covering(test=1)
@pytest.mark.slow
def test_forms_of_the_result(pipe, arguments):
    options = arguments(drafter="prompt_lookup")
    for form in (
        {"return_full_text": False},
        {"return_full_text": True},
        {"return_tensors": True},
        {"prefix": "the cat "},
        {"num_return_sequences": 1, "return_dict_in_generate": True},
    ):
        expected = pipe("the cat sat", **GREEDY, **form)
        got = pipe("the cat sat", **GREEDY, **form, **options)
        assert {k: got[0][k] for k in expected[0]} == expected[0]


@pytest.mark.covering(test=1)
@pytest.mark.slow
def test_a_chat_is_answered(pipe, arguments):
    options = arguments(drafter="prompt_lookup")
    for chat in (CHAT, [*CHAT, {"role": "assistant", "content": "on"}]):
        assert pipe(chat, **GREEDY, **options) == pipe(chat, **GREEDY)
    assert pipe([CHAT, CHAT], **GREEDY, **options, batch_size=2) == pipe([CHAT, CHAT], **GREEDY)


@pytest.mark.covering(test=1)
def test_a_seed_repeats_the_samples_of_a_pipeline(pipe, arguments):
    """Sampling is the pipeline's default."""
    options = arguments(drafter="prompt_lookup", rule="match", seed=3)
    first = pipe(PROMPTS[0], **SAMPLED, num_return_sequences=3, **options)
    assert first == pipe(PROMPTS[0], **SAMPLED, num_return_sequences=3, **options)
    assert len({one["generated_text"] for one in first}) == 3
    plain = arguments(drafter=None, rule="match", seed=3)
    assert first == pipe(PROMPTS[0], **SAMPLED, num_return_sequences=3, **plain)


def test_the_assistant_of_a_pipeline_drafts(model, arguments):
    """The pipeline keeps it and hands it to every call."""
    tokenizer, calls = cli_models.tokenizer(), []
    near = hf_models.with_noise(model, 0.05)
    forward = near.forward
    near.forward = lambda *args, **kwargs: calls.append(1) or forward(*args, **kwargs)
    expected = pipeline("text-generation", model=model, tokenizer=tokenizer)(PROMPTS[0], **GREEDY)
    options = arguments(guard=False)
    helped = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, assistant_model=near,
        assistant_tokenizer=tokenizer,
    )  # fmt: skip
    assert helped(PROMPTS[0], **GREEDY, **options) == expected
    assert calls


def test_a_stop_sequence_needs_the_folder_or_a_decoder_that_has_it(pipe, arguments):
    others = [t for t in range(END + 1) if not pipe.tokenizer.decode(t).isalnum()]
    letters = {**GREEDY, "suppress_tokens": others}
    text = pipe("abc", **letters, return_full_text=False)[0]["generated_text"]
    expected = pipe("abc", **letters, stop_sequence=text[5])
    assert len(expected[0]["generated_text"]) < len("abc" + text)
    options = arguments(drafter="prompt_lookup")
    if isinstance(options["custom_generate"], str):
        assert pipe("abc", **letters, stop_sequence=text[5], **options) == expected
        return
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        pipe("abc", **letters, stop_sequence=text[5], **options)
    decoder = SpeculativeDecoder("prompt_lookup", tokenizer=pipe.tokenizer, stop_strings=text[5])
    assert pipe("abc", **letters, custom_generate=decoder) == expected
