"""The specification itself: Philox, noise, filters, and two rules in exact arithmetic."""

import math

import numpy as np
import proofs
import pytest
import torch
from proofs import assert_close, rational
from support.providers import HEAVY_PROVIDERS, philox_uniforms, philox_words, provider, verify

from specdec_kernels import reference
from specdec_kernels.reference.row import noise

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zero", "ones", "pi"],
)  # fmt: skip
def test_philox_gives_the_known_answers_of_random123(counter, key, words):
    first, low, high, stream = counter
    assert reference.philox(key[0] | key[1] << 32, first, low | high << 32, stream) == words


def test_philox_takes_negative_seeds_and_positions_as_64_bits():
    seeds, positions = [-1, 5, -(2**63)], [2**40 + 3, -1, -7]
    for counter, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        want = tuple(int(w) for w in philox_words(seed, counter, position, 3))
        assert reference.philox(seed, counter, position, 3) == want


def test_uniforms_stay_in_the_half_open_unit_interval_and_use_53_bits():
    u = philox_uniforms(np.arange(100_000), 0, 0)
    assert u.min() >= 0
    assert u.max() < 1
    assert (((2**53 - 1) << 11) >> 11) * 2.0**-53 < 1
    assert len(np.unique((u * 2**53).astype(np.int64) & 0x3FFFFF)) > 90_000
    assert reference.uniform(77, 5, 0) == philox_uniforms(77, 5, 0)


def test_token_v_takes_word_v_mod_4_of_counter_v_div_4():
    exponentials = reference.exponentials(9, 4, 3, 11).numpy()
    words = philox_words(9, np.arange(3), 4, 3).reshape(-1)[:11]
    np.testing.assert_allclose(exponentials, -np.log1p(-(words + 0.5) * 2.0**-32), rtol=1e-14)


def test_words_below_256_are_extended_by_32_bits(monkeypatch):
    words = {3: (255, 0, 256, 1), 3 + reference.TAIL: (7, 0, 9, ONES)}
    monkeypatch.setattr(noise, "philox", lambda s, counter, p, stream: words[stream])
    u = [(255 << 32) + 7.5, 0.5, (256 << 32) + 2.0**31, (1 << 32) + ONES + 0.5]
    want = torch.tensor([-math.log1p(-x * 2.0**-64) for x in u], dtype=torch.float64)
    assert_close("noise", reference.exponentials(0, 0, 3, 4), want, rtol=1e-15)
    assert float(want[1]) == 2.0**-65


FILTERS = [
    dict(top_k=1), dict(top_k=3), dict(top_k=400), dict(top_p=0.5), dict(top_p=0.999999),
    dict(min_p=0.3), dict(min_p=1.0), dict(temperature=0.3, top_k=5, top_p=0.7, min_p=0.05),
    dict(temperature=3.0, top_k=7, top_p=0.95, min_p=0.4),
]  # fmt: skip


def name_of(filters):
    return "-".join(f"{k}{v}" for k, v in filters.items())


@pytest.mark.parametrize("filters", FILTERS, ids=name_of)
def test_filtering_by_a_threshold_follows_the_definition_of_each_filter(filters):
    generator = torch.Generator().manual_seed(3)
    for ties in (False, True):
        logits = 2 * torch.randn(40, generator=generator)
        logits = logits.round() if ties else logits
        logits[::9] = -torch.inf
        full = {**dict(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), **filters}
        got = reference.Distribution(logits.double(), **full)
        assert_close("probs", got.probs, proofs.filtered_distribution(logits, **full), atol=1e-14)


# Powers of two: with target probabilities that are multiples of 1/16, every ratio, product and sum
# of rule block is a short binary fraction, so float32 decides exactly as rationals do.
DYADIC = [[8, 4, 2, 2], [4, 4, 4, 4], [8, 8, 0, 0], [16, 0, 0, 0], [8, 4, 4, 0]]


def dyadic(rng, shape):
    rows = [rng.permutation(DYADIC[k]) for k in rng.integers(0, len(DYADIC), math.prod(shape[:-1]))]
    return np.array(rows, dtype=np.float64).reshape(shape) / 16


EXACT = {"token": (rational.token, rational.sixteenths), "block": (rational.block, dyadic)}


@pytest.mark.parametrize("rule", EXACT)
@pytest.mark.parametrize("name", HEAVY_PROVIDERS)
def test_a_rule_decides_as_exact_arithmetic_does_ties_included(name, rule):
    decide, draft_rows = EXACT[rule]
    rng = np.random.default_rng(6)
    n, gamma, v = {"cpp": 600, "triton": 24}.get(name, 200), 2, 4
    p, q = rational.sixteenths(rng, (n, gamma + 1, v)), draft_rows(rng, (n, gamma, v))
    drafts = np.array([[rng.choice(v, p=row) for row in rows] for rows in q])
    uniforms = rng.integers(0, 16, (n, gamma + 1)) / 16
    got = verify(
        provider("verify_chain", name), torch.from_numpy(p).float(), torch.from_numpy(drafts),
        torch.from_numpy(q).float(), kind="probs", rule=rule, uniforms=torch.from_numpy(uniforms),
    )  # fmt: skip
    tied = 0
    for r in range(n):
        rows = [[rational.fractions(row) for row in m] for m in (p[r], q[r])]
        u, exact = rational.fractions(uniforms[r]), rational.Exact()
        want = decide(exact, *rows, drafts[r].tolist(), u, u[-1])
        tied += any(0 < h < 1 and h == u for h, u in exact.accept_probs)
        assert got[0][r].tolist() == want + [-1] * (gamma + 1 - len(want)), (r, p[r], q[r])
        assert int(got[1][r]) == len(want) - 1
        assert int(got[2][r]) == 0
    assert tied >= n // 100  # equality of a probability and its uniform occurred
