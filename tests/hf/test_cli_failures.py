"""The command line under faults: damaged files, missing libraries, prompts that are too long."""

import json
import subprocess
import sys

import pytest
from hf.test_cli import invoke, one_line_error
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare, weights
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.weights import MissingModelError, load_embedded, load_folder
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here


def test_help_is_quick_and_loads_no_torch():
    code = (
        "import sys; from specdec_hf.cli.app import app\n"
        "try: app(['--help'])\n"
        "finally: assert not {'torch', 'transformers', 'specdec_kernels'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "generate" in done.stdout


def test_a_missing_library_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_kernels", None)
    assert "specdec_kernels" in one_line_error("info")


def test_an_unexpected_error_gets_one_line(monkeypatch):
    def broken():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("specdec_hf.cli.app.collect_info", broken)
    assert one_line_error("info") == "error: unexpected ZeroDivisionError: oops"


def test_prompt_files_may_hold_any_character(tmp_path):
    path = tmp_path / "prompts.jsonl"
    line = '{"question_id": "[/x]", "category": "[/x]", "turns": ["one\u2028two"]}'
    path.write_bytes(f"{line}\r\n{line}\r\n".encode("utf-8-sig"))
    prompts = read_prompts(path)
    assert [p.turns for p in prompts] == [["one\u2028two"]] * 2
    result = invoke("generate", "--prompts", path, "--limit", 1, "--max-new-tokens", 2)
    assert result.exit_code == 0, result.output
    assert "[/x]" in result.output


def test_a_damaged_model_gets_one_line(tmp_path):
    hf_models.tiny("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" * 64)
    with pytest.raises(MissingModelError, match="cannot load a model from"):
        load_folder(tmp_path)
    assert "cannot load a model" in one_line_error("generate", "--prompt", "a", "--model", tmp_path)


def test_a_damaged_converted_model_is_converted_again(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    folder = tmp_path / f"{weights.embedded_gguf().stem}-{weights.CONVERSION}"
    folder.mkdir()
    (folder / "config.json").write_text("{oops")
    good = hf_models.tiny("llama")
    monkeypatch.setattr(weights, "_convert", lambda gguf, to, say: good.save_pretrained(to))
    seen = []
    with pytest.raises(MissingModelError, match="cannot load a model"):  # no tokenizer in there
        load_embedded(progress=seen.append)
    assert any(text.startswith("converting") for text in seen)
    assert (folder / "model.safetensors").is_file()


def test_long_first_turns_are_refused_before_the_run(tmp_path):
    path = tmp_path / "prompts.jsonl"
    texts = ("Hi", "word " * 9000)
    path.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts))
    message = one_line_error("generate", "--prompts", path, "--max-new-tokens", 2)
    assert message.startswith("error: prompt 2 has ")
    assert "but the model's context is 8192" in message


def test_a_later_failure_keeps_the_earlier_answers(tmp_path):
    path, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    path.write_text(json.dumps({"turns": ["Hi", "word " * 9000]}))
    result = invoke("generate", "--prompts", path, "--max-new-tokens", 2, "--json", out)
    assert result.exit_code == 2, result.output
    assert "error: prompt 1: prompt of row 0 has" in result.output
    report = json.loads(out.read_text())
    assert len(report["prompts"][0]["turns"]) == report["summary"]["answers"] == 1
    assert "but the model's context is 8192" in report["error"]


@pytest.mark.parametrize("do_sample", [False, True])
def test_speculative_and_plain_decoding_both_stop_at_the_context(do_sample):
    model = hf_models.build("llama", context=16)
    decoder = SpeculativeDecoder("prompt_lookup", rule="auto")
    settings = {"do_sample": do_sample, "max_new_tokens": 20}
    turn = compare.run_turn(model, hf_models.prompts((9,)), decoder, settings, compare=True)
    assert len(turn.tokens) == len(turn.baseline_tokens) == 7
    assert do_sample or turn.identical
