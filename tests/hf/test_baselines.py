"""The baselines of `bench`: rejection sampling is exact, and both keep greedy text."""

import itertools
import math

import pytest
import torch
from specdec_lab.bench.baselines import BestOf, RejectionSampling
from support import hf_models

VOCAB, GAMMA = 3, 2


def conditionals(seed):
    """Random distributions of the next token after each prefix of up to gamma tokens."""
    generator = torch.Generator().manual_seed(seed)
    prefixes = [x for n in range(GAMMA + 1) for x in itertools.product(range(VOCAB), repeat=n)]
    rows = torch.rand(len(prefixes), VOCAB, generator=generator, dtype=torch.float64)
    return dict(zip(prefixes, rows / rows.sum(-1, keepdim=True), strict=True))


def emitted(accept_of, after):
    """Exact distribution of gamma + 1 tokens of a round and of the target that completes it.

    Args:
        accept_of: acceptance probabilities [gamma] of some drafts.
        after: distribution of the token after a rejection, of the rows P and Q there.
    """
    p, q = conditionals(1), conditionals(2)
    found = dict.fromkeys(itertools.product(range(VOCAB), repeat=GAMMA + 1), 0.0)
    for drafts in itertools.product(range(VOCAB), repeat=GAMMA):
        rows_p = torch.stack([p[drafts[:i]] for i in range(GAMMA + 1)])[None]
        rows_q = torch.stack([q[drafts[:i]] for i in range(GAMMA)])[None]
        accept = accept_of(rows_p, rows_q, torch.tensor([drafts]))[0].tolist()
        weight = math.prod(float(q[drafts[:i]][drafts[i]]) for i in range(GAMMA))
        for n in range(GAMMA + 1):
            share = weight * math.prod(accept[:n])
            follows = p[drafts]
            if n < GAMMA:
                follows = (1 - accept[n]) * after(rows_p[0, n], rows_q[0, n])
            for rest in itertools.product(range(VOCAB), repeat=GAMMA + 1 - n):
                tokens = drafts[:n] + rest
                later = math.prod(float(p[tokens[:i]][tokens[i]]) for i in range(n + 1, GAMMA + 1))
                found[tokens] += share * float(follows[rest[0]]) * later
    return [found[x] - math.prod(float(p[x[:i]][x[i]]) for i in range(GAMMA + 1)) for x in found]


def test_rejection_sampling_is_distributed_as_the_target():
    differences = emitted(RejectionSampling.accept_probs, lambda p, q: p)
    assert max(map(abs, differences)) < 1e-14

    # Negative controls: without M, and with the residual in the place of P.
    def token(p, q, drafts):
        ids = drafts[:, :, None]
        return (p[:, :-1].gather(-1, ids) / q.gather(-1, ids))[..., 0].clamp(max=1)

    def residual(p, q):
        return (p - q).clamp(min=0) / (p - q).clamp(min=0).sum()

    assert max(map(abs, emitted(token, residual))) < 1e-14  # speculative sampling is exact too
    assert max(map(abs, emitted(token, lambda p, q: p))) > 1e-3
    assert max(map(abs, emitted(RejectionSampling.accept_probs, residual))) > 1e-3


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
