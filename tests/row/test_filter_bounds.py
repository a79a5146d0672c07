"""Top-p and min-p exactly at their bounds, where one comparison or one rounding decides."""

import math

import numpy as np
import pytest
import torch
from support.providers import ALL_PROVIDERS, provider, sample

HOT = 1e30  # at this temperature, logits that differ have equal weights
SIZES = [(p, n) for p in ALL_PROVIDERS for n in (4, 40, 5000) if p != "triton" or n < 5000]


@pytest.mark.parametrize(("name", "n"), SIZES)
def test_top_p_is_reached_by_a_sum_that_equals_it(name, n):
    """Half of 2n equal weights is p = .5 to the last bit, also where top-k keeps n of them.

    Up to 4,096 survivors are listed on the CPU; more take a selection by radix.
    """
    logits = torch.randperm(2 * n, generator=torch.Generator().manual_seed(n)).float()[None]
    for top_k, kept in ((0, n), (n, n // 2)):
        out = sample(provider("sample", name), logits, temperature=HOT, top_k=top_k, top_p=0.5)
        assert float(out[3]) == 2 * n - kept  # the likeliest, whose logits end at 2n-1
        assert math.isclose(float(out[2]), math.log(kept), rel_tol=1e-6)


@pytest.mark.parametrize(("name", "n"), SIZES)
@pytest.mark.parametrize(("filter_name", "value"), [("top_k", 1), ("top_p", 0.5), ("min_p", 1.0)])
def test_any_number_of_tokens_that_tie_at_the_threshold_survive(name, n, filter_name, value):
    out = sample(provider("sample", name), torch.zeros(1, n), **{filter_name: value})
    assert float(out[3]) == 0
    assert math.isclose(float(out[2]), math.log(n), rel_tol=1e-6)


@pytest.mark.parametrize(("name", "n"), SIZES)
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_top_k_above_the_number_of_finite_entries_keeps_them(name, n, top_p):
    logits = torch.full((1, 3 * n), -torch.inf)
    logits[0, ::3] = torch.arange(n).float()
    out = sample(provider("sample", name), logits, temperature=HOT, top_k=2 * n, top_p=top_p)
    assert float(out[3]) == (-torch.inf if top_p == 1 else n - n // 2)
    assert math.isclose(float(out[2]), math.log(n * top_p), rel_tol=1e-6)


def rounded_down(n):
    """(T, min-p, bound): in a row whose maximum is 0, the bound T log(min-p) rounds down."""
    rng = np.random.default_rng(3)
    while n:
        t, p = (np.float32(x) for x in (rng.uniform(0.3, 3), rng.uniform(0.01, 0.9)))
        exact = float(t) * math.log(float(p))
        if float(np.float32(exact)) < exact:
            n -= 1
            yield float(t), float(p), np.float32(exact)


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_the_threshold_of_min_p_is_not_rounded_down(name):
    """The float below the exact bound is no survivor, the one above it is."""
    for t, p, below in rounded_down(8):
        above = np.nextafter(below, np.float32(np.inf))
        logits = torch.tensor([[0.0, float(below), float(above)]])
        out = sample(provider("sample", name), logits, temperature=t, min_p=p)
        weights = [1.0, math.exp(float(above) / t)]
        assert math.isclose(float(out[2]), math.log(sum(weights)), rel_tol=1e-5)
