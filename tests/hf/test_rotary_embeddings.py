"""Rotary embeddings that turn all tokens of a forward by its largest place.

Without drafts a forward reads one place further than the one before it; text with drafts must be
turned where that text is.
"""

import functools

import pytest
import torch
from support import drafter_proof, hf_models
from transformers import Phi3Config, Phi3ForCausalLM

BOUND, CONTEXT = 24, 48
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
KINDS = {
    "longrope": {**FACTORS, "original_max_position_embeddings": BOUND, "factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": BOUND},
    "llama3": {
        "factor": 2.0, "original_max_position_embeddings": BOUND, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}  # fmt: skip


@functools.cache
def model_of(kind):
    if kind == "phi3":  # which reads the text again where it is turned
        rope = {"rope_type": "longrope", "rope_theta": 1e4, **KINDS["longrope"]}
        torch.manual_seed(0)
        return Phi3ForCausalLM(
            Phi3Config(
                vocab_size=11, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
                original_max_position_embeddings=BOUND, rope_parameters=rope, pad_token_id=0,
                bos_token_id=None, eos_token_id=None, initializer_range=0.3, sliding_window=None,
            )
        ).eval()  # fmt: skip
    rope = {"rope_type": kind, "rope_theta": 1e4, **KINDS[kind]}
    return hf_models.build("llama", vocab_size=11, context=CONTEXT, rope_parameters=rope)


def decode(kind, lengths, **settings):
    """Greedy text up to the context, with a draft model if no other drafter is named."""
    model = model_of(kind)
    settings.setdefault("drafter", hf_models.with_noise(model, 0.1))
    return hf_models.decode(model, lengths, max_new_tokens=CONTEXT - max(lengths), **settings)


def own_text(kind, lengths):
    inputs, new = hf_models.prompts(lengths, vocab_size=11), CONTEXT - max(lengths)
    return model_of(kind).generate(**inputs, max_new_tokens=new, do_sample=False).tolist()


@pytest.mark.parametrize("kind", [*KINDS, "phi3"])
@pytest.mark.parametrize("lengths", [(9,), (BOUND,), (30,), (9, 4, 12), (20, 30)], ids=str)
def test_text_with_drafts_turns_where_plain_text_does(kind, lengths):
    own = own_text(kind, lengths)
    for settings in ({}, {"tree": (2, 1)}, {"drafter": "auto"}, {"cache": "aligned"}):
        out = decode(kind, lengths, **settings)
        assert out.sequences.tolist() == own
        assert out.stats.drafted > 0
    if kind not in KINDS or kind == "longrope":
        turns = any("turned the angles" in note for note in out.stats.notes)
        assert turns == (len(lengths) > 1 and max(lengths) < BOUND)


ANY = ("early_exit", "pass_head", "token_recycling", "lookahead")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(
            ("longrope", name)
            for name in (*ANY, "sparse_cache", "eagle3", "merged", "model, EAGLE-2")
        ),
        *(("phi3", name) for name in ANY),
    ],
)
def test_drafters_of_every_shape_do(kind, name, tmp_path):
    out = decode(kind, (9,), **drafter_proof.make(name, model_of(kind), tmp_path))
    assert out.sequences.tolist() == own_text(kind, (9,))
    assert out.stats.drafted > 0


def test_a_text_beyond_the_context_leaves_nothing_in_later_calls():
    model, inputs = model_of("dynamic"), hf_models.prompts((9,), vocab_size=11)
    expected = own_text("dynamic", (9,))
    for drafter in (None, "prompt_lookup", "layers:1"):
        model.generate(**inputs, max_new_tokens=CONTEXT, do_sample=False)
        out = decode("dynamic", (9,), drafter=drafter)
        assert out.sequences.tolist() == expected
        assert any("rotary embedding 'dynamic' goes by the len" in note for note in out.stats.notes)
