"""The command line under faults: damaged files, missing libraries, prompts that are too long."""

import json
import sys
from pathlib import Path

import pytest
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli import compare
from specdec_hf.cli.prompts import read_prompts
from support import hf_models
from support.cli_models import folder, invoke, one_line_error, write_folder  # noqa: F401
from support.hf_models import one_thread  # noqa: F401  # autouse here

pytestmark = pytest.mark.slow


def test_a_missing_library_gets_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_kernels", None)
    assert "specdec_kernels" in one_line_error("info", code=1)


def test_an_unexpected_error_gets_one_line(monkeypatch):
    def broken():
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("specdec_hf.cli.app.collect_info", broken)
    assert one_line_error("info", code=1) == "error: unexpected ZeroDivisionError: oops"


def test_prompt_files_may_hold_any_character(folder, tmp_path):  # noqa: F811
    path = tmp_path / "prompts.jsonl"
    line = '{"question_id": "[/x]", "category": "[/x]", "turns": ["one\u2028two"]}'
    path.write_bytes(f"{line}\r\n{line}\r\n".encode("utf-8-sig"))
    prompts = read_prompts(path)
    assert [p.turns for p in prompts] == [["one\u2028two"]] * 2
    result = invoke(
        "generate", "--model", folder, "--prompts", path, "--limit", 1, "--max-new-tokens", 2
    )
    assert result.exit_code == 0, result.output
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


@pytest.fixture
def two_turns(tmp_path):
    """A prompt file whose second turn does not fit the context."""
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["Hi", "word " * 90]}))
    return path


def test_a_later_failure_keeps_the_earlier_answers(folder, two_turns, tmp_path):  # noqa: F811
    out = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", folder, "--prompts", two_turns, "--max-new-tokens", 2, "--json", out
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
    assert len(turn.tokens) == len(turn.baseline_tokens) == 7
    assert do_sample or turn.identical
