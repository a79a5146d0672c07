"""The command line prints and writes the same figures, and refuses bad input in one line."""

import json

import pytest
from specdec_hf.cli.app import app
from specdec_hf.cli.prompts import read_prompts, shipped_prompts
from specdec_hf.cli.trace import render
from specdec_hf.decode.streaming import Step, step_kinds
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from typer.testing import CliRunner

SCHEDULE = "--num-assistant-tokens-schedule"
LINE = '{"question_id": 1, "category": "x", "turns": ["Say yes.", "Say no."]}\n'


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def says(result, words):
    """Whether the output holds these words, whatever its line breaks."""
    return words in " ".join(result.output.split())


def one_line_error(*arguments):
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit), result.exception
    lines = result.output.strip().splitlines()
    assert len(lines) == 1, result.output
    assert lines[0].startswith("error: ")
    return lines[0]


def test_generate_writes_the_text_that_it_printed(tmp_path):
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--prompt", "Say: the cat sat on the mat. The cat sat on", "--max-new-tokens",
        10, "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    turn = report["prompts"][0]["turns"][0]
    assert len(turn["tokens"]) == len(turn["kinds"]) == turn["stats"]["new_tokens"] <= 10
    assert turn["text"].split()[0] in result.output
    assert turn["identical"] is True
    assert report["summary"]["greedy_outputs_identical"] is True
    assert says(result, "greedy outputs identical yes")
    assert "tokens/s without" in result.output
    assert report["summary"]["ratio"] > 0


def test_generate_samples_with_a_model_drafter(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(LINE * 3)
    result = invoke(
        "generate", "--prompts", prompts, "--limit", 1, "--max-new-tokens", 6, "--drafter",
        "layers:4", "--temperature", 0.8, "--top-p", 0.9, "--rule", "match", "--gamma", 3,
        SCHEDULE, "heuristic",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "sampled outputs identical yes")
    assert "Say yes." in result.output
    assert "Say no." in result.output


def test_generate_drafts_a_tree(tmp_path):
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--prompt", "Say: one two one two one", "--max-new-tokens", 6, "--drafter",
        "layers:4", "--tree", "2,2", "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "greedy outputs identical yes")
    report = json.loads(path.read_text())
    assert report["tree"] == [2, 2]
    assert report["prompts"][0]["turns"][0]["stats"]["drafted"] > 0
    result = invoke(
        "generate", "--prompt", "Say", "--max-new-tokens", 4, "--temperature", 0.8, "--tree", "3",
        "--rule", "match",
    )  # fmt: skip
    assert says(result, "sampled outputs identical yes")


def test_no_compare_omits_the_baseline(tmp_path):
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--prompt", "Hi", "--max-new-tokens", 4, "--no-compare", "--drafter", "none",
        "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "baseline" not in json.loads(path.read_text())["summary"]


def test_demo_answers_the_shipped_prompts():
    result = invoke("demo", "--limit", 1, "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    assert says(result, "greedy outputs identical yes")


def test_info_lists_versions_and_providers(tmp_path):
    result = invoke("info", "--json", tmp_path / "info.json")
    assert result.exit_code == 0, result.output
    for word in ("torch", "transformers", "verify_chain", "cpu instructions", "gpu"):
        assert word in result.output
    assert json.loads((tmp_path / "info.json").read_text())["providers"]["sample"]["cpu"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --prompt TEXT or --prompts FILE"),
        (["--prompt", "a", "--prompts", "b"], "give either"),
        (["--prompt", "  "], "empty prompt"),
        (["--prompts", "nowhere.jsonl"], "cannot read prompt file nowhere.jsonl: No such file"),
        (["--prompt", "a", "--temperature", "-1"], "--temperature must be finite and >= 0, got -1"),
        (["--prompt", "a", "--temperature", "nan"], "--temperature must be finite"),
        (["--prompt", "a", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
        (["--prompt", "a", "--top-k", "-3"], "--top-k must be in [0, 2**31), got -3"),
        (["--prompt", "a", "--min-p", "2"], "--min-p must be in [0, 1], got 2.0"),
        (["--prompt", "a", "--top-k", str(2**63)], "--top-k must be in [0, 2**31), got 9223"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be in [1, 2**31)"),
        (["--prompt", "a", "--seed", str(2**63)], "--seed must be in [-2**63, 2**63), got 9223"),
        (["--prompt", "a", "--gamma", str(10**12)], "--num-assistant-tokens must be in [0, 1024]"),
        (["--prompt", "a", "--gamma", str(10**20)], "--num-assistant-tokens must be in [0, 1024]"),
        (["--prompt", "a", "--json", "tests"], "--json must name a file, tests is a folder"),
        (["--prompt", "a", "--limit", "0"], "--limit must be >= 1, got 0"),
        (["--prompt", "a", "--json", "no/such/folder/x.json"], "folder no/such/folder does not"),
        (["--prompt", "a", "--model", "nowhere"], "model folder nowhere does not exist"),
        (["--prompt", "a", "--drafter", "magic"], "--drafter must be prompt_lookup, none"),
        (["--prompt", "a", "--drafter", "layers:x"], "--drafter layers:N needs a number"),
        (["--prompt", "a", "--drafter", "layers:99"], "num_layers must be in [1, 30], got 99"),
        (["--prompt", "a", "--rule", "best"], "rule must be 'auto'"),
        (["--prompt", "a", "--rule", "greedy", "--temperature", "1"], "needs do_sample=False"),
        (["--prompt", "a", "--gamma", "-1"], "--num-assistant-tokens must be in"),
        (["--prompt", "a", "--tree", "2,x"], "--tree must be numbers of children such as 4,2,1"),
        (["--prompt", "a", "--tree", "2,0"], "--tree must be an integer in [1, 1024], got 0"),
        (["--prompt", "a", "--tree", "99,99"], "--tree must have at most 1024 nodes"),
        (["--prompt", "a", "--tree", "2", "--gamma", "3"], "must not be given with tree"),
        (["--prompt", "a", "--tree", "2", "--drafter", "none"], "drafter must be given with tree"),
        (["--prompt", "a", SCHEDULE, "x"], "num_assistant_tokens_schedule must be"),
        (["--prompt", "a", SCHEDULE, "x", "--gamma", "0"], "num_assistant_tokens_schedule must be"),
        (["--prompt", "word " * 9000], "tokens, but the model's context is 8192"),
    ],
    ids=lambda value: value[-2] if isinstance(value, list) and value else "",
)
def test_bad_input_gets_one_line(arguments, message):
    assert message in one_line_error("generate", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompts"),
        (LINE + "{oops\n", "line 2: not valid JSON"),
        (LINE + "\n[1]\n", 'line 3: needs "turns", a list of strings'),
        ('{"turns": []}', 'line 1: needs "turns"'),
        ('{"turns": ["a", 3]}', 'line 1: needs "turns"'),
        ('{"turns": ["a", " "]}', "line 1: empty prompt"),
        (LINE + '{"turns": ["a\\ud800"]}', "line 2: lone surrogate '\\ud800'"),
        (LINE + '{"turns": ["a"], "category": "\\ud800"}', "line 2: lone surrogate"),
    ],
)
def test_bad_prompt_files_name_the_line(tmp_path, text, message):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert message in one_line_error("generate", "--prompts", path)


def test_unreadable_prompt_files_are_named(tmp_path):
    assert "cannot read prompt file" in one_line_error("generate", "--prompts", tmp_path)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "cannot read prompt file" in one_line_error("generate", "--prompts", binary)


def test_missing_model_gets_one_line(monkeypatch):
    monkeypatch.setattr("specdec_hf.cli.weights.EMBEDDED_PACKAGE", "no_such_package")
    assert "SmolLM2-135M-Instruct not found" in one_line_error("generate", "--prompt", "a")


def test_a_broken_model_folder_gets_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert "cannot load a model from" in one_line_error(
        "generate", "--prompt", "a", "--model", tmp_path
    )


def test_shipped_prompts_are_of_many_kinds():
    prompts = read_prompts(shipped_prompts())
    assert len(prompts) >= 6
    assert {p.category for p in prompts} >= {"summarise", "rewrite", "code edit", "chat"}


def test_tokens_are_coloured_by_kind():
    tokenizer = hf_models.smollm()[1]
    ids = tokenizer("the café at seven").input_ids
    steps = [
        Step(0, ids[:2], step_kinds(2, 1, 3), [0.0] * 2),
        Step(1, ids[:1], step_kinds(1, 0, 0), [0.0]),
        Step(0, ids[2:], step_kinds(len(ids) - 2, len(ids) - 3, len(ids) - 3), [0.0]),
    ]
    text = render(tokenizer, steps)
    assert text.plain == "the café at seven"
    assert [str(span.style) for span in text.spans if span.style] == ["green", "blue", "green"]
    assert step_kinds(2, 3, 3) == ["accepted", "accepted"]
    assert step_kinds(1, 0, 0) == ["plain"]
    assert step_kinds(1, 0, 4) == ["recovered"]
    assert step_kinds(4, 3, 3)[-1] == "bonus"
