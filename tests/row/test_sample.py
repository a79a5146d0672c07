"""`sample`: providers against the specification, large vocabularies, the tail of the noise."""

import math

import numpy as np
import proofs
import pytest
import torch
from proofs import (
    MAX_TIE_RATE,
    SIGNIFICANCE,
    assert_close,
    assert_outputs_close,
    assert_outputs_equal,
    chi_square,
)
from scipy.special import pdtr, pdtrc
from support.providers import (
    ALL_PROVIDERS,
    KERNEL_PROVIDERS,
    philox_uniforms,
    philox_words,
    provider,
    provider_cases,
    sample,
)

import specdec_kernels
from specdec_kernels import reference

STREAM = {"residual": 1, "draft": 2, "shared": 3}


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize(("name", "case"), provider_cases("sample"))
def test_agrees_with_the_specification(name, case):
    assert_outputs_close(
        "sample", provider("sample", name)(*case.args()), reference.sample(*case.args())
    )


@pytest.mark.parametrize("name", ALL_PROVIDERS)
@pytest.mark.parametrize("noise", ["draft", "residual"])
def test_the_token_is_the_inverse_cdf_of_the_uniform_of_its_noise_stream(name, noise):
    n, v = {"triton": 12, "cpp": 3000}.get(name, 600), 50
    logits = torch.zeros(n, v)
    got = sample(provider("sample", name), logits, seeds=torch.arange(n) - 7,
                 positions=2**33 + torch.arange(n), noise=noise)  # fmt: skip
    u = philox_uniforms(np.arange(n) - 7, 2**33 + np.arange(n), STREAM[noise])
    away = np.abs(u * v - np.round(u * v)) > 1e-4
    np.testing.assert_array_equal(got[0].numpy()[away], np.floor(u * v)[away])
    assert_close("logprob", got[1], torch.full((n,), -math.log(v)), atol=1e-6)


def test_the_public_function_tells_seeds_from_positions():
    seeds, positions = torch.arange(8), torch.full((8,), 3)
    got = specdec_kernels.sample(torch.zeros(8, 50), seeds=seeds, positions=positions)
    uniforms = philox_uniforms(seeds, positions, STREAM["draft"])
    assert got.tokens.tolist() == np.floor(uniforms * 50).tolist()
    rows, wide = torch.linspace(0, 1, 50).expand(8, 50), torch.full((8,), 2**32 + 1)  # 1 if cut
    all_kept, counted = (
        specdec_kernels.sample(rows, top_k=k, seeds=seeds, positions=positions) for k in (0, wide)
    )
    assert counted.tokens.tolist() == all_kept.tokens.tolist()


def test_a_vocabulary_beyond_32_bits_is_refused():
    logits = torch.zeros(1, 1).expand(1, 2**31)  # holds no memory
    with pytest.raises(RuntimeError, match="a vocabulary of 1 to 2147483647 entries"):
        sample(provider("sample", "cpp"), logits)


def test_draws_agree_with_the_specification_on_thousands_of_rows():
    """Draws may differ only where a uniform falls within rounding of a step of the CDF."""
    n, v = 1500, 257
    generator = torch.Generator().manual_seed(6)
    logits = proofs.zipf_logits(n, v, generator)
    filters = dict(
        temperature=0.3 + torch.rand(n, generator=generator),
        top_k=torch.randint(0, v, (n,), generator=generator, dtype=torch.int32),
        top_p=1 - 0.5 * torch.rand(n, generator=generator),
        min_p=0.02 * torch.rand(n, generator=generator),
    )
    got, want = (
        sample(provider("sample", name), logits, positions=torch.arange(n), **filters)
        for name in ("cpp", "reference")
    )
    assert int((got[0] != want[0]).sum()) <= n * MAX_TIE_RATE + 1
    # A top-p within rounding of a cumulative sum may move the threshold by one entry.
    moved = (got[3] - want[3]).abs() > 1e-6
    assert int(moved.sum()) <= n // 200
    assert_close("logsumexp", got[2][~moved], want[2][~moved], atol=2e-6)
    assert_close("logsumexp", got[2], want[2], atol=1e-3)


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_logsumexp_and_threshold_describe_the_distribution_that_was_drawn_from(name):
    logits = 3 * torch.randn(5, 60, generator=torch.Generator().manual_seed(1))
    filters = dict(temperature=0.7, top_k=20, top_p=0.95, min_p=0.01)
    got = sample(provider("sample", name), logits, **filters)
    inner = (logits.double() / np.float32(0.7) - got[2][:, None]).exp()
    probs = torch.where(logits >= got[3][:, None], inner, 0.0)
    for row, x in zip(probs, logits, strict=True):
        assert_close("probs", row, proofs.filtered_distribution(x, **filters), atol=1e-6)
    at = probs.gather(1, got[0][:, None])[:, 0]
    assert_close("logprob", got[1], at.log().float(), atol=1e-5)


@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_temperature_zero_takes_the_lowest_id_of_the_largest(name):
    logits = torch.full((2, 5000), -1.0)
    logits[0, [37, 38, 4999]] = 4.0
    logits[1, [4096, 4097]] = -torch.inf
    got = sample(provider("sample", name), logits, temperature=0.0)
    assert got[0].tolist() == [37, 0]
    assert got[3].tolist() == [4.0, -1.0]
    assert got[1].tolist() == got[2].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("top_k", [64, 65, 2**31 - 1, 2**40])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_a_top_k_of_the_vocabulary_or_more_keeps_every_token(name, top_k):
    logits = torch.randn(2, 64, generator=torch.Generator().manual_seed(5))
    op = provider("sample", name)
    assert_outputs_equal("sample", sample(op, logits, top_k=top_k), sample(op, logits))


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
@pytest.mark.parametrize("name", ALL_PROVIDERS)
def test_a_tiny_temperature_is_nearly_greedy_and_finite(name, temperature):
    logits = torch.tensor([[0.0, 3.0, -1.0, 2.9]])
    got = sample(provider("sample", name), logits, temperature=temperature)
    assert got[0].tolist() == [1]
    assert float(got[1]) == 0.0


def equal_cells(n):
    return torch.full((n,), 1 / n, dtype=torch.float64)


def test_noise_streams_are_independent():
    n, v = 20_000, 8
    op = provider("sample", "cpp")
    logits = torch.zeros(n, v)
    draws = [
        sample(op, logits, positions=torch.arange(n), noise=s, method=m)[0]
        for s, m in (("draft", "cdf"), ("residual", "cdf"), ("shared", "gumbel"))
    ]
    draws.append(torch.from_numpy(philox_uniforms(0, np.arange(n), 0) * v).long())  # acceptance
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert chi_square(a * v + b, equal_cells(v * v)) > SIGNIFICANCE


@pytest.mark.parametrize(("vary", "fixed"), [("seeds", "positions"), ("positions", "seeds")])
def test_neighbouring_seeds_and_positions_are_independent(vary, fixed):
    n, v = 20_000, 8
    got = sample(provider("sample", "cpp"), torch.zeros(n, v), **{vary: torch.arange(n), fixed: 5})
    assert chi_square(got[0][1:] * v + got[0][:-1], equal_cells(v * v)) > SIGNIFICANCE


@pytest.mark.slow
@pytest.mark.parametrize("method", ["cdf", "gumbel"])
def test_chi_square_over_a_large_vocabulary(method):
    n, v = 6000, 50_257
    row = proofs.zipf_logits(1, v, torch.Generator().manual_seed(3), exponent=1.1)[0]
    got = sample(provider("sample", "cpp"), row.expand(n, v), positions=torch.arange(n),
                 method=method, temperature=0.9)  # fmt: skip
    p = (row.double() / np.float32(0.9)).softmax(-1)
    assert chi_square(got[0], p) > SIGNIFICANCE
    # The same draws by tile: none is favoured.
    tile = torch.arange(v) // 4096
    mass = torch.zeros(int(tile.max()) + 1, dtype=torch.float64).index_add_(0, tile, p)
    assert chi_square(got[0] // 4096, mass) > SIGNIFICANCE


# (position, counter, word): all words below 256 of the shared noise stream at seed 0, for positions
# below 2^17 and tokens below 4096. They were found in 16 s as
# `philox_words(0, range(1024), range(2**17), 3) < 256`.
RARE = [
    (479, 402, 1), (1331, 569, 1), (3353, 67, 3), (8832, 837, 2), (18482, 512, 3), (19819, 691, 0),
    (26038, 859, 2), (28982, 504, 1), (32350, 330, 3), (35039, 770, 3), (41553, 17, 3),
    (45472, 21, 2), (47877, 261, 2), (54156, 450, 3), (64666, 928, 3), (66885, 554, 2),
    (72189, 604, 0), (76479, 657, 3), (76909, 485, 0), (88103, 464, 0), (91352, 813, 0),
    (91824, 971, 0), (93734, 551, 0), (98972, 430, 2), (99564, 504, 3), (100059, 405, 3),
    (101454, 813, 2), (103800, 216, 0), (105066, 40, 1), (124603, 917, 0),
]  # fmt: skip


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_noise_of_rare_words_has_its_exact_tail(name, top_k):
    """The rare token wins over token 0 exactly if its 64-bit noise says so, within 1 %."""
    op = provider("sample", name)
    for position, counter, word in RARE[: 4 if name == "triton" else None]:
        token = 4 * counter + word
        x, more = (int(philox_words(0, counter, position, 3 + s)[word]) for s in (0, 256))
        assert x < 256
        rare = -math.log1p(-((x << 32) + more + 0.5) * 2.0**-64)
        level = math.log(rare / float(reference.exponentials(0, position, 3, 1)))
        logits = torch.full((2, token + 4), -torch.inf)
        logits[:, 0] = 0.0
        logits[:, token] = torch.tensor([level + 0.01, level - 0.01])
        got = sample(op, logits, positions=position, noise="shared", top_k=top_k)
        assert got[0].tolist() == [token, 0], (position, counter, word, level)


@pytest.mark.slow
def test_tail_tokens_keep_their_mass_in_gumbel_sampling():
    """One dominant token against 32,767 whose logits are 15 lower: hits are Poisson."""
    n, v, gap = 8000, 32_768, 15.0
    logits = torch.full((v,), -gap)
    logits[77] = 0.0
    got = sample(provider("sample", "cpp"), logits.expand(n, v), positions=torch.arange(n),
                 noise="shared")[0]  # fmt: skip
    tail = (v - 1) * math.exp(-gap)
    hits, expected = int((got != 77).sum()), n * tail / (1 + tail)
    assert min(pdtr(hits, expected), pdtrc(hits - 1, expected)) > SIGNIFICANCE
