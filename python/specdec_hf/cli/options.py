"""The options of the commands, each declared once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from specdec_hf.cli.report import drafter_table
from specdec_hf.cli.terminal import console
from specdec_hf.drafting.registry import AUTO
from specdec_hf.schedules.registry import SCHEDULES, tree_schedules

CLI_NUM_ASSISTANT_TOKENS = 7  # on two CPU cores a forward of 5 to 8 tokens costs the same

DEFAULT_DRAFTERS = (AUTO,)


def list_drafters(given: list[str]) -> list[str]:
    """Answers ``--drafter help``."""
    if "help" in given:
        console.print(drafter_table())
        raise typer.Exit
    return given


def drafter_option(text: str) -> Any:
    """``--drafter`` with a command's own help, where the value help lists those with a name."""
    return typer.Option(
        "--drafter", metavar="DRAFTER", callback=list_drafters, is_eager=True, help=text
    )


PromptText = Annotated[
    str | None,
    typer.Option("--prompt", metavar="TEXT", help="One prompt; - reads it from standard input."),
]
PromptFile = Annotated[
    str | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help='Prompts as JSON lines with "turns" (Spec-Bench); - reads standard input.',
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message of the chat template."),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="embedded (SmolLM2-135M-Instruct, dequantised from Q4_1), a model folder, a GGUF "
        "file, or a hub id that is in the local cache.",
    ),
]
Drafters = Annotated[
    list[str],
    drafter_option(
        "A name that --drafter help lists, none, or a model, named as for --model. The drafts of "
        "several become one tree."
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help="float32, bfloat16, float16, or auto, the dtype of the model's file.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, cuda:N or mps.  [default: cuda where there is one]",
    ),
]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option(
        "--num-assistant-tokens",
        "--gamma",
        metavar="N",
        help="Tokens to draft per round, with which auto drafts chains.  "
        f"[default: {CLI_NUM_ASSISTANT_TOKENS}; auto chooses by itself]",
    ),
]
TreeShape = Annotated[
    str | None,
    typer.Option(
        "--tree", metavar="N,N,..", help="Draft a tree: children at each depth, such as 4,2,1."
    ),
]
Schedule = Annotated[
    str | None,
    typer.Option(
        "--num-assistant-tokens-schedule",
        metavar="NAME",
        help=f"How much to draft: {', '.join(SCHEDULES)}; with parameters, such as "
        f"egag:gamma_max=8,beta=0.5. Trees take {' and '.join(tree_schedules())}.  "
        "[default: optimal for auto, else constant]",
    ),
]
MaxNewTokens = Annotated[
    int, typer.Option("--max-new-tokens", metavar="N", help="Most tokens of an answer.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="X", help="0 is greedy, more samples.")
]
TopK = Annotated[
    int | None,
    typer.Option("--top-k", metavar="N", help="Sample among the N most likely; 0 keeps all."),
]
TopP = Annotated[
    float | None,
    typer.Option("--top-p", metavar="X", help="Sample among the most likely that sum to X."),
]
MinP = Annotated[
    float | None,
    typer.Option("--min-p", metavar="X", help="Drop tokens below X times the most likely."),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", help="Seed of sampling.  [default: drawn and printed]"),
]
Rule = Annotated[
    str,
    typer.Option(
        "--rule",
        metavar="RULE",
        help="Acceptance rule: auto, token, block, match, greedy; with trees also target_only, "
        "multi_draft_wor, multi_draft, top_k_plus_one, k_seq, traversal.",
    ),
]
Guard = Annotated[
    str,
    typer.Option(
        "--guard",
        metavar="MODE",
        help="on: drafts wait until plain decoding has paid for them, and pause where they are "
        "slower. off: they begin in the second round. auto: on where that changes no text.",
    ),
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Run forwards on packed weights and compiled layers; the first one takes longer.",
    ),
]
FixedWidth = Annotated[
    int | None,
    typer.Option(
        "--fixed-width",
        metavar="N",
        help="Give every forward N tokens, so that speculation changes no text in bfloat16 either.",
    ),
]
CompileOrNot = Annotated[
    bool,
    typer.Option(
        "--compile/--no-compile",
        help="Run forwards on packed weights and compiled layers; the first one takes longer.",
    ),
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Only the first N prompts.")
]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Also run without speculation.")
]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write prompts, answers, times and counts here."),
]
