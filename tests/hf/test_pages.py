"""Pages of the documents: commands are accepted, names exist, examples run."""

import functools
import re
import shlex
import sys
from pathlib import Path

import pytest
import specdec_hf
import specdec_papers
import specdec_serve
import torch
from specdec_hf import check_drafter
from specdec_hf.drafting.registry import drafters
from support import cli_models, hf_models
from support.cli_models import invoke, says, write_folder
from transformers import dynamic_module_utils

from specdec_kernels import analysis

ROOT = Path(__file__).parents[2]

DOCS = ROOT / "docs"
TEXT = (DOCS / "papers.md").read_text() if DOCS.is_dir() else ""
PACKAGES = (specdec_hf, specdec_papers, specdec_serve)
KINDS = "generate|analyze|bench|train|build"
COMMANDS = sorted({*re.findall(rf"`python -m specdec_hf ((?:{KINDS}) [^`]*)`", TEXT)})

pytestmark = pytest.mark.skipif(not TEXT, reason="the documents are not beside the tests")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """What the words of the page stand for; nothing is loaded."""

    def reached(*_, **__):
        raise ValueError("a model would be loaded")

    loading = (
        "hf.cli.run.load_models", "lab.analysis.command.load_models",
        "lab.bench.command.load_models", "hf.cli.load.read_config", "papers.build._tokenizer",
    )  # fmt: skip
    for name in loading:
        monkeypatch.setattr(f"specdec_{name}", reached)
    file = tmp_path / "questions.jsonl"
    file.write_text('{"category": "a", "turns": ["Why?"]}\n' * 4)
    return {"FOLDER": str(write_folder(tmp_path / "model")), "FILE": str(file), "TEXT": "Why?"}


def run(command, places):
    if command.startswith("train"):  # which writes where no model is
        places = places | {"FOLDER": places["FOLDER"] + "-new"}
    return invoke(*shlex.split(re.sub("|".join(places), lambda found: places[found[0]], command)))


def test_the_commands_are_accepted(places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 40
    for command in COMMANDS:
        result = run(command, places)
        assert says(result, "a model would be loaded"), f"{command}: {result.output}"
    for wrong in ("generate --prompt TEXT --drafter rest", "train --head x --output FOLDER",
                  "build layer_skip FILE --output FILE --tokens 1"):  # fmt: skip
        refused = run(wrong, places)
        assert not says(refused, "a model would be loaded"), f"the control: {wrong}"


def test_the_names_of_the_pages_exist():
    for name in re.findall(r"`(\w+(?:Cascade|Drafter|Tree|Spec|Queue))\b", TEXT):
        assert any(name in package.__all__ for package in PACKAGES), name
    for name in re.findall(r"`specdec_kernels\.analysis\.(\w+)`", TEXT):
        assert hasattr(analysis, name), name
    listed = (DOCS / "drafters.md").read_text()
    for name, entry in drafters().items():
        module, _, kind = entry.place.partition(":")
        assert re.search(rf"^\| `{name}[:`].*\| `{kind}`", listed, re.MULTILINE), name
        assert getattr(sys.modules[module.partition(".")[0]], kind).name == name


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


@pytest.fixture
def few_tokens():
    """Calls that say nothing about lengths make few tokens, and two drafters to choose from."""
    model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    model.generation_config.max_new_tokens = 6
    inputs = hf_models.prompts((9,), vocab_size=cli_models.END + 1)
    return {"model": model, "inputs": inputs, "small": hf_models.with_noise(model, 0.05)}


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to work in, which has a model under its name on the hub."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "HuggingFaceTB/SmolLM2-135M-Instruct")
    return tmp_path


def test_the_programs_of_the_readme_run(elsewhere, capsys):
    generated, verified = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    names = {}
    exec(generated, names)
    assert torch.equal(names["before"], names["after"])
    assert capsys.readouterr().out.strip() == names["tokenizer"].decode(names["after"][0]).strip()
    exec(verified, names)
    assert not names["verdict"].status.any()
    assert names["verdict"].num_accepted.sum() > 0


@pytest.mark.parametrize("page", ["analysis.md", "forwards.md", "draft-models.md", "choosing.md"])
def test_the_printed_calls_of_the_loop_run(page, few_tokens, elsewhere, capsys):
    small = few_tokens["small"]
    small.save_pretrained(elsewhere / "draft")  # what `train --draft-model` writes
    names = few_tokens | {"draft_model": small, "generate": specdec_hf.generate}
    for block in blocks(page):
        exec(block, names)
    outputs = {"forwards.md": r"PackedStats", "analysis.md": "tensor"}
    assert re.search(outputs.get(page, ""), capsys.readouterr().out)


def test_the_printed_calls_of_the_page_of_the_loop_run(few_tokens, capsys):
    *printed, encoders = blocks("loop.md")
    names = few_tokens | {"other": hf_models.with_noise(few_tokens["model"], 0.1)}
    for block in printed:
        exec(block, names)
    assert names["out"].sequences_scores is not None  # of the beams
    assert "cache" in capsys.readouterr().out
    t5, whisper = hf_models.tiny("t5"), hf_models.tiny("whisper")
    names = {
        "t5": t5, "t5_large": t5, "t5_small": hf_models.perturbed("t5"),
        "inputs": hf_models.texts((9,)),
        "whisper": whisper, "distil_whisper": hf_models.perturbed("whisper"),
        "features": hf_models.sounds(1)["input_features"],
        "generate": functools.partial(specdec_hf.generate, max_new_tokens=6),
    }  # fmt: skip
    exec(encoders, names)
    assert names["out"].sequences.shape == (1, 7)


def test_the_printed_call_of_the_hub_folder_runs(few_tokens, elsewhere):
    page = ROOT / "examples/hub/README.md"
    (program,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    (elsewhere / "path/of/this").mkdir(parents=True)
    (elsewhere / "path/of/this/folder").symlink_to(page.parent)
    exec(program, few_tokens)
    model, inputs = few_tokens["model"], few_tokens["inputs"]
    assert few_tokens["out"].tolist() == model.generate(**inputs, max_new_tokens=64).tolist()


@pytest.mark.full
def test_the_printed_drafters_run(tmp_path):
    kept, skipped, learning, *printed, table = blocks("drafters.md")
    assert len(printed) == 3
    exec(skipped + table, {})
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9, 12))
    exec(kept, {"model": model, "inputs": inputs})
    questions = {"small": hf_models.perturbed("llama"), "questions": [inputs], "folder": tmp_path}
    exec(learning, {"model": model, **questions})
    greedy = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    made = []
    for program in printed:
        made.append({"model": model, "inputs": inputs})
        exec(program, made[-1])
    first, second, third = (names["out"] for names in made)
    assert first.sequences.tolist() == third.tolist() == greedy.tolist()
    assert (first.stats.drafter, first.stats.drafted > 0) == ("repeats", True)
    assert second.shape == (2, 12 + 32)
    assert check_drafter(made[1]["Unigram"](), model, rules=["block", "match"]).passed
    assert check_drafter(made[2]["drafter"], model).passed


def test_the_printed_calls_by_transformers_run(elsewhere, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)  # where the page's paths begin
    model, tokenizer = hf_models.build("llama", vocab_size=258), cli_models.tokenizer()
    names = {"model": model, "tokenizer": tokenizer, "folder": elsewhere / "model"}
    texts = []
    for block in blocks("transformers.md"):
        exec(block, names)
        texts.append(getattr(names["out"], "sequences", names["out"]))
    assert capsys.readouterr().out
    assert len(texts) == 4
    assert texts[1].equal(texts[2]), "the folder of the model has another text"
    assert texts[0].shape == texts[1].shape == (2, names["inputs"]["input_ids"].shape[1] + 32)
