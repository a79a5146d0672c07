"""Without ``--dtype`` the commands run a model in the dtype that its file has."""

import json

import pytest
import torch
from specdec_hf.cli.compare import Turn
from support import cli_models, hf_models
from support.cli_models import invoke, says
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory):
    """A folder whose weights are bfloat16, and a file of questions."""
    folder = tmp_path_factory.mktemp("bfloat16")
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    model.to(torch.bfloat16).save_pretrained(folder)
    cli_models.tokenizer().save_pretrained(folder)
    questions = folder / "questions.jsonl"
    questions.write_text('{"question_id": 1, "category": "a", "turns": ["Hi"]}\n')
    return folder


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("generate", ["--prompt", "Hi", "--max-new-tokens", 2]),
        ("chat", ["--max-new-tokens", 2]),
        ("check", []),
        pytest.param(
            "bench",
            ["--questions", "FILE", "--drafter", "none", "--runs", 1],
            marks=pytest.mark.build,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_models_run_in_their_own_dtype(bfloat16, tmp_path, command, options):
    given = [bfloat16 / "questions.jsonl" if one == "FILE" else one for one in options]
    written = tmp_path / "out.json"
    if command in ("generate", "bench"):
        given += ["--json", written]
    result = invoke(command, "--model", bfloat16, *given, input="Hi\n")
    assert result.exit_code == 0, result.output
    assert says(result, "bfloat16, cpu"), result.output
    if written.exists():
        report = json.loads(written.read_text())
        assert {one["dtype"] for one in report.get("results", [report])} == {"bfloat16"}


@pytest.mark.parametrize(
    ("options", "code", "line"),
    [
        ([], 0, "note: greedy texts may differ from model.generate in bfloat16"),
        (["--dtype", "float32"], 1,
         "error: greedy output with speculation differs from model.generate"),
    ],
)  # fmt: skip
def test_a_difference_is_an_error_unless_sixteen_bits_may_round(
    bfloat16, monkeypatch, options, code, line
):
    monkeypatch.setattr(Turn, "identical", False)
    result = invoke(
        "generate", "--model", bfloat16, "--prompt", "Hi", "--max-new-tokens", 2, *options
    )
    assert result.exit_code == code, result.output
    assert says(result, line)


@pytest.mark.parametrize(
    ("option", "forwards"), [([], "packed"), (["--compile"], "packed"), (["--no-compile"], "own")]
)
def test_an_option_says_how_forwards_run(bfloat16, tmp_path, option, forwards):
    written = tmp_path / "out.json"
    result = invoke(
        "generate", "--model", bfloat16, "--prompt", "Hi", "--max-new-tokens", 2, "--no-compare",
        "--json", written, *option,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert f'"forwards": "{forwards}"' in written.read_text()
