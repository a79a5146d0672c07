"""Drafter ``layers:N``: the target's first layers as a draft model of their own."""

import gc
import weakref

import pytest
import torch
from specdec_hf import EagleTree, LayersDrafter, TrieTree, generate
from support import encoder_models, hf_models

GREEDY = {"max_new_tokens": 12, "do_sample": False}


@pytest.mark.parametrize(
    "options",
    [
        {"drafter": "layers:1", "cache": "dynamic"},
        {"drafter": "layers:1", "tree": (2, 1)},
        {"drafter": "layers:1", "tree": EagleTree(2, 3, 5)},
        {"drafter": ["layers:1", "prompt_lookup"], "tree": TrieTree(2, 3, 5)},
        {"drafter": LayersDrafter(1)},
    ],
    ids=["dynamic", "tree", "eagle", "trie", "drafter"],
)
def test_the_first_layers_draft_chains_and_trees(options):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((7,))
    out = generate(model, **inputs, **GREEDY, **options, guard=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, model.generate(**inputs, **GREEDY))
    assert out.stats.drafted > 0


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gemma2"])
def test_a_config_that_lists_its_layers_gets_a_shorter_list(name):
    model, inputs = hf_models.tiny(name), hf_models.prompts((7,))
    out = generate(
        model, **inputs, **GREEDY, drafter="layers:1", guard=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, model.generate(**inputs, **GREEDY))
    assert out.stats.drafted > 0


def test_the_first_layers_draft_beams():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((7,))
    beams = {**GREEDY, "num_beams": 2}
    out = generate(
        model, **inputs, **beams, drafter="layers:1", guard=False, return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, model.generate(**inputs, **beams))
    assert (out.stats.drafter, out.stats.drafted > 0) == ("layers", True)


def draft_model(model, text="layers:1"):
    drafter = LayersDrafter.from_text(text.partition(":")[2])
    drafter.draft_for(model)
    return drafter.model


def test_calls_share_the_draft_model_until_weights_are_moved():
    """So that its self-check, its graphs and its measured costs are those of earlier calls."""
    model, inputs = hf_models.build("llama"), hf_models.prompts((7,))
    generate(model, **inputs, **GREEDY, drafter="layers:1")
    small = draft_model(model)
    assert draft_model(model) is small
    assert draft_model(model, "layers:2") is not small
    assert {p.data_ptr() for p in small.parameters()} < {p.data_ptr() for p in model.parameters()}
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert draft_model(model) is small
    model.to(torch.bfloat16)
    moved = draft_model(model)
    assert moved is not small
    assert moved.dtype == torch.bfloat16
    generate(model, **inputs, **GREEDY, drafter="layers:1")
    watched = weakref.ref(model)
    del model, small, moved
    gc.collect()
    assert watched() is None


def test_a_weight_with_other_memory_makes_another_draft_model():
    model = hf_models.build("llama")
    small = draft_model(model)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)
    assert draft_model(model) is not small
    assert torch.equal(draft_model(model).lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("make", "text", "message"),
    [
        (lambda: hf_models.tiny("llama"), "layers:9", r"must have N in \[1, 2\], got 9"),
        (lambda: hf_models.tiny("llama"), "layers:x", "with a number of layers, got 'x'"),
        (
            lambda: hf_models.tiny("llama"),
            "layers",
            r"drafter must be layers:N\[,temperature=\.\.\], got 'layers'",
        ),
        (lambda: encoder_models.tiny("t5"), "layers:1", "needs a model of text alone, got 't5'"),
    ],
    ids=["too-many", "no-number", "none", "encoder"],
)
def test_what_makes_no_draft_model_is_refused(make, text, message):
    with pytest.raises(ValueError, match=message):
        generate(make(), **hf_models.prompts((5,)), drafter=text, max_new_tokens=2)
