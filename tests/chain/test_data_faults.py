"""Data that is legal in shape and wrong or extreme in value: a status, never a wrong id."""

from __future__ import annotations

import pytest
import torch
from support.providers import ALL_PROVIDERS, provider, sample, verify


@pytest.mark.parametrize("name", ALL_PROVIDERS)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_draft_temperature_out_of_range_is_a_bad_parameter(name, bad):
    target, tokens = torch.zeros(2, 2, 5), torch.tensor([[1], [2]])
    law = (torch.zeros(2, 1).double(), torch.zeros(2, 1), torch.tensor([bad, 1.0]))
    out = verify(provider("verify_chain", name), target, tokens, target[:, :1], sampled=law)
    assert out[2].tolist()[0] == 16
    assert out[0][0].tolist() == [-1, -1]
    assert int(out[2][1]) & 16 == 0


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_nan_draft_threshold_is_a_draft_fault(name):
    target, tokens = torch.zeros(1, 2, 5), torch.tensor([[1]])
    law = (torch.zeros(1, 1).double(), torch.full((1, 1), float("nan")), 1.0)
    out = verify(provider("verify_chain", name), target, tokens, target[:, :1], sampled=law)
    assert out[2].tolist() == [2]
    assert 0 <= int(out[0][0, 0]) < 5


@pytest.mark.parametrize("name", ALL_PROVIDERS)
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_extreme_uniforms_find_a_token_where_whole_tiles_vanish(name, u):
    target = torch.full((1, 1, 8192), -95.0)
    target[0, 0, 5000] = 0.0
    none = torch.empty(1, 0, dtype=torch.int64)
    coins = torch.tensor([[u]], dtype=torch.float64)
    out = verify(provider("verify_chain", name), target, none, uniforms=coins)
    assert out[2].tolist() == [0]
    # The reference's float64 sees the weight of e^-95 that float32 cannot.
    assert int(out[0]) == 5000 or name == "reference"


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_two_zeros_tie_at_a_threshold(name):
    logits = torch.tensor([[1.0, 0.0, *[-0.0] * 100, -5.0]])
    out = sample(provider("sample", name), logits, top_k=2, top_p=0.5)
    assert float(out[3]) == 0.0
