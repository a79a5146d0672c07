"""The baselines of `bench`: rejection sampling is exact, and both keep greedy text."""

import pytest
import torch
from proofs.toy_chain import ToyChain, chain_joint_distribution, rejection_mass, rows_after
from specdec_lab.bench.baselines import BestOf, RejectionSampling
from support import hf_models


def difference(accept_of, after):
    """The largest between the distributions of a round's tokens and of the target's.

    Args:
        accept_of: acceptance probabilities [gamma] of some drafts.
        after: distribution of the token after a rejection, of the rows P and Q there.
    """
    toy = ToyChain(v=3, gamma=2)
    p, q = toy.target_probs, toy.draft_probs
    drafts = torch.cartesian_prod(torch.arange(3), torch.arange(3))
    accept = accept_of(rows_after(p, drafts), rows_after(q, drafts), drafts).view(3, 3, 2)
    accepted = [accept[:, 0, 0] * q[0], accept[..., 1] * q[1]]
    recovered = [rejection_mass(accepted[i], after(p[i], q[i])) for i in range(2)]
    found = chain_joint_distribution(accepted, recovered, p)
    expected = chain_joint_distribution([], [], p)  # where nothing is drafted
    return float((found - expected).abs().max())


def test_rejection_sampling_is_distributed_as_the_target():
    assert difference(RejectionSampling.accept_probs, lambda p, q: p) < 1e-14

    # Negative controls: without M, and with the residual in the place of P.
    def token(p, q, drafts):
        ids = drafts[:, :, None]
        return (p[:, :-1].gather(-1, ids) / q.gather(-1, ids))[..., 0].clamp(max=1)

    def residual(p, q):
        return (p - q).clamp(min=0) / (p - q).clamp(min=0).sum(-1, keepdim=True)

    assert difference(token, residual) < 1e-14  # speculative sampling is exact too
    assert difference(token, lambda p, q: p) > 1e-3
    assert difference(RejectionSampling.accept_probs, residual) > 1e-3


def test_the_longest_of_several_chains_is_kept():
    p = torch.eye(4, dtype=torch.float64)[torch.tensor([[0, 3, 3], [0, 1, 2], [0, 2, 1]])]
    drafts = torch.tensor([[1, 1], [0, 1], [0, 3]])
    best = BestOf(None, None, 2, chains=3)
    assert best.choose(p, p[:, :2], drafts) == (1, 2, 2)
    assert best.choose(p[:1], p[:1, :2], drafts[:1]) == (0, 0, 0)


@pytest.fixture(scope="module")
def models():
    return hf_models.tiny("llama"), hf_models.perturbed("llama", 0.3)


@pytest.mark.parametrize("gamma", [1, 3])
@pytest.mark.parametrize("ends", [False, True], ids=["long", "ends"])
def test_greedy_text_of_baselines_is_that_of_plain_generation(models, monkeypatch, gamma, ends):
    prompt, arguments = hf_models.prompts((9,)), {"max_new_tokens": 20, "do_sample": False}
    plain = models[0].generate(**prompt, **arguments)
    if ends:
        monkeypatch.setattr(models[0].generation_config, "eos_token_id", int(plain[0, 14]))
        plain = models[0].generate(**prompt, **arguments)
    rejection, best = RejectionSampling(*models, gamma), BestOf(*models, gamma, chains=3)
    for baseline in (rejection, best):
        assert baseline.generate(**prompt, **arguments).tolist() == plain.tolist()
        assert baseline.rounds < 20
    assert best.rounds <= rejection.rounds


def test_equal_models_accept_everything_also_where_text_is_sampled(models):
    same, other = RejectionSampling(models[0], models[0], 3), RejectionSampling(*models, 3)
    torch.manual_seed(1)
    for baseline in (same, other):
        text = baseline.generate(**hf_models.prompts((9,)), max_new_tokens=20, do_sample=True)
        assert text.shape == (1, 29)
    assert same.rounds == 5 < other.rounds <= 20


def test_what_would_be_biased_or_is_not_meant_is_refused(models):
    sampled = {"max_new_tokens": 4, "do_sample": True}
    with pytest.raises(ValueError, match="the longest of sampled chains is biased"):
        BestOf(*models, 3, chains=2).generate(**hf_models.prompts((9,)), **sampled)
    with pytest.raises(ValueError, match="input_ids must be of one sequence, got 2"):
        RejectionSampling(*models, 3).generate(**hf_models.prompts((9, 5)), **sampled)
