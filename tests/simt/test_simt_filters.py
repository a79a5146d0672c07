"""Filters of the CUDA source on rows that are hard to select from, beside the C++ kernels.

A block selects among the few entries that reach a bound, and lists the survivors. Rows with more
than 1024 of either are counted in bins, and keep no list.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from proofs import assert_outputs_close, assert_outputs_equal
from support.providers import sample, verify

SEEDS = torch.arange(3)
INF = float("inf")


def zipf(n, v, g):
    places = torch.stack([torch.randperm(v, generator=g) for _ in range(n)])
    return -1.5 * torch.log1p(places.float()) + 0.5 * torch.randn(n, v, generator=g)


def half_masked(n, v, g):
    return zipf(n, v, g).masked_fill(torch.rand(n, v, generator=g) < 0.5, -INF)


ROWS = {
    "zipf": zipf,
    "ties": lambda n, v, g: (2 * zipf(n, v, g)).round() / 2,
    "flat": lambda n, v, g: torch.randn(n, v, generator=g) / 100,
    "equal": lambda n, v, _: torch.full((n, v), 3.25),
    "sorted": lambda n, v, g: zipf(n, v, g).sort(descending=True).values,
    "half-masked": half_masked,
    "far": lambda n, v, g: zipf(n, v, g) - 3e6,
}  # fmt: skip
# top_k, top_p, min_p; "V" is the vocabulary.
FILTERS = {
    "k1": (1, 1.0, 0.0), "k5-p": (5, 0.8, 0.0), "p": (0, 0.9, 0.0), "p-small": (0, 1e-6, 0.0),
    "k-many": (1500, 1.0, 0.0), "k-many-p": (1500, 0.95, 0.01), "all-but-one": ("V", 0.999, 0.0),
    "min-p": (0, 1.0, 0.05),
}  # fmt: skip
SIZES = (7, 300, 5003)


def moved(rows):
    """The same rows at odd addresses."""
    room = torch.empty(rows.numel() + 1, dtype=rows.dtype)
    return room[1:].view(rows.shape).copy_(rows)


def filters_of(name, v):
    k, p, m = FILTERS[name]
    return {"top_k": min(v - 1 if k == "V" else k, v), "top_p": p, "min_p": m}


def both(simt, name, function, *args, **kwargs):
    """The outputs of the C++ kernel, which those of the emulator must be on devices of any size."""
    want = function(getattr(torch.ops.specdec_kernels, name).default, *args, **kwargs)
    first = None
    for processors, fill in ((0, 2**64 - 1), (16, 0)):
        with simt.running(processors=processors, order="interleaved-1", fill=fill):
            got = function(simt.op(name), *args, **kwargs)
        assert_outputs_close(name, got, want)
        if first is not None:
            assert_outputs_equal(name, got, first)
        first = got
    return want


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("filters", FILTERS)
def test_hard_rows_are_filtered_as_by_the_cpu_kernels(simt, filters):
    for rows, v in itertools.product(ROWS.values(), SIZES):
        g = torch.Generator().manual_seed(v)
        for dtype in (torch.float32, torch.bfloat16):
            logits = moved(rows(3, v, g).to(dtype))
            for method in ("cdf", "gumbel"):
                both(simt, "sample", sample, logits, seeds=SEEDS, positions=SEEDS + 5,
                     temperature=0.8, method=method, **filters_of(filters, v))  # fmt: skip


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("rule", ["token", "match", "block", "typical"])
def test_hard_rows_are_verified_as_by_the_cpu_kernels(simt, rule):
    b, gamma, v = 2, 2, 5003
    statuses = set()
    bounds = {"epsilon": 0.9, "delta": 0.8} if rule == "typical" else {}
    for rows, filters in itertools.product(ROWS.values(), ("k5-p", "p", "k-many", "min-p")):
        g = torch.Generator().manual_seed(len(statuses))
        target = rows(b * (gamma + 1), v, g).view(b, gamma + 1, v)
        draft = target[:, :gamma] + torch.randn(b, gamma, v, generator=g) / 3
        best = target[:, :gamma].topk(3).indices
        tokens = best[..., 2 if rule == "typical" else 0]
        want = both(simt, "verify_chain", verify, target.bfloat16(), tokens,
                    draft.bfloat16() if rule in ("token", "block") else None, rule=rule,
                    temperature=0.9, seeds=SEEDS[:b], positions=SEEDS[:b] + 9,
                    **filters_of(filters, v), **bounds)  # fmt: skip
        statuses |= set(want[2].tolist())
    assert statuses <= {0, 4}


def test_a_list_holds_no_entry_beyond_a_short_row(simt):
    """Where fewer than k entries are finite, every entry reaches the bound."""
    g = torch.Generator().manual_seed(5)
    target = half_masked(40 * 3, 7, g).view(40, 3, 7)
    target[..., 3] = 0
    tokens, many = torch.full((40, 2), 3), torch.arange(40)
    both(simt, "verify_chain", verify, target, tokens, target[:, :2], top_k=6, seeds=many,
         positions=many)  # fmt: skip


def test_a_uniform_of_0_draws_the_first_survivor(simt):
    target = zipf(2, 700, torch.Generator().manual_seed(7)).view(1, 2, 700)
    tokens = target[:, :1].argmax(-1)
    want = both(simt, "verify_chain", verify, target, tokens, top_k=9, seeds=SEEDS[:1],
                uniforms=torch.zeros(1, 2).double())  # fmt: skip
    assert want[0][0, 1] == target[0, 1].topk(9).indices.min()


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("kind", ["logits", "sampled"])
def test_a_draft_row_that_is_not_valid_is_found_beside_a_list_of_survivors(simt, kind):
    """The survivors' residual reads few entries of the draft; the others must be valid too."""
    g = torch.Generator().manual_seed(3)
    target, draft = zipf(4, 5003, g).view(1, 4, -1), zipf(3, 5003, g).view(1, 3, -1)
    tokens = draft.argmax(-1)
    draft[0, 0, 4999] = INF
    statistics = (torch.ones(1, 3).double(), torch.full((1, 3), -INF), 1.0)
    want = both(simt, "verify_chain", verify, target, tokens, draft, top_k=4, seeds=SEEDS[:1],
                positions=SEEDS[:1], sampled=statistics if kind == "sampled" else None)  # fmt: skip
    assert want[2].item() == 2


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("v", [262_144, 524_288 + 3])
def test_long_rows_are_filtered(simt, v):
    g = torch.Generator().manual_seed(1)
    for filters in ("k5-p", "p"):
        both(simt, "sample", sample, zipf(1, v, g), seeds=SEEDS[:1], positions=SEEDS[:1],
             **filters_of(filters, v))  # fmt: skip


@pytest.mark.parametrize("b", [0, pytest.param(4096, marks=pytest.mark.full)])
def test_many_sequences_and_none(simt, b):
    g = torch.Generator().manual_seed(b)
    seeds = torch.arange(b)
    target, draft = torch.randn(b, 2, 40, generator=g), torch.randn(b, 1, 40, generator=g)
    tokens = torch.randint(40, (b, 1), generator=g)
    both(simt, "verify_chain", verify, target, tokens, draft, seeds=seeds, positions=seeds, top_k=5)
