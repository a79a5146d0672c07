"""The command line prints and writes the same text and figures, whatever the model and prompt."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare, load
from specdec_hf.cli.checks import Settings, check
from specdec_hf.cli.prompts import Prompt, read_prompts
from specdec_hf.cli.report import print_turn
from specdec_hf.cli.terminal import visible
from specdec_hf.cli.trace import ASCII_MARKS, MARKS, PieceStream, legend, render
from specdec_hf.drafting.registry import DRAFTERS, usage
from specdec_hf.loop.streaming import Step
from specdec_hf.runner.fit import Fit
from support import cli_models, hf_models, toy_tokenizers
from support.cli_models import answered, folder, invoke, one_line_error, reported, says, succeed  # noqa: F401

import specdec_kernels

SCHEDULE = "--num-assistant-tokens-schedule"
LINE = '{"question_id": 1, "category": "x", "turns": ["Say yes.", "Say no."]}\n'


def test_generate_writes_the_text_that_it_printed(folder, tmp_path):  # noqa: F811
    report, result = reported(
        tmp_path, "generate", "--model", folder, "--prompt", "Say: the cat sat. The cat sat",
        "--max-new-tokens", 10, "--drafter", folder, "--guard", "off",
    )  # fmt: skip
    turn = report["prompts"][0]["turns"][0]
    assert len(turn["tokens"]) == len(turn["kinds"]) == turn["stats"]["new_tokens"] <= 10
    assert result.stdout == turn["text"] + "\n"
    assert turn["identical"] is True
    assert turn["stats"]["drafter"] == report["summary"]["drafter"] != "none"
    assert report["summary"]["greedy_outputs_identical"] is True
    assert says(result, "greedy outputs identical yes")
    for one in (turn, report["summary"]):
        speeds = one["tokens_per_second"]
        assert one["ratios"] == {
            "library": speeds["without_drafts"] / speeds["model.generate"],
            "speculation": speeds["with_drafts"] / speeds["without_drafts"],
            "together": speeds["with_drafts"] / speeds["model.generate"],
        }
    assert all(turn["seconds"][name] > 0 for name in speeds)
    assert report["dtype"] == "float32"
    number = r"([\d.]+)"
    (said,) = re.findall(
        rf"\n{number} times as fast as model.generate: {number} times without drafts, "
        rf"{number} times by speculation; [\d.]+ tokens a round",
        result.stderr,
    )
    wanted = [one["ratios"][name] for name in ("together", "library", "speculation")]
    assert [float(x) for x in said] == pytest.approx(wanted, abs=0.006)


def test_what_is_piped_are_the_texts_alone(folder, tmp_path):  # noqa: F811
    """Titles, figures and the summary are on standard error, unless more is asked for."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(LINE)
    start = ("generate", "--model", folder, "--prompts", prompts, "--max-new-tokens", 90)
    start += ("--drafter", "layers:1", "--guard", "off", "--no-compare")
    report, result = reported(tmp_path, *start)
    first, second = (turn["text"] for turn in report["prompts"][0]["turns"])
    assert len(first) > 80  # no line is broken
    assert set(first) & {chr(n) for n in range(32)}  # nothing is replaced, expanded or stripped
    assert result.stdout_bytes.decode() == f"{first}\n\n{second}\n"
    for words in ("Say yes.", "Say no.", "90 tokens; with drafts", "summary", "wrote "):
        assert words in result.stderr
    for option in ("--show-drafts", "--trace"):
        more = succeed(*start, option)
        assert more.stderr == ""
        assert "90 tokens; with drafts" in more.stdout
        assert ("×drafted and rejected×" in more.stdout) is (option == "--show-drafts")


def test_the_demo_shows_the_drafts_of_one_answer(folder, tmp_path, monkeypatch):  # noqa: F811
    given = Settings(model=str(folder), drafter=[str(folder)], guard="off", max_new_tokens=12)
    monkeypatch.setattr("specdec_hf.cli.app.Settings", lambda **_: given)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(LINE)
    output = succeed("demo", "--prompts", prompts).stdout
    answers, example = output.split("how answer ")
    assert "summary" in example
    assert not re.search("[«×‹]", answers)
    assert re.match(r"[12] of 2 came about ", example)
    shown, _, after = example.partition("«drafted and accepted»")
    assert "«" in shown
    assert "specul" in after


def test_generate_samples_with_a_model_drafter(folder, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(LINE * 3)
    result = succeed(
        "generate", "--model", folder, "--prompts", prompts, "--limit", 1, "--max-new-tokens", 6,
        "--drafter", "layers:1", "--temperature", 0.8, "--top-p", 0.9, "--rule", "match",
        "--gamma", 3, SCHEDULE, "heuristic",
    )  # fmt: skip
    assert says(result, "sampled outputs identical yes")
    assert "Say yes." in result.output
    assert "Say no." in result.output


def test_a_lossy_rule_is_said_in_a_note_and_in_the_summary(folder, tmp_path):  # noqa: F811
    """Its greedy text is not compared with that of model.generate, from which it differs."""
    texts = {}
    lossy = ["--rule", "lenient", "--lenience", 0.05]
    for options in ([], lossy):
        report, result = reported(
            tmp_path, "generate", "--model", folder, "--prompt", "Say: the cat sat. The cat sat",
            "--max-new-tokens", 20, "--drafter", "layers:1", "--guard", "off", *options,
        )  # fmt: skip
        texts[len(options)] = report["prompts"][0]["turns"][0]["tokens"]
        assert report["summary"]["lossless"] is (not options)
        assert says(result, "rule lenient, lossy") is bool(options)
        assert says(result, "rule 'lenient' with lenience=0.05 is lossy") is bool(options)
        assert ("greedy_outputs_identical" in report["summary"]) is (not options)
    assert texts[0] != texts[len(lossy)]
    assert (report["rule"], report["lenience"]) == ("lenient", 0.05)


def test_a_text_without_the_residual_is_said_to_be_lossy(folder, tmp_path):  # noqa: F811
    report, result = reported(
        tmp_path, "generate", "--model", folder, "--prompt", "Say: the cat sat.",
        "--max-new-tokens", 8, "--drafter", "layers:1", "--temperature", 1, "--ablate", "residual",
    )  # fmt: skip
    assert says(result, "rule token without the residual, lossy")
    assert says(result, "ablate='residual' is lossy")
    assert (report["rule"], report["ablate"]) == ("token", "residual")
    assert report["summary"]["lossless"] is False


def test_the_drafts_of_several_drafters_become_one_tree(folder, tmp_path):  # noqa: F811
    answer = answered(
        tmp_path, "--prompt", "the story of a bear, the story of a", "--model", folder,
        "--drafter", "lookahead:2,3,2", "--drafter", "prompt_lookup", "--gamma", 3,
        "--max-new-tokens", "24",
    )  # fmt: skip
    stats = answer["stats"]
    assert answer["identical"] is True
    assert stats["drafter"] == "lookahead, prompt_lookup"
    assert stats["drafted"] > 0
    assert max(max(record["accepted"]) for record in stats["round_log"]) <= 3


def test_drafter_help_lists_the_drafters():
    result = succeed("generate", "--drafter", "help")
    assert set(map(usage, DRAFTERS)) <= set(result.output.split())


def test_a_printed_seed_gives_the_answer_again(folder, tmp_path):  # noqa: F811
    def answer(*seed):
        report, result = reported(
            tmp_path, "generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 6,
            "--temperature", 1, "--drafter", "layers:1", "--device", "cpu", *seed,
        )  # fmt: skip
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


@pytest.mark.full
def test_models_are_folders_files_and_ids_of_the_cache(folder, tmp_path, monkeypatch):  # noqa: F811
    cli_models.write_snapshot(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    gguf = cli_models.write_gguf(tmp_path / "tiny.gguf")
    texts = []
    for name in (folder, cli_models.HUB_ID, gguf):
        answer = answered(
            tmp_path, "--model", name, "--drafter", name, "--prompt", "Hi", "--max-new-tokens", 6
        )
        assert answer["identical"] is True
        assert answer["stats"]["accepted"] > 0
        texts.append(answer["tokens"])
    assert texts[0] == texts[1] == texts[2]


def test_dtype_and_system_message_reach_the_model(folder, tmp_path):  # noqa: F811
    arguments = ("generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 3)
    tokens = {}
    for system in ((), ("--system", "Be brief.")):
        report, _ = reported(tmp_path, *arguments, *system, "--dtype", "bfloat16")
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
    asked = ("generate", "--model", folder, "--max-new-tokens", 2)
    text = "Say yes.\nSay é :smile:\n"
    for option, given, prompts in (
        ("--prompt", text, [text]), ("--prompts", LINE, ["Say yes.", "Say no."])
    ):  # fmt: skip
        report, _ = reported(tmp_path, *asked, option, "-", input=given)
        assert [turn["prompt"] for turn in report["prompts"][0]["turns"]] == prompts
    start = ("generate", "--model", folder, "--prompt", "-")
    assert one_line_error(*start, input="  \n") == "error: standard input is empty"
    line = "error: standard input is not UTF-8 text: byte 0xff at 2"
    assert one_line_error(*start, input=b"ok\xff") == line
    assert "standard input line 1: not valid JSON" in one_line_error(
        "generate", "--model", folder, "--prompts", "-", input="{oops"
    )


def test_prompts_and_answers_are_printed_as_they_are(folder):  # noqa: F811
    text = "[bold]a[/bold] :smile: \x1b[31mred"
    result = succeed(
        "generate", "--model", folder, "--prompt", text, "--max-new-tokens", 24, "--no-compare",
        "--trace",
    )  # fmt: skip
    assert "[bold]a[/bold] :smile: ␛[31mred" in result.output
    assert not any(ord(c) < 32 and c not in "\n\t" for c in result.output)
    assert visible("a\tb\n\x1b[0m\r\x7f\x9b") == "a\tb\n␛[0m␍␡\N{REPLACEMENT CHARACTER}"


def test_check_lists_the_caches_that_fit(folder, monkeypatch):  # noqa: F811
    result = succeed("check", "--model", folder)
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
    report, result = reported(tmp_path, "info")
    words = ("torch", "transformers", "verify_chain", "cpu instructions", "gpu", "heads shipped")
    words += ("SmolLM2-135M-Instruct (Q4_1)",)
    for word in words:
        assert word in result.output
    assert report["providers"]["sample"]["cpu"]
    built = specdec_kernels.has_cuda_kernels()
    assert report["cuda_kernels"] is built
    row = "CUDA kernels +" + ("built" if built else "not built; SPECDEC_CUDA=all builds them")
    assert re.search(row, result.output)


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
        "«drafted and accepted»  ×drafted and rejected×  ‹recovered after a rejection›  "
        "bonus or plain"
    )


def test_an_answer_copies_nothing_that_its_seed_drew_before(folder, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Say yes."]}\n' * 2)
    report, _ = reported(
        tmp_path, "generate", "--model", folder, "--prompts", prompts, "--drafter",
        "suffix_automaton:keep=1MiB", "--temperature", 1, "--seed", 3, "--max-new-tokens", 8,
        "--guard", "off",
    )  # fmt: skip
    first, second = (prompt["turns"][0] for prompt in report["prompts"])
    assert first["tokens"] == second["tokens"]
    noted = [
        any("had the same seed" in x for x in one["stats"]["notes"]) for one in (first, second)
    ]
    assert noted == [False, True]


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


def test_a_rejected_end_of_the_text_has_its_name():
    tokenizer = cli_models.tokenizer()
    s, first, second = tokenizer("sé").input_ids
    end = cli_models.END
    kinds = ["plain", "recovered", "bonus"]
    steps = [
        Step(0, [s], ["recovered"], [0.0], rejected=[end]),
        Step(0, [first, second, end], kinds, [0.0] * 3, rejected=[end]),
    ]
    assert render(tokenizer, steps, marks=MARKS).plain == "×</s>×‹s›×</s>×‹é›"


def test_a_stream_of_pieces_is_the_text():
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("né 😄 ok").input_ids
    stream = PieceStream(tokenizer)
    pieces = [p for i in ids for p in stream.feed(Step(0, [i], ["accepted"], [0.0]))]
    assert [text for text, _ in pieces] == ["n", "é", " ", "😄", " ", "o", "k"]
    stream.feed(Step(0, ids[1:2], ["bonus"], [0.0]))
    assert stream.rest() == ("\N{REPLACEMENT CHARACTER}", "bonus")


def test_a_stream_of_pieces_decodes_a_long_text_once():
    """Root: all tokens so far were decoded for each new one. A blank that begins stays, too."""
    tokenizer = toy_tokenizers.Counting(toy_tokenizers.sentence_piece())
    hello, newline = (tokenizer.convert_tokens_to_ids(x) for x in ("▁Hello", "<0x0A>"))
    stream, size = PieceStream(tokenizer, [hello], rejected=True), 2000
    plain = Step(0, [hello, newline], ["plain"] * 2, [0.0] * 2)
    pieces = [piece for _ in range(size // 2) for piece in stream.feed(plain)]
    assert tokenizer.decoded < 8 * size
    last = Step(0, [hello, newline], ["recovered", "bonus"], [0.0] * 2, "eos", rejected=[hello])
    assert stream.feed(last) == [(" Hello", "rejected"), (" Hello", "recovered"), ("\n", "bonus")]
    assert "".join(piece for piece, _ in pieces) + " Hello\n" == stream.text
    assert stream.text == " Hello\n" * (size // 2 + 1)
    assert stream.rest() == ("", "bonus")


def test_the_first_word_of_an_answer_keeps_its_blank(capsys):
    """Root: reports, marks and models alone decoded new tokens without what they follow."""
    tokenizer = toy_tokenizers.small_pieces(258)
    model = hf_models.build("llama", vocab_size=258)
    prompt, text = "ab ba", ""
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    settings = {"do_sample": True, "max_new_tokens": 8}
    for seed in range(100):
        decoder = SpeculativeDecoder("prompt_lookup", rule="match", seed=seed)
        turn = compare.run_turn(model, inputs, decoder, settings, compare=False)
        whole = tokenizer.decode([*inputs["input_ids"][0].tolist(), *turn.tokens])
        text = whole.removeprefix(prompt)
        if text.startswith(" "):
            break
    assert text.startswith(" ")
    assert turn.to_dict(tokenizer)["text"] == text
    alone = compare.answer_alone("target", model, tokenizer, inputs, decoder, settings, seed)
    assert alone.text == text
    assert render(tokenizer, turn.steps, prompt=turn.prompt).plain == text
    print_turn(tokenizer, Prompt("", "", [prompt]), prompt, turn)
    assert visible(text).split("\n")[0].rstrip() in capsys.readouterr().out.split("\n")[2]


# The dtype of a model, and how its forwards run.


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A folder whose weights are bfloat16."""
    path = tmp_path_factory.mktemp("bfloat16")
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    model.to(torch.bfloat16).save_pretrained(path)
    cli_models.tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        "generate --prompt Hi --max-new-tokens 2",
        "chat --max-new-tokens 2",
        "check",
        pytest.param("bench --questions FILE --drafter none --runs 1", marks=pytest.mark.build),
    ],
)
def test_models_run_in_the_dtype_of_their_file(bfloat16, tmp_path, command):
    (tmp_path / "file").write_text(LINE)
    words = command.replace("FILE", str(tmp_path / "file")).split()
    assert says(succeed(*words, "--model", bfloat16, input="Hi\n"), "bfloat16, cpu")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([], "packed weights add products up in another order"),
        (["--no-compile", "--guard", "off"], None),
    ],
    ids=["packed", "own"],
)
def test_a_note_in_sixteen_bits_is_where_the_text_differs_and_only_there(
    bfloat16, tmp_path, options, reason
):
    report, result = reported(
        tmp_path, "generate", "--model", bfloat16, "--prompt", "Hi there, hi there",
        "--max-new-tokens", 40, "--drafter", "prompt_lookup", *options,
    )  # fmt: skip
    turn = report["prompts"][0]["turns"][0]
    assert (turn["identical"], turn["difference"]) == (reason is None, reason)
    differs = "note: 1 of 1 texts differ from model.generate in bfloat16, where " + (reason or "")
    assert says(result, differs) == (reason is not None)
    said = [*turn["stats"]["notes"], *report["summary"]["notes"]]
    assert not any("rounds" in note for note in said)


def test_a_difference_in_float32_is_an_error(bfloat16, monkeypatch):
    monkeypatch.setattr(compare.Turn, "identical", False)
    asked = ("--model", bfloat16, "--prompt", "Hi", "--max-new-tokens", 2)
    result = invoke("generate", *asked, "--dtype", "float32")
    assert result.exit_code == 1, result.output
    assert says(result, "error: 1 of 1 texts differ from model.generate")


@pytest.mark.parametrize(
    ("option", "forwards"), [([], "packed"), (["--compile"], "packed"), (["--no-compile"], "own")]
)
def test_an_option_says_how_forwards_run(bfloat16, tmp_path, option, forwards):
    asked = ("--model", bfloat16, "--prompt", "Hi", "--max-new-tokens", 2, "--no-compare")
    assert answered(tmp_path, *asked, *option)["stats"]["forwards"] == forwards


# Faults: damaged files, missing libraries, prompts that are too long.


def test_a_missing_library_and_an_unexpected_error_get_one_line(monkeypatch):
    def broken():
        raise ZeroDivisionError("oops")

    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "specdec_kernels", None)
        assert "specdec_kernels" in one_line_error("info", code=1)
    monkeypatch.setattr("specdec_hf.cli.app.collect_info", broken)
    assert one_line_error("info", code=1) == "error: unexpected ZeroDivisionError: oops"


def test_prompt_files_may_hold_any_character(folder, tmp_path):  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    line = '{"question_id": "[/x]", "category": "[/x]", "turns": ["one\u2028two"]}'
    path.write_bytes(f"{line}\r\n{line}\r\n".encode("utf-8-sig"))
    prompts = read_prompts(path)
    assert [p.turns for p in prompts] == [["one\u2028two"]] * 2
    result = succeed(
        "generate", "--model", folder, "--prompts", path, "--limit", 1, "--max-new-tokens", 2
    )
    assert "[/x]" in result.output


def test_a_broken_model_folder_gets_one_line(tmp_path):
    def line():
        return one_line_error("generate", "--prompt", "a", "--model", tmp_path)

    (tmp_path / "config.json").write_text("{}")
    assert "holds no weights (*.safetensors or *.bin)" in line()
    (tmp_path / "model.safetensors").write_text("")
    assert "cannot load the configuration from" in line()
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert "is of type 'vit', which Transformers does not list among causal" in line()
    (tmp_path / "config.json").unlink()
    (tmp_path / "x.gguf").write_text("")
    assert "config.json is missing; name the GGUF file in it" in line()


def test_a_later_failure_keeps_the_earlier_answers(folder, tmp_path):  # noqa: F811
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text(json.dumps({"turns": ["Hi", "word " * 90]}))
    result = invoke(
        "generate", "--model", folder, "--prompts", prompts, "--max-new-tokens", 2, "--json", out
    )
    assert result.exit_code == 1, result.output
    assert "error: prompt 1: prompt of sequence 0 has" in result.output
    report = json.loads(out.read_text())
    assert len(report["prompts"][0]["turns"]) == report["summary"]["answers"] == 1
    assert "but the model's context is 256" in report["error"]


def test_a_disk_that_is_full_gets_one_line(folder):  # noqa: F811
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    result = invoke(
        "generate", "--model", folder, "--prompt", "a", "--max-new-tokens", 2, "--json", "/dev/full"
    )
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "error: No space left on device"


@pytest.mark.parametrize("do_sample", [False, True])
def test_speculative_and_plain_decoding_both_stop_at_the_context(do_sample):
    model = hf_models.build("llama", context=16)
    decoder = SpeculativeDecoder("prompt_lookup", rule="auto")
    settings = {"do_sample": do_sample, "max_new_tokens": 20}
    turn = compare.run_turn(model, hf_models.prompts((9,)), decoder, settings, compare=True)
    assert [len(one.tokens) for one in (turn, turn.without_drafts, turn.generate)] == [7] * 3
    assert do_sample or turn.identical
