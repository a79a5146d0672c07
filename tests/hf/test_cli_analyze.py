"""The command `analyze`: its tables, its files, and one line for each wrong input."""

import itertools
import json

import pytest
from specdec_hf import PromptLookupDrafter
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401
from support.heads import blockwise_folder, head_folder
from support.hf_models import one_thread  # noqa: F401  # autouse here
from transformers import AutoModelForCausalLM

from specdec_kernels.analysis import walltime_factor

pytestmark = pytest.mark.build  # a tool of the laboratory

PROMPTS = (
    '{"question_id": 7, "category": "x", "turns": ["Say yes yes yes no no, yes yes yes no"]}\n'
    '{"question_id": 8, "category": "y", "turns": ["Hello hello & <b>", "not asked"]}\n'
)


@pytest.fixture(scope="module")
def analysed(folder, tmp_path_factory):  # noqa: F811
    """Output, report and pictures of one run."""
    home = tmp_path_factory.mktemp("analyze")
    (home / "prompts.jsonl").write_text(PROMPTS)
    result = invoke(
        "analyze", "--model", folder, "--prompts", home / "prompts.jsonl", "--drafter", "layers:1",
        "--drafter", "prompt_lookup", "--max-new-tokens", 12, "--gamma", "2,4", "--temperature",
        0.5, "--ablate", "residual", "--output", home / "pictures", "--json", home / "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return result, json.loads((home / "out.json").read_text()), home / "pictures"


def test_every_table_is_printed(analysed):
    result, _, _ = analysed
    for words in (
        "Figure 1: rounds of the first answer, layers:1", "Table 1: operations and speed",
        "Corollary 3.6", "Table 4: expected against measured", "Table 5: acceptance rate under",
        "Without the residual", "drafted and rejected", "1.53x 1.53x 1.96x 1.96x",
    ):  # fmt: skip
        assert says(result, words), words
    assert max(map(len, result.output.splitlines())) <= 80


def test_the_report_holds_what_was_measured(analysed):
    _, report, _ = analysed
    assert [row["computed"]["gamma"] for row in report["table_1"]] == [2, 3, 2, 5, 2, 10]
    assert [(m["drafter"], m["temperature"]) for m in report["measured"]] == [
        ("layers:1", 0.0), ("prompt_lookup", 0.0), ("layers:1", 0.5), ("prompt_lookup", 0.5)
    ]  # fmt: skip
    for one in report["measured"]:
        accepted = one["acceptance"]
        assert accepted["positions"] == 24
        assert accepted["texts"] == 2
        rates = [row["alpha"] for row in accepted["lenience"]]
        assert rates[0] == accepted["alpha"]
        if one["drafter"] == "layers:1":
            assert accepted["drafted"] == 24
            assert rates == sorted(rates)
            assert [speed["gamma"] for speed in one["speed"]] == [2, 4]
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
    ablation = report["measured"][2]["ablation"]
    assert ablation["mean"]["correct"] < 1e-12 < ablation["mean"]["ablated"]
    assert ablation["experiment"]["correct"]["p_value"] > 1e-4
    assert ablation["experiment"]["ablated"]["p_value"] < 1e-6
    assert report["measured"][0]["ablation"] is None  # greedy decoding draws nothing


def test_figures_and_page_are_written(analysed):
    _, report, pictures = analysed
    names = ["figure-1.html", *(f"figure-{i}.svg" for i in range(2, 6))]
    assert sorted(path.name for path in pictures.iterdir()) == names
    for name in names[1:]:
        assert "<svg" in (pictures / name).read_text()
    page = (pictures / "figure-1.html").read_text()
    assert page.count("data-kind=") == sum(
        len(said) for one in report["measured"][2:] for answer in one["rounds"] for said in answer
    )
    assert "Hello hello &amp; &lt;b&gt;" in page
    assert "not asked" not in page


@pytest.fixture
def analyze(folder, tmp_path):  # noqa: F811
    """Runs the command with some drafters; its result and its report."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)

    def call(*drafters):
        named = [argument for drafter in drafters for argument in ("--drafter", drafter)]
        result = invoke(
            "analyze", "--model", folder, "--prompts", tmp_path / "prompts.jsonl", "--limit", 1,
            "--max-new-tokens", 6, "--gamma", 2, "--json", tmp_path / "out.json", *named,
        )  # fmt: skip
        report = tmp_path / "out.json"
        return result, json.loads(report.read_text()) if report.exists() else None

    return call


def test_drafters_that_read_hidden_states_are_measured(folder, analyze, tmp_path):  # noqa: F811
    target = AutoModelForCausalLM.from_pretrained(folder)
    heads = [
        f"eagle3_chain:{head_folder(target, tmp_path)}",
        f"blockwise:{blockwise_folder(target, tmp_path)}",
    ]
    result, report = analyze(*heads)
    assert result.exit_code == 0, result.output
    assert [m["drafter"] for m in report["measured"]] == heads * 2
    for one in report["measured"]:
        # The first position follows the prompt, which is not read yet.
        assert (one["acceptance"]["drafted"], one["acceptance"]["positions"]) == (5, 6)
        assert one["calls"]["2"][0]["drafted"] > 0


def test_a_drafter_that_fails_leaves_the_others_their_results(analyze, monkeypatch):
    """It fails once and is not asked again."""
    asked = itertools.count()
    propose = PromptLookupDrafter.propose

    def fails(self, history, limits):
        if next(asked) == 10:
            raise RuntimeError("lost the table")
        return propose(self, history, limits)

    monkeypatch.setattr(PromptLookupDrafter, "propose", fails)
    result, report = analyze("prompt_lookup", "layers:1")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "error: --drafter prompt_lookup: lost the table"
    assert says(result, "Table 4: expected against measured")
    assert [m["drafter"] for m in report["measured"]] == ["layers:1", "layers:1"]
    assert report["failed"] == {"prompt_lookup": "lost the table"}
