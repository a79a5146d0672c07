"""Transformers' `_speculative_sampling`: its own example, the original, and `verify_chain`."""

import pytest
import torch
from transformers.generation import utils

from specdec_kernels import verify_chain
from specdec_kernels.compat import transformers as compat
from specdec_kernels.compat.noise import GOLDEN, draw_seed


def peaked(ids, v=10):
    """[1, n, v] logits: 10 at each id, -10 elsewhere."""
    return 20 * torch.nn.functional.one_hot(torch.tensor([ids]), v).float() - 10


def test_the_example_of_its_own_tests():
    new = peaked([1, 4, 8, 0])
    new[0, 2] = new[0, 2].masked_fill(new[0, 2] < 0, -torch.inf)
    new[0, 3] = -10
    arguments = torch.tensor([[8, 0, 3, 9, 8, 1, 4, 5]]), peaked([1, 4, 5]), 3, new
    tokens, matches = compat._speculative_sampling(*arguments)
    want_tokens, want_matches = utils._speculative_sampling(*arguments)
    assert tokens.tolist() == want_tokens.tolist() == [[1, 4, 8]]
    assert matches.tolist() == want_matches.tolist() == 2
    assert (tokens.dtype, tokens.shape) == (want_tokens.dtype, want_tokens.shape)
    assert (matches.dtype, matches.shape) == (want_matches.dtype, want_matches.shape)


@pytest.mark.parametrize("weight", [None, 1.0, 0.5, 0.0])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_candidate_of_an_invalid_row_counts_as_absent(weight, fault):
    """The token after it has the distribution of new_logits, whatever the weight."""
    ids, assistant, new = torch.tensor([[3, 1, 4]]), peaked([3, 1, 4]), peaked([3, 7, 8, 9])
    assistant[0, 1] = fault
    tokens, matches = compat._speculative_sampling(ids, assistant, 3, new, weight)
    assert tokens.tolist() == [[3, 7]]
    assert matches == 1


@pytest.mark.parametrize("weight", [None, 0.6])
def test_it_equals_verify_chain_with_a_seed_of_the_default_generator(weight):
    ids, assistant, new = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    for seed in range(9):
        torch.manual_seed(seed)
        tokens, matches = compat._speculative_sampling(ids, assistant, 3, new, weight)
        torch.manual_seed(seed)
        draws = dict(seeds=draw_seed(None, new.device) * GOLDEN, positions=torch.zeros(1).long())
        if weight is None:
            want = verify_chain(new, ids, assistant, **draws)
        else:
            draft, target = assistant.softmax(-1), new.softmax(-1)
            target[:, :3] = weight * target[:, :3] + (1 - weight) * draft
            want = verify_chain(target, ids, draft, kind="probs", **draws)
        assert tokens.tolist() == want.tokens[:, : matches + 1].tolist()
        assert matches == want.num_accepted


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("candidate_length", 3, ValueError, r"candidate_length must be in \[0, 2\], got 3"),
        (
            "new_logits",
            torch.full((1, 3, 5), torch.nan),
            RuntimeError,
            "row 0, got <Status.TARGET_I",
        ),
        ("candidate_logits", torch.zeros(1, 2, 1), RuntimeError, r"new_logits, 5, got \[1, 2, 1\]"),
        ("assistant_ensemble_weight", 1.5, ValueError, r"must be in \[0, 1\], got 1.5"),
    ],
)
def test_wrong_values_of_transformers_are_named(name, value, error, message):
    """Wrong types and shapes are in test_interfaces.py."""
    good = {
        "candidate_input_ids": torch.tensor([[3, 1]]), "candidate_logits": torch.zeros(1, 2, 5),
        "candidate_length": 2, "new_logits": torch.zeros(1, 3, 5),
    }  # fmt: skip
    for weight in (None, 0.5):
        with pytest.raises(error, match=message):
            compat._speculative_sampling(
                **good | {"assistant_ensemble_weight": weight, name: value}
            )
