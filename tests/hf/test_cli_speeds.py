"""The three speeds of an answer: who is credited with what, and in which words."""

from dataclasses import replace

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare
from specdec_hf.cli.speeds import Speeds
from support import hf_models

ALL = Speeds(10.0, 24.0, 30.0, drafted=50, accepted=20)
LINE = "model.generate 10.0 tokens/s, without drafts 24.0 (2.40 times)"
OVER = "times as fast as model.generate"
FACTORS = {
    "all": ({}, f"{LINE}, with drafts 30.0 (3.00 times); speculation: 1.25 times as fast as "
            "without drafts", f"3.00 {OVER}: 2.40 times without drafts, 1.25 times by speculation"),
    "none accepted": (
        {"accepted": 0, "with_drafts": 12.0},
        f"{LINE}, with drafts 12.0 (1.20 times); none of 50 drafts was accepted",
        f"1.20 {OVER}: 2.40 times without drafts, 0.50 times by drafts of which none was accepted"),
    "nothing drafted": (
        {"drafted": 0, "accepted": 0, "with_drafts": 24.0}, f"{LINE}; nothing was drafted",
        f"2.40 {OVER}"),
    "no time": ({"with_drafts": 0.0}, f"{LINE}, with drafts 0.0", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_every_factor_has_its_cause(name):
    changed, line, conclusion = FACTORS[name]
    speeds = replace(ALL, **changed)
    assert str(speeds) == line
    assert speeds.conclusion() == conclusion


def test_to_compare_leaves_the_random_numbers_of_others_alone():
    model, inputs = hf_models.build("llama"), hf_models.prompts((9,))
    settings = {"do_sample": True, "max_new_tokens": 6}
    decoder = SpeculativeDecoder("prompt_lookup", rule="match", seed=3)
    before = torch.get_rng_state()
    turn = compare.run_turn(model, inputs, decoder, settings, compare=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert turn.identical is True
    assert len(turn.generate.tokens) == 6
    assert turn.generate.tokens != turn.tokens  # a text of its own, whose speed counts
