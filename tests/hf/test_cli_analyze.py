"""The command `analyze`: its tables, its files, and one line for each wrong input."""

import itertools
import json

import pytest
from specdec_hf import PromptLookupDrafter
from support.cli_models import folder, invoke, reported, says, write_encoder_decoder  # noqa: F401
from support.heads import head_folder
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
    report, result = reported(
        home, "analyze", "--model", folder, "--prompts", home / "prompts.jsonl", "--drafter",
        "layers:1", "--drafter", "prompt_lookup", "--max-new-tokens", 12, "--gamma", "2,4",
        "--temperature", 0.5, "--ablate", "residual", "--output", home / "pictures",
        "--num-assistant-tokens-schedule", "heuristic",
    )  # fmt: skip
    return result, report, home / "pictures"


def test_every_table_is_printed(analysed):
    result, _, _ = analysed
    for words in (
        "Figure 1: rounds of the first answer, layers:1", "Table 1: operations and speed",
        "Table 2: measured speed-up of", "prompts layers:1", "Table 3: acceptance rates", "T=0.5",
        "Corollary 3.6", "Table 4: expected against measured", "Sections 3.3 and 3.5: what α",
        "Section 3.4: arithmetic operations", "SpecInfer, Table 1: how often", "Baselines",
        "Section 3.5: what each schedule leaves", "constant, γ = 4", "heuristic",
        "Table 5 and Appendix A.5: acceptance rate under", "0.87 8 4.91x 4.9x",
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
            assert [speed["gamma"] for speed in one["speed"]] == [2, 4]
            assert accepted["divergence"] == pytest.approx(1 - accepted["alpha"])
            assert accepted["rejection_sampling"] <= accepted["alpha"]
            # One of two layers, and the same output matrix.
            assert 0.5 < one["operations"] < 1
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
    for title in (
        "Table 2: measured", "Section 3.4: arithmetic", "Without the residual", "Table 3 as printed"
    ):  # fmt: skip
        assert f"<h2>{title}" in page
    expected = "".join(f"<td>{x}</td>" for x in ("0.75", "0.02", "3.16x", "3.2x", "3.4x"))
    assert expected in page


@pytest.fixture
def analyze(folder, tmp_path):  # noqa: F811
    """Runs the command with some drafters; its result and its report."""
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)

    def call(*drafters, options=()):
        named = [argument for drafter in drafters for argument in ("--drafter", drafter)]
        result = invoke(
            "analyze", "--model", folder, "--prompts", tmp_path / "prompts.jsonl", "--limit", 1,
            "--max-new-tokens", 6, "--gamma", 2, "--json", tmp_path / "out.json", *named, *options,
        )  # fmt: skip
        report = tmp_path / "out.json"
        return result, json.loads(report.read_text()) if report.exists() else None

    return call


def test_trees_of_heads_and_of_merged_drafters_are_measured(folder, analyze, tmp_path):  # noqa: F811
    head = head_folder(AutoModelForCausalLM.from_pretrained(folder), tmp_path)
    names = [f"eagle3:{head}", "auto", "prompt_lookup+layers:1"]
    result, report = analyze(*names, options=["--temperature", 0])
    assert result.exit_code == 0, result.output
    assert [m["drafter"] for m in report["measured"]] == names
    for one in report["measured"]:
        assert one["trees"]
        assert one["acceptance"]["positions"] == 6
        (stats,) = next(iter(one["calls"].values()))
        assert stats["rule"] == "target_only"
        assert stats["tree"]
    assert [one["drafter"] for one in report["trees"]] == names
    merged = report["measured"][2]
    assert list(merged["calls"]) == ["2"]
    assert merged["acceptance"]["drafted"] == 6
    assert says(result, "Of trees γ is the depth")


def test_an_encoder_decoder_is_measured_with_its_encoder(tmp_path):
    """Its draft model is one too. One of the drafters needs a decoder alone, and is named."""
    for name, seed in (("target", 5), ("small", 8)):
        write_encoder_decoder(tmp_path / name, seed=seed)
    (tmp_path / "prompts.jsonl").write_text(PROMPTS)
    small = str(tmp_path / "small")
    result = invoke(
        "analyze", "--model", tmp_path / "target", "--prompts", tmp_path / "prompts.jsonl",
        "--max-new-tokens", 6, "--gamma", 2, "--temperature", 0, "--json", tmp_path / "out.json",
        "--output", tmp_path / "pictures", "--drafter", small, "--drafter", "prompt_lookup",
        "--drafter", "layers:1",
    )  # fmt: skip
    assert result.exit_code == 1
    report = json.loads((tmp_path / "out.json").read_text())
    assert list(report["failed"]) == ["layers:1"]
    assert [m["drafter"] for m in report["measured"]] == [small, "prompt_lookup"]
    model = report["measured"][0]
    assert (model["acceptance"]["drafted"], model["acceptance"]["positions"]) == (12, 12)
    assert [call["new_tokens"] for call in model["calls"]["2"]] == [6, 6]
    figure = (tmp_path / "pictures" / "figure-5.svg").read_text()
    assert "encoder of the target" in figure
    assert "#f58518" in figure  # that of the draft model


def test_a_drafter_that_cannot_be_analyzed_is_named_and_the_others_are_measured(analyze):
    result, report = analyze("early_exit:1", "layers:1", "layer_skip:1-1")
    assert result.exit_code == 1
    assert says(result, "Table 4: expected against measured")
    last = result.output.splitlines()[-1]
    assert last.startswith("error: --drafter early_exit:1: cannot be analyzed: it runs the target")
    assert "layers:N has the distribution of early_exit:N" in last
    assert "; --drafter layer_skip:1-1: cannot be analyzed" in last
    assert last.endswith("; bench gives the share of its drafts that are accepted")
    assert [m["drafter"] for m in report["measured"]] == ["layers:1"] * 2
    assert list(report["failed"]) == ["early_exit:1", "layer_skip:1-1"]


def test_a_drafter_that_does_not_fit_is_named_and_the_others_are_measured(analyze, tmp_path):
    """Where no other is left, no weights are read."""
    (tmp_path / "empty").mkdir()
    head = f"eagle3:{tmp_path / 'empty'}"
    names = [head, f"prompt_lookup+{head}"]
    result, report = analyze(*names)
    assert result.exit_code == 2
    assert report is None
    result, report = analyze(*names, "layers:1")
    assert result.exit_code == 1
    assert list(report["failed"]) == names
    assert report["failed"][head] == report["failed"][names[1]]
    assert [m["drafter"] for m in report["measured"]] == ["layers:1"] * 2


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
