"""FlashInfer's chain: the distribution of its counts, its noise, and its probabilities."""

import itertools

import pytest
import torch
from support.providers import SIGNIFICANCE, chi_square

from specdec_kernels import verify_chain
from specdec_kernels.compat import flashinfer, noise

NAN = float("nan")
DRAWS = 20_000
DRAFT = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
TARGET = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])


@pytest.mark.parametrize("first", [0, 1])
def test_drafts_may_be_drawn_with_the_noise_of_their_verification(first):
    """Negative control: from its first position on, a chain would draw with the drafts' noise."""
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT[:1], TARGET[:2])]
    ids = flashinfer.sampling_from_probs(rows[0][:, 0], seed=1, offset=3)[:, None]
    tokens, *_ = flashinfer.chain_speculative_sampling(rows[0], ids, rows[1], seed=1, offset=3)
    if first == 0:
        seeds, positions = noise.seeds_and_positions(DRAWS, ids.device, None, 1, 3)
        tokens = verify_chain(
            rows[1], ids, rows[0], kind="probs", seeds=seeds, positions=positions
        ).tokens
    p_value = chi_square(tokens[:, 0].long(), TARGET[0].double())
    assert (p_value > SIGNIFICANCE) == (first == 1)


def accepted_distribution(probabilities, *, again):
    """[n+1], of the accepted drafts and those that pass a test of their own after the rejection.

    again: whether the rejected draft is tested once more.
    """
    n = len(probabilities)
    out = torch.zeros(n + 1, dtype=torch.float64)
    for m in range(n + 1):
        first = torch.tensor(probabilities[:m]).prod() * (1 - probabilities[m] if m < n else 1)
        rest = probabilities[m if again else m + 1 :]
        for passed in itertools.product((0, 1), repeat=len(rest)):
            weight = torch.tensor([a if x else 1 - a for a, x in zip(rest, passed, strict=True)])
            out[m + sum(passed)] += first * weight.prod()
    return out


@pytest.mark.parametrize(
    ("scale", "probabilities", "again", "fits"),
    [
        pytest.param(1, [0.4, 1.0], True, True, id="kernel"),
        pytest.param(1, [0.4, 1.0], False, False, id="one test of the rejected draft"),
        pytest.param(0.5, [0.2, 0.5], True, True, id="rows that sum to a half"),
        pytest.param(0.5, [0.4, 0.99], True, False, id="rows divided by their sums"),
    ],
)
def test_the_accepted_number_has_the_distribution_of_the_kernel(scale, probabilities, again, fits):
    """Probabilities are taken as they are. What does not fit is a negative control."""
    ids = torch.tensor([[0, 2]]).expand(DRAWS, -1)
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT, scale * TARGET)]
    _, accepted, _ = flashinfer.chain_speculative_sampling(rows[0], ids, rows[1], seed=1, offset=0)
    want = accepted_distribution(probabilities, again=again)
    assert (chi_square(accepted.long(), want) > SIGNIFICANCE) == fits


@pytest.mark.parametrize("p", [0.5, NAN, torch.inf, -0.5])
@pytest.mark.parametrize("q", [0.5, NAN, torch.inf, -0.5])
def test_a_draft_counts_only_with_valid_probabilities(p, q):
    """The first draft is rejected, so that the second only has a test of its own."""
    draft = torch.tensor([[[1.0, 0.0], [q, 0.5]]])
    target = torch.tensor([[[0.0, 1.0], [p, 0.5], [1.0, 0.0]]])
    out = flashinfer.chain_speculative_sampling(draft, torch.zeros(1, 2).int(), target)
    assert [t.tolist() for t in out] == [[[1, -1, -1]], [int(p == q == 0.5)], [0]]


@pytest.mark.parametrize("wrong", [torch.zeros(2, dtype=torch.int64), torch.zeros(1), [0]])
def test_no_count_is_written_if_the_other_is_refused(wrong):
    names = ("maybe_output_accepted_token_num", "maybe_output_emitted_draft_token_num")
    rows, ids = [t[None] for t in (DRAFT, TARGET)], torch.zeros(1, 2, dtype=torch.int64)
    for good, bad in (names, names[::-1]):
        count = torch.full((1,), 7)
        with pytest.raises((RuntimeError, TypeError), match=f"{bad} must"):
            flashinfer.chain_speculative_sampling(
                rows[0], ids, rows[1], **{good: count, bad: wrong}
            )
        assert count.tolist() == [7]
