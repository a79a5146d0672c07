"""The three speeds of an answer: who is credited with what, and in which words."""

from dataclasses import replace

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare
from specdec_hf.cli.report import figures, print_summary, summarize, verdict
from specdec_hf.cli.speeds import Speeds
from specdec_hf.cli.terminal import console
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.loop.streaming import Step
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


WAITED = "the guard held drafting back; guard=False drafts from the second round"


def made_up(drafted=0, accepted=0, rounds=10, seconds=1.0, **stats):
    """An answer of ``rounds + accepted`` tokens; without drafts 1 s, of `model.generate` 2 s."""
    counts = SequenceStats(new_tokens=rounds + accepted, drafted=drafted, accepted=accepted)
    counts.rounds = rounds
    tokens = [1] * counts.new_tokens
    return compare.Turn(
        5, [Step(0, tokens, ["plain"] * len(tokens), [0.0] * len(tokens))],
        SpecStats([counts], rounds, drafter="ngram", cache="spec", **stats), seconds,
        compare.Run(tokens, 1.0), compare.Run(tokens, 2.0),
    )  # fmt: skip


def test_the_verdict_follows_from_the_statistics():
    slower = f"1.00 {OVER}: 2.00 times without drafts, 0.50 times by speculation; 1.20 tokens a "
    slower += "round, 5% of drafts accepted; another --drafter may gain"
    assert verdict([made_up(40, 2, seconds=2.0)]) == slower
    waited = f"2.00 {OVER}; nothing was drafted in 10 tokens, because the guard waited; --guard "
    assert verdict([made_up(notes=[WAITED])]) == waited + "off drafts from the second round"
    other = made_up(12, 10, seconds=0.5)
    other.generate = compare.Run(other.tokens[:10], 2.0)  # tokens a second are compared
    assert verdict([other]).startswith(f"8.00 {OVER}: 4.00 times without")


def test_figures_and_summary_have_the_same_speeds(capsys):
    """Each answer's, and those of all tokens over all seconds."""
    turns = [made_up(12, 9, seconds=0.5), made_up(10, 1, rounds=10, seconds=1.0)]
    assert figures(turns[0]).startswith(
        "19 tokens; model.generate 9.5 tokens/s, without drafts 19.0 (2.00 times), with drafts "
        "38.0 (4.00 times); speculation: 2.00 times as fast as without drafts; 1.90 tokens a round"
    )
    speeds = compare.speeds_of(turns)
    assert (speeds.generate, speeds.without_drafts, speeds.with_drafts) == (7.5, 15.0, 20.0)
    summary = summarize(turns, greedy=True)
    assert summary["ratios"] == {"library": 2.0, "speculation": 4 / 3, "together": 20 / 7.5}
    print_summary({**summary, "model": "", "dtype": "", "device": ""}, speeds, console)
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows[3:7] == [
        "tokens/s model.generate 7.5",
        "tokens/s without drafts 15.0, 2.00 times model.generate",
        "tokens/s with drafts 20.0, 2.67 times model.generate",
        "speculation 1.33 times without drafts",
    ]
