"""What the plug-in draws drafts with, with objects in place of vLLM's proposer."""

from types import SimpleNamespace

import pytest
import torch
from specdec_vllm import Settings
from specdec_vllm.drafting_v1 import DraftNoise, sample_from_logits

from specdec_kernels import draft_positions, sample

V = 17
SAMPLE_FROM_LOGITS = sample_from_logits(lambda *_: "vLLM's", Settings())


def draw(rule, rows, number=1, *, probabilistic=True, temperature=None, as_logits=True):
    """(tokens, logits or probabilities) of the last of `number` drafts of the requests `rows`."""
    logits = 2 * torch.randn(40, V, generator=torch.Generator().manual_seed(1))
    rows = torch.as_tensor(rows)
    temperature = torch.linspace(0.5, 1.5, 40) if temperature is None else temperature
    noise = DraftNoise(rule, rows + 3, 10 * rows, as_logits=as_logits)
    owner = SimpleNamespace(_enable_probabilistic_draft_probs=probabilistic, specdec_noise=noise)
    given = SimpleNamespace(all_greedy=False, temperature=temperature[rows])
    for _ in range(number):
        drawn = SAMPLE_FROM_LOGITS(owner, logits[rows].clone(), given)
    return drawn, logits[rows]


@pytest.mark.parametrize(
    ("rule", "noise"), [("token", "draft"), ("block", "draft"), ("match", "shared")]
)
def test_drafts_take_the_noise_that_the_rule_needs(rule, noise):
    rows = torch.arange(40)
    (tokens, handed_on), logits = draw(rule, rows, number=2)
    positions = draft_positions(10 * rows, 2, rule=rule)[:, 1]
    divided = logits / torch.linspace(0.5, 1.5, 40)[:, None]
    expected = sample(divided, seeds=rows + 3, positions=positions, noise=noise).tokens
    assert tokens.equal(expected)
    assert handed_on.equal(logits)
    (same, probs), _ = draw(rule, rows, number=2, as_logits=False)
    assert same.equal(tokens)
    torch.testing.assert_close(probs, divided.softmax(-1))


@pytest.mark.parametrize("rule", ["token", "block", "match"])
def test_drafts_that_come_at_once_are_those_that_come_one_after_another(rule):
    """Parallel drafting: the rows of each request's drafts follow each other."""
    rows, temperature = torch.arange(20), torch.linspace(0.5, 1.5, 20)
    logits = 2 * torch.randn(20, 3, V, generator=torch.Generator().manual_seed(1))

    def drawn(steps):
        owner = SimpleNamespace(
            _enable_probabilistic_draft_probs=True,
            specdec_noise=DraftNoise(rule, rows + 3, 10 * rows),
        )
        given = SimpleNamespace(all_greedy=False, temperature=temperature)
        parts = [SAMPLE_FROM_LOGITS(owner, step.flatten(0, 1), given) for step in steps]
        tokens = torch.cat([tokens.view(20, -1) for tokens, _ in parts], dim=1)
        return tokens, torch.cat([kept.view(20, -1, V) for _, kept in parts], dim=1)

    one_by_one, rows_of_each = drawn(logits.split(1, dim=1))
    at_once, rows_at_once = drawn([logits])
    assert at_once.equal(one_by_one)
    torch.testing.assert_close(rows_at_once, rows_of_each)
    assert drawn(logits.split([1, 2], dim=1))[0].equal(one_by_one)


def test_drafts_of_another_number_come_from_vllm_with_all_that_follow_in_the_step(logged):
    noise = DraftNoise("token", torch.arange(3), torch.arange(3))
    owner = SimpleNamespace(_enable_probabilistic_draft_probs=True, specdec_noise=noise)
    for rows in (4, 3):
        given = SimpleNamespace(all_greedy=False, temperature=torch.ones(3))
        assert SAMPLE_FROM_LOGITS(owner, torch.zeros(rows, V), given) == "vLLM's"
    assert len(logged) == 1


def test_greedy_requests_of_a_batch_draft_their_argmax():
    temperature = torch.zeros(40)
    temperature[::2] = 1.0
    (tokens, logits), _ = draw("token", torch.arange(40), temperature=temperature)
    assert tokens[1::2].equal(logits[1::2].argmax(-1))
    assert not tokens[::2].equal(logits[::2].argmax(-1))
    assert draw("token", range(40), probabilistic=False)[0] == "vLLM's"
