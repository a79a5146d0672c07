"""The command `train`: a golden run, what it writes, and what it does not overwrite."""

import json
import re
import shutil

import pytest
from specdec_hf.heads.eagle3.files import load_head
from specdec_lab.training.command import _share
from support.cli_models import invoke, masked, one_line_error, says, succeed

pytestmark = pytest.mark.training

SMALL = ("--tokens", 900, "--length", 24, "--rows", 8, "--steps", 12, "--batch-size", 4)


TRAINED = """
loading texts hidden states training
# tokens, # steps, # minutes; # bytes
held-out acceptance of draft #, #, ...: #, #, # greedy, #, #, # drawn
wrote the head to head
"""


@pytest.mark.build
@pytest.mark.usefixtures("home")
def test_train_writes_a_head_that_drafts(tmp_path):
    output = tmp_path / "head"
    result = succeed(
        "train", "--model", "tiny", "--output", "head", "--dtype", "float32", "--turn-length", 12,
        *SMALL,
    )  # fmt: skip
    assert masked(result.stderr + result.stdout) == " ".join(TRAINED.split())
    report = json.loads((output / "report.json").read_text())
    assert report["steps"] == report["settings"]["turn_length"] == 12
    assert report["tokens"] >= 800
    assert len(report["greedy_acceptance"]) == len(report["loss"]) == 3
    losses = report["curves"]["losses"]
    assert report["loss"] == losses[-1] < losses[1] < losses[0], "of three draft steps"
    assert report["bytes"] == (output / "model.safetensors").stat().st_size
    card = (output / "README.md").read_text()
    assert f"{report['tokens']:,} tokens" in card
    assert re.findall(r"^\| (\d) \| 0\.", card, re.MULTILINE) == ["1", "2", "3"]
    assert str(tmp_path) not in card + json.dumps(report)
    assert (output / "training.svg").read_text().startswith("<?xml")
    assert load_head(output).config.draft_vocab_size == 258
    asked = "generate --model tiny --prompt ab --drafter eagle3:head --max-new-tokens 8"
    succeed(*asked.split())


@pytest.mark.build
def test_given_texts_and_prompts_are_read(folder, tmp_path):
    texts, prompts = [tmp_path / f"{n}.txt" for n in range(24)], tmp_path / "prompts.jsonl"
    for n, file in enumerate(texts):
        file.write_text("one"[: 2 + n % 2])
    prompts.write_text('{"turns": ["hey you"]}\n' * 24)
    for option, paths in (("--texts", texts), ("--prompts", [prompts])):
        output = tmp_path / option
        succeed(
            "train", "--model", folder, "--output", output, "--dtype", "float32", "--tokens", 900,
            *(word for path in paths for word in (option, path)), "--length", 8,
            "--batch-size", 4, "--steps", 2, "--draft-steps", 5, "--rows", 8,
        )  # fmt: skip
    lines = [json.loads(line) for line in (output / "work" / "texts.jsonl").open()]
    assert sorted(one["number"] for one in lines) == list(range(24))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", 300), "--length must be at most 256, the model's context, got 300"),
        ((*SMALL, "--head", "exit_head", "--layer", 2), "layer must be an integer in [1, 1], got"),
        (("--draft-model", *SMALL, "--width", 64), "--width must be at most 32, that of"),
    ],
)
def test_what_does_not_fit_is_refused_before_texts(folder, tmp_path, arguments, message):
    result = invoke("train", "--model", folder, "--output", tmp_path, *arguments)
    assert result.exit_code == 2, result.output
    assert f"error: {message}" in result.output.splitlines()[-1]
    assert result.output.splitlines()[-1].endswith(f"got {arguments[-1]}")
    assert not (tmp_path / "work" / "texts.jsonl").exists()


@pytest.mark.build
def test_train_writes_draft_models_that_draft_one_tree(folder, tmp_path):
    output = tmp_path / "drafts"
    given = (
        "train", "--draft-model", "--model", folder, "--output", output, "--dtype", "float32",
        "--width", 32, "--num-layers", 1, "--num-drafters", 2, "--loss", "total_variation",
        "--on-policy", 0.25, *SMALL,
    )  # fmt: skip
    result = succeed(*given)
    assert says(result, "wrote the draft model to")  # and a path that is longer than a line
    assert not (output / "2" / "work" / "texts.jsonl").exists()
    reports = [json.loads((output / n / "report.json").read_text()) for n in "12"]
    assert [report["covered"] is None for report in reports] == [True, False]
    assert {report["loss_name"] for report in reports} == {"total_variation"}
    card = (output / "2" / "README.md").read_text()
    assert "forward_kl for the first half of the steps, then total_variation" in card
    assert f"At {reports[1]['covered']:.3f} of the places" in card
    assert invoke(*given).exit_code == 0  # again, from what is there
    drafters = [word for n in "12" for word in ("--drafter", output / n)]
    asked = ("--model", folder, "--prompt", "ab ab ab", "--max-new-tokens", 8)
    succeed("generate", *asked, *drafters)


def test_the_first_of_several_drafters_has_the_time_of_two():
    """It writes the texts, too."""
    assert [_share(8.0, number, 3) for number in range(3)] == [4, 2, 2]


def test_the_target_and_other_models_are_not_overwritten(folder, tmp_path):
    copied, link, other = (tmp_path / name for name in ("drafts/1", "link", "other"))
    shutil.copytree(folder, copied)
    link.symlink_to(copied)
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    two = ("train", "--draft-model", "--num-drafters", 2)
    line = one_line_error(*two, "--model", copied, "--output", copied.parent)
    assert f"--output must not be the folder of --model, got {copied}" in line
    line = one_line_error("train", "--model", copied, "--output", link)
    assert "--output must not be the folder of --model, got" in line
    rule = "--output must be a new folder, an empty one or that of an earlier run, and"
    line = one_line_error("train", "--model", copied, "--output", other)
    assert f"{rule} {other} holds notes.txt and no work/run.json" in line
    line = one_line_error(*two, "--model", folder, "--output", copied.parent)
    assert f"{rule} {copied} holds chat_template.jinja and no work/run.json" in line
    assert {path.name for path in copied.iterdir()} == {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "dtype", "what"),
    [
        (("--learning-rate", 1e30), "float16", r"the loss in step \d+ is nan"),
        (("--learning-rate", 1e37, "--head", "medusa"), "float32", "the sum of a weight in step 2"),
        # Squares of such weights are infinite, so that norms give 0, and the loss stays finite.
        (("--learning-rate", 1e30, "--draft-model", "--width", 32), "float32", "the norm of the g"),
    ],
)
def test_training_that_diverges_says_so_and_what_to_try(folder, tmp_path, options, dtype, what):
    output = tmp_path / "head"
    given = ("--dtype", dtype, *SMALL, "--steps", 2 if "medusa" in options else 12, *options)
    result = invoke("train", "--model", folder, "--output", output, *given)
    assert result.exit_code == 1, result.output
    (line,) = [line for line in result.output.splitlines() if "error" in line]
    assert line == result.output.splitlines()[-1]
    assert re.match(f"error: training has diverged: {what}.*; try --learning-rate below 1e", line)
    assert ("another --dtype than float16" in line) == (dtype == "float16")
    assert f"--reuse {output}" in line
    assert not (output / "model.safetensors").exists()
