"""Every argument of ``model.generate`` and of a pipeline reaches a decoder, or is refused by name.

There are two ways in: the folder of examples/hub, to which Transformers hands all arguments, and an
object as ``custom_generate``, which does not see those that change no text.
"""

import inspect
import shutil
from pathlib import Path

import pytest
import torch
from specdec_hf import SpeculativeDecoder, generate
from support import cli_models, hf_models
from support.hf_models import Recorder
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    StoppingCriteriaList,
    dynamic_module_utils,
    pipeline,
)

HUB = Path(__file__).parents[2] / "examples" / "hub"
ENTRIES = ["object", "folder"]
NEW = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
TOKENIZER = cli_models.tokenizer()

pytestmark = pytest.mark.skipif(not HUB.is_dir(), reason="the examples are not here")


@pytest.fixture(autouse=True)
def hub(tmp_path, monkeypatch):
    """A copy of the folder. Transformers copies the code of folders to a place of its own."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return shutil.copytree(HUB, tmp_path / "hub")


def by(entry, hub, **options):
    """The arguments with which a decoder of these options is called."""
    if entry == "folder":
        return {"custom_generate": str(hub), "trust_remote_code": True, **options}
    return {"custom_generate": SpeculativeDecoder(**options)}


def call(entry, model, arguments, hub, **options):
    if entry == "generate":
        return generate(model, **arguments, **options)
    return model.generate(**arguments, **by(entry, hub, **options))


def inputs_of(model):
    return hf_models.prompts((9,), vocab_size=model.config.vocab_size)


class Limits:
    def __init__(self, limits):
        self.limits = limits

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] >= limit for limit in self.limits])


# Argument -> arguments with which plain generation gives another text; a decoder must give it too.
PLAIN = {
    "inputs": {"inputs": torch.arange(1, 8)[None], "input_ids": None, "attention_mask": None},
    "generation_config": {"generation_config": GenerationConfig(repetition_penalty=1.9, **NEW)},
    "logits_processor": {
        "logits_processor": LogitsProcessorList(
            [lambda ids, scores: scores.scatter(1, ids[:, -1:], -torch.inf)]
        )
    },
    "stopping_criteria": {"stopping_criteria": [Limits([14])]},
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda b, ids: list(range(1, hf_models.VOCAB, 2))
    },
    "position_ids": {"position_ids": torch.arange(20, 29)[None]},
    "repetition_penalty": {"repetition_penalty": 1.9},
}
# Argument -> value that a decoder does not serve.
REFUSED = {
    "negative_prompt_ids": torch.ones(1, 3).long(),
    "negative_prompt_attention_mask": torch.ones(1, 3).long(),
    "synced_gpus": True,
}
DRAFTS = {"assistant_model", "tokenizer", "assistant_tokenizer"}
OTHERS = {"streamer", "custom_generate", "trust_remote_code"}


@pytest.mark.parametrize("entry", ["generate", "folder"])
def test_arguments_that_choose_the_drafter_are_used(entry, hub):
    """An assistant of other tokens drafts by its text, which takes all three arguments."""
    model = hf_models.tiny("llama")
    near = call(entry, model, {**inputs_of(model), **NEW, "assistant_model": model}, hub)
    assert near.stats.drafter == "model"
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    other = hf_models.build("llama", vocab_size=cli_models.END + 40)
    arguments = {**TOKENIZER("abc abc abc", return_tensors="pt"), **NEW}
    arguments |= {"assistant_model": other, "tokenizer": TOKENIZER}
    out = call(entry, model, {**arguments, "assistant_tokenizer": TOKENIZER}, hub)
    assert out.stats.drafter == "text"
    assert out.sequences.equal(model.generate(**{**arguments, "assistant_model": None}).sequences)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_streamer_gets_what_plain_generation_gives_it(entry, hub):
    model, theirs, ours = hf_models.tiny("llama"), Recorder(), Recorder()
    arguments = {**inputs_of(model), **NEW}
    model.generate(**arguments, streamer=theirs)
    call(entry, model, arguments, hub, drafter="prompt_lookup", streamer=ours)
    assert ours.calls == theirs.calls


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_that_is_not_served_is_refused(name, hub):
    model = hf_models.tiny("llama")
    with pytest.raises(ValueError, match=f"{name}.* is not supported"):
        call("folder", model, {**inputs_of(model), **NEW, name: REFUSED[name]}, hub)


def test_what_transformers_hands_to_no_object_changes_no_text(hub):
    model, inputs = hf_models.tiny("llama"), inputs_of(hf_models.tiny("llama"))
    dropped = {**REFUSED, "assistant_model": model, "streamer": Recorder(), "tokenizer": TOKENIZER}
    out = call("object", model, {**inputs, **NEW, **dropped}, hub, drafter="prompt_lookup")
    assert out.sequences.equal(model.generate(**inputs, **NEW).sequences)
    assert out.stats.drafter == "prompt_lookup"
    with pytest.raises(ValueError, match=r"guidance_scale=2.0 is not supported"):
        call("object", model, {**inputs, **NEW, **dropped, "guidance_scale": 2.0}, hub)


def test_the_tables_name_every_argument_of_model_generate():
    removed = {}

    class Spy(dict):
        def pop(self, name, default=None):
            removed[name] = default

    model = hf_models.tiny("llama")
    model._extract_generation_mode_kwargs(None, Spy(), None, None, None)
    named = inspect.signature(GenerationMixin.generate).parameters.keys() - {"self", "kwargs"}
    known = PLAIN.keys() - {"position_ids", "repetition_penalty"}
    assert (
        named | removed.keys() | {"trust_remote_code"} == known | REFUSED.keys() | DRAFTS | OTHERS
    )


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", *ENTRIES])
@pytest.mark.parametrize("name", PLAIN)
def test_an_argument_changes_the_text_as_in_plain_generation(name, entry, hub):
    model = hf_models.tiny("gpt2")
    plain = {**inputs_of(model), **NEW}
    given = {k: v for k, v in {**plain, **PLAIN[name]}.items() if v is not None}
    if name == "generation_config":
        given = {k: v for k, v in given.items() if k not in NEW}
    expected = model.generate(**given).sequences
    assert not expected.equal(model.generate(**plain).sequences), "it changes nothing here"
    out = call(entry, model, given, hub, drafter=hf_models.perturbed("gpt2"))
    assert out.sequences.equal(expected)


def test_a_folder_takes_the_options_of_the_loop(hub):
    model = hf_models.tiny("llama")
    sampled = {**inputs_of(model), **NEW, "do_sample": True, "temperature": 0.8}
    options = {"drafter": hf_models.perturbed("llama"), "gamma": 3, "rule": "match", "seed": 5}
    out = call("folder", model, sampled, hub, **options)
    assert out.sequences.equal(call("object", model, sampled, hub, **options).sequences)
    assert out.stats.seeds == [5]
    assert out.stats.accepted > 0
    with pytest.raises(
        ValueError, match="draftre is no argument of generate; did you mean 'drafter'"
    ):
        call("folder", model, sampled, hub, draftre="prompt_lookup")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(**sampled, custom_generate=str(hub), trust_remote_code=False)


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.full), "t5"])
def test_a_saved_model_with_the_folder_generates_speculatively(family, hub, tmp_path):
    made, load, inputs = hf_models.tiny("llama"), AutoModelForCausalLM, hf_models.prompts((9, 5))
    if family == "t5":
        made, load = hf_models.tiny("t5"), AutoModelForSeq2SeqLM
        inputs = hf_models.texts((9, 5))
    made.save_pretrained(tmp_path / "model")
    shutil.copytree(hub / "custom_generate", tmp_path / "model" / "custom_generate")
    model = load.from_pretrained(tmp_path / "model", trust_remote_code=True)
    expected = made.generate(**inputs, **NEW).sequences
    out = model.generate(**inputs, **NEW, drafter="prompt_lookup")
    assert out.sequences.equal(expected)
    assert out.stats.drafter == "prompt_lookup"
    ids = inputs.pop("input_ids")
    assert model.generate(ids, **inputs, **NEW).sequences.equal(expected)
    untrusted = load.from_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="drafter"):
        untrusted.generate(ids, **inputs, **NEW, drafter="prompt_lookup")


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("entry", ["generate", *ENTRIES])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_stop_strings_end_the_text_as_in_plain_generation(family, entry, hub):
    build = hf_models.build if family == "llama" else hf_models.encoder_decoder
    model = build(family, vocab_size=cli_models.END + 1)
    others = [t for t in range(cli_models.END + 1) if not TOKENIZER.decode(t).isalnum()]
    plain = {**TOKENIZER("abc abc", return_tensors="pt"), **NEW, "suppress_tokens": others}
    whole = model.generate(**plain).sequences
    stop = {"stop_strings": TOKENIZER.decode(whole[0, -7]), "tokenizer": TOKENIZER}
    expected = model.generate(**plain, **stop).sequences
    assert expected.shape[1] < whole.shape[1]
    if entry == "generate":
        out = generate(model, **plain, **stop, drafter="prompt_lookup")
    elif entry == "object":  # Transformers looks for the tokenizer that it drops
        with pytest.raises(ValueError, match=r"stop strings, .* could not locate a tokenizer"):
            call(entry, model, {**plain, **stop}, hub)
        out = call(entry, model, plain, hub, **stop, drafter="prompt_lookup")
    else:
        out = call(entry, model, {**plain, **stop}, hub, drafter="prompt_lookup")
    assert out.sequences.equal(expected)


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_criterion_may_answer_for_each_sequence_of_its_batch(entry, hub):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 4, 12))
    limits = [14, 20, 17]
    kwargs = {**inputs, "max_new_tokens": 20, "do_sample": False}
    kwargs["stopping_criteria"] = StoppingCriteriaList([Limits(limits)])
    expected = model.generate(**kwargs, eos_token_id=hf_models.VOCAB - 1)
    for drafter in (None, hf_models.perturbed("llama")):
        got = call(entry, model, kwargs, hub, drafter=drafter)
        assert [(row != hf_models.PAD)[12:].sum() + 12 for row in got] == limits
        for b, limit in enumerate(limits):
            assert got[b, :limit].equal(expected[b, :limit])
    kwargs["stopping_criteria"] = StoppingCriteriaList([Limits([30, 30])])
    with pytest.raises(ValueError, match="stopping_criteria must answer with 1 or 3 bools, got 2"):
        call(entry, model, kwargs, hub)


PROMPTS = ["the cat sat on the cat", "abc", "x y x y x"]
GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize("entry", ENTRIES)
def test_a_pipeline_gives_the_text_of_plain_generation_in_batches_and_chats(hub, entry):
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    pipe = pipeline("text-generation", model=model, tokenizer=TOKENIZER, device="cpu")
    drafts = by(entry, hub, drafter=hf_models.with_noise(model, 0.05), guard=False)
    chats = [[{"role": "user", "content": "the cat"}]] * 2
    for given in (PROMPTS, chats):
        expected = pipe(given, **GREEDY)
        for size in (1, 2):
            assert pipe(given, batch_size=size, **GREEDY, **drafts) == expected
