"""Packed weights: what they compute, and which changes of a weight are seen."""

import weakref
from itertools import combinations

import numpy as np
import pytest
import torch
from specdec_hf.runner.packed import linear as packed_linear
from specdec_hf.runner.packed.linear import LinearWithPackedCopy


def packable(linear):
    """The layer, where its weight can be packed; else the test is skipped."""
    if packed_linear.unpacked_reason(linear) is not None:
        pytest.skip(packed_linear.unpacked_reason(linear))
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 3, 16, 40])
def test_packed_layers_compute_what_linear_layers_do(dtype, size):
    linear = packable(torch.nn.Linear(48, 40, bias=size == 3).to(dtype))
    x = torch.randn(2, size, 48).to(dtype)
    with torch.inference_mode():
        got = LinearWithPackedCopy(linear)(x)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(got, linear(x), rtol=tolerance, atol=tolerance)


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


def test_weights_of_one_address_or_one_shape_are_packed_apart():
    whole = packable(torch.nn.Linear(48, 64, bias=False))
    part = torch.nn.Linear(48, 16, bias=False)
    part.weight = torch.nn.Parameter(whole.weight.detach()[:16])
    layers = (whole, part, torch.nn.Linear(48, 64, bias=False))
    packed = [LinearWithPackedCopy(linear) for linear in layers]
    x = torch.randn(2, 3, 48)
    with torch.inference_mode():
        for got, linear in zip(packed, layers, strict=True):
            torch.testing.assert_close(got(x), linear(x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def linear():
    """A layer whose rows have 28 bytes, which are summed as seven integers."""
    torch.manual_seed(0)
    return packable(torch.nn.Linear(7, 11))


def assert_packed_again(packed, linear):
    x = torch.randn(2, 3, linear.weight.shape[1])
    assert packed.refresh()
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=1e-4)
    assert not packed.refresh()


def test_a_weight_whose_rows_change_places_is_packed_again(linear):
    packed = LinearWithPackedCopy(linear)
    for pair in combinations(range(11), 2):
        linear.weight.data[[*pair]] = linear.weight.data[[*pair[::-1]]]
        assert_packed_again(packed, linear)


@pytest.mark.parametrize("row", [0, 5, 10])
def test_a_weight_whose_columns_change_places_is_packed_again(linear, row):
    """The first, the middle or the last row shows it where all others hold one number."""
    linear.weight.data[torch.arange(11) != row] = 0.5
    packed = LinearWithPackedCopy(linear)
    for pair in combinations(range(7), 2):
        linear.weight.data[:, [*pair]] = linear.weight.data[:, [*pair[::-1]]]
        assert_packed_again(packed, linear)


def test_a_packed_copy_goes_with_its_weight(linear):
    """A weight that is replaced keeps its memory until then, so that no other gets its address."""

    def replace():
        numbers = np.ones((11, 7), dtype=np.float32)
        linear.weight = torch.nn.Parameter(torch.from_numpy(numbers))
        return weakref.ref(numbers)

    before, memory = set(packed_linear._copies), replace()
    first, second = LinearWithPackedCopy(linear), LinearWithPackedCopy(linear)
    del first
    replace()
    assert len(set(packed_linear._copies) - before) == 1
    assert memory() is not None
    assert_packed_again(second, linear)
    assert len(set(packed_linear._copies) - before) == 1
    assert memory() is None
    del second
    assert not set(packed_linear._copies) - before


def test_layers_that_are_no_plain_linear_layers_stay():
    class Own(torch.nn.Linear):
        pass

    assert packed_linear.unpacked_reason(Own(2, 2)) == "it is no plain linear layer"
    with pytest.warns(UserWarning, match="Initializing zero-element tensors"):
        empty = torch.nn.Linear(2, 0)
    assert packed_linear.unpacked_reason(empty) == "an empty weight has nothing to pack"
    assert "float64" in packed_linear.unpacked_reason(torch.nn.Linear(2, 2).double())
