"""The options of the commands, each declared once."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_hf.arguments import did_you_mean
from specdec_hf.cli.devices import why_no_gpu
from specdec_hf.cli.report import drafter_table
from specdec_hf.cli.terminal import console, fail
from specdec_hf.drafting.parsed import with_name_of_head
from specdec_hf.drafting.registry import AUTO
from specdec_hf.options import COMMON, DEFAULT_NUM_ASSISTANT_TOKENS
from specdec_hf.rules import LOSSY_RULES
from specdec_hf.schedules.registry import SCHEDULES, tree_schedules

_OPS = find_spec("specdec_kernels")
assert _OPS is not None
assert _OPS.origin is not None
# The tables of the ops, without importing the ops, which loads torch.
_RULES = runpy.run_path(str(Path(_OPS.origin).parent / "arguments" / "rules.py"))
# Lossless rules; of trees, those that a draft model draws.
CHAIN_RULES: tuple[str, ...] = _RULES["LOSSLESS_RULES"]
TREE_RULES: tuple[str, ...] = _RULES["LOSSLESS_TREE_RULES"]
COPY_TREE_RULES = tuple(r for r in TREE_RULES if r not in _RULES["TREE_RULES_READING_DRAFT"])
# As in `TrieDrafter`: siblings are drawn independently, each from a distribution of its own.
TRIE_RULES = ("multi_draft", "traversal", *COPY_TREE_RULES)
LOSSY_TREE_RULES = tuple(rule for rule in LOSSY_RULES if rule in _RULES["TREE_RULES"])
ONLY_CHAIN_RULES = {*CHAIN_RULES, *LOSSY_RULES} - {*COPY_TREE_RULES, *LOSSY_TREE_RULES}

DEFAULT_DRAFTERS = (AUTO,)


DTYPES = ("float32", "bfloat16", "float16", "auto")
DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,3})?")
Check = Callable[[str, Any], None]  # of an option's name and its value


def option(usage: str, text: str, *checks: Check, **more: Any) -> Any:
    """An option of a command: its names, the word for its value, its help and its checks.

    Args:
        usage: as users see it, such as ``--num-assistant-tokens --gamma N``.
        text: for ``--help``.
        checks: of each value that is given; they end the command where it is wrong.
        more: arguments of typer.
    """
    words = usage.split()
    metavar = None if words[-1].startswith("-") else words.pop()
    if checks:
        more["callback"] = lambda value: _checked(words[0], value, checks)
    return typer.Option(*words, metavar=metavar, help=text, **more)


def _checked(name: str, value: Any, checks: Sequence[Check]) -> Any:
    for one in value if isinstance(value, list | tuple) else [value]:
        for check in checks if one is not None else ():
            check(name, one)
    return value


def must_be(rule: str, holds: Callable[[Any], bool]) -> Check:
    """The check of a value that keeps a rule."""

    def check(name: str, value: Any) -> None:
        if not holds(value):
            fail(f"{name} must be {rule}, got {value}")

    return check


def at_least(minimum: int) -> Check:
    """The check of a number."""
    return must_be(f"at least {minimum}", lambda value: value >= minimum)


def one_of(*choices: str) -> Check:
    """The check of a word."""
    return lambda name, value: check_choice(name, value, choices)


def check_choice(option: str, value: str, choices: tuple[str, ...], which: str = "") -> None:
    """Refuse a value that is not among the choices."""
    if value not in choices:
        fail(
            f"{option} must be one of {', '.join(choices)}{which}, got {value!r}"
            + did_you_mean(value, choices)
        )


LIMIT = must_be(">= 1", lambda value: value >= 1)
SHARE = must_be("in [0, 1]", lambda value: 0 <= value <= 1)
POSITIVE = must_be("above 0 and finite", lambda value: 0 < value < float("inf"))
SEED = must_be("in [0, 2**31)", lambda value: 0 <= value < 2**31)


def check_device(option: str, device: str) -> None:
    """Refuse a device that torch has no name for, and one that is surely not there."""
    if not DEVICE.fullmatch(device):
        fail(f"{option} must be cpu, cuda, cuda:N or mps, got {device!r}")
    reason = why_no_gpu() if device.startswith("cuda") else None
    if reason is not None:
        fail(f"{option} {device} is not available: {reason}")


def list_drafters(drafters: list[str]) -> list[str]:
    """Answers ``--drafter help``, and names the heads whose folders are given alone."""
    if "help" in drafters:
        console.print(drafter_table())
        raise typer.Exit
    try:
        return [with_name_of_head(one) for one in drafters]
    except (ImportError, ValueError) as error:  # a table of another package
        fail(f"--drafter: {error}")


def drafter_option(text: str) -> Any:
    """``--drafter`` with a command's own help, where the value help lists those with a name."""
    return option("--drafter DRAFTER", text, callback=list_drafters, is_eager=True)


# What the command line adds to the text of an option of the loop, and what its values are called.
_WORDS = {
    "num_assistant_tokens": (
        "N",
        "{text}, with which auto drafts chains.  "
        f"[default: {DEFAULT_NUM_ASSISTANT_TOKENS}; auto chooses by itself]",
    ),
    "tree": ("N,N,..", "Draft a tree: children at each depth, such as 4,2,1."),
    "num_assistant_tokens_schedule": (
        "NAME",
        f"{{text}}: {', '.join(SCHEDULES)}; with parameters, such as egag:gamma_max=8,beta=0.5. "
        f"Trees take {' and '.join(tree_schedules())}.  "
        "[default: optimal for auto, else constant]",
    ),
    "seed": ("N", "{text}.  [default: drawn and printed]"),
    "rule": (
        "RULE",
        f"{{text}}: auto, {', '.join(CHAIN_RULES)}; with trees also "
        f"{', '.join(rule for rule in TREE_RULES if rule not in CHAIN_RULES)}. Lossy: "
        f"{', '.join(LOSSY_TREE_RULES)}, and for chains "
        f"{', '.join(rule for rule in LOSSY_RULES if rule not in LOSSY_TREE_RULES)}.",
    ),
    "ablate": (
        "residual",
        "{text}: residual draws recovered tokens of chains from P, so that sampled text is biased.",
    ),
    "guard": (
        "MODE",
        "on: drafts wait until plain decoding has paid for them, and pause where they are slower. "
        "off: they begin in the second round. auto: on where that changes no text.",
    ),
    "compile": (
        "N",
        "{text}. --no-compile: as the model's own. --compile: on a CUDA device as CUDA graphs. "
        "Neither: on a CPU on packed weights.",
    ),
}
_NAMES = {
    "num_assistant_tokens": "--num-assistant-tokens --gamma",
    "compile": "--compile/--no-compile",
}


def own(name: str) -> Any:
    """The option of an argument of the loop, with the first sentence of its text."""
    text = COMMON[name].metadata["text"].partition(". ")[0]
    number = "X" if str(COMMON[name].type).startswith("float") else "N"
    metavar, words = _WORDS.get(name, (number, "{text}."))
    names = _NAMES.get(name, f"--{name.replace('_', '-')}")
    return option(f"{names} {metavar}", words.format(text=text[0].upper() + text[1:]))


PromptText = Annotated[
    str | None, option("--prompt TEXT", "One prompt; - reads it from standard input.")
]
PromptFile = Annotated[
    str | None,
    option(
        "--prompts FILE", 'Prompts as JSON lines with "turns" (Spec-Bench); - reads standard input.'
    ),
]
System = Annotated[str | None, option("--system TEXT", "System message of the chat template.")]
ChatTemplate = Annotated[
    bool,
    option(
        "--chat-template/--no-chat-template",
        "Put messages in the tokenizer's chat template where it has one. Without it a model "
        "continues each message as text, and knows no earlier ones.",
    ),
]
ModelName = Annotated[
    str,
    option(
        "--model MODEL",
        "embedded (SmolLM2-135M-Instruct, dequantised from Q4_1), a model folder, a GGUF "
        "file, or a hub id that is in the local cache.",
    ),
]
Drafters = Annotated[
    list[str],
    drafter_option(
        "A name that --drafter help lists, none, or a model, named as for --model. The drafts of "
        f"several become one tree.  [default: {', '.join(DEFAULT_DRAFTERS)}]"
    ),
]
Cascade = Annotated[
    str | None,
    option(
        "--cascade KIND",
        "How several --drafter, the largest first, draft for one another in place of one "
        "tree. vertical: each, a model, verifies what the next one drafts; with --tree the next "
        "one guesses the nodes. horizontal:N,N: each drafts so many tokens, the last the rest.",
    ),
]
Dtype = Annotated[
    str,
    option(
        "--dtype DTYPE",
        "float32, bfloat16, float16, or auto, the dtype of the model's file.",
        one_of(*DTYPES),
    ),
]
Device = Annotated[
    str | None,
    option(
        "--device DEVICE",
        "cpu, cuda, cuda:N or mps.  [default: cuda where there is one]",
        check_device,
    ),
]
NumAssistantTokens = Annotated[int | None, own("num_assistant_tokens")]
Compile = Annotated[bool | None, own("compile")]
MaxNewTokens = Annotated[
    int,
    option(
        "--max-new-tokens N",
        "Most tokens of an answer.",
        must_be("in [1, 2**31)", lambda value: 1 <= value < 2**31),
    ),
]
Temperature = Annotated[float, option("--temperature X", "0 is greedy, more samples.")]
TopK = Annotated[int | None, option("--top-k N", "Sample among the N most likely; 0 keeps all.")]
TopP = Annotated[float | None, option("--top-p X", "Sample among the most likely that sum to X.")]
MinP = Annotated[float | None, option("--min-p X", "Drop tokens below X times the most likely.")]
Limit = Annotated[int | None, option("--limit N", "Only the first N prompts.", LIMIT)]
Compare = Annotated[
    bool,
    option(
        "--compare/--no-compare",
        "Also answer without drafts and with model.generate, and compare speeds and texts.",
    ),
]
ShowDrafts = Annotated[
    bool,
    option(
        "--show-drafts",
        "Colour accepted drafts and recovered tokens, or mark them where there is no colour, and "
        "show rejected drafts, which are no part of the text.",
    ),
]
Traced = Annotated[
    bool,
    option(
        "--trace",
        "Show of every draft its position, Q, P, their ratio, the uniform and the verdict, "
        "and draw trees.",
    ),
]
Alone = Annotated[
    bool, option("--alone", "Show the texts and speeds of target and drafter alone, too.")
]
JsonFile = Annotated[
    Path | None, option("--json FILE", "Write prompts, answers, times and counts here.")
]
