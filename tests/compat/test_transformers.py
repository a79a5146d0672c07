"""Transformers' `_speculative_sampling`: its own example, the original, and `verify_chain`."""

import pytest
import torch
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.providers import SIGNIFICANCE, chi_square
from transformers.generation import utils

from specdec_kernels import verify_chain
from specdec_kernels.compat import transformers as compat
from specdec_kernels.compat.noise import GOLDEN, draw_seed

DRAWS = 2000
Q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
P = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])


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


@pytest.mark.parametrize("length", [0, 1, 3])
def test_equal_models_accept_every_candidate(length):
    ids, new = torch.tensor([[7, 2, 4, 4, 1]]), torch.randn(1, length + 1, 9)
    tokens, matches = compat._speculative_sampling(ids, new[:, :length], length, new)
    assert matches == length
    assert tokens[0, :length].tolist() == ids[0, 5 - length :].tolist()
    assert 0 <= tokens[0, length] < 9


def outcomes(function, **options):
    """[DRAWS, 3] the tokens of many calls, -1 where there is none."""
    torch.manual_seed(1)
    drafts = torch.stack([torch.multinomial(q, DRAWS, True) for q in Q], 1)
    out = torch.full((DRAWS, 3), -1)
    for ids, row in zip(drafts, out, strict=True):
        tokens, matches = function(ids[None], Q[None].log(), 2, P[None].log(), **options)
        assert tokens.shape == (1, matches + 1)
        row[: int(matches) + 1] = tokens[0]
    return out


def p_values(out, first):
    """Of the first token, of the second after an accepted draft, and of the bonus token."""
    second, bonus = (out[out[:, i] >= 0, i] for i in (1, 2))
    return [
        chi_square(x, p.double()) for x, p in ((out[:, 0], first), (second, P[1]), (bonus, P[2]))
    ]


def test_the_tokens_have_the_targets_distribution():
    assert min(p_values(outcomes(compat._speculative_sampling), P[0])) > SIGNIFICANCE


@pytest.mark.parametrize("weight", [None, 1.0, 0.5, 0.0])
@pytest.mark.parametrize("fault", [torch.nan, torch.inf, -torch.inf])
def test_a_candidate_of_an_invalid_row_counts_as_absent(weight, fault):
    """The token after it has the distribution of new_logits, whatever the weight."""
    ids, assistant, new = torch.tensor([[3, 1, 4]]), peaked([3, 1, 4]), peaked([3, 7, 8, 9])
    assistant[0, 1] = fault
    tokens, matches = compat._speculative_sampling(ids, assistant, 3, new, weight)
    assert tokens.tolist() == [[3, 7]]
    assert matches == 1


@pytest.mark.slow
def test_the_original_and_ours_have_one_distribution_and_an_ensemble_another():
    """The weight w makes drafted places those of w P + (1 - w) Q. The bonus token stays P's."""
    mixed = 0.6 * P[0] + 0.4 * Q[0]
    ours, original = (
        outcomes(f._speculative_sampling, assistant_ensemble_weight=0.6) for f in (compat, utils)
    )
    for out in (ours, original):
        first, _, bonus = p_values(out, mixed)
        assert min(first, bonus) > SIGNIFICANCE
        assert p_values(out, P[0])[0] < SIGNIFICANCE  # negative control
    share = [float((out[:, 1] >= 0).float().mean()) for out in (ours, original)]
    assert share[0] == pytest.approx(share[1], abs=0.05)


def test_it_equals_verify_chain_with_a_seed_of_the_default_generator():
    ids, assistant, new = torch.tensor([[3, 1, 4]]), torch.randn(1, 3, 8), torch.randn(1, 4, 8)
    torch.manual_seed(5)
    tokens, matches = compat._speculative_sampling(ids, assistant, 3, new)
    torch.manual_seed(5)
    seeds = draw_seed(None, new.device) * GOLDEN
    want = verify_chain(new, ids, assistant, seeds=seeds, positions=torch.zeros(1).long())
    assert tokens.tolist() == want.tokens[:, : matches + 1].tolist()
    assert matches == want.num_accepted


def test_assisted_generation_runs_with_it(monkeypatch):
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return compat._speculative_sampling(*args, **kwargs)

    monkeypatch.setattr(utils, "_speculative_sampling", counted)
    torch.manual_seed(0)
    out = model.generate(**inputs, assistant_model=model, do_sample=True, max_new_tokens=12)
    assert calls
    assert out.shape == (1, 21)


GOOD = dict(
    candidate_input_ids=torch.tensor([[3, 1]]), candidate_logits=torch.zeros(1, 2, 5),
    candidate_length=2, new_logits=torch.zeros(1, 3, 5), assistant_ensemble_weight=0.5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("candidate_input_ids", [[3, 1]], TypeError, "candidate_input_ids must be a tensor"),
        ("candidate_input_ids", torch.tensor([3]), RuntimeError, r"must be \[1, L\], got \[1\]"),
        ("candidate_length", 3, ValueError, r"candidate_length must be in \[0, 2\], got 3"),
        ("candidate_length", 1.0, TypeError, "candidate_length must be an integer"),
        ("candidate_logits", torch.zeros(1, 3, 5), RuntimeError, r"must be \[1, 2, V\], got"),
        ("new_logits", torch.zeros(2, 3, 5), RuntimeError, r"must be \[1, 3, V\], got \[2, 3, 5\]"),
        ("new_logits", torch.full((1, 3, 5), torch.nan), RuntimeError, "hold a distribution in"),
        (
            "candidate_logits",
            torch.zeros(1, 2, 4),
            RuntimeError,
            r"of new_logits, 5, got \[1, 2, 4\]",
        ),
        ("new_logits", torch.zeros(1, 3, 5).int(), RuntimeError, "floating-point, got int32"),
        ("assistant_ensemble_weight", 1.5, ValueError, r"must be in \[0, 1\], got 1.5"),
        ("assistant_ensemble_weight", "1", TypeError, "must be a number, got '1'"),
    ],
)
def test_wrong_arguments_are_named(name, value, error, message):
    compat._speculative_sampling(**GOOD)
    with pytest.raises(error, match=message):
        compat._speculative_sampling(**GOOD | {name: value})


@pytest.mark.parametrize("weight", [None, 0.5])
def test_logits_of_any_floating_dtype_and_stride_are_read(weight):
    ids, assistant, new = torch.tensor([[3, 1]]), peaked([3, 1]).double(), peaked([3, 7, 8])
    new = new.mT.contiguous().mT  # [1, 3, V] of which the vocabulary is not contiguous
    for logits in (assistant, assistant.half()):
        assert compat._speculative_sampling(ids, logits, 2, new, weight)[1] >= 1


@pytest.mark.parametrize("weight", [None, 0.5])
def test_vocabularies_of_two_sizes_raise(weight):
    """The op takes another vocabulary for the draft; the original takes one size."""
    arguments = GOOD | dict(candidate_logits=torch.zeros(1, 2, 1), assistant_ensemble_weight=weight)
    with pytest.raises(RuntimeError, match="candidate_logits must have the vocabulary"):
        compat._speculative_sampling(**arguments)


def test_a_fault_without_an_ensemble_raises_too():
    with pytest.raises(RuntimeError, match="TARGET_INVALID"):
        compat._speculative_sampling(*[*GOOD.values()][:3], torch.full((1, 3, 5), torch.nan))
