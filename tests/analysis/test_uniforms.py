"""The uniforms that are shown are those that the verification compared."""

import pytest
import torch

from specdec_kernels import sample, verify_chain
from specdec_kernels.analysis import acceptance_uniforms, draw_uniforms

pytestmark = pytest.mark.analysis

B, GAMMA, V = 300, 3, 5


def verified(rule):
    """Uniforms, acceptance probabilities and counts of a batch of random chains."""
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(1, 1, V, generator=generator).expand(B, GAMMA + 1, V)
    rows = torch.randn(1, 1, V, generator=generator).expand(B, GAMMA, V)
    seeds, positions = torch.arange(B) - 9, torch.arange(B) * 7
    many = torch.arange(B * GAMMA)
    drafts = sample(rows.reshape(-1, V), seeds=many + 10**6, positions=many).tokens.view(B, GAMMA)
    verdict = verify_chain(
        target, drafts, rows, rule=rule, seeds=seeds, positions=positions, with_accept_probs=True
    )
    return acceptance_uniforms(seeds, positions, GAMMA, rule), verdict


def last_accepted(uniforms, verdict, rule):
    """[B], how many drafts uniforms and acceptance probabilities accept by themselves."""
    accepted = uniforms < verdict.accept_probs
    if rule == "block":  # the last of them decides
        return (accepted * torch.arange(1, GAMMA + 1)).amax(-1)
    return accepted.long().cumprod(-1).sum(-1)


@pytest.mark.parametrize(("rule", "other"), [("token", "block"), ("block", "token")])
def test_uniforms_below_the_acceptance_probability_are_the_accepted_drafts(rule, other):
    """Negative control: the uniforms of another rule."""
    uniforms, verdict = verified(rule)
    assert last_accepted(uniforms, verdict, rule).tolist() == verdict.num_accepted.tolist()
    assert set(verdict.num_accepted.tolist()) == {0, 1, 2, 3}
    uniforms, _ = verified(other)
    assert last_accepted(uniforms, verdict, rule).tolist() != verdict.num_accepted.tolist()


def test_the_bonus_token_is_the_inverse_cdf_of_its_uniform():
    target = torch.randn(V, generator=torch.Generator().manual_seed(2))
    seeds, positions = torch.arange(B) - 9, torch.arange(B) * 7
    none = torch.empty(B, 0, dtype=torch.int64)
    verdict = verify_chain(target.expand(B, 1, V), none, seeds=seeds, positions=positions)
    cdf = target.double().softmax(-1).cumsum(-1)

    def drawn(uniforms):
        return (cdf <= uniforms[:, None]).sum(-1).tolist()

    assert drawn(draw_uniforms(seeds, positions)) == verdict.tokens[:, 0].tolist()
    assert drawn(draw_uniforms(seeds, positions + 1)) != verdict.tokens[:, 0].tolist()
