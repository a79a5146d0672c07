"""What encoder-decoders refuse by name, and faults that the self-check of their caches finds."""

import pytest
import torch
from specdec_hf import TrieTree, check_model, generate
from specdec_hf.runner.fit import forget_fits
from specdec_hf.runner.plain_runner import PlainRunner
from support import encoder_models
from support.encoder_models import texts, tiny

from bench.tiny_models.compare import OracleDrafter

NEW = 15
ONE, RAGGED = (9,), (9, 5, 7)
CALL = {
    "max_new_tokens": NEW, "do_sample": False, "guard": False, "return_dict_in_generate": True,
}  # fmt: skip


REFUSED = {
    "tree": (
        {"drafter": "prompt_lookup", "tree": TrieTree(2, 3)},
        "cannot be used with a tree of drafts; cache='spec': its decoder also caches the keys of",
    ),
    "spec": ({"drafter": "prompt_lookup", "cache": "spec"}, "cache='spec': its decoder also"),
    "positions": ({"decoder_position_ids": torch.ones(3, 1)}, "decoder_position_ids"),
    "states": ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
    "beams": (
        {"num_beams": 2, "drafter": encoder_models.perturbed("t5")},
        "T5ForConditionalGeneration cannot be used with a tree of drafts",
    ),
    "mask": (
        {
            "decoder_input_ids": torch.full((3, 3), 2),
            "decoder_attention_mask": torch.tensor([[1, 0, 1]] * 3),
        },
        "decoder_attention_mask must hide columns on the left only",
    ),
    "list": ({"input_ids": [[1, 2]]}, "input_ids must be a torch.Tensor, got list"),
    "name": ({"temprature": 1.0}, "temprature"),
    "type": ({"max_new_tokens": "5"}, "max_new_tokens must be an integer, got '5'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    options, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        generate(tiny("t5"), **{**texts(RAGGED), **CALL, **options})


def test_a_cache_without_its_mask_is_refused_as_plain_generation_would_read_the_text_twice():
    inputs = texts(RAGGED)
    out = generate(tiny("t5"), **inputs, **{**CALL, "max_new_tokens": 4})
    with pytest.raises(ValueError, match="decoder_attention_mask must be given with past_key_val"):
        generate(
            tiny("t5"), **inputs, **CALL, decoder_input_ids=out.sequences,
            past_key_values=out.past_key_values,
        )  # fmt: skip


def test_check_model_reads_a_text_of_its_own():
    assert check_model(tiny("t5")).fitting() == ["aligned", "dynamic"]
    assert check_model(tiny("bart")).fitting() == ["dynamic"]
    with pytest.raises(ValueError, match="whose encoder reads input_features"):
        check_model(tiny("whisper"))


def shifted(cache):
    """A roll back that keeps one token too many."""
    whole = cache._roll_back
    cache._roll_back = lambda kept: whole(kept + (kept < cache._held))


def shortened(cache):
    """A roll back that also cuts the keys of cross-attention."""
    whole = cache._roll_back

    def roll_back(kept):
        whole(kept)
        if cache.cache is not None and kept.any():
            for layer in cache.cache.cross_attention_cache.layers:
                layer.crop(-1)

    cache._roll_back = roll_back


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("fault", [shifted, shortened])
@pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=str)
@pytest.mark.parametrize("name", encoder_models.TEXT_MODELS)
def test_a_wrong_roll_back_is_found_by_the_check_and_changes_the_text(
    monkeypatch, name, lengths, fault
):
    class Wrong(PlainRunner):
        def __init__(self, model, batch_size, kind="dynamic", **options):
            super().__init__(model, batch_size, kind, **options)
            if kind in ("dynamic", "aligned"):
                fault(self)

    monkeypatch.setattr("specdec_hf.runner.make.PlainRunner", Wrong)
    inputs = texts(lengths)
    expected = tiny(name).generate(**inputs, max_new_tokens=NEW, do_sample=False)

    def call(**options):
        drafter = OracleDrafter(expected[:, 1:].numpy())
        return generate(tiny(name), **inputs, **CALL, drafter=drafter, **options)

    forget_fits()
    try:
        with pytest.raises(ValueError, match="cannot be used with drafts"):
            call()
    finally:
        forget_fits()
    try:
        text = call(self_check=False).sequences
    except RuntimeError:
        return  # the mask of the encoder no longer fits
    assert text.tolist() != expected.tolist()
