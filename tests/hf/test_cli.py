"""The command line prints and writes the same text and figures, whatever the model and prompt."""

import json

import pytest
from specdec_hf.cli import load
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.terminal import visible
from specdec_hf.cli.trace import ASCII_MARKS, MARKS, PieceStream, legend, render
from specdec_hf.drafting.registry import DRAFTERS, usage
from specdec_hf.loop.streaming import Step
from specdec_hf.runner.fit import Fit
from support import cli_models
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

pytestmark = pytest.mark.slow

SCHEDULE = "--num-assistant-tokens-schedule"
LINE = '{"question_id": 1, "category": "x", "turns": ["Say yes.", "Say no."]}\n'


def test_generate_writes_the_text_that_it_printed(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompt", "Say: the cat sat. The cat sat",
        "--max-new-tokens", 10, "--drafter", "layers:1", "--guard", "off", "--json", path,
        "--no-rejected",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    turn = report["prompts"][0]["turns"][0]
    assert len(turn["tokens"]) == len(turn["kinds"]) == turn["stats"]["new_tokens"] <= 10
    without_marks = result.output.translate(dict.fromkeys(map(ord, "«»‹›")))
    assert visible(turn["text"]).split()[0] in without_marks
    assert turn["identical"] is True
    assert turn["stats"]["drafter"] == report["summary"]["drafter"] == "layers"
    assert report["summary"]["greedy_outputs_identical"] is True
    assert says(result, "greedy outputs identical yes")
    assert "tokens/s without" in result.output
    assert report["summary"]["ratio"] > 0
    assert report["dtype"] == "float32"


def test_generate_samples_with_a_model_drafter(folder, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(LINE * 3)
    result = invoke(
        "generate", "--model", folder, "--prompts", prompts, "--limit", 1, "--max-new-tokens", 6,
        "--drafter", "layers:1", "--temperature", 0.8, "--top-p", 0.9, "--rule", "match",
        "--gamma", 3, SCHEDULE, "heuristic",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "sampled outputs identical yes")
    assert "Say yes." in result.output
    assert "Say no." in result.output


def test_a_lossy_rule_is_said_in_a_note_and_in_the_summary(folder, tmp_path):  # noqa: F811
    """Its greedy text is not compared with that of model.generate, from which it differs."""
    texts = {}
    lossy = ["--rule", "lenient", "--lenience", 0.05]
    for options in ([], lossy):
        path = tmp_path / "out.json"
        result = invoke(
            "generate", "--model", folder, "--prompt", "Say: the cat sat. The cat sat",
            "--max-new-tokens", 20, "--drafter", "layers:1", "--guard", "off", "--json", path,
            *options,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        report = json.loads(path.read_text())
        texts[len(options)] = report["prompts"][0]["turns"][0]["tokens"]
        assert report["summary"]["lossless"] is (not options)
        assert says(result, "rule lenient, lossy") is bool(options)
        assert says(result, "rule 'lenient' with lenience=0.05 is lossy") is bool(options)
        assert ("greedy_outputs_identical" in report["summary"]) is (not options)
    assert texts[0] != texts[len(lossy)]
    assert (report["rule"], report["lenience"]) == ("lenient", 0.05)


def test_a_text_without_the_residual_is_said_to_be_lossy(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompt", "Say: the cat sat.", "--max-new-tokens", 8,
        "--drafter", "layers:1", "--temperature", 1, "--ablate", "residual", "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "rule token without the residual, lossy")
    assert says(result, "ablate='residual' is lossy")
    report = json.loads(path.read_text())
    assert (report["rule"], report["ablate"]) == ("token", "residual")
    assert report["summary"]["lossless"] is False


def test_the_drafts_of_several_drafters_become_one_tree(folder, tmp_path):  # noqa: F811
    report = tmp_path / "report.json"
    result = invoke(
        "generate", "--prompt", "the story of a bear, the story of a", "--model", folder,
        "--drafter", "lookahead:2,3,2", "--drafter", "prompt_lookup", "--gamma", 3,
        "--max-new-tokens", "24", "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(report.read_text())
    assert content["summary"]["greedy_outputs_identical"] is True
    stats = content["prompts"][0]["turns"][0]["stats"]
    assert stats["drafter"] == "lookahead, prompt_lookup"
    assert stats["drafted"] > 0
    assert max(max(record["accepted"]) for record in stats["round_log"]) <= 3


def test_drafter_help_lists_the_drafters():
    result = invoke("generate", "--drafter", "help")
    assert result.exit_code == 0
    assert set(map(usage, DRAFTERS)) <= set(result.output.split())


def test_a_printed_seed_gives_the_answer_again(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    arguments = (
        "generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 6, "--temperature",
        1, "--drafter", "layers:1", "--device", "cpu", "--json", path,
    )  # fmt: skip

    def answer(*seed):
        result = invoke(*arguments, *seed)
        report = json.loads(path.read_text())
        assert report["device"] == "cpu"
        (turn,) = report["prompts"][0]["turns"]
        assert says(result, f"seed {turn['seed']}")
        assert turn["identical"] is None  # rule block: other text than plain decoding
        assert "identical" not in result.output
        return turn["seed"], turn["tokens"]

    (seed, tokens), (other_seed, other_tokens) = answer(), answer()
    assert seed != other_seed
    assert tokens != other_tokens
    assert answer("--seed", seed) == (seed, tokens)


def test_nothing_drafted_prints_no_ratio(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 4, "--drafter",
        "none", "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert says(result, "drafts accepted nothing was drafted")
    for word in ("ratio", "x)", "%"):
        assert word not in result.output
    report = json.loads(path.read_text())
    assert "ratio" not in report["summary"]
    assert report["prompts"][0]["turns"][0]["ratio"] is None


@pytest.mark.full
def test_models_are_folders_gguf_files_and_ids_of_the_local_cache(
    folder,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    cli_models.write_snapshot(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    gguf = cli_models.write_gguf(tmp_path / "tiny.gguf")
    texts = []
    for name in (folder, cli_models.HUB_ID, gguf):
        result = invoke(
            "generate", "--model", name, "--drafter", name, "--prompt", "Hi", "--max-new-tokens",
            6, "--json", tmp_path / "out.json",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert says(result, "greedy outputs identical yes")
        report = json.loads((tmp_path / "out.json").read_text())
        assert report["summary"]["dtype"] == "float32"
        assert report["summary"]["accepted"] > 0
        texts.append(report["prompts"][0]["turns"][0]["tokens"])
    assert texts[0] == texts[1] == texts[2]


def test_dtype_and_system_message_reach_the_model(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    arguments = ["generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 3]
    tokens = {}
    for system in ((), ("--system", "Be brief.")):
        result = invoke(*arguments, *system, "--dtype", "bfloat16", "--json", path)
        assert result.exit_code == 0, result.output
        report = json.loads(path.read_text())
        assert report["summary"]["dtype"] == "bfloat16"
        tokens[system] = report["prompts"][0]["turns"][0]["stats"]["prompt_tokens"]
    assert report["system"] == "Be brief."
    assert tokens["--system", "Be brief."] - tokens[()] == len("<system>Be brief.") + 1


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_the_progress_line_says_where_weights_are_packed(folder, monkeypatch, place):  # noqa: F811
    """A model of another device is not packed."""
    read = load.load_model
    monkeypatch.setattr(load, "load_model", lambda *args, **more: read(*args, **more).to(place))
    settings, said = Settings(model=str(folder), drafter=[str(folder)]), []
    load.load(settings, check(settings), said.append)
    assert said.count("packing weights") == (2 if place == "cpu" else 0)


def test_prompts_come_from_standard_input(folder, tmp_path):  # noqa: F811
    path = tmp_path / "out.json"
    arguments = ("generate", "--model", folder, "--max-new-tokens", 2, "--json", path)
    for option, text in (("--prompt", "Say yes.\nSay é :smile:\n"), ("--prompts", LINE)):
        result = invoke(*arguments, option, "-", input=text)
        assert result.exit_code == 0, result.output
        turns = json.loads(path.read_text())["prompts"][0]["turns"]
        assert [t["prompt"] for t in turns] == (
            [text] if option == "--prompt" else ["Say yes.", "Say no."]
        )
    start = ("generate", "--model", folder, "--prompt", "-")
    assert one_line_error(*start, input="  \n") == "error: standard input is empty"
    line = "error: standard input is not UTF-8 text: byte 0xff at 2"
    assert one_line_error(*start, input=b"ok\xff") == line
    assert "standard input line 1: not valid JSON" in one_line_error(
        "generate", "--model", folder, "--prompts", "-", input="{oops"
    )


def test_prompts_and_answers_are_printed_as_they_are(folder, tmp_path):  # noqa: F811
    text = "[bold]a[/bold] :smile: \x1b[31mred"
    result = invoke(
        "generate", "--model", folder, "--prompt", text, "--max-new-tokens", 24, "--no-compare",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "[bold]a[/bold] :smile: ␛[31mred" in result.output
    assert not any(ord(c) < 32 and c not in "\n\t" for c in result.output)


def test_check_lists_the_caches_that_fit(folder, monkeypatch):  # noqa: F811
    result = invoke("check", "--model", folder)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[3:]]
    assert [row[0] for row in rows] == ["spec"] * 4 + ["aligned"] + ["dynamic"] * 2
    assert {row[1] for row in rows if row[-1] == "fits"} == {"chain", "tree"}
    unfit = Fit(difference=0.5, tolerance=1e-4, reason="its logits differ")
    monkeypatch.setattr("specdec_hf.model_check.check_fit", lambda *_, **__: unfit)
    result = invoke("check", "--model", folder)
    assert result.exit_code == 1, result.output
    assert result.output.count("5.0e-01") == result.output.count("its logits differ") == 7
    assert "error: no cache fits" in result.output


def test_info_lists_versions_and_providers(tmp_path):
    result = invoke("info", "--json", tmp_path / "info.json")
    assert result.exit_code == 0, result.output
    words = ("torch", "transformers", "verify_chain", "cpu instructions", "gpu", "heads shipped")
    words += ("SmolLM2-135M-Instruct (Q4_1)",)
    for word in words:
        assert word in result.output
    assert json.loads((tmp_path / "info.json").read_text())["providers"]["sample"]["cpu"]


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


def test_where_there_is_no_colour_marks_tell_drafted_tokens_apart():
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("a cat sat on").input_ids
    steps = [
        Step(0, ids[:5], ["accepted"] * 5, [0.0] * 5),
        Step(0, ids[5:9], ["recovered"] * 4, [0.0] * 4),
        Step(0, ids[9:10], ["accepted"], [0.0]),
        Step(0, ids[10:], ["plain"] * 2, [0.0] * 2),
    ]
    assert render(tokenizer, steps, marks=MARKS).plain == "«a cat» ‹sat› on"
    assert render(tokenizer, steps, marks=ASCII_MARKS).plain == "[a cat] {sat} on"
    assert not render(tokenizer, steps, marks=MARKS).spans
    assert legend(MARKS).plain == (
        "«drafted and accepted»  ‹recovered after a rejection›  bonus or plain"
    )


def test_rejected_drafts_stand_before_the_token_that_replaces_them():
    """Siblings are apart, and half of a character is not shown."""
    tokenizer = cli_models.tokenizer()
    s, o, first, second, t = tokenizer("soét").input_ids
    c, d, half = tokenizer("cdé").input_ids[:3]
    steps = [
        Step(0, [s, o], ["accepted", "recovered"], [0.0] * 2, rejected=[c]),
        Step(0, [first], ["recovered"], [0.0], rejected=[c, d, half]),
        Step(0, [second], ["recovered"], [0.0], rejected=[c]),
        Step(0, [t], ["bonus"], [0.0]),
    ]
    assert render(tokenizer, steps, marks=MARKS).plain == "«s»×c×‹o›×c××d××c×‹é›t"
    coloured = render(tokenizer, steps)
    struck = {coloured.plain[a:b] for a, b, style in coloured.spans if style == "red strike"}
    assert struck == {"c", "d"}
    assert render(tokenizer, steps, marks=MARKS, rejected=False).plain == "«s»‹oé›t"
    assert legend(MARKS, rejected=True).plain.split("  ")[1] == "×drafted and rejected×"


def test_a_stream_of_pieces_is_the_text():
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("né 😄 ok").input_ids
    stream = PieceStream(tokenizer)
    pieces = [p for i in ids for p in stream.feed(Step(0, [i], ["accepted"], [0.0]))]
    assert [text for text, _ in pieces] == ["n", "é", " ", "😄", " ", "o", "k"]
    stream.feed(Step(0, ids[1:2], ["bonus"], [0.0]))
    assert stream.rest() == ("\N{REPLACEMENT CHARACTER}", "bonus")


def test_control_characters_become_symbols():
    assert visible("a\tb\n\x1b[0m\r\x7f\x9b") == "a\tb\n␛[0m␍␡\N{REPLACEMENT CHARACTER}"
