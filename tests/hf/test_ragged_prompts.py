"""Prompts of very different lengths are read one sequence at a time, without padding."""

from __future__ import annotations

import pytest
import torch
from specdec_hf import generate
from specdec_hf.runner import spec_runner
from support import hf_models
from support.heads import head_folder

RAGGED, ALIKE = (9, 200, 5), (60, 64, 50)
SETTINGS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def forwards(monkeypatch):
    """Shapes of the ids of all forwards of the model."""
    model, shapes = hf_models.build("llama"), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
        with_kwargs=True,
    )
    return model, shapes


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_each_prompt_is_read_alone_where_padding_would_cost_more(forwards, drafter):
    model, shapes = forwards
    inputs = hf_models.prompts(RAGGED)
    plain = model.generate(**inputs, **SETTINGS)
    shapes.clear()
    out = generate(model, **inputs, **SETTINGS, drafter=drafter, self_check=False)
    assert torch.equal(out, plain)
    assert shapes[:3] == [(1, length) for length in RAGGED]
    assert all(rows == 3 for rows, _ in shapes[3:])
    # Prompts of about one length are read together.
    shapes.clear()
    generate(model, **hf_models.prompts(ALIKE), **SETTINGS, drafter=drafter, self_check=False)
    assert shapes[0] == (3, max(ALIKE))


def test_hidden_states_are_those_of_prompts_read_together(tmp_path, monkeypatch):
    model, inputs = hf_models.build("llama", layers=4), hf_models.prompts(RAGGED)
    settings = SETTINGS | {"return_dict_in_generate": True, "output_hidden_states": True}
    settings["drafter"] = f"eagle3:{head_folder(model, tmp_path)}"
    alone = generate(model, **inputs, **settings, guard=False)
    monkeypatch.setattr(spec_runner, "TOKENS_OF_A_PASS", 10**6)
    together = generate(model, **inputs, **settings, guard=False)
    assert torch.equal(alone.sequences, together.sequences)
    assert alone.stats.accepted == together.stats.accepted
    first, other = alone.hidden_states[0][-1], together.hidden_states[0][-1]
    assert first.shape == other.shape
    for b, length in enumerate(RAGGED):
        assert torch.allclose(first[b, -length:], other[b, -length:], atol=1e-5)
