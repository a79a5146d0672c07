"""Each dtype of the table in docs/loop.md, by calls of `generate`.

What decides how much is drafted is in test_clocks.py.
"""

import contextlib
import functools
import re
from pathlib import Path

import pytest
import torch
from specdec_hf import EagleTree, SpeculativeDecoder, generate
from specdec_hf.loop.streaming import run_stream
from support import drafter_cases, encoder_models, hf_models

DOCS = Path(__file__).parents[2] / "docs/loop.md"
EXACT = ("float32", "float64")
COARSE = ("bfloat16", "float16", "autocast")
PACKED = ("packed float32", "packed bfloat16", "packed float16")
RAGGED = (9, 4, 12)


@functools.cache
def model_of(column):
    """Of so few tokens that texts repeat themselves, and drafters are right."""
    dtype = torch.float32 if column == "autocast" else getattr(torch, column.split()[-1])
    return hf_models.build("llama", vocab_size=11).to(dtype)


@functools.cache
def draft_model_of(column):
    return hf_models.with_noise(model_of(column), 0.2)


def decode(column, lengths=RAGGED, **settings):
    """With the forwards and under the autocast of a column."""
    autocast = torch.autocast("cpu", torch.bfloat16)
    with autocast if column == "autocast" else contextlib.nullcontext():
        packed = {} if column in PACKED else {"compile": False}
        return hf_models.decode(model_of(column), lengths, **packed, **settings)


MATCH = {"do_sample": True, "temperature": 0.7, "seed": [5, 6, 7], "rule": "match"}
TARGET_ONLY = {**MATCH, "rule": "target_only"}
# What drafts, and how the same text comes without it.
CALLS = {
    "chains": (lambda column: {"drafter": draft_model_of(column)}, {}),
    "tree": (lambda column: {"drafter": draft_model_of(column), "tree": (2, 1)}, {}),
    "auto": (lambda column: {"drafter": "auto"}, {}),
    "match": (lambda column: {"drafter": draft_model_of(column), **MATCH}, MATCH),
    "target_only": (
        lambda column: {"drafter": draft_model_of(column), "tree": (2, 1), **TARGET_ONLY},
        {**MATCH, "rule": "auto"},
    ),
}


def test_every_dtype_of_the_table_is_here():
    (header,) = re.findall(r"^\| \| (float32.*) \|$", DOCS.read_text(), re.MULTILINE)
    exact, coarse, packed = header.split(" | ")
    assert tuple(exact.split(", ")) == EXACT
    assert tuple(coarse.split(", ")) == (*COARSE, "TF32")  # which needs a GPU
    assert packed == "the same on packed weights"


@pytest.mark.parametrize("column", [*EXACT, *PACKED])
@pytest.mark.parametrize("call", CALLS)
def test_text_with_drafts_is_text_without(column, call):
    make, plain = CALLS[call]
    out = decode(column, **make(column))
    assert out.stats.forwards == ("packed" if column in PACKED else "own")
    assert out.stats.accepted > 0
    assert out.sequences.tolist() == decode(column, **plain).sequences.tolist()


@pytest.mark.parametrize("column", [*EXACT, *COARSE, *PACKED])
def test_the_same_call_gives_the_same_text_and_no_note_of_what_nobody_compared(column):
    for call in ("auto", "match"):
        first, second = (decode(column, **CALLS[call][0](column)) for _ in range(2))
        assert first.sequences.tolist() == second.sequences.tolist()
        assert not any("rounds" in note for note in first.stats.notes)


# float64: the ops read 32 bits at most, so rows are rounded where they leave a model.
@functools.cache
def own_text(lengths=RAGGED):
    """What the model in float64 generates."""
    inputs = hf_models.prompts(lengths, vocab_size=11)
    return model_of("float64").generate(**inputs, max_new_tokens=12, do_sample=False).tolist()


# One of each way in which logits reach an op.
MECHANISMS = {
    "auto", "prompt_lookup", "model", "early_exit", "sparse_cache", "eagle3", "eagle3_chain",
    "dflash", "medusa", "mtp_tree", "mtp, layers", "exit_head", "pass_head", "model, tree",
    "model, EAGLE-2", "staged, tree", "horizontal cascade", "merged, drawn", "distilled",
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        name if name in MECHANISMS else pytest.param(name, marks=pytest.mark.full)
        for name in drafter_cases.ALL
    ],
)
def test_every_drafter_serves_a_model_in_float64(name, tmp_path):
    arguments = drafter_cases.make(name, model_of("float64"), tmp_path)
    out = decode("float64", **arguments)
    assert out.sequences.tolist() == own_text()
    assert out.stats.drafted > 0
    sampled = decode("float64", **arguments, do_sample=True, seed=3)
    assert sampled.stats.drafted > 0


DRAFT_DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OF_ANY = {  # settings under which the text in float64 is that of the model
    **{f"cache {c}": {"cache": c} for c in ("spec", "aligned", "dynamic")},
    **{f"drafts of {c}": {"cache": c, "drafter": torch.float64} for c in ("aligned", "dynamic")},
    **{f"{d} drafts": {"drafter": d} for d in DRAFT_DTYPES},
    **{f"trees of {d}": {"drafter": d, "tree": EagleTree(2, 3, 5)} for d in DRAFT_DTYPES},
}


@pytest.mark.parametrize("name", OF_ANY)
def test_every_cache_and_every_dtype_of_a_draft_model_serves_a_model_in_float64(name):
    settings = {**OF_ANY[name]}
    drafts = "drafter" in settings
    if drafts:
        draft_model = hf_models.with_noise(model_of("float32"), 0.2)
        settings["drafter"] = draft_model.to(settings["drafter"])
    for column in ("float64", "float32") if "cache" not in settings else ("float64",):
        out = decode(column, **settings)
        assert out.sequences.tolist() == own_text()
        assert (out.stats.accepted > 0) == drafts


def test_scores_and_logits_in_float64_are_those_of_generate():
    inputs = hf_models.prompts(RAGGED, vocab_size=11)
    kwargs = {
        "max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True,
        "output_scores": True, "output_logits": True, "output_hidden_states": True,
    }  # fmt: skip
    own = model_of("float64").generate(**inputs, **kwargs)
    out = generate(model_of("float64"), **inputs, **kwargs, drafter="prompt_lookup", guard=False)
    for name in ("scores", "logits"):
        for ours, theirs in zip(getattr(out, name), getattr(own, name), strict=True):
            assert ours.dtype == theirs.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert out.hidden_states[2][1].dtype == own.hidden_states[2][1].dtype == torch.float64


def test_logits_that_float32_cannot_tell_apart_are_a_tie_as_in_generate():
    """The lowest id is taken, also where the other one is larger in float64."""
    model = hf_models.build("llama", vocab_size=12).double()
    with torch.no_grad():
        weight = model.lm_head.weight
        weight[1::2] = weight[::2] * (1 + 1e-12)
    inputs = hf_models.prompts(RAGGED, vocab_size=12)
    own = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    last = model(**inputs).logits[:, -1]
    assert any(last.argmax(-1) % 2), "in float64 an odd token is the largest somewhere"
    assert not any(last.float().argmax(-1) % 2)
    drafter = hf_models.with_noise(model, 0.05)
    for settings in ({"drafter": None}, {"drafter": drafter}, {"drafter": drafter, "tree": (2, 1)}):
        assert hf_models.decode(model, RAGGED, **settings).sequences.tolist() == own.tolist()


def joined(model, prompts, kwargs):
    """The new tokens of prompts that join the batch of the first one."""
    waiting = [{"input_ids": ids, **kwargs} for ids in prompts[1:]]
    decoder = SpeculativeDecoder(drafter=draft_model_of("float64"), guard=False)
    stream = decoder.stream(
        model, prompts[0], **kwargs, source=lambda _: waiting.pop(0) if waiting else None
    )
    steps, _ = run_stream(stream, lambda _: None)
    return [[t for one in steps if one.sequence == b for t in one.tokens] for b in range(3)]


def test_beams_joining_sequences_and_a_prefill_in_float64_are_those_of_generate():
    model, drafter = model_of("float64"), draft_model_of("float64")
    inputs, kwargs = hf_models.prompts(RAGGED, vocab_size=11), {"max_new_tokens": 9}
    kwargs["do_sample"] = False
    want = model.generate(**inputs, **kwargs, num_beams=3).tolist()
    for draft_model in (None, drafter):
        assert (
            generate(model, **inputs, **kwargs, num_beams=3, drafter=draft_model).tolist() == want
        )
    prompts = [torch.tensor([ids]) for ids in ([5, 6, 7, 5, 6], [8], [9, 4, 9, 4])]
    for ids, text in zip(prompts, joined(model, prompts, kwargs), strict=True):
        assert model.generate(ids, **kwargs)[0, ids.shape[1] :].tolist() == text
    embeddings = model.get_input_embeddings()(inputs["input_ids"][:1, -9:])
    own = model.generate(inputs_embeds=embeddings, **kwargs).tolist()
    for name in ("auto", "suffix_automaton"):
        got = generate(model, inputs_embeds=embeddings, **kwargs, drafter=name, guard=False)
        assert got.tolist() == own


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_in_float64(name):
    model = encoder_models.build(name).double()
    inputs = encoder_models.inputs_for(name, RAGGED)
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    own = model.generate(**inputs, **kwargs).tolist()
    for drafter in ("auto", model):
        assert generate(model, **inputs, **kwargs, drafter=drafter, guard=False).tolist() == own
