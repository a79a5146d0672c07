"""Packed weights: what they compute, and which changes of a weight are seen."""

import pytest
import torch
from specdec_hf.compiled import packed_linear
from specdec_hf.compiled.packed_linear import PackedLinear
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 16])
def test_packed_layers_compute_what_linear_layers_do(dtype, size):
    linear = torch.nn.Linear(48, 40, bias=size == 3).to(dtype)
    if packed_linear.unpacked_reason(linear) is not None:
        pytest.skip(packed_linear.unpacked_reason(linear))
    x = torch.randn(2, size, 48).to(dtype)
    with torch.inference_mode():
        got = PackedLinear(linear)(x)
        torch.testing.assert_close(got, linear(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [6, 7, 8])
def test_any_changed_number_and_any_order_of_columns_changes_the_digest(dtype, columns):
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(11, columns, generator=generator).to(dtype)[1:]
    before = packed_linear._digest(weight)
    assert torch.equal(packed_linear._digest(weight.clone()), before)
    for changed in (weight.flip(0), weight.flip(1)):
        assert not torch.equal(packed_linear._digest(changed), before)
    for i in range(weight.numel()):
        changed = weight.clone()
        changed.view(-1)[i] *= 1.01  # the smallest step of bfloat16 is 1/128
        if not torch.equal(changed, weight):
            assert not torch.equal(packed_linear._digest(changed), before)


def test_weights_that_begin_at_one_address_are_packed_apart():
    whole = torch.nn.Linear(48, 64, bias=False)
    if packed_linear.unpacked_reason(whole) is not None:
        pytest.skip(packed_linear.unpacked_reason(whole))
    part = torch.nn.Linear(48, 16, bias=False)
    part.weight = torch.nn.Parameter(whole.weight.detach()[:16])
    packed = [PackedLinear(whole), PackedLinear(part)]
    x = torch.randn(2, 3, 48)
    with torch.inference_mode():
        for got, linear in zip(packed, (whole, part), strict=True):
            torch.testing.assert_close(got(x), linear(x), rtol=1e-4, atol=1e-4)


def test_layers_that_are_no_plain_linear_layers_stay():
    class Own(torch.nn.Linear):
        pass

    assert packed_linear.unpacked_reason(Own(2, 2)) == "it is no plain linear layer"
    assert "float64" in packed_linear.unpacked_reason(torch.nn.Linear(2, 2).double())
