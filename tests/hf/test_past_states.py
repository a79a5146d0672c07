"""The caches that callers pass in are never written, whatever a copy of them shares."""

import copy

import pytest
import torch
from specdec_hf import generate
from support import hf_models

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


def test_keys_of_a_callers_batch_with_padding_everywhere_are_not_moved():
    model = hf_models.tiny("llama")
    ids = torch.tensor([[0, 0, 7, 8, 9, 10], [0, 5, 6, 7, 8, 9]])
    mask = (ids > 0).long()
    with torch.no_grad():
        past = model(ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
    before = [layer.keys.clone() for layer in past.layers]
    texts = [
        generate(
            model, ids, attention_mask=mask, past_key_values=past, cache="aligned",
            drafter="prompt_lookup", max_new_tokens=6, do_sample=False,
        ).tolist()
        for _ in range(2)
    ]  # fmt: skip
    assert texts[0] == texts[1]
    assert all(layer.keys.equal(keys) for layer, keys in zip(past.layers, before, strict=True))
