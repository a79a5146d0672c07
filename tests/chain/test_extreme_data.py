"""Values that are extreme, and rows far apart in memory: they give the right token."""

from __future__ import annotations

import resource

import pytest
import torch
from proofs import assert_close, assert_outputs_equal
from support.providers import ALL_PROVIDERS, HEAVY_PROVIDERS, provider, sample, verify

by_provider = pytest.mark.parametrize("name", ALL_PROVIDERS)
NONE = torch.empty(1, 0, dtype=torch.int64)


@by_provider
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_extreme_uniforms_find_the_token_where_the_weights_of_whole_tiles_underflow(name, u):
    target = torch.full((1, 1, 8192), -95.0)
    target[0, 0, 5000] = 0.0
    uniforms = torch.tensor([[u]], dtype=torch.float64)
    out = verify(provider("verify_chain", name), target, NONE, uniforms=uniforms)
    assert out[2].tolist() == [0]
    # In the reference's float64, weights of e^-95 do not underflow as they do in float32.
    assert int(out[0]) == 5000 or name == "reference"


@by_provider
def test_positive_and_negative_zero_tie_at_a_threshold(name):
    logits = torch.tensor([[1.0, 0.0, *[-0.0] * 100, -5.0]])
    assert float(sample(provider("sample", name), logits, top_k=2, top_p=0.5)[3]) == 0.0


@by_provider
def test_a_probability_below_the_smallest_normal_float_keeps_its_value(name):
    """A high temperature makes it likely."""
    target = torch.tensor([[[1e-40, 1.0]]])
    got = verify(provider("verify_chain", name), target, NONE, kind="probs", temperature=50.0,
                 uniforms=torch.zeros(1, 1, dtype=torch.float64))  # fmt: skip
    assert got[0].tolist() == [[0]]
    want = (target.double().log() / 50).log_softmax(-1)[0, :, 0]
    assert_close("logprob", got[3][0], want.float(), atol=1e-5)


@pytest.mark.parametrize("name", HEAVY_PROVIDERS[1:])
def test_element_offsets_beyond_32_bits_do_not_wrap(name):
    """5 rows, 2^30 + 7 elements apart: the last starts at element 4,294,967,324, byte 8.6e9.

    The memory is reserved, and only the rows are read or written.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    v, stride = 33, 2**30 + 7
    memory = torch.empty(4 * stride + v, dtype=torch.float16)
    rows = memory.as_strided((5, v), (stride, 1))
    near = torch.randn(5, v, generator=torch.Generator().manual_seed(3)).half()
    rows.copy_(near)
    draw, at = provider("sample", name), torch.arange(5)
    assert_outputs_equal("sample", *(sample(draw, x, positions=at) for x in (rows, near)))
    op = provider("verify_chain", name)
    drafts = near[:4].float().argmax(-1)[None]
    target_indptr = torch.tensor([0, 5], dtype=torch.int32)
    for rule in ("token", "block", "match", "greedy"):
        far, close = (verify(op, x[None], drafts, x[None, :4], rule=rule) for x in (rows, near))
        assert_outputs_equal("verify_chain", far, close)
        assert int(far[1]) > 0
        ragged = verify(op, rows, drafts, rows[:4], rule=rule, target_indptr=target_indptr)
        assert_outputs_equal("verify_chain", ragged, far)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2_000_000  # kB: the pages between the rows stayed untouched
