"""What may decide how much a call drafts.

A clock in float32 and on packed weights, none by default in 16 bits by the model's own forwards.
"""

import random

import pytest
import torch
from specdec_hf import BenefitGuard, PromptLookupDrafter, generate
from specdec_hf.schedules.costs import ExpectedCosts
from support import hf_models

GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 3}
CALLS = {
    "tree": GREEDY,
    "chains": {**SAMPLED, "cache": "aligned"},
    "batch": {**GREEDY, "lengths": (9, 4)},
    "a schedule": {**GREEDY, "num_assistant_tokens_schedule": "constant"},
}


class Clock:
    """Takes next to no time for a phase, or ten seconds by chance, another one for each seed."""

    def __init__(self, seed):
        self.now, self.random = 0.0, random.Random(seed)

    def __call__(self):
        self.now += 10 if self.random.random() < 0.2 else 0.01
        return self.now


@pytest.fixture(autouse=True)
def drafts_at_once():
    """The guard has its own limit here."""


def run(model, dtype, lengths=(9,), **kwargs):
    inputs = hf_models.prompts(lengths, vocab_size=11)
    how = {"max_new_tokens": 28, "return_dict_in_generate": True, "compile": False, **kwargs}
    return generate(model.to(dtype), **inputs, **how)


def drafted(model, dtype, clocks=3, **kwargs):
    """The numbers of drafted tokens of each round, by one clock after the other."""
    return {tuple(run(model, dtype, clock=Clock(s), **kwargs).stats.gammas) for s in range(clocks)}


def timing_in(out):
    return [note for note in out.stats.notes if "timing" in note]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_default_a_clock_decides_in_float32_alone(model, call):
    (gammas,) = drafted(model, torch.bfloat16, **call)
    assert any(gammas)
    assert len(drafted(model, torch.float32, **call)) > 1, "the clocks differ enough to matter"
    if call is GREEDY:
        chains = {**GREEDY, "drafter": "prompt_lookup", "compile": None}
        assert len(drafted(model, torch.bfloat16, **chains)) > 1
        assert not timing_in(run(model, torch.bfloat16, **chains))
        with torch.autocast("cpu", torch.bfloat16):  # its products are torch's own
            assert len(drafted(model, torch.float32, **chains)) == 1
        first, *later = (run(model, torch.bfloat16, **GREEDY).stats.gammas for _ in range(4))
        assert later == [first] * 3, "earlier calls decide"


def test_a_clock_decides_in_sixteen_bits_by_choice_and_a_note_says_so(model):
    choice = {"guard": BenefitGuard(window=2)}
    assert len(drafted(model, torch.bfloat16, **GREEDY, **choice)) > 1
    assert timing_in(run(model, torch.bfloat16, **GREEDY, **choice))
    assert not timing_in(run(model, torch.bfloat16, **GREEDY))
    assert not timing_in(run(model, torch.float32, **GREEDY, **choice))


def test_drafts_that_are_never_accepted_are_ended_by_their_number():
    """Within the loss that the guard allows, at the costs that it expects."""
    model = hf_models.build("llama")
    out = run(model, torch.bfloat16, **GREEDY, drafter="random", max_new_tokens=60)
    costs = ExpectedCosts(1, prompt=9)
    lost = sum(costs.round(n) - 1 for n in out.stats.gammas) - out.stats.accepted
    assert 0 < lost <= 0.02 * (60 + costs.prefill)
    assert out.stats.plain_step_seconds is None, "nothing was measured"


def test_a_text_without_a_draft_says_which_of_two_causes_it_has(model):
    def notes(**kwargs):
        # What earlier tests measured is not recalled with a clock that is given.
        found = run(
            model, torch.bfloat16, **GREEDY, **kwargs, max_new_tokens=6, clock=Clock(1)
        ).stats.notes
        return [note for note in found if note.startswith("nothing was drafted")]

    (held,) = notes(drafter="prompt_lookup", guard=BenefitGuard(max_loss=0))
    assert "the benefit guard held drafting back in 4 of 6 rounds" in held
    (vain,) = notes(drafter=PromptLookupDrafter(99, 99), guard=False)
    assert vain == "nothing was drafted: no draft was found in 4 of 6 rounds"
    assert not notes(drafter="random", guard=False)
    assert not notes(drafter=None)
