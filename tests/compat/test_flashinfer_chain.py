"""FlashInfer's chain: the distributions of its tokens and of its counts, and probabilities."""

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


def drawn_chains(count, draft=DRAFT):
    """(drafts drawn from DRAFT, what the chain emits if it is told that they are from `draft`)."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.multinomial(q, count, True, generator=generator) for q in DRAFT], 1)
    rows = [t.expand(count, -1, -1) for t in (draft, TARGET)]
    return ids, flashinfer.chain_speculative_sampling(rows[0], ids, rows[1], seed=1, offset=0)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_first_tokens_have_the_targets_distribution(wrong):
    """Negative control: a draft distribution that the drafts were not drawn from."""
    tokens = drawn_chains(DRAWS, DRAFT.flip(0) if wrong else DRAFT)[1][0].long()
    second = tokens[tokens[:, 1] >= 0, 1]  # after an accepted draft
    values = chi_square(tokens[:, 0], TARGET[0].double()), chi_square(second, TARGET[1].double())
    assert (min(values) < SIGNIFICANCE) == wrong


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


@pytest.mark.parametrize("again", [True, False])
def test_the_accepted_number_has_the_distribution_of_the_kernel(again):
    """Negative control: the rejected draft is not tested a second time."""
    ids = torch.tensor([[0, 2]]).expand(DRAWS, -1)
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT, TARGET)]
    _, accepted, _ = flashinfer.chain_speculative_sampling(rows[0], ids, rows[1], seed=1, offset=0)
    want = accepted_distribution([0.2 / 0.5, 1.0], again=again)
    assert (chi_square(accepted.long(), want) > SIGNIFICANCE) == again


@pytest.mark.parametrize("divided", [False, True])
def test_a_chain_takes_probabilities_as_they_are(divided):
    """Negative control: rows of the target that sum to 0.5, (nearly) divided by their sums."""
    ids = torch.tensor([[0, 2]]).expand(DRAWS, -1)
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT, TARGET / 2)]
    _, accepted, _ = flashinfer.chain_speculative_sampling(rows[0], ids, rows[1], seed=1, offset=0)
    want = accepted_distribution([0.4, 0.99] if divided else [0.2, 0.5], again=True)
    assert (chi_square(accepted.long(), want) > SIGNIFICANCE) != divided


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
