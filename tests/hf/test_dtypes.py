"""Each dtype of the table in docs/loop.md, by calls of `generate`.

What decides how much is drafted is in test_clocks.py.
"""

import contextlib
import functools

import pytest
import torch
from specdec_hf import generate
from support import drafter_proof, hf_models

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
    inputs = hf_models.prompts(lengths, vocab_size=11)
    return model_of("float64").generate(**inputs, max_new_tokens=12, do_sample=False).tolist()


# One of each way in which logits reach an op.
MECHANISMS = [
    "auto", "prompt_lookup", "model", "early_exit", "sparse_cache", "eagle3", "eagle3_chain",
    "dflash", "medusa", "mtp_tree", "mtp, layers", "exit_head", "pass_head", "model, tree",
    "model, EAGLE-2", "staged, tree", "horizontal cascade", "merged, drawn", "distilled",
]  # fmt: skip


@pytest.mark.parametrize("name", MECHANISMS)
def test_drafters_of_every_mechanism_serve_a_model_in_float64(name, tmp_path):
    arguments = drafter_proof.make(name, model_of("float64"), tmp_path)
    out = decode("float64", **arguments)
    assert out.sequences.tolist() == own_text()
    assert out.stats.drafted > 0
    sampled = decode("float64", **arguments, do_sample=True, seed=3)
    assert sampled.stats.drafted > 0


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
