"""Drafts that end early keep the distribution of the text, and lose it where the token that ends
them is dropped. The enumeration is exact: every draft, every cell of the uniforms.
"""

import numpy as np
import proofs
import pytest
import torch
from specdec_hf.schedules.base import ScheduleContext, TokenStats
from specdec_hf.schedules.registry import make_schedule
from support.toy_chain import ToyChain, assert_target_distribution, assert_wrong_distribution

V, GAMMA = 3, 3
SCHEDULES = {
    "confidence": "confidence:threshold=0.45",
    "specdec++": "specdec++:h=0.6",
    "egag": "egag:gamma_max=3",
    "budget": "budget:tokens=3,max_length=3",
}


def stats_of(toy, drafts):
    """The statistics of each position of draft tuples [N, gamma], every tuple a sequence."""
    out = []
    for i in range(toy.gamma):
        row = toy.draft_probs[i][tuple(drafts[:, :i].T)] if i else toy.draft_probs[0]
        row = row.expand(len(drafts), -1)
        probability = row.gather(1, drafts[:, i : i + 1])[:, 0]
        entropy = torch.special.entr(row).sum(dim=1)
        out.append(TokenStats(*(x.float().numpy() for x in (probability, row.amax(1), entropy))))
    return out


def beside_another(stats, n):
    """The statistics of tuple n, and of a second sequence of its batch."""
    other = (0.7, 0.4, 0.9)
    return [
        TokenStats(*(np.array([x[n], y]) for x, y in zip(
            (one.probability, one.largest, one.entropy), (c, c, 0.5), strict=True
        )))
        for one, c in zip(stats, other, strict=True)
    ]  # fmt: skip


def kept_lengths(toy, name, drafts, *, drawn=True, sees_draw=False, confidence=False):
    """[N] how much of each draft tuple a schedule keeps."""
    stats = stats_of(toy, drafts)
    if sees_draw:
        stats = [TokenStats(one.probability, one.probability, one.entropy) for one in stats]
    if confidence:
        stats = [TokenStats.of_confidence(one.probability) for one in stats]
    kept = []
    for n in range(len(drafts)):
        schedule = make_schedule(SCHEDULES[name])
        schedule.start(ScheduleContext(2, GAMMA, V))
        schedule.lengths(np.array([GAMMA, GAMMA]))
        mine = beside_another(stats, n)
        kept.append(schedule.cut(mine, np.array([GAMMA, GAMMA]), drawn=drawn)[0])
    return torch.tensor(kept)


def realized(toy, name, **kwargs):
    verify = toy.verifier("cpp")
    tuples = torch.cartesian_prod(*[torch.arange(V)] * GAMMA)
    kept = kept_lengths(toy, name, tuples, **kwargs)
    assert (kept < GAMMA).any(), "the schedule never ends a draft"

    def run(drafts, uniforms):
        lengths = kept[(drafts * V ** torch.arange(GAMMA - 1, -1, -1)).sum(1)]
        ended = torch.arange(GAMMA) >= lengths[:, None]
        return verify(drafts.masked_fill(ended, -1), uniforms)

    return proofs.enumerate_distribution(run, toy.draft_probs, toy.target_probs)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("confidence", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_ending_a_draft_keeps_the_targets_distribution(name, rule, confidence):
    """Also where a confidence ends it, which depends on what was drawn."""
    toy = ToyChain(V, GAMMA, rule=rule, seed=3)
    assert_target_distribution(realized(toy, name, confidence=confidence), toy)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["confidence", "specdec++"])
def test_dropping_the_token_that_ends_the_draft_is_biased(name, rule):
    """Negative control: llama.cpp's reading of a threshold, which suits greedy text only."""
    toy = ToyChain(V, GAMMA, rule=rule, seed=3)
    assert_wrong_distribution(realized(toy, name, drawn=False), toy)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_budget_that_looks_at_the_draw_is_biased(rule):
    """Negative control: the confidence of a draft is the probability of what was drawn."""
    toy = ToyChain(V, GAMMA, rule=rule, seed=3)
    assert_wrong_distribution(realized(toy, "budget", sees_draw=True), toy)
