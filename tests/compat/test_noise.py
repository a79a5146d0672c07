"""Noise of the functions of other projects: each seed, row and offset has its own."""

import itertools

import pytest
import torch

from specdec_kernels.compat import flashinfer

ROWS = 64
EQUAL = torch.full((1, 1, 2**14), 2**-14)  # a row whose tokens are all equally likely


def tokens(seed, offset):
    """[ROWS], the sample of each row."""
    return flashinfer.sampling_from_probs(EQUAL[0].expand(ROWS, -1), seed=seed, offset=offset)


def last_tokens(positions):
    """[4], the last tokens of chains that accept all drafts, at offset 0 and so many positions."""
    target = EQUAL.expand(4, positions - 1, -1)
    drafts = torch.zeros(4, positions - 2, dtype=torch.int32)
    chains = flashinfer.chain_speculative_sampling(target[:, 1:], drafts, target, seed=1, offset=0)
    return chains[0][:, -1]


def test_a_call_is_determined_by_seed_and_offset_or_by_the_generator():
    probs = torch.full((64, 97), 1 / 97)
    draw = flashinfer.sampling_from_probs

    def of(seed, offset):
        return draw(probs, seed=seed, offset=offset).tolist()

    assert of(1, 0) == of(1, 0) == of(torch.tensor([1]), torch.tensor([0]))
    assert of(1, 0) == of(torch.full((64,), 1), torch.zeros(64, dtype=torch.int64))
    assert (
        of(2**64 - 1, 0) == of(-1, 0) == of(*torch.tensor([[2**64 - 1], [0]], dtype=torch.uint64))
    )
    other = [of(1, 0), of(2, 0), of(1, 1), of(1, 2**40)]
    for a, b in itertools.combinations(other, 2):
        assert sum(x == y for x, y in zip(a, b, strict=True)) < 16
    generator = torch.Generator().manual_seed(3)
    first, second = (draw(probs, generator=generator).tolist() for _ in range(2))
    assert first != second
    assert draw(probs, generator=generator.manual_seed(3)).tolist() == first
    torch.manual_seed(4)
    default = draw(probs).tolist()
    assert draw(probs).tolist() != default
    torch.manual_seed(4)
    assert draw(probs).tolist() == default


@pytest.mark.parametrize("step", [1, 2, 2**62, 2**63])
@pytest.mark.parametrize("seed", [0, -1])
def test_no_row_has_the_noise_of_any_row_of_another_seed(seed, step):
    """Negative control: 2**64 seeds further, all have that of this one."""
    ours, others, control = (set(tokens(seed + n, 0).tolist()) for n in (0, step, 2**64))
    assert len(ours & others) < 6  # of 64 * 64 pairs, one in 2**14 is equal by chance
    assert ours == control
    assert len(ours) > ROWS - 6  # nor has it that of another row


def test_no_position_of_a_row_is_that_of_another_row_or_offset():
    """Negative control: one position more than 2**16 is the first one of the next offset."""
    assert len({*last_tokens(9).tolist()} & {*tokens(1, 0).tolist()}) < 2
    drawn = last_tokens(2**15 + 1)
    for power in range(17):
        assert (drawn == tokens(1, 2**power)[:4]).sum() < 2
    assert last_tokens(2**16 + 1).tolist() == tokens(1, 1)[:4].tolist()


def test_each_row_may_have_a_seed_and_an_offset_of_its_own():
    odd = torch.arange(ROWS) % 2
    one, other_offset, other_seed = tokens(3, 5), tokens(3, 9), tokens(4, 5)
    assert torch.equal(tokens(3 + 0 * odd, 5 + 4 * odd), torch.where(odd == 1, other_offset, one))
    assert torch.equal(tokens(3 + odd, 5 + 0 * odd), torch.where(odd == 1, other_seed, one))


@pytest.mark.parametrize("given", [{"seed": 1}, {"offset": 1}])
def test_a_seed_or_an_offset_alone_is_ignored_with_a_warning(given):
    rows, generator = EQUAL[0].expand(ROWS, -1), torch.Generator()
    missing = "offset" if "seed" in given else "seed"
    with pytest.warns(UserWarning, match=f"because {missing} is None") as warned:
        drawn = flashinfer.sampling_from_probs(rows, generator=generator.manual_seed(3), **given)
    assert [w.filename for w in warned] == [__file__]
    expected = flashinfer.sampling_from_probs(rows, generator=generator.manual_seed(3))
    assert torch.equal(drawn, expected)
