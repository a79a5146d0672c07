"""The command ``bench`` measures what it names, on every prompt, and writes it twice."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specdec_hf.api import SpeculativeDecoder
from specdec_hf.cli.checks import Settings
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_hf.lab.bench import configs as bench_configs
from specdec_hf.lab.bench import runs as bench_runs
from specdec_hf.lab.bench import summary
from specdec_hf.lab.bench.runs import PLAIN, Answer, Batch, Config
from support.cli_models import END, folder, invoke, one_line_error  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

pytestmark = pytest.mark.build

LINES = "".join(
    json.dumps({"question_id": n, "category": category, "turns": [f"Say {n} one two one"]}) + "\n"
    for n, category in enumerate("aabbb")
)


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text(LINES)
    return path


def test_bench_compares_drafters_and_schedules(folder, questions, tmp_path):  # noqa: F811
    report, markdown = tmp_path / "out.json", tmp_path / "out.md"
    result = invoke(
        "bench", "--questions", questions, "--limit", 1, "--model", folder, "--max-new-tokens", 6,
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
        assert row["identical"] == row["texts"] == 2
        assert [answer["prompts"] for answer in row["answers"]] == [["0"], ["2"]]
        seconds = sum(answer["seconds"] for answer in row["answers"])
        assert all(a["seconds"] == np.median(a["seconds_of_runs"]) for a in row["answers"])
        tokens = sum(len(answer["texts"][0]) for answer in row["answers"])
        assert row["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert results[0]["rows"][2]["tokens_per_round"] == 1
    assert results[0]["rows"][0]["ratio"] == pytest.approx(1)
    text = markdown.read_text()
    assert text.count("| prompt_lookup, heuristic |") == 4  # a line and a column for each dtype
    assert "| b | " in text
    assert "2 of 2" in text


def test_bench_says_which_configs_are_lossy(folder, questions, tmp_path):  # noqa: F811
    report = tmp_path / "out.json"
    result = invoke(
        "bench", "--questions", questions, "--limit", 1, "--model", folder, "--max-new-tokens", 16,
        "--drafter", "layers:1", "--drafter", "auto", "--rule", "lenient", "--lenience", 0.05,
        "--guard", "off", "--runs", 1, "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    *others, model, chains = json.loads(report.read_text())["results"][0]["rows"]
    assert model["name"] == "layers:1, lossy rule lenient 0.05, guard off"
    assert chains["name"] == "auto, lossy rule lenient 0.05, guard off"
    assert model["identical"] < model["texts"]
    for row in (model, chains):
        assert any("is lossy" in note for note in row["notes"])
    for row in others:
        assert "lossy" not in row["name"]
        assert row["identical"] == row["texts"]
    chosen = Settings(drafter=["layers:1"], rule="token", ablate="residual")
    loaded = SimpleNamespace(drafters=[None], dtype="float32", model=None)
    configs, _ = bench_configs.make_configs([chosen], loaded, (), None)
    assert configs[-1].name == "layers:1, rule token, lossy without the residual"
    refused = ("bench", "--questions", questions, "--model", folder, "--rule", "lenient")
    assert "--rule 'lenient' needs --lenience" in one_line_error(*refused, "--drafter", "auto")
    trees = one_line_error(*refused, "--lenience", 0.5, "--drafter", "token_recycling")
    assert "typical with trees of --drafter token_recycling, got 'lenient'" in trees


def test_ragged_batches_are_compared_greedily_and_sampled(folder, questions, tmp_path):  # noqa: F811
    report = tmp_path / "out.json"
    result = invoke(
        "bench", "--questions", questions, "--model", folder, "--max-new-tokens", 5, "--drafter",
        "layers:1", "--peer", "assisted", "--peer", "llama.cpp", "--batch-size", 2,
        "--temperature", 0, "--temperature", 0.7, "--top-p", 0.9, "--runs", 1, "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    greedy, sampled = json.loads(report.read_text())["results"]
    assert (greedy["batch_size"], sampled["temperature"], sampled["top_p"]) == (2, 0.7, 0.9)
    assert set(greedy["left_out"]) == {"llama.cpp", "assisted, Transformers"}
    names = [row["name"] for row in greedy["rows"]]
    assert names == ["plain, Transformers", "plain, specdec", "layers:1"]
    for row, other in zip(greedy["rows"], sampled["rows"], strict=True):
        # Five prompts make two batches, each of categories in turns.
        assert [answer["prompts"] for answer in row["answers"]] == [["0", "2"], ["1", "3"]]
        assert (row["identical"], other["identical"], row["categories"]) == (2, None, {})
        assert all(1 <= len(text) <= 5 for a in row["answers"] for text in a["texts"])


def test_the_baselines_of_speculative_sampling_take_part(folder, questions, tmp_path):  # noqa: F811
    report = tmp_path / "out.json"
    result = invoke(
        "bench", "--questions", questions, "--model", folder, "--max-new-tokens", 5, "--drafter",
        "layers:1", "--peer", "rejection", "--peer", "best_of", "--limit", 1,
        "--temperature", 0, "--temperature", 0.7, "--runs", 1, "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    greedy, sampled = json.loads(report.read_text())["results"]
    names = ["rejection sampling, A.2", "best of 4 chains"]
    rows = {row["name"]: row for row in greedy["rows"]}
    assert all(rows[name]["identical"] == rows[name]["texts"] for name in names)
    assert names[0] in [row["name"] for row in sampled["rows"]]
    assert "the longest of sampled chains is biased" in sampled["left_out"][names[1]]


def test_texts_must_equal_those_of_the_reference(monkeypatch):
    """Those of other ways to generate must equal those of plain Transformers all the same."""
    texts = {PLAIN: [[1]], "peer": [[1]], "ours": [[2]], "equal": [[2]], "other": [[1]]}

    def answer(model, config, batch, arguments):
        return Answer(batch.prompts, "", texts[config.name], 1.0, [1.0])

    monkeypatch.setattr(bench_runs, "_answer", answer)
    monkeypatch.setattr(bench_runs, "_generate", lambda *_: None)
    decoder = SpeculativeDecoder()
    every = [Config(PLAIN), Config("peer"), Config("ours", decoder, reference=True)]
    every += [Config("equal", decoder), Config("other", decoder)]
    batch = Batch(["p"], "", {"input_ids": torch.ones(1, 2)})
    loaded, arguments = SimpleNamespace(model=None), {"max_new_tokens": 2}
    pairs, _ = bench_runs.run_configs(loaded, every, [batch], arguments, 1, str)
    same = {name: each[0].mine.identical for name, each in pairs.items()}
    assert same == {"peer": True, "ours": True, "equal": True, "other": False}
    assert all(each[0].plain.identical for each in pairs.values())


def measured(monkeypatch, seconds, configs=("fast",), batches=4, runs=3):
    """Pairs of faked answers; ``seconds`` takes config, call number and whether it comes first."""
    calls = []

    def answer(model, config, batch, arguments):
        first = sum(name == PLAIN for name in calls) == sum(name != PLAIN for name in calls)
        calls.append(config.name)
        took = seconds(config.name, calls.count(config.name), first)
        return Answer(batch.prompts, batch.category, [[1, 2]], took, [took])

    monkeypatch.setattr(bench_runs, "_answer", answer)
    monkeypatch.setattr(bench_runs, "_generate", lambda *_: None)
    prompts = [
        Batch([str(n)], "ab"[n % 2], {"input_ids": torch.ones(1, 2)}) for n in range(batches)
    ]
    every = [Config(PLAIN), *map(Config, configs)]
    loaded, arguments = SimpleNamespace(model=None), {"max_new_tokens": 2}
    pairs, left_out = bench_runs.run_configs(loaded, every, prompts, arguments, runs, str)
    assert not left_out
    return summary.rows_of(every, pairs, None, sampled=False), calls


def test_each_answer_is_made_in_turns_with_a_plain_one(monkeypatch):
    rows, calls = measured(monkeypatch, lambda name, call, first: 2.0 if name == PLAIN else 1.0)
    pairs = list(zip(calls[::2], calls[1::2], strict=True))
    assert set(pairs) == {(PLAIN, "fast"), ("fast", PLAIN)}
    assert sum(first == PLAIN for first, _ in pairs) == 6
    assert (rows[1].ratio, rows[1].interval, rows[1].notes) == (2.0, (2.0, 2.0), [])
    assert rows[1].categories == {"a": 2.0, "b": 2.0}
    assert (rows[0].ratio, rows[0].texts) == (1.0, 4)


@pytest.mark.parametrize(("side", "word"), [("fast", "it"), (PLAIN, "plain generation")])
def test_a_warm_up_that_one_side_pays_for_is_flagged(monkeypatch, side, word):
    rows, _ = measured(monkeypatch, lambda name, call, _: 9.0 if (name, call) == (side, 1) else 1.0)
    assert rows[1].notes == [
        f"unfair: the first answer of {word} took 9.0 times the seconds of the same later"
    ]
    assert rows[1].ratio == 1  # by the median


def test_a_plus_in_the_path_of_a_file_or_folder_merges_nothing(questions, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("draft+nasd").mkdir()
    Path("prompt_lookup+nasd").mkdir()
    NgramTable.build([np.array([1, 2])], END + 1, 2).save("a+nasd")
    names = {
        "ngram:a+nasd": ["ngram:a+nasd"],
        "prompt_lookup+ngram:a+nasd+nasd": ["prompt_lookup", "ngram:a+nasd", "nasd"],
        "draft+nasd": ["draft+nasd"],
        "draft+nasd+prompt_lookup": ["draft+nasd", "prompt_lookup"],
        "prompt_lookup+layers:1": ["prompt_lookup", "layers:1"],
        "prompt_lookup+nasd": ["prompt_lookup", "nasd"],
        "./prompt_lookup+nasd": ["./prompt_lookup+nasd"],
        "ngram:~/a+nasd": ["ngram:~/a+nasd"],
        "~/draft+nasd+nasd": ["~/draft+nasd", "nasd"],
    }
    assert {name: bench_configs.merged(name) for name in names} == names
    asked = ("bench", "--questions", questions, "--drafter", "ngram:b+nasd")
    assert "--drafter: cannot read b: No such file" in one_line_error(*asked)


def test_a_synthetic_model_is_labelled_and_accepts_as_often_as_asked(tmp_path):
    report, markdown = tmp_path / "out.json", tmp_path / "out.md"
    result = invoke(
        "bench-synthetic", "--shape", "tiny", "--acceptance", 0.5, "--acceptance", 1, "--dtype",
        "bfloat16", "--batch-size", 2, "--limit", 1, "--runs", 1, "--prompt-tokens", 9,
        "--max-new-tokens", 48, "--json", report, "--markdown", markdown,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (content,) = json.loads(report.read_text())["results"]
    assert content["synthetic"] is True
    plain, _, half, whole = content["rows"]
    text = plain["answers"][0]["texts"][0]
    assert np.all(np.diff(text) % 512 == 1)
    assert (whole["alpha"], whole["identical"]) == (1, 1)
    assert half["alpha"] == pytest.approx(0.5, abs=0.2)
    for words in (result.output, markdown.read_text(), content["title"], half["name"]):
        assert "SYNTHETIC" in words
