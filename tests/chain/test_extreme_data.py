"""Values that are out of range or extreme, and rows far apart in memory, in tensors of legal shape.

They give a status or the right token, and never an id out of range.
"""

from __future__ import annotations

import resource

import pytest
import torch
from support.providers import (
    ALL_PROVIDERS,
    HEAVY_PROVIDERS,
    assert_close,
    assert_outputs_equal,
    provider,
    sample,
    verify,
)


@pytest.mark.parametrize("name", ALL_PROVIDERS)
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_draft_temperature_out_of_range_sets_the_parameter_bit_of_its_sequence_only(name, bad):
    target, tokens = torch.zeros(2, 2, 5), torch.tensor([[1], [2]])
    sampled = (torch.zeros(2, 1).double(), torch.zeros(2, 1), torch.tensor([bad, 1.0]))
    out = verify(provider("verify_chain", name), target, tokens, target[:, :1], sampled=sampled)
    assert out[2].tolist()[0] == 16
    assert out[0][0].tolist() == [-1, -1]
    assert int(out[2][1]) & 16 == 0


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_nan_draft_threshold_sets_the_draft_bit(name):
    target, tokens = torch.zeros(1, 2, 5), torch.tensor([[1]])
    sampled = (torch.zeros(1, 1).double(), torch.full((1, 1), float("nan")), 1.0)
    out = verify(provider("verify_chain", name), target, tokens, target[:, :1], sampled=sampled)
    assert out[2].tolist() == [2]
    assert 0 <= int(out[0][0, 0]) < 5


@pytest.mark.parametrize("name", ALL_PROVIDERS)
@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_extreme_uniforms_find_the_token_where_the_weights_of_whole_tiles_underflow(name, u):
    target = torch.full((1, 1, 8192), -95.0)
    target[0, 0, 5000] = 0.0
    none = torch.empty(1, 0, dtype=torch.int64)
    uniforms = torch.tensor([[u]], dtype=torch.float64)
    out = verify(provider("verify_chain", name), target, none, uniforms=uniforms)
    assert out[2].tolist() == [0]
    # In the reference's float64, weights of e^-95 do not underflow as they do in float32.
    assert int(out[0]) == 5000 or name == "reference"


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_positive_and_negative_zero_tie_at_a_threshold(name):
    logits = torch.tensor([[1.0, 0.0, *[-0.0] * 100, -5.0]])
    out = sample(provider("sample", name), logits, top_k=2, top_p=0.5)
    assert float(out[3]) == 0.0


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_probability_below_the_smallest_normal_float_keeps_its_value(name):
    """A high temperature makes it likely."""
    target, none = torch.tensor([[[1e-40, 1.0]]]), torch.empty(1, 0, dtype=torch.int64)
    got = verify(provider("verify_chain", name), target, none, kind="probs", temperature=50.0,
                 uniforms=torch.zeros(1, 1, dtype=torch.float64))  # fmt: skip
    assert got[0].tolist() == [[0]]
    want = (target.double().log() / 50).log_softmax(-1)[0, :, 0]
    assert_close("logprob", got[3][0], want.float(), atol=1e-5)


# Offsets beyond 2^31 elements: the memory is reserved, and only the rows are read or written.


def far_rows(rows, v, stride):
    """[rows, v] float16 with `stride` elements between rows, in memory that was only reserved."""
    return torch.empty((rows - 1) * stride + v, dtype=torch.float16).as_strided(
        (rows, v), (stride, 1)
    )


@pytest.mark.parametrize("name", HEAVY_PROVIDERS[1:])
def test_element_offsets_beyond_32_bits_do_not_wrap(name):
    """5 rows, 2^30 + 7 elements apart: the last starts at element 4,294,967,324, byte 8.6e9."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    v, stride = 33, 2**30 + 7
    rows = far_rows(5, v, stride)
    near = torch.randn(5, v, generator=torch.Generator().manual_seed(3)).half()
    rows.copy_(near)
    positions = torch.arange(5)
    assert_outputs_equal(
        "sample",
        sample(provider("sample", name), rows, positions=positions),
        sample(provider("sample", name), near, positions=positions),
    )
    op = provider("verify_chain", name)
    drafts = near[:4].float().argmax(-1)[None]
    target_indptr = torch.tensor([0, 5], dtype=torch.int32)
    for rule in ("token", "block", "match", "greedy"):
        far = verify(op, rows[None], drafts, rows[None, :4], rule=rule)
        assert_outputs_equal(
            "verify_chain", far, verify(op, near[None], drafts, near[None, :4], rule=rule)
        )
        assert int(far[1]) > 0
        ragged = verify(op, rows, drafts, rows[:4], rule=rule, target_indptr=target_indptr)
        assert_outputs_equal("verify_chain", ragged, far)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2_000_000  # kB: the pages between the rows stayed untouched
