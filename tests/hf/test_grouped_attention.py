"""The attention of packed twins: heads that share keys read them once."""

from __future__ import annotations

import pytest
import torch
from specdec_hf.runner.packed import attention, decoder_layer
from support import hf_models
from transformers.integrations.sdpa_attention import sdpa_attention_forward

GROUPS, KEYS, SLOTS, SIZE = 3, 2, 11, 16


class Module(torch.nn.Module):
    num_key_value_groups = GROUPS
    is_causal = True


def inputs(rows, size, dtype=torch.float32, heads=1):
    generator = torch.Generator().manual_seed(rows + size)
    query = torch.randn(rows, size, GROUPS * KEYS, SIZE, generator=generator).transpose(1, 2)
    buffers = torch.randn(2, rows, KEYS, 2 * SLOTS, SIZE, generator=generator)
    mask = torch.rand(rows, heads, size, SLOTS, generator=generator) < 0.6
    mask[..., 0] = True
    key, value = buffers.to(dtype)[..., :SLOTS, :]
    return query.to(dtype), key, value, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (1, 5), (3, 1), (3, 4)])
@pytest.mark.parametrize("additive", [False, True])
def test_it_is_transformers_own(rows, size, dtype, additive):
    query, key, value, mask = inputs(rows, size, dtype)
    if additive:
        mask = torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)
    for scaling in (None, 0.3):
        given = Module(), query, key, value, mask, 0.0, scaling
        ours, own = attention.attend(*given)[0], sdpa_attention_forward(*given)[0]
        assert ours.shape == own.shape
        assert ours.is_contiguous()
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        assert torch.allclose(ours.float(), own.float(), atol=tolerance)


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_packed_twin_attends_so(activation, monkeypatch):
    """In decoder layers that run by ops of their own, and as their classes say."""
    attended, attend = [], attention.attend

    def spied(*args, **kwargs):
        attended.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setitem(attention.AttentionInterface._global_mapping, attention.NAME, spied)
    monkeypatch.setattr(decoder_layer, "attend", spied)
    packed = hf_models.decode(hf_models.build("llama", hidden_act=activation)).stats.packed
    assert (packed.reason, packed.fused) == ("", 2 if activation == "silu" else 0)
    assert attended
