"""Wrong inputs as a new user types them: one line each, in the words of the command line.

Types, ranges and choices follow from the declarations of the options. What is special follows in
tables, and is refused before a weight is read: those of the model of these tests are damaged.
"""

import inspect
import math
import re
import shlex
import subprocess
import sys
from typing import get_args

import pytest
from specdec_hf import TrieTree
from specdec_hf.cli import options
from specdec_hf.cli.app import app, build
from specdec_hf.drafters import tree_model
from specdec_hf.drafters.copying import PromptLookupDrafter
from specdec_hf.drafters.merge import TrieDrafter
from specdec_hf.drafters.model import ModelDrafter
from specdec_hf.drafting.drafter import RULES_OF_DETERMINISTIC_TREES, lossy_rules_of
from specdec_hf.options import COMMON
from specdec_hf.rules import LOSSY_RULES
from specdec_papers.ngram import NgramDrafter
from support import hf_models
from support.cli_models import environment, invoke, one_line_error, write_folder
from transformers import Gemma3Config

SCHEDULE = "--num-assistant-tokens-schedule"


@pytest.fixture(scope="module")
def hollow(tmp_path_factory):
    """A folder to work in, with a model whose weights cannot be read, an empty one, and files."""
    place = tmp_path_factory.mktemp("hollow")
    (write_folder(place / "model") / "model.safetensors").write_bytes(b"no weights")
    (place / "empty").mkdir()
    (place / "text").write_text("a b c")
    (place / "questions").write_text('{"turns": ["a"]}\n' * 5)
    return place


@pytest.fixture(autouse=True)
def _works_there(hollow, monkeypatch):
    monkeypatch.chdir(hollow)


# What a command needs beside the option; all but two also take a model.
NEEDED = {
    "generate": "--prompt a", "demo": "--prompt a", "analyze": "--prompts questions",
    "bench": "--questions questions", "tune": "--prompts questions",
    "train": "--output head", "serve": "--port 0",
    **dict.fromkeys(("build ngram", "build rest", "build layer_skip"), "text --output out"),
}  # fmt: skip
WITHOUT_MODEL = ("demo", "bench-synthetic", "info")
SAMPLED = dict.fromkeys(("--top-k", "--top-p", "--min-p"), ("--temperature", "1"))


def declared(*kinds):
    """Command, option and type of each option of these types."""
    for group, prefix in ((app, ""), (build, "build ")):
        for one in group.registered_commands:
            for parameter in inspect.signature(one.callback, eval_str=True).parameters.values():
                kind, info = get_args(parameter.annotation)[:2]
                found = {kind, *get_args(kind)} & {*kinds}
                names = [x for x in (info.default, *(info.param_decls or ())) if isinstance(x, str)]
                if found and names:
                    yield prefix + one.name, names[0], found.pop()


NUMBERS = list(declared(int, float))


def words(command, option, value, model="model"):
    given = [] if command in WITHOUT_MODEL else ["--model", model]
    return [*command.split(), *NEEDED.get(command, "").split(), *given,
            *SAMPLED.get(option, ()), option, value]  # fmt: skip


def edges(rule, kind):
    """Values just outside of a range that a message names, and those just inside."""
    step = 1 if kind is int else 1e-9
    interval = re.search(r"in ([\[(])(-?[\d*]+), ([\d*]+)([\])])", rule)
    if interval is None:
        low = next(int(x) for x in re.findall(r"(?:at least|>=|above) (\d+)", rule))
        return ([low], [low + step]) if "above" in rule else ([low - step], [low])
    first, low, high, last = interval.groups()
    low, high = eval(low), eval(high)
    outside = [low if first == "(" else low - step, high if last == ")" else high + step]
    inside = [low + step if first == "(" else low, high - step if last == ")" else high]
    return outside, inside


@pytest.mark.parametrize(
    ("command", "option", "kind"), NUMBERS, ids=lambda x: getattr(x, "__name__", x)
)
def test_an_option_takes_the_numbers_that_its_refusal_names(command, option, kind):
    line = one_line_error(*words(command, option, "x"))
    assert option in line
    assert line.endswith("got 'x'")
    low = -(2**70) if kind is int else math.nan
    line = one_line_error(*words(command, option, low))
    rule = re.fullmatch(f"error: {option} must be (.*), got {low}(; .*)?", line)
    assert rule, line
    if option == "--tokens" and command == "build layer_skip":
        return  # its range depends on --length
    outside, inside = edges(rule[1], kind)
    for value in outside:
        assert f"error: {option} must be " in one_line_error(*words(command, option, value))
    for value in inside if command not in WITHOUT_MODEL else ():
        result = invoke(*words(command, option, value, model="empty"))
        assert f"{option} must be {rule[1]}" not in result.output, value
        assert result.exit_code == 2


@pytest.mark.parametrize(
    "typed",
    [
        "--num-assistant-tokens 1 --drafter prompt_lookup",
        "--drafter layers:1 --drafter prompt_lookup --cascade horizontal:1",
    ],
)
def test_drafts_of_one_token_may_be_asked_for(typed):
    """So the damaged weights are the first thing that is wrong."""
    line = one_line_error("generate", "--prompt", "a", "--model", "model", *typed.split())
    assert "cannot load a model from model" in line


def test_every_command_has_options_of_numbers():
    assert len(NUMBERS) > 90
    assert len({command for command, *_ in NUMBERS}) == 11


@pytest.mark.parametrize(
    ("command", "option", "choices"),
    [
        ("generate", "--rule", "auto, token, block, greedy, m"),
        ("bench", "--peer", "prompt_lookup, assisted"), ("bench-synthetic", "--shape", "tiny"),
        ("train", "--loss", "forward_kl, reverse_kl, total_variation"),
        ("serve", "--log-level", "debug, info, warning, error, critic"),
    ],
)  # fmt: skip
def test_an_option_takes_one_of_its_choices(command, option, choices):
    line = one_line_error(*words(command, option, "x"))
    assert f"{option} must be one of {choices}" in line
    assert line.endswith("got 'x'")


# Beside `--prompt a`.
GENERATE = [
    ("--prompts b", "or --prompts FILE, not both"),
    ("--top-k 5", "--top-k needs --temperature above 0"),
    (f"{SCHEDULE} egag:beta=2", f"{SCHEDULE}: beta must be a number in [0, 1]"),
    (f"--drafter prompt_lookup {SCHEDULE} egag", f"{SCHEDULE} 'egag' needs a drafter with a dra"),
    ("--gamma 3 --drafter lookahead", "lookahead, which drafts its o"),
    ("--json empty", "--json must name a file, empty is a folder"),
    ("--drafter prompt_lookup --rule token --tree 2", "one of auto, greedy, match, "),
    ("--rule lenient", "--rule 'lenient' needs --lenience, which has no def"),
    ("--lenience .5", "--lenience is for --rule 'lenient' alone, got 0.5"),
    ("--rule tipical", "got 'tipical'; did you mean 'typical'?"),
    ("--tree 2", "--tree needs --drafter prompt_lookup or a draft model"),
    ("--ablate residual", "residual needs --temperature above 0: greedy"),
    ("--temperature 1 --ablate residual --rule block", "--rule must be auto or token with --abl"),
    ("--system b --no-chat-template", "but --no-chat-template is given"),
    ("--model 'no/where/at all'", "--model must be embedded, a model folder,"),
    ("--drafter /no/where", "'/no/where'; there is no such file or folder"),
    pytest.param(f"--model {'a' * 300}", "is no hub id", id="a name that is too long"),
    ("--model some/one", "`hf download some/one` gets a hub id"),
    ("--drafter random --cascade vertical", "--cascade needs several --drafter, the largest"),
    ("--drafter random --drafter ngram --cascade vertical", "vertical needs draft models, such "),
    ("--drafter layers:1 --drafter random --cascade deep", "one of vertical, horizontal, got 'd"),
    ("--drafter layers:1 --drafter auto --cascade vertical", "--cascade needs drafters of chains"),
    ("--drafter layers:1 --drafter random --cascade vertical:2", "vertical takes no numbers, got"),
    ("--drafter layers:1 --drafter random --cascade horizontal:2,2", "horizontal needs a number"),
    ("--drafter layers:1 --drafter random --cascade horizontal:2 --tree 2,1", "--tree must not be"),
    ("--drafter prompt_lookup --drafter layers:1 --drafter none",
     "--drafter none must be the only one, got"),
    ("--drafter prompt_lookup+layers:99",
     "--drafter must name one drafter, got 'prompt_lookup+layers:99'; several are given as "
     "--drafter prompt_lookup --drafter layers:99"),
    ("--drafter rest:no", "--drafter: cannot read no"),
    ("--device cuda:99", "--device cuda:99 is not available"),
]  # fmt: skip
# Of all commands, as they are typed.
COMMANDS = {
    "generate --model model": [
        ("", "give either --prompt TEXT or --prompts FILE"),
        ("--prompt a\udcff", "--prompt is not valid UTF-8 at character 1"),
        ("--prompts nowhere.jsonl", "cannot read prompt file nowhere.jsonl: No such file"),
        ("--prompts questions --json questions", "would overwrite the input file"),
        (f"--prompt '{'word ' * 90}'", "the prompt has 468 tokens, but the model's context is 256"),
    ],
    "analyze --model model --prompts questions": [
        ("--drafter none", "--drafter must not be none"),
        ("--tree 2,1 --drafter ngram", "--tree needs a draft model or a drafter that drafts"),
        (
            "--drafter layers:3 --drafter layers:4",
            "layers:3: drafter layers:N must have N in [1, 2], got 3; --drafter layers:4: ",
        ),
        ("--output /proc/self/folder", "--output: cannot write /proc/self/folder: "),
    ],
    "train --output head": [
        ("--prompts - --texts text", "give one of --prompts FILE, --texts FILE and --reuse"),
        # Without the refusal, no such model is found, rather than trained for.
        ("--width 64 --model none", "--width needs --draft-model, got --head eagle3"),
        ("--draft-steps 24 --length 24", "--draft-steps must be below --length, 24, got 24"),
        ("--draft-model --reuse a", "a must hold a run of train"),
    ],
    "bench --model model": [
        ("", "Missing option '--questions'"),
        (
            "--questions questions --json new --markdown ./new",
            "--json and --markdown must name different files, got new",
        ),
    ],
    "bench-synthetic": [
        (f"--batch-size {10**20}", f"--batch-size must be in [1, 2**31), got {10**20}")
    ],
    "tune --model model": [
        ("--prompts questions --batch-size 2", "in [1, 1] with 5 prompts, so that 5 batches"),
        ("--prompts questions --drafter suffix_automaton:keep=1MiB", "must not keep texts of ear"),
    ],
    "serve --port 0": [
        (f"--model model --host {'a' * 64}", f"--host {'a' * 64}: "),  # too long to be asked for
        ("--model model --rule block", "No such option: --rule"),
    ],
    "build": [
        ("", "build needs one of layer_skip, ngram, rest"),
        ("ngram nowhere --output x", "FILES: cannot read nowhere"),
        ("ngram text --output text", "--output would overwrite the input file text"),
        ("ngram text --output x --order 9", "--order must be in [1, 8], got 9"),
        ("ngram text --output no/x", "--output: folder no does not exist"),
    ],
    "": [("nonsense", "nonsense"), ("--nonsense", "--nonsense"), ("chat --prompt a", "--prompt")],
}


@pytest.mark.parametrize(("typed", "message"), GENERATE)
def test_wrong_options_of_generate_get_one_line(typed, message):
    model = [] if "--model" in typed else ["--model", "model"]
    assert message in one_line_error("generate", "--prompt", "a", *model, *shlex.split(typed))


@pytest.mark.parametrize(
    ("typed", "message"),
    [(f"{command} {typed}", text) for command, rows in COMMANDS.items() for typed, text in rows],
)
def test_wrong_options_of_a_command_get_one_line(typed, message):
    if typed.startswith("serve"):
        pytest.importorskip("uvicorn", reason="needs the extra [server]")
    assert message in one_line_error(*shlex.split(typed))


def test_an_option_of_the_loop_has_its_text_as_a_sentence():
    text = COMMON["num_assistant_tokens"].metadata["text"]
    words = options.own("num_assistant_tokens").help
    assert words.startswith(text[0].upper() + text[1:20])


def test_help_and_wrong_inputs_are_quick_and_load_no_torch(hollow):
    wrong = "generate --model model --prompt a --drafter"
    code = (
        "import sys; from specdec_hf.cli.app import main\n"
        f"for words in ('--help', '{wrong} best', '{wrong} layers:99'):\n"
        "    sys.argv = ['x', *words.split()]\n"
        "    try: main()\n"
        "    except SystemExit as end: print('exit', end.code)\n"
        "print(*{'torch', 'transformers', 'specdec_kernels'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=hollow,
        env=environment(),
    )  # fmt: skip
    assert "generate" in done.stdout
    assert re.findall("exit .", done.stdout) == ["exit 0", "exit 2", "exit 2"]
    assert done.stdout.splitlines()[-1] == ""
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_what_a_model_or_its_tokenizer_lacks_gets_one_line(tmp_path):
    asked, other = ("generate", "--prompt", "a", "--model"), tmp_path / "other"
    bare = write_folder(tmp_path / "bare", template=None)
    line = one_line_error(*asked, bare, "--system", "Be brief.")
    assert "--system needs a chat template, which the tokenizer of" in line
    hf_models.tiny("llama").save_pretrained(other)
    line = one_line_error(*asked, "model", "--drafter", other, "--tree", "2,1")
    assert "--tree needs a drafter of the model's vocabulary of 258 tokens, got 67" in line
    assert "tokenizer" in one_line_error(*asked, "model", "--drafter", other)
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
