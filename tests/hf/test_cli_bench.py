"""The command ``bench`` measures what it names, on every prompt, and writes it twice."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specdec_hf.cli import bench, bench_runs
from specdec_hf.drafters.model_free.ngram_table import NgramTable
from support.cli_models import END, folder, invoke, one_line_error  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

LINES = "".join(
    json.dumps({"question_id": n, "category": category, "turns": [f"Say {n} one two one"]}) + "\n"
    for n, category in enumerate("aabbb")
)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(LINES)
    return path


@pytest.mark.slow
def test_bench_compares_drafters_and_schedules(folder, questions, tmp_path):  # noqa: F811
    report, markdown = tmp_path / "out.json", tmp_path / "out.md"
    result = invoke(
        "bench", "--questions", questions, "--limit", 2, "--model", folder, "--max-new-tokens", 6,
        "--drafter", "prompt_lookup", "--drafter", "layers:1", "--drafter", "prompt_lookup+ngram",
        "--num-assistant-tokens-schedule", "constant", "--num-assistant-tokens-schedule",
        "heuristic", "--num-assistant-tokens-schedule", "optimal", "--dtype", "float32",
        "--dtype", "bfloat16", "--runs", 2,
        "--json", report, "--markdown", markdown,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    results = json.loads(report.read_text())["results"]
    assert [entry["dtype"] for entry in results] == ["float32", "bfloat16"]
    assert [entry["runs"] for entry in results] == [2, 2]
    names = [row["name"] for row in results[0]["rows"]]
    assert names == [
        "plain, Transformers", "prompt lookup, Transformers", "plain, specdec", "prompt_lookup",
        "prompt_lookup, heuristic", "prompt_lookup, optimal", "layers:1", "layers:1, heuristic",
        "layers:1, optimal", "prompt_lookup+ngram, tree", "prompt_lookup+ngram, tree, optimal",
    ]  # fmt: skip
    for row in results[0]["rows"]:
        assert row["identical"] == row["texts"] == 4
        assert [answer["prompt"] for answer in row["answers"]] == ["0", "1", "2", "3"]
        seconds = sum(answer["seconds"] for answer in row["answers"])
        assert all(a["seconds"] == sum(a["seconds_of_runs"]) / 2 for a in row["answers"])
        tokens = sum(len(answer["tokens"]) for answer in row["answers"])
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert results[0]["rows"][2]["tokens_per_round"] == 1
    assert results[0]["rows"][0]["ratio"] == 1
    text = markdown.read_text()
    assert text.count("| prompt_lookup, heuristic |") == 2
    assert "4 of 4" in text


def test_the_runs_of_an_answer_are_united(monkeypatch):
    runs = {
        "slow": ([9.0, 1.0, 4.0, 2.0], [[1], [1], [1], [7]], [["b"], [], ["a"], []]),
        bench_runs.PLAIN: ([1.0] * 4, [[1]] * 4, [[]] * 4),
    }
    left = {name: list(zip(*each, strict=True)) for name, each in runs.items()}

    def answer(model, config, prompt, arguments):
        seconds, tokens, notes = left[config.name].pop(0)
        return bench_runs.Answer("p", "c", tokens, seconds, [seconds], rounds=1, notes=notes)

    monkeypatch.setattr(bench_runs, "_answer", answer)
    monkeypatch.setattr(bench_runs, "_generate", lambda *_: None)
    configs = [bench_runs.Config(bench_runs.PLAIN), bench_runs.Config("slow")]
    loaded, prompts = SimpleNamespace(model=None), [("p", "c", {"input_ids": torch.ones(1, 2)})]
    row = bench_runs.run_configs(loaded, configs, prompts, {}, 4, lambda _: None)[1]
    assert row.answers[0].seconds_of_runs == runs["slow"][0]
    assert row.answers[0].seconds == 3
    assert row.answers[0].tokens == [7]
    assert (row.identical, row.texts) == (0, 1)
    assert row.notes == ["a", "b"]


def test_a_plus_in_the_path_of_a_file_or_folder_merges_nothing(
    folder,  # noqa: F811
    questions,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    Path("draft+nasd").symlink_to(folder)
    NgramTable.build([np.array([1, 2])], END + 1, 2).save("a+nasd")
    drafters = [
        "ngram:a+nasd", "prompt_lookup+ngram:a+nasd+nasd", "draft+nasd", "draft+nasd+prompt_lookup",
        "prompt_lookup+layers:1",
    ]  # fmt: skip
    result = invoke(
        "bench", "--questions", questions, "--limit", 1, "--model", folder, "--max-new-tokens", 2,
        *(word for drafter in drafters for word in ("--drafter", drafter)), "--json", "out.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = json.loads(Path("out.json").read_text())["results"][0]["rows"]
    trees = ["", ", tree", "", ", tree", ", tree"]
    assert [row["name"] for row in rows[3:]] == [
        drafter + tree for drafter, tree in zip(drafters, trees, strict=True)
    ]
    Path("prompt_lookup+nasd").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    names = {
        "prompt_lookup+nasd": ["prompt_lookup", "nasd"],
        "./prompt_lookup+nasd": ["./prompt_lookup+nasd"],
        "ngram:~/a+nasd": ["ngram:~/a+nasd"],
        "~/draft+nasd+nasd": ["~/draft+nasd", "nasd"],
    }
    assert {name: bench._merged(name) for name in names} == names
    asked = ("bench", "--questions", questions, "--drafter", "ngram:b+nasd")
    assert "--drafter: cannot read b: No such file" in one_line_error(*asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing option '--questions'"),
        (["--questions", "nowhere"], "cannot read prompt file nowhere"),
        (["--questions", "README.md"], "README.md line 1: not valid JSON"),
        (["--questions", "Q", "--dtype", "int8"], "--dtype must be one of float32"),
        (["--questions", "Q", "--runs", "0"], "--runs must be at least 1, got 0"),
        (["--questions", "Q", "--limit", "0"], "--limit must be >= 1, got 0"),
        (["--questions", "Q", "--drafter", "a b"], "--drafter must be"),
        (["--questions", "Q", "--drafter", "ngram+none"], "--drafter none must be the only one"),
        (["--questions", "Q", "--num-assistant-tokens-schedule", "x"], "schedule must be one of"),
        (["--questions", "Q", "--markdown", "no/where"], "--markdown: folder no does not exist"),
        (
            ["--questions", "Q", "--json", "new", "--markdown", "./new"],
            "--json and --markdown must name different files, got new twice",
        ),
        (
            ["--questions", "Q", "--num-assistant-tokens", "0"],
            "--num-assistant-tokens must be at least 1, got 0",
        ),
        (
            ["--questions", "Q", "--num-assistant-tokens-schedule", "egag"],
            "egag needs a drafter with a draft distribution or a confidence, got --drafter prom",
        ),
        (["--questions", "Q", "--json", "Q"], "--json would overwrite the input file"),
    ],
)
def test_wrong_input_is_one_line(arguments, message, questions):
    given = [str(questions) if word == "Q" else word for word in arguments]
    assert message in one_line_error("bench", *given)


def test_bench_lists_the_drafters():
    result = invoke("bench", "--drafter", "help")
    assert result.exit_code == 0, result.output
    assert "suffix_automaton" in result.output
