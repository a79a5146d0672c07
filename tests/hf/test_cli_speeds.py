"""The three speeds of an answer: who is credited with what, and in which words."""

from dataclasses import replace

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare
from specdec_hf.cli.report import figures, in_options, print_summary, summarize, verdict
from specdec_hf.cli.speeds import Speeds
from specdec_hf.cli.terminal import console
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.loop.streaming import Step
from support import hf_models

ALL = Speeds(10.0, 24.0, 30.0, drafted=50, accepted=20)
LINE = "model.generate 10.0 tokens/s, without drafts 24.0 (2.40 times)"


PLAIN = {"drafted": 0, "accepted": 0}
OVER = "times as fast as model.generate"
FACTORS = {
    "all": ({}, f"{LINE}, with drafts 30.0 (3.00 times); speculation: 1.25 times as fast as "
            "without drafts", f"3.00 {OVER}: 2.40 times without drafts, 1.25 times by speculation"),
    "none accepted": (
        {"accepted": 0, "with_drafts": 12.0},
        f"{LINE}, with drafts 12.0 (1.20 times); none of 50 drafts was accepted",
        f"1.20 {OVER}: 2.40 times without drafts, 0.50 times by drafts of which none was accepted"),
    "no drafter": (
        {**PLAIN, "with_drafts": 24.0}, f"{LINE}; nothing was drafted", f"2.40 {OVER}"),
    "nothing drafted": (
        {**PLAIN, "with_drafts": 23.0},
        f"{LINE}, with the drafter 23.0 (2.30 times); nothing was drafted", f"2.30 {OVER}"),
    "no model.generate": (
        {"generate": None}, "without drafts 24.0 tokens/s, with drafts 30.0; speculation: 1.25 "
        "times as fast as without drafts", ""),
    "alone": ({"generate": None, "without_drafts": None}, "with drafts 30.0 tokens/s", ""),
    "no plain decoding": (
        {"without_drafts": None}, "model.generate 10.0 tokens/s, with drafts 30.0 (3.00 times)",
        f"3.00 {OVER}"),
    "no time": ({"with_drafts": 0.0}, f"{LINE}, with drafts 0.0", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_every_factor_has_its_cause(name):
    changed, line, conclusion = FACTORS[name]
    speeds = replace(ALL, **changed)
    assert str(speeds) == line
    assert speeds.conclusion() == conclusion


def test_speeds_of_nothing_have_no_ratios():
    speeds = Speeds(0.0, None, 30.0, drafted=0, accepted=0)
    assert (speeds.library, speeds.together, speeds.speculation) == (None, None, None)
    assert Speeds(10.0, 24.0, 30.0, 5, 0).to_dict() == {
        "tokens_per_second": {"model.generate": 10.0, "without_drafts": 24.0, "with_drafts": 30.0},
        "ratios": {"library": 2.4, "speculation": None, "together": 3.0},
    }


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


def made_up(drafted=0, accepted=0, rounds=10, seconds=1.0, compared=True, **stats):
    """An answer of ``rounds + accepted`` tokens; without drafts 1 s, of `model.generate` 2 s."""
    counts = SequenceStats(new_tokens=rounds + accepted, drafted=drafted, accepted=accepted)
    counts.rounds = rounds
    stats = {"drafter": "ngram", "cache": "spec", **stats}
    tokens = [1] * counts.new_tokens
    return compare.Turn(
        5, [Step(0, tokens, ["plain"] * len(tokens), [0.0] * len(tokens))],
        SpecStats([counts], rounds, **stats), seconds,
        *([compare.Run(tokens, 1.0), compare.Run(tokens, 2.0)] if compared else []),
    )  # fmt: skip


VERDICTS = {
    "several answers": (
        [made_up(12, 8, seconds=0.5), made_up(seconds=1.0)],
        f"2.67 {OVER}: 2.00 times without drafts, 1.33 times by speculation; 1.40 tokens a round"),
    "slower": (
        [made_up(40, 2, seconds=2.0)],
        f"1.00 {OVER}: 2.00 times without drafts, 0.50 times by speculation; 1.20 tokens a round, "
        "5% of drafts accepted; another --drafter may gain"),
    "none accepted": (
        [made_up(40, 0, seconds=2.0)],
        f"1.00 {OVER}: 2.00 times without drafts, 0.50 times by drafts of which none was accepted; "
        "another --drafter may gain"),
    "no comparison": ([made_up(12, 9, compared=False)], "1.90 tokens a round"),
    "no drafter": ([made_up(drafter="none", seconds=0.5)], f"4.00 {OVER}"),
    "neither": ([made_up(drafter="none", compared=False)], ""),
    "waited": (
        [made_up(notes=[WAITED])],
        f"2.00 {OVER}; nothing was drafted in 10 tokens, because the guard waited; --guard off "
        "drafts from the second round"),
    "not found": (
        [made_up(notes=["no draft was found in 10 rounds"])],
        f"2.00 {OVER}; nothing was drafted in 10 tokens, because no draft was found; --drafter "
        "help lists others"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_the_verdict_follows_from_the_statistics(name):
    turns, line = VERDICTS[name]
    assert verdict(turns) == line


def test_the_verdict_compares_tokens_a_second_of_answers_of_other_lengths():
    turn = made_up(12, 10, seconds=0.5)
    turn.generate = compare.Run(turn.tokens[:10], 2.0)
    assert verdict([turn]).startswith("8.00 times as fast as model.generate: 4.00 times without")


def test_notes_name_the_options_of_the_command_line():
    assert in_options(WAITED).endswith("; --guard off drafts from the second round")


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
