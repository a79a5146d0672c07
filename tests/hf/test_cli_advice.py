"""The last lines of ``generate``, ``demo`` and ``chat``: what speculation gained, and advice."""

import re

import pytest
from specdec_hf.cli.advice import in_options, verdict
from specdec_hf.cli.compare import Turn
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.loop.streaming import Step
from support.cli_models import folder, invoke  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

WAITED = "the guard held drafting back; guard=False drafts from the second round"


def made_up(drafted=0, accepted=0, rounds=10, seconds=1.0, baseline="model.generate", **stats):
    """An answer of ``rounds + accepted`` tokens, which plain decoding takes a second for."""
    counts = SequenceStats(new_tokens=rounds + accepted, drafted=drafted, accepted=accepted)
    counts.rounds = rounds
    stats = {"drafter": "ngram", "cache": "spec", **stats}
    tokens = [1] * counts.new_tokens
    return Turn(
        5, [Step(0, tokens, ["plain"] * len(tokens), [0.0] * len(tokens))],
        SpecStats([counts], rounds, **stats), seconds, baseline,
        tokens if baseline else [], 1.0 if baseline else 0.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "line"),
    [
        (
            [made_up(12, 9, seconds=0.5)],
            "2.00 times as fast as model.generate, 1.90 tokens a round",
        ),
        (
            [made_up(12, 8, seconds=0.5), made_up(seconds=1.0)],
            "1.33 times as fast as model.generate, 1.40 tokens a round",
        ),
        (
            [made_up(40, 2, seconds=2.0)],
            "0.50 times as fast as model.generate, 1.20 tokens a round; 5% of drafts accepted, "
            "another --drafter may gain",
        ),
        ([made_up(12, 9, baseline="")], "1.90 tokens a round"),
        (
            [made_up(notes=[WAITED])],
            "nothing was drafted in 10 tokens, because the guard waited; --guard off drafts from "
            "the second round",
        ),
        (
            [made_up(notes=["no draft was found in 10 rounds"])],
            "nothing was drafted in 10 tokens, because no draft was found; --drafter help lists "
            "others",
        ),
    ],
    ids=["gain", "several", "slower", "no-compare", "waited", "not-found"],
)
def test_the_verdict_follows_from_the_statistics(turns, line):
    assert verdict(turns) == f"speculation: {line}"


def test_the_verdict_compares_tokens_a_second_of_answers_of_other_lengths():
    turn = made_up(12, 10, seconds=0.5)
    turn.baseline_tokens = turn.baseline_tokens[:10]
    assert verdict([turn]).startswith("speculation: 4.00 times as fast as model.generate")


def test_notes_name_the_options_of_the_command_line():
    assert in_options(WAITED).endswith("; --guard off drafts from the second round")


def test_generate_ends_with_the_verdict(folder):  # noqa: F811
    result = invoke(
        "generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 8, "--drafter",
        "layers:2", "--guard", "off",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    line = result.output.splitlines()[-1]
    assert re.fullmatch(r"speculation: .* times as fast as model.generate, .* a round.*", line)
