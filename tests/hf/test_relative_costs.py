"""What drafters say of their cost before one is measured: those with heads, and those of others."""

import pytest
import torch
from specdec_hf import (
    BlockwiseDrafter,
    EarlyExitDrafter,
    ExitHeadDrafter,
    HorizontalCascade,
    LayerSkipDrafter,
    MedusaDrafter,
    PassHeadDrafter,
    RemoteDrafter,
    TrieTree,
    generate,
)
from specdec_hf.drafters import remote
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.schedules.costs import Costs
from support import hf_models
from support.heads import exit_head, head_for, parallel_heads, pass_head

# Of a target with hidden states of 32, and of three heads that draft 66 of its 67 tokens.
OUTPUTS = 3 * 66 * 32
MEDUSA = 2 * 3 * (32 * 32 + 32)
BLOCKWISE = (32 * 6 + 6) + (6 * 96 + 96)
EXIT = 32 * 32 + 32


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=4)


def size(module):
    return sum(x.numel() for x in module.parameters())


def costs_of(target, drafter, monkeypatch):
    """What schedule and benefit guard of a call begin with."""
    seen, adopt = [], Costs.adopt

    def recorded(self, *args, **kwargs):
        seen.append(self)
        adopt(self, *args, **kwargs)

    monkeypatch.setattr(Costs, "adopt", recorded)
    generate(target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=1)
    return seen[0]


def with_own_outputs(target):
    head = parallel_heads(MedusaHeads, target)
    head.lm_head, head.own_lm_head = torch.stack([head.lm_head] * 3), True
    return head


@pytest.mark.parametrize(
    ("drafter", "weights", "at_once", "reads_prompt"),
    [
        (lambda t: MedusaDrafter(parallel_heads(MedusaHeads, t)), MEDUSA + OUTPUTS, True, False),
        (lambda t: MedusaDrafter(with_own_outputs(t)), MEDUSA + OUTPUTS, True, False),
        (
            lambda t: BlockwiseDrafter(parallel_heads(BlockwiseHeads, t)),
            BLOCKWISE + OUTPUTS, True, False,
        ),
        (lambda t: PassHeadDrafter(pass_head(t)), size, True, False),
        (
            lambda t: ExitHeadDrafter(exit_head(t)),
            lambda t: size(t) - size(t.model.layers[1:]) + EXIT, False, False,
        ),
        (
            lambda t: EarlyExitDrafter(1), lambda t: size(t) - size(t.model.layers[1:]),
            False, False,
        ),
        (
            lambda t: LayerSkipDrafter(1, 2), lambda t: size(t) - size(t.model.layers[1:3]),
            False, False,
        ),
        (
            lambda t: Eagle3Drafter(head_for(t)), lambda t: size(head_for(t)) + 66 * 32,
            False, True,
        ),
    ],
    ids=["medusa", "own-outputs", "blockwise", "pass", "exit", "early-exit", "skip", "eagle3"],
)  # fmt: skip
def test_a_draft_costs_the_weights_that_it_reads(
    drafter, weights, at_once, reads_prompt, target, monkeypatch
):
    costs = costs_of(target, drafter(target), monkeypatch)
    share = (weights(target) if callable(weights) else weights) / size(target)
    assert costs.relative_cost == pytest.approx(share)
    assert (costs.drafts_at_once, costs.reads_prompt) == (at_once, reads_prompt)


class Stated(Drafter):
    """A drafter of which only the costs matter."""

    rolls_back = True

    def __init__(self, cost, at_once, reads_prompt):
        self.costs = cost, at_once, reads_prompt

    def start(self, context):
        self.relative_cost, self.drafts_at_once, self.reads_prompt = self.costs

    def propose(self, history, limits):
        return None


AT_ONCE, STEPS, FREE = (0.2, True, False), (0.3, False, True), (0.0, False, True)


@pytest.mark.parametrize(
    ("stated", "expected", "merged"),
    [
        ((AT_ONCE, AT_ONCE), (0.4, True, False), 0.4),
        ((STEPS, STEPS), (0.3, False, True), 0.6),
        ((STEPS, AT_ONCE), (0.3, False, True), 0.5),
        ((AT_ONCE, FREE), (0.2, True, False), 0.2),
        ((FREE, FREE), (0, False, False), 0),
    ],
    ids=["at-once", "steps", "both", "free", "none"],
)
def test_costs_of_several_drafters_follow_from_theirs(
    stated, expected, merged, target, monkeypatch
):
    """In a cascade a step is one drafter's; in a merged tree it is one of each."""
    cascade = HorizontalCascade([Stated(*one) for one in stated], [1])
    tree = TrieDrafter([Stated(*one) for one in stated], TrieTree())
    for drafter, cost in ((cascade, expected[0]), (tree, merged)):
        with monkeypatch.context() as patch:
            costs = costs_of(target, drafter, patch)
        assert costs.relative_cost == pytest.approx(cost)
        assert (costs.drafts_at_once, costs.reads_prompt) == expected[1:]


@pytest.mark.parametrize("stated", [AT_ONCE, STEPS])
def test_a_drafter_elsewhere_costs_what_it_says_there(stated, target, monkeypatch):
    server = remote._Server(Stated(*stated))
    monkeypatch.setattr(
        RemoteDrafter, "_ask", lambda self, what, value: getattr(server, what)(value)
    )
    monkeypatch.setattr(remote, "_check_initialized", lambda name: None)
    monkeypatch.setattr(remote.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(remote.dist, "get_rank", lambda: 0)
    costs = costs_of(target, RemoteDrafter(1), monkeypatch)
    assert (costs.relative_cost, costs.drafts_at_once, costs.reads_prompt) == stated
