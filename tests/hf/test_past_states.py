"""The caches that callers pass in: their convolution states lie in dicts, which a copy shares."""

import copy

import pytest
import torch
from specdec_hf import generate

from bench.tiny_models.build import build


@pytest.mark.parametrize("drafter", [None, "prompt_lookup"])
def test_the_convolution_states_of_a_callers_cache_are_not_written(drafter):
    model = build("Lfm3ForCausalLM")
    ids = torch.randint(10, 100, (1, 9), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        past = model(ids[:, :-1], use_cache=True).past_key_values
    states = [layer.conv_states for layer in past.layers if hasattr(layer, "conv_states")]
    before = copy.deepcopy(states)
    options = dict(max_new_tokens=12, do_sample=False)
    plain = model.generate(ids, past_key_values=copy.deepcopy(past), **options)
    for _ in range(2):  # a cache that was written would change the second text
        text = generate(model, ids, past_key_values=past, drafter=drafter, **options)
        assert text.tolist() == plain.tolist()
    assert states
    for now, then in zip(states, before, strict=True):
        assert all(torch.equal(now[i], then[i]) for i in then)
