"""What drafters with trained heads say of their cost before one is measured."""

import pytest
import torch
from specdec_hf import (
    BlockwiseDrafter,
    EarlyExitDrafter,
    ExitHeadDrafter,
    LayerSkipDrafter,
    MedusaDrafter,
    PassHeadDrafter,
    generate,
)
from specdec_hf.drafters.heads.eagle3 import Eagle3Drafter
from specdec_hf.heads.blockwise import BlockwiseHeads
from specdec_hf.heads.medusa import MedusaHeads
from specdec_hf.schedules.costs import Costs
from support import hf_models
from support.heads import exit_head, head_for, parallel_heads, pass_head
from support.hf_models import one_thread  # noqa: F401  # autouse here

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
