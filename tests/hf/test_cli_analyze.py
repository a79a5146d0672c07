"""The command `analyze`: a golden run, what it reports and draws, and what it leaves out."""

import html
import json
import re

import pytest
from specdec_hf.loop.statistics import RoundRecord
from specdec_lab.analysis import figures, tree_pictures
from specdec_lab.analysis.encoders import EncoderSeconds
from support.cli_models import invoke, masked, says

from specdec_kernels.analysis import walltime_factor

pytestmark = [pytest.mark.build, pytest.mark.usefixtures("home")]  # a tool of the laboratory

PROMPTS = (
    '{"question_id": 7, "category": "x", "turns": ["Say yes yes yes no no, yes yes yes no"]}\n'
    '{"question_id": 8, "category": "y", "turns": ["Hello hello & <b>", "not asked"]}\n'
)
TABLES = """
Figure #: rounds of the first answer, layers:1, temperature #
Table #: operations and speed against plain decoding, at c = #
Table #: measured speed-up of tiny
Table #: acceptance rates
Corollary #: acceptance rate
Table #: expected against measured speed-up over plain decoding
Sections # and #: what α and c make possible, with v = #
Section #: arithmetic operations and memory accesses
SpecInfer, Table #: how often one of the first k drafts is accepted
Baselines: expected tokens per round that drafts
Section #: what each schedule leaves of an oracle for γ
Table # and Appendix A.#: acceptance rate under lenience l
Appendix A.#: speed under lenience, T5-small for T5-XXL, c = #
Without the residual: recovered tokens drawn from P, layers:1
wrote figure-1.html, figure-2.svg, figure-3.svg, figure-4.svg, figure-5.svg to pictures
"""


def test_analyze_prints_reports_and_draws_this(home):
    (home / "prompts.jsonl").write_text(PROMPTS)
    asked = (
        "analyze --model tiny --prompts prompts.jsonl --drafter layers:1 --max-new-tokens 12 "
        "--gamma 2,4 --temperature 0.5 --ablate residual --output pictures --json out.json "
        "--num-assistant-tokens-schedule heuristic"
    )
    result = invoke(*asked.split())
    assert result.exit_code == 0, result.output
    printed = masked(result.output)
    for title in TABLES.strip().splitlines():
        before, found, printed = printed.partition(title)
        assert found, f"{title} in {before}"
    assert max(map(len, result.output.splitlines())) <= 80
    for words in ("0.87 8 4.91x 4.9x", "1.53x 1.53x 1.96x 1.96x"):
        assert says(result, words)
    report = json.loads((home / "out.json").read_text())
    check_report(report)
    pictures = home / "pictures"
    names = ["figure-1.html", *(f"figure-{i}.svg" for i in range(2, 6))]
    assert sorted(path.name for path in pictures.iterdir()) == names
    assert all("<svg" in (pictures / name).read_text() for name in names[1:])
    page = shown(pictures / "figure-1.html")
    kinds = [
        t["kind"] for answer in report["measured"][1]["rounds"] for said in answer for t in said
    ]
    said = r"[\d ] (accepted|rejected|recovered|bonus|plain)(?:, \d+ unread)? *$"
    assert re.findall(said, page, re.M) == kinds
    assert "Hello hello & <b>" in page
    assert "Definition 3.2, 1 - α." in page, "a table's note"


def shown(page):
    """The text of a page."""
    return html.unescape(re.sub("<[^>]*>", "", page.read_text()))


def check_report(report):
    assert [row["computed"]["gamma"] for row in report["table_1"]] == [2, 3, 2, 5, 2, 10]
    assert [m["temperature"] for m in report["measured"]] == [0.0, 0.5]
    for one in report["measured"]:
        accepted = one["acceptance"]
        assert (accepted["positions"], accepted["texts"]) == (24, 2)
        assert accepted["lenience"][0]["alpha"] == accepted["alpha"]
        schedules = [made["schedule"] for made in one["schedules"]]
        assert schedules == ["oracle", "constant, γ = 2", "constant, γ = 4", "heuristic"]
        assert list(one["calls"]) == ["2", "4"]
        emitted = [
            sum(token["kind"] != "rejected" for said in answer for token in said)
            for answer in one["rounds"]
        ]
        assert emitted == [call["new_tokens"] for call in one["calls"]["2"]] == [12, 12]
        for speed in one["speed"]:
            factor = walltime_factor(speed["alpha"], speed["gamma"], speed["cost"])
            assert speed["expected_paper"] == pytest.approx(factor)
            assert speed["measured"] > 0
    greedy, sampled = (one["ablation"] for one in report["measured"])
    assert greedy is None  # its decoding draws nothing
    assert sampled["mean"]["correct"] < 1e-12 < sampled["mean"]["ablated"]


@pytest.fixture
def analyze(home):
    (home / "prompts.jsonl").write_text(PROMPTS)

    def call(*drafters, options=()):
        named = [argument for drafter in drafters for argument in ("--drafter", drafter)]
        result = invoke(
            "analyze", "--model", "tiny", "--prompts", "prompts.jsonl", "--limit", 1,
            "--max-new-tokens", 6, "--gamma", 2, "--json", "out.json", *named, *options,
        )  # fmt: skip
        report = home / "out.json"
        return result, json.loads(report.read_text()) if report.exists() else None

    return call


def test_drafters_that_cannot_be_measured_are_named_and_the_others_are(analyze, tmp_path):
    """Where no other is left, no weights are read."""
    (tmp_path / "empty").mkdir()
    head = f"eagle3:{tmp_path / 'empty'}"
    names = ["early_exit:1", "layer_skip:1-1", head, f"prompt_lookup+{head}"]
    result, report = analyze(*names[2:])
    assert (result.exit_code, report) == (2, None)
    result, report = analyze(*names, "layers:1")
    assert result.exit_code == 1
    assert [m["drafter"] for m in report["measured"]] == ["layers:1"] * 2
    assert [m["schedules"] for m in report["measured"]] == [[], []], "nobody asked for one"
    assert list(report["failed"]) == names
    last = result.output.splitlines()[-1]
    assert last.startswith("error: --drafter early_exit:1: cannot be analyzed: it runs the target")
    assert "; --drafter layer_skip:1-1: cannot be analyzed" in last


def test_trees_are_drawn_as_they_were_measured(analyze, home):
    """Those of a drafter of its own, and those that --tree asks of a drafter of chains."""
    options = ("--temperature", 0, "--max-new-tokens", 24, "--output", "pictures")
    result, content = analyze("lookahead:2,3,2", options=options)
    assert result.exit_code == 0, result.output
    assert not says(result, "nothing was drafted")
    (measured,), (drawn,) = content["measured"], content["trees"]
    assert drawn["drafter"] == measured["drafter"] == "lookahead:2,3,2"
    (calls,) = measured["calls"].values()
    nodes = [node for tree in drawn["trees"] for node in tree["nodes"]]
    assert len(nodes) == calls[0]["drafted"] > 0
    accepted = sum(node["kind"] == "accepted" for node in nodes)
    page = shown(home / "pictures" / "trees.html")
    assert page.count("  accepted, P ") == accepted == calls[0]["accepted"]
    result, content = analyze("layers:1", options=(*options, "--tree", "2,1"))
    assert result.output.count("mask, 0 is the root") >= tree_pictures.SHOWN_ROUNDS
    assert [one["drafter"] for one in content["trees"]] == ["layers:1"]


def test_a_timeline_has_the_parts_of_each_round_where_they_were_measured():
    """An encoder of a drafter is a part of the call before its first round, and may delay it."""
    rounds = [
        RoundRecord(0.5, 0.0, 0.5, 0.125, 0.0, 0.125, [0], [0], [1]),
        RoundRecord(2.5, 1.0, 2.0, 0.5, 0.0, 0.0, [4], [3], [4]),
    ]
    rows = [figures.Timeline("a", rounds, EncoderSeconds(1.0, drafter)) for drafter in (0.25, 1.0)]
    assert [(row.offset, row.end) for row in rows] == [(1.0, 7.0), (1.5, 7.5)]
    (panel,) = figures.draw_timeline(rows[:1], seconds=8.0).axes
    parts = [path.get_extents() for bars in panel.collections for path in bars.get_paths()]
    assert [(part.x0, part.x1) for part in parts] == [
        (0, 1), (1, 1.25),  # the encoders
        (1.5, 2), (2, 2.25),  # the first round: the target, and what follows it
        (3.5, 3.75), (3.75, 4), (4, 4.25), (4.25, 4.5), (4.5, 6.5), (6.5, 7),
    ]  # fmt: skip
    (panel,) = figures.draw_timeline([rows[0], rows[0], rows[1]]).axes
    assert panel.get_xlim() == (0, 7.5), "until the last row has ended"
