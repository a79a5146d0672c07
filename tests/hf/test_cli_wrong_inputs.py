"""Wrong inputs as a new user types them: one line each, in the words of the command line.

The first table is refused before torch does anything, the second before a weight is read.
"""

import fnmatch
import json
import sys

import numpy as np
import pytest
import torch
from specdec_hf import NgramDrafter, TrieTree
from specdec_hf.cli import devices, options
from specdec_hf.drafters import tree_model
from specdec_hf.drafters.copying import PromptLookupDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafters.ngram_table import NgramTable
from specdec_hf.drafting.drafter import RULES_OF_DETERMINISTIC_TREES, lossy_rules_of
from specdec_hf.model_paths import num_layers
from specdec_hf.options import LOSSY_RULES
from support import hf_models
from support.cli_models import END, folder, one_line_error, succeed, write_folder, write_gguf  # noqa: F401
from transformers import Gemma3Config

SCHEDULE = "--num-assistant-tokens-schedule"

LOOKUP = ("--drafter", "prompt_lookup")
LENIENT = ("--rule", "lenient", "--lenience")
HOT = ("--prompt", "a", "--temperature", "1")
SEVERAL = ("--drafter", "prompt_lookup", "--drafter", "layers:1")
SPARSE = ("--drafter", "sparse_cache", *LOOKUP, "--cascade")
BEFORE_TORCH = [
    ([], "give either --prompt TEXT or --prompts FILE"),
    (["--prompt", "a", "--prompts", "b"], "or --prompts FILE, not both"),
    (["--prompt", "  "], "--prompt is empty"),
    (["--prompt", "a\udcff"], "--prompt is not valid UTF-8 at character 1"),
    (["--prompts", "nowhere.jsonl"], "cannot read prompt file nowhere.jsonl: No such file"),
    (["--prompt", "a", "--seed", "x"], "'--seed'"),
    (["--prompt", "a", "--temperature", "-1"], "--temperature must be finite and >= 0, got -1"),
    (["--prompt", "a", "--temperature", "1", "--top-p", "0"], "--top-p must be in (0, 1], got 0.0"),
    (["--prompt", "a", "--temperature", "1", "--top-k", "-3"], "--top-k must be in [0, 2**31)"),
    (["--prompt", "a", "--temperature", "1", "--min-p", "2"], "--min-p must be in [0, 1], got 2.0"),
    (["--prompt", "a", "--top-k", "5"], "--top-k needs --temperature above 0"),
    (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens must be in [1, 2**31), got 0"),
    (["--prompt", "a", "--gamma", "-1"], "--num-assistant-tokens must be an integer in [0, 1024]"),
    (["--prompt", "a", "--guard", "true"], "--guard must be one of auto, on, off, got 'true'"),
    (["--prompt", "a", SCHEDULE, "x"], f"{SCHEDULE} must be one of constant, heuristic,"),
    (["--prompt", "a", SCHEDULE, "egag:beta=2"], f"{SCHEDULE}: beta must be a number in [0, 1]"),
    (["--prompt", "a", *LOOKUP, SCHEDULE, "egag"], f"{SCHEDULE} 'egag' needs a drafter with a dra"),
    (["--prompt", "a", SCHEDULE, "confidence", "--drafter", "nasd"], "got --drafter nasd"),
    (["--prompt", "a", "--gamma", "3", "--drafter", "lookahead"], "lookahead, which drafts its o"),
    (["--prompt", "a", "--limit", "0"], "--limit must be >= 1, got 0"),
    (["--prompt", "a", "--json", "tests"], "--json must name a file, tests is a folder"),
    (["--prompt", "a", "--json", "-"], "--json must name a file, got -"),
    (["--prompt", "a", "--json", "no/such/folder/x.json"], "folder no/such/folder does not exist"),
    (["--prompts", "README.md", "--json", "README.md"], "would overwrite the input file"),
    (["--prompt", "a", "--rule", "best"], "--rule must be one of auto, token, block, greedy, m"),
    (["--prompt", "a", *LOOKUP, "--rule", "token", "--tree", "2"], "one of auto, greedy, match, "),
    (["--prompt", "a", "--rule", "greedy", "--temperature", "1"], "greedy needs --temperature 0"),
    (["--prompt", "a", "--rule", "lenient"], "--rule 'lenient' needs --lenience, which has no def"),
    (["--prompt", "a", *LENIENT, "2"], "--lenience must be in (0, 1], got 2.0"),
    (["--prompt", "a", *LENIENT, "much"], "Invalid value for '--lenience'"),
    (["--prompt", "a", "--seed", "1.5"], "'1.5'"),
    (["--prompt", "a", *LENIENT, ".5", *LOOKUP, "--tree", "2"], "match, target_only, typical with"),
    (["--prompt", "a", *LENIENT, ".5", *SEVERAL], "typical with trees of --drafter prompt_lookup"),
    (["--prompt", "a", "--lenience", ".5"], "--lenience is for --rule 'lenient' alone, got 0.5"),
    (["--prompt", "a", "--rule", "top_beta"], "--rule 'top_beta' needs --top-beta-rank, which has"),
    (["--prompt", "a", "--typical-delta", "1"], "--typical-delta is for --rule 'typical' alone"),
    (["--prompt", "a", "--top-beta-rank", "2"], "--top-beta-rank is for --rule 'top_beta' alone"),
    (["--prompt", "a", "--rule", "tipical"], "got 'tipical'; did you mean 'typical'?"),
    (["--prompt", "a", "--tree", "2,x"], "--tree must be numbers of children such as 4,2,1, got"),
    (["--prompt", "a", "--tree", "2,0"], "--tree must be an integer in [1, 1024], got 0"),
    (["--prompt", "a", *LOOKUP, "--tree", "2", "--gamma", "3"], "must not be given with --tree"),
    (["--prompt", "a", "--tree", "2"], "--tree needs --drafter prompt_lookup or a draft model"),
    (["--prompt", "a", "--rule", "target_only", "--gamma", "2"], "with --num-assistant-tokens"),
    (["--prompt", "a", "--tree", "2,2", "--drafter", "ngram"], "several chains, got --drafter ngr"),
    (["--prompt", "a", "--ablate", "residual"], "residual needs --temperature above 0: greedy"),
    ([*HOT, "--ablate", "x"], "--ablate must be one of residual, got 'x'"),
    ([*HOT, "--ablate", "residual", "--rule", "block"], "--rule must be auto or token with --abl"),
    ([*HOT, "--ablate", "residual", "--tree", "2", "--drafter", "prompt_lookup"],
     "--ablate residual is for chains, got trees of --drafter prompt_lookup"),
    ([*HOT, "--ablate", "residual", "--drafter", "lookahead"], "got trees of --drafter lookahead"),
    ([*HOT, "--ablate", "residual", "--drafter", "none"], "--ablate needs a drafter, but --dra"),
    (["--prompt", "a", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, au"),
    (["--prompt", "a", "--device", "gpu"], "--device must be cpu, cuda, cuda:N or mps, got 'gpu'"),
    (["--prompt", "a", "--system", " "], "--system is empty"),
    (["--prompt", "a", "--system", "b", "--no-chat-template"], "but --no-chat-template is given"),
    (["--prompt", "a", "--alone", "--no-compare"], "--alone shows what --compare runs, got --no-c"),
    (["--prompt", "a", "--model", "no/where/at all"], "--model must be embedded, a model folder,"),
    (["--prompt", "a", "--drafter", "/no/where"], "'/no/where'; there is no such file or folder"),
    (["--prompt", "a", "--model", "README.md"], "README.md is no GGUF file: it begins with b'# sp"),
    (["--prompt", "a", "--model", "some/one"], "`hf download some/one` gets a hub id"),
    (["--prompt", "a", "--drafter", "magic wand"], "none, embedded, a model folder, a GGUF"),
    (["--prompt", "a", "--drafter", "prompt_lookup:9"], "'prompt_lookup' takes no value, got 'pr"),
    (["--prompt", "a", "--drafter", "ngram:none"], "--drafter: cannot read none: No such file"),
    (["--prompt", "a", *SPARSE, "vertical", "--tree", "2"], "--drafter sparse_cache, which drafts"),
    (["--prompt", "a", *SPARSE, "horizontal:2"], "chains of their own, got --drafter sparse_cache"),
    (["--prompt", "a", *LOOKUP, *SPARSE, "vertical"], "of their own, got --drafter sparse_cache"),
    (["--prompt", "a", *SEVERAL, "--tree", "2"], "--tree must not be given with several --drafter"),
    (["--prompt", "a", *SEVERAL, "--drafter", "none"], "--drafter none must be the only one, got"),
    (["--prompt", "a", "--drafter", "promt_lookup"], "did you mean 'prompt_lookup'?"),
    (["--prompt", "a", "--drafter", "prompt_lookup+layers:99"],
     "--drafter must name one drafter, got 'prompt_lookup+layers:99'; several are given as "
     "--drafter prompt_lookup --drafter layers:99"),
    (["--prompt", "a", "--drafter", "layers:4+embedded"], "as --drafter layers:4 --drafter embed"),
    (["--prompt", "a", "--drafter", "ngram:a+b"], "--drafter: cannot read a+b: No such file"),
    (["--prompt", "a", "--drafter", "layers:1,top_k=1,top_k=2"],
     "--drafter layers:1,top_k=1,top_k=2: top_k must be given once, got '1,top_k=1,top_k=2'"),
    (["--prompt", "a", "--drafter", "layers"],
     "drafter must be layers:N[,temperature=..], got 'layers'"),
]  # fmt: skip
BEFORE_WEIGHTS = [
    (["--prompt", "a", "--drafter", "layers:99"], "layers:N must have N in [1, 2], got 99"),
    (["--prompt", "a", "--drafter", "sparse_cache:budget=512,sinks=-1"],
     "--drafter sparse_cache:budget=512,sinks=-1: sinks must be an integer in [0, 2147483647], "
     "got -1"),
    (["--prompt", "a", "--drafter", "early_exit:2"], "layers must be below the target's 2 with"),
    (["--prompt", "a", "--drafter", "layers:1", "--drafter", "nasd", "--cascade", "vertical"],
     "models, prompt_lookup, random or ngram:FILE after the first --drafter, because others"),
    (["--prompt", "a", *LOOKUP, "--drafter", "ngram", "--cascade", "horizontal:2"], "got ngram"),
    (["--prompt", "a", "--drafter", "ngram:TABLE"], "table must have the model's vocabulary of"),
    (["--prompt", "word " * 90], "the prompt has 468 tokens, but the model's context is 256"),
    (["--prompt", "a", "--device", "cuda:99"], "--device cuda:99 is not available"),
    (["--prompt", "a", "--device", "mps"], "--device mps is not available"),
]  # fmt: skip

# QUESTIONS is a file of five prompts.
OTHER_COMMANDS = {
    "analyze": [
        ("--gamma x", "--num-assistant-tokens must be numbers such as 3,7, got 'x'"),
        ("--ablate bonus", "--ablate must be one of residual, got 'bonus'"),
        ("--drafter none", "--drafter must not be none"),
        ("--tree 2,x", "--tree must be numbers of children such as 4,2,1, got '2,x'"),
        ("--tree 2,1 --drafter ngram", "--tree needs a draft model or a drafter that drafts"),
        ("--drafter token_recycling --tree 2", "--tree must not be given with --drafter token_rec"),
        ("--drafter prompt_lookup+layers:1 --tree 2", "--tree must not be given with --drafter pr"),
        ("--drafter early_exit:1", "early_exit:1: cannot be analyzed: it runs the target wi"),
        (f"{SCHEDULE} constant {SCHEDULE} x", f"{SCHEDULE} must be one of constant, heuristic,"),
        ("--temperature -1", "--temperature must be finite and >= 0, got -1"),
        ("--output nowhere/folder", "--output: folder nowhere does not exist"),
        ("--output pyproject.toml", "--output must name a folder, pyproject.toml is a file"),
        ("--output /proc/self/folder", "--output: cannot write /proc/self/folder: "),
        ("--output /proc/self", "--output: cannot write /proc/self: "),
    ],
    "train --output QUESTIONS.head": [
        ("--head hydra", "must be one of eagle3, medusa, blockwise, exit_head, pass_head, got 'h"),
        ("--layer 3", "--layer needs --head exit_head, got eagle3"),
        ("--length 7", "--length must be at least 8, got 7"),
        ("--minutes 0", "--minutes must be above 0 and finite, got 0.0"),
        ("--texts /nowhere", "--texts: cannot read /nowhere: No such file"),
        ("--prompts - --texts README.md", "give one of --prompts FILE, --texts FILE and --reuse"),
        ("--output /nowhere/head", "--output: folder /nowhere does not exist"),
    ],
    "bench": [
        ("", "Missing option '--questions'"),
        ("--questions nowhere", "cannot read prompt file nowhere"),
    ],
    "bench --questions QUESTIONS": [
        ("--dtype int8", "--dtype must be one of float32"),
        ("--runs 0", "--runs must be at least 1, got 0"),
        ("--peer x", "--peer must be one of prompt_lookup, assisted"),
        ("--temperature -1", "--temperature must be finite and >= 0"),
        ("--batch-size 6", "--batch-size must be in [1, 5], the prompts"),
        ("--markdown no/where", "--markdown: folder no does not exist"),
        ("--json new --markdown ./new", "--json and --markdown must name different files, got new"),
        (f"{SCHEDULE} egag", "'egag' needs a drafter with a draft distribution or a confidence"),
        ("--json QUESTIONS", "--json would overwrite the input file"),
    ],
    "bench-synthetic": [
        ("--acceptance 2", "--acceptance must be in [0, 1], got 2.0"),
        ("--limit 0", "--limit must be at least 1, got 0"),
        ("--num-assistant-tokens 0", "--num-assistant-tokens must be in [1, 1024], got 0"),
        ("--prompt-tokens 131000", "must sum up to at most 131072, the model's context, got"),
    ],
}


@pytest.fixture
def no_weights(monkeypatch):
    """A test that gets as far as to read weights fails."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delattr("specdec_hf.cli.load.load_model")


def named(value):
    """A readable test id."""
    return " ".join(value)[:60] if isinstance(value, list) else ""


@pytest.mark.parametrize(("arguments", "message"), BEFORE_TORCH, ids=named)
def test_wrong_options_get_one_line_before_a_model_is_loaded(monkeypatch, arguments, message):
    monkeypatch.delattr("specdec_hf.cli.run.load_models")
    assert message in one_line_error("generate", *arguments)


@pytest.mark.build
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"{command} {words}", message)
        for command, rows in OTHER_COMMANDS.items()
        for words, message in rows
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_wrong_options_of_other_commands_get_one_line(tmp_path, monkeypatch, words, message):
    monkeypatch.delattr("specdec_hf.lab.bench.synthetic.load_synthetic")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["a"]}\n' * 5)
    assert message in one_line_error(*words.replace("QUESTIONS", str(questions)).split())


@pytest.mark.parametrize(("arguments", "message"), BEFORE_WEIGHTS, ids=named)
@pytest.mark.usefixtures("no_weights")
def test_what_does_not_fit_gets_one_line(folder, tmp_path, monkeypatch, arguments, message):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    NgramTable.build([np.array([1, 2])], END, 2).save("TABLE")
    assert message in one_line_error("generate", "--model", folder, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("layers:99", "--drafter layers:99: drafter layers:N must have N in [1, 2], got 99"),
        ("layers:3,top_k=2", "layers:N must have N in [1, 2], got 3"),
        ("early_exit:2", "layers must be below the target's 2 with drafter early_exit, got 2"),
        ("layer_skip:1-2", "last must be below the target's 2 layers with drafter layer_skip, got"),
        ("eagle3:.", "--drafter eagle3:.: cannot read a head's config.json: No such file"),
        ("eagle3:/nothing", "--drafter eagle3: folder /nothing does not exist"),
    ],
)
@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_what_files_tell_is_refused_before_transformers_is_imported(
    folder, tmp_path, monkeypatch, kind, arguments, message  # noqa: F811
):  # fmt: skip
    for module in ("load", "compare"):  # which import Transformers
        monkeypatch.setitem(sys.modules, f"specdec_hf.cli.{module}", None)
    monkeypatch.setitem(sys.modules, "specdec_hf.api", None)
    monkeypatch.chdir(tmp_path)
    model = folder if kind == "folder" else write_gguf(tmp_path / "model.gguf")
    asked = ("generate", "--model", model, "--prompt", "a", "--drafter", arguments)
    assert message in one_line_error(*asked)


def test_the_number_of_layers_is_an_integer_of_the_model_or_of_its_text(tmp_path):
    for config, layers in (
        ({"num_hidden_layers": 3}, 3),
        ({"n_layer": 4}, 4),
        ({"text_config": {"num_hidden_layers": 5}}, 5),
        ({"num_hidden_layers": True, "text_config": {"n_layer": 6}}, 6),
        ({"num_hidden_layers": True}, None),
        ({"text_config": None}, None),
        ({"text_config": [1]}, None),
        ([], None),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found = num_layers(tmp_path)
        assert (found, type(found)) == (layers, type(layers)), config


def test_analyze_measures_nothing_where_files_refuse_all_drafters(folder, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "specdec_hf.cli.load", None)
    asked = ("--drafter", "layers:3", "--drafter", "layers:4")
    line = one_line_error("analyze", "--model", folder, *asked)
    assert (
        "--drafter layers:3: drafter layers:N must have N in [1, 2], got 3; --drafter lay" in line
    )


@pytest.mark.parametrize(
    ("build", "files", "driver", "reason"),
    [
        ("2.13.0+cpu", ["/dev/nvidia0"], True, "this torch has no CUDA"),
        ("2.13.0", [], False, "no CUDA device is visible: there is no driver (libcuda.so.1)"),
        ("2.13.0", ["/dev/nvidia0"], False, None),
        ("2.13.0+rocm7", ["/dev/kfd"], False, None),
        ("2.13.0+cu130", [], True, None),
    ],
)
def test_a_gpu_is_refused_before_torch_is_imported_only_where_there_is_surely_none(
    monkeypatch, build, files, driver, reason
):
    def load(name):
        if not driver:
            raise OSError(name)

    monkeypatch.setattr(devices.sys, "platform", "linux")
    monkeypatch.setattr(devices, "version", lambda name: build)
    monkeypatch.setattr(devices.glob, "glob", lambda one: fnmatch.filter(files, one))
    monkeypatch.setattr(devices.ctypes, "CDLL", load)
    found = devices.why_no_gpu()
    assert (found is None) == (reason is None)
    assert (reason or "") in (found or "")
    if reason is not None:
        monkeypatch.delattr("specdec_hf.cli.run.load_models")
        line = one_line_error("generate", "--prompt", "a", "--device", "cuda:1")
        assert f"--device cuda:1 is not available: {reason}" in line


def test_no_drafts_at_all_are_asked_for_by_another_option():
    line = one_line_error("generate", "--prompt", "a", "--num-assistant-tokens", 0)
    assert line.endswith(
        "--num-assistant-tokens must be at least 1, got 0; --drafter none drafts nothing"
    )


def test_build_without_a_command_names_those_that_there_are():
    assert "build needs one of ngram, rest, layer_skip" in one_line_error("build")


@pytest.mark.parametrize("command", [["nonsense"], ["--nonsense"], ["chat", "--prompt", "a"]])
def test_what_the_parser_does_not_know_gets_one_line(command):
    assert command[-2 if command[0] == "chat" else -1] in one_line_error(*command)


@pytest.mark.usefixtures("no_weights")
def test_what_a_model_or_its_tokenizer_lacks_gets_one_line(folder, tmp_path):  # noqa: F811
    asked, other = ("generate", "--prompt", "a", "--model"), tmp_path / "other"
    bare = write_folder(tmp_path / "bare", template=None)
    line = one_line_error(*asked, bare, "--system", "Be brief.")
    assert "--system needs a chat template, which the tokenizer of" in line
    hf_models.tiny("llama").save_pretrained(other)
    line = one_line_error(*asked, folder, "--drafter", other, "--tree", "2,1")
    assert "--tree needs a drafter of the model's vocabulary of 258 tokens, got 67" in line
    assert "tokenizer" in one_line_error(*asked, folder, "--drafter", other)
    Gemma3Config().save_pretrained(bare)  # of text and images
    line = one_line_error(*asked, bare, "--drafter", "layers:1")
    assert "drafter layers needs a model of text alone, got 'gemma3'" in line


def test_the_rules_of_the_command_line_are_those_of_the_drafters():
    assert set(options.CHAIN_RULES) == set(PromptLookupDrafter.rules) == set(ModelDrafter.rules)
    assert set(options.COPY_TREE_RULES) == set(RULES_OF_DETERMINISTIC_TREES)
    assert set(options.TREE_RULES) == set(tree_model.RULES_OF_ONE_MODEL)
    drawn = TrieDrafter([NgramDrafter(), NgramDrafter()], TrieTree(2, 2))
    assert set(options.TRIE_RULES) == set(drawn.rules)
    assert tuple(LOSSY_RULES) == lossy_rules_of(PromptLookupDrafter())
    assert lossy_rules_of(drawn) == options.LOSSY_TREE_RULES


def test_help_and_version_succeed():
    for arguments in (["--help"], [], ["generate", "--help"], ["chat", "--help"], ["--version"]):
        result = succeed(*arguments)
        assert result.output.strip()
        assert max(map(len, result.output.splitlines())) <= 80
