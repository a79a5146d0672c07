"""Pages of the documents: commands run what they name, names exist, examples run."""

import functools
import json
import re
import shlex
import string
import sys
from pathlib import Path

import pytest
import specdec_hf
import specdec_papers
import specdec_serve
import torch
from specdec_hf import check_drafter
from specdec_hf.drafting.registry import drafters
from specdec_papers import compat
from support import cli_models, drafter_proof, hf_models
from support.cli_models import END, invoke, write_folder
from transformers import dynamic_module_utils

import specdec_kernels
from bench.tiny_models.build import build
from specdec_kernels import analysis

ROOT = Path(__file__).parents[2]

DOCS = ROOT / "docs"
TEXT = (DOCS / "papers.md").read_text() if DOCS.is_dir() else ""
PACKAGES = (specdec_hf, specdec_papers, specdec_serve)
KINDS = "generate|analyze|bench|train|build|chat"
COMMANDS = [*dict.fromkeys(re.findall(rf"`python -m specdec_hf ((?:{KINDS}) [^`]*)`", TEXT))]
OPTIONS = "drafter|rule|cascade|peer|head|ablate|num-assistant-tokens-schedule"
NAMING = rf"--(?:(draft-model)|output FILE(\.\w+)|(?:{OPTIONS}) ([\w.+]+))"
LETTERS = 2 * string.ascii_uppercase
FIRST = {command.split()[0]: command for command in reversed(COMMANDS)}
CALLS = re.findall(r"\| `([\w.]+\([^`]*[^.`]\))` \|$", TEXT, re.MULTILINE)

pytestmark = pytest.mark.skipif(not TEXT, reason="the documents are not beside the tests")


# What makes a command small, by what is in it.
SMALL = {
    "generate": "--max-new-tokens 16 --json out.json",
    "chat": "--max-new-tokens 8",
    "analyze": "--prompts FILE --limit 1 --max-new-tokens 16",
    "bench": "--limit 4 --runs 1 --max-new-tokens 16",
    "train": "--tokens 900 --length 24 --rows 8 --steps 4 --batch-size 4 --dtype float32",
    "--draft-model": "--width 32 --num-layers 1",
    "layer_skip": "--evaluations 4 --tokens 64 --length 16",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """What the words of the page stand for: a model that says letters, heads and files for it."""
    place = tmp_path_factory.mktemp("papers")
    model = hf_models.build("llama", vocab_size=END + 1)
    with torch.no_grad():
        model.lm_head.weight[: ord("A") - 33] = model.lm_head.weight[ord("Z") - 32 :] = 0
    native = build("Glm4MoeForCausalLM", vocab_size=END + 1, num_hidden_layers=3)
    state, size = native.state_dict(), native.config.hidden_size
    state["model.layers.2.eh_proj.weight"] = torch.eye(size, 2 * size)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        state[f"model.layers.2.{name}.weight"] = torch.ones(size)
    native.save_pretrained(place / "native", state_dict=state)
    native.config.num_hidden_layers = 2  # so that the last layer is one of MTP
    native.config.save_pretrained(place / "native")
    model.save_pretrained(place / "model")
    hf_models.with_noise(model, 0.05).save_pretrained(place / "draft")
    for folder in ("model", "draft", "native"):
        cli_models.tokenizer().save_pretrained(place / folder)
    (place / "file").write_text(f'{{"category": "a", "turns": ["{LETTERS}"]}}\n' * 4)
    heads = {
        f"{kind}:FOLDER": drafter_proof.NAMED[kind](model, place)
        for kind in re.findall(r"(\w+):FOLDER", " ".join(COMMANDS))
    }
    return heads | {
        "layers:28": "layers:1", "early_exit:20": "early_exit:1", "TEXT": LETTERS,
        "--output FOLDER": "--output made", "--model FOLDER": f"--model {place / 'native'}",
        "FOLDER": str(place / "draft"), "FILE": str(place / "file"), "": str(place / "model"),
    }  # fmt: skip


def told(kind, result, file):
    """What the output of a command says that ran."""
    if kind == "generate":
        report = json.loads(Path("out.json").read_text())
        stats = report["prompts"][0]["turns"][0]["stats"]
        said = [stats["drafter"], stats["rule"], report["num_assistant_tokens_schedule"]]
        assert stats["drafted"] > 0 or {"auto", "optimal"} & {*said}, "a clock decides of these"
        return f"{said} {stats['notes']}"
    if kind == "train":
        return str([json.loads(one.read_text()) for one in Path("made").rglob("report.json")])
    if kind == "build":
        return str(sorted(file.parent.glob("file.*")))
    return result.output


def check_command(command, places, typed=None):
    """A command, or what is typed in its place, runs and says what the command names."""
    typed, kind = typed or command, command.split()[0]
    words = " ".join([typed, *(more for name, more in SMALL.items() if name in typed)])
    words += "" if "--model" in typed else f" --model {places['']}"
    names = "|".join(name for name in places if name)
    words = re.sub(names, lambda found: places[found[0]], words)
    result = invoke(*shlex.split(words), input="Say it\n" if kind == "chat" else None)
    assert result.exit_code == 0, result.output
    named = ["".join(one) for one in re.findall(NAMING, command)]
    if "--cascade" in command:
        named = [f"{named[-1]}_cascade"]
    known = {"FOLDER": "model"} | ({"layers": "model"} if "--tree" in command else {})
    text = " ".join(told(kind, result, Path(places["FILE"])).replace("_", " ").split())
    for name in (known.get(one, one) for one in named):
        assert re.sub("[_-]", " ", name) in text, (command, text)


@pytest.mark.parametrize(
    "command",
    [pytest.param(x, marks=[] if x in FIRST.values() else pytest.mark.full) for x in COMMANDS],
    ids=COMMANDS,
)
def test_a_command_of_the_page_runs_what_it_names(command, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_command(command, places)


def test_a_command_that_does_not_run_what_it_names_is_found(places, tmp_path, monkeypatch):
    """The control."""
    monkeypatch.chdir(tmp_path)
    assert len(COMMANDS) > 60
    for wrong in ("generate --prompt TEXT --drafter rest", "train --head x --output FOLDER",
                  "build layer_skip FILE --output FILE --tokens 1"):  # fmt: skip
        with pytest.raises(AssertionError, match="error: "):
            check_command(wrong, places)
    asked, typed = (f"generate --prompt TEXT --drafter {name}" for name in ("nasd", "ngram:2"))
    with pytest.raises(AssertionError, match="ngram"):
        check_command(asked, places, typed)


def test_the_calls_of_the_page_run(few_tokens):
    t5, texts = hf_models.encoder_decoder("t5", END + 1), few_tokens["inputs"]
    t5.generation_config.max_new_tokens = 6
    names = {name: getattr(of, name) for of in (*PACKAGES[:2], compat) for name in of.__all__}
    names |= few_tokens | {
        "specdec_kernels": specdec_kernels, "t5": t5, "other": few_tokens["small"],
        "prompt": texts["input_ids"][0].tolist(), "p": torch.rand(9), "q": torch.rand(9),
        "cache": few_tokens["model"](**texts).past_key_values,
        "parents": torch.tensor([[-1, 0, 0]]), "lengths": torch.tensor([3]),
    }  # fmt: skip
    assert len(CALLS) > 9
    for call in CALLS:
        assert eval(call, names) is not None, call


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
    names["tokenizer"] = cli_models.tokenizer()
    few_tokens["model"].generation_config.eos_token_id = cli_models.END  # ends what grammars say
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
