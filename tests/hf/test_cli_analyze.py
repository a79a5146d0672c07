"""The command `analyze`: a golden run, what it reports and draws, and what it leaves out."""

import json

import pytest
from specdec_hf.lab.analysis import tree_pictures
from support.cli_models import (  # noqa: F401
    folder,
    home,
    invoke,
    masked,
    says,
)
from support.heads import head_folder
from transformers import AutoModelForCausalLM

from specdec_kernels.analysis import walltime_factor

pytestmark = [pytest.mark.build, pytest.mark.usefixtures("home")]  # a tool of the laboratory

PROMPTS = (
    '{"question_id": 7, "category": "x", "turns": ["Say yes yes yes no no, yes yes yes no"]}\n'
    '{"question_id": 8, "category": "y", "turns": ["Hello hello & <b>", "not asked"]}\n'
)
ANALYSED = """
tiny, float32, cpu
Figure #: rounds of the first answer, layers:1, temperature #
«drafted and accepted» ×drafted and rejected× ‹recovered after a rejection› bonus or plain
Table #: operations and speed against plain decoding, at c = #
α γ operations printed speed printed ##
Table #: measured speed-up of tiny
TASK M_q TEMP γ α SPEED
prompts layers:1 ## prompts layers:1 ## prompts layers:1 ## prompts layers:1 ##
the fastest at its temperature
Table #: acceptance rates
M_p M_q SMPL α tiny layers:1 T=# # tiny layers:1 T=# #
Corollary #: acceptance rate
drafter T α ± standard error D_LK A.# positions layers:1 ## of # layers:1 ## of #
On the target's own texts, over the positions with a draft. D_LK: mean of Definition #, ## α. A.#:
acceptance of rejection sampling with the same drafts.
Table #: expected against measured speed-up over plain decoding
drafter T γ α c v drafting Exp Exp v Emp tokens Emp
layers:1 ## layers:1 ## layers:1 ## layers:1 ##
Exp: Theorem #, with v = # and drafts in every round. Exp v: with the measured v and share of rounds
with drafts. tokens: expected per round. Emp: measured.
Sections # and #: what α and c make possible, with v = #
drafter T α c at least best γ Exp oracle gain layers:1 ## layers:1 ##
at least: Corollary #, # where α does not exceed c. Exp: Theorem # at the best γ. oracle: γ is in
every round what will be accepted, and its gain over Exp.
Section #: arithmetic operations and memory accesses
drafter T γ α ĉ operations reads Emp layers:1 ## layers:1 ## layers:1 ## layers:1 ##
Per token, against plain decoding. ĉ: counted operations of a draft step over those of a token of
the target. operations: Theorem #. reads: of the target's weights and KV cache, expected where every
round drafts. Emp: reads as measured.
SpecInfer, Table #: how often one of the first k drafts is accepted
drafter T measured in k = # k = # k = # k = # k = # layers:1 # texts ## layers:1 # texts ##
texts: the k likeliest tokens at temperature #, else k that are drawn independently and tried by
rule multi_draft. root, texts: the children of a tree's root. rounds: the children of every node
that was tried, by acceptance_by_trial.
Baselines: expected tokens per round that drafts
drafter T γ speculative rejection best of # layers:1 ## layers:1 ## layers:1 ## layers:1 ##
speculative: Equation #. rejection: the same with the acceptance of Appendix A.#. best: the longest
of # greedy chains that begin with the likeliest tokens, which cost # times as much; the longest of
sampled chains would be biased.
Section #: what each schedule leaves of an oracle for γ
drafter T schedule drafts tokens speed of oracle
layers:1 # oracle ## layers:1 # constant, γ = ## layers:1 # constant, γ = ##
layers:1 # heuristic ## layers:1 # oracle ## layers:1 # constant, γ = ##
layers:1 # constant, γ = ## layers:1 # heuristic ##
The oracle drafts in each round what is accepted. speed: by c alone, with v = #.
Table # and Appendix A.#: acceptance rate under lenience l
drafter T l = # l = # l = # l = # layers:1 ## layers:1 ##
At T = # a draft x is accepted where P(x) >= l max P before the argmax.
Appendix A.#: speed under lenience, T5-small for T5-XXL, c = #
T l α γ speed printed ##
At T = # the paper names no γ: it is the best one, and the printed speeds are larger.
Without the residual: recovered tokens drawn from P, layers:1
with the residual without probability of a rejection ## TV of the recovered token ##
TV of the emitted token ## the same, worst position ## chi-square, # draws there # (df #), p = ##
(df #), p = #
Means over # positions. TV: exact total variation from the residual for the recovered token, from P
for the emitted one.
wrote figure-1.html, figure-2.svg, figure-3.svg, figure-4.svg, figure-5.svg to pictures
wrote out.json
"""


def test_analyze_prints_reports_and_draws_this(home):  # noqa: F811
    (home / "prompts.jsonl").write_text(PROMPTS)
    asked = (
        "analyze --model tiny --prompts prompts.jsonl --drafter layers:1 --max-new-tokens 12 "
        "--gamma 2,4 --temperature 0.5 --ablate residual --output pictures --json out.json "
        "--num-assistant-tokens-schedule heuristic"
    )
    result = invoke(*asked.split())
    assert result.exit_code == 0, result.output
    rounds = r"(?<=temperature 0\.5 )─+.*?(?=«drafted and)"  # whose text may hold anything
    assert masked(result.output, rounds, " ★") == " ".join(ANALYSED.split())
    assert max(map(len, result.output.splitlines())) <= 80
    for words in ("0.87 8 4.91x 4.9x", "1.53x 1.53x 1.96x 1.96x"):
        assert says(result, words)
    report = json.loads((home / "out.json").read_text())
    check_report(report)
    pictures = home / "pictures"
    names = ["figure-1.html", *(f"figure-{i}.svg" for i in range(2, 6))]
    assert sorted(path.name for path in pictures.iterdir()) == names
    assert all("<svg" in (pictures / name).read_text() for name in names[1:])
    page = (pictures / "figure-1.html").read_text()
    assert page.count("data-kind=") == sum(
        len(said) for answer in report["measured"][1]["rounds"] for said in answer
    )
    assert "Hello hello &amp; &lt;b&gt;" in page


def check_report(report):
    assert [row["computed"]["gamma"] for row in report["table_1"]] == [2, 3, 2, 5, 2, 10]
    assert [m["temperature"] for m in report["measured"]] == [0.0, 0.5]
    for one in report["measured"]:
        accepted = one["acceptance"]
        assert accepted["positions"] == 24
        assert accepted["texts"] == 2
        rates = [row["alpha"] for row in accepted["lenience"]]
        assert rates[0] == accepted["alpha"]
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
def analyze(home):  # noqa: F811
    """Runs the command with some drafters; its result and its report."""
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


def test_trees_of_heads_and_of_merged_drafters_are_measured(folder, analyze, tmp_path):  # noqa: F811
    head = head_folder(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    names = [f"eagle3:{head}", "auto", "prompt_lookup+layers:1"]
    result, report = analyze(*names, options=["--temperature", 0])
    assert [m["drafter"] for m in report["measured"]] == names, result.output
    for one in report["measured"]:
        assert one["trees"]
        assert one["acceptance"]["positions"] == 6
        (stats,) = next(iter(one["calls"].values()))
        assert stats["rule"] == "target_only"
        assert stats["tree"]
    assert [one["drafter"] for one in report["trees"]] == names


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
    assert list(report["failed"]) == names
    last = result.output.splitlines()[-1]
    assert last.startswith("error: --drafter early_exit:1: cannot be analyzed: it runs the target")
    assert "; --drafter layer_skip:1-1: cannot be analyzed" in last


def test_trees_are_drawn_as_they_were_measured(analyze, home):  # noqa: F811
    """Those of a drafter of its own, and those that --tree asks of a drafter of chains."""
    options = ("--temperature", 0, "--max-new-tokens", 24, "--output", "pictures")
    result, content = analyze("lookahead:2,3,2", options=options)
    assert result.exit_code == 0, result.output
    (measured,), (drawn,) = content["measured"], content["trees"]
    assert drawn["drafter"] == measured["drafter"] == "lookahead:2,3,2"
    (calls,) = measured["calls"].values()
    nodes = [node for tree in drawn["trees"] for node in tree["nodes"]]
    assert len(nodes) == calls[0]["drafted"] > 0
    accepted = sum(node["kind"] == "accepted" for node in nodes)
    page = (home / "pictures" / "trees.html").read_text()
    assert page.count('<g class="node accepted"') == accepted == calls[0]["accepted"]
    result, content = analyze("layers:1", options=(*options, "--tree", "2,1"))
    assert result.output.count("mask, 0 is the root") >= tree_pictures.SHOWN_ROUNDS
    assert [one["drafter"] for one in content["trees"]] == ["layers:1"]
