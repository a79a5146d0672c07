"""Command line: ``python -m specdec_hf generate | demo | info``."""

# torch and transformers are imported inside the commands: --help stays quick, and an import that
# fails (a missing native library) is reported in one line like any other error.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from click import ClickException
from rich.table import Table

from specdec_hf.cli.checks import check_json, check_ranges, fail, parse_branching
from specdec_hf.cli.prompts import Prompt, read_prompts, shipped_prompts
from specdec_hf.cli.report import collect_info, console, write_json
from specdec_hf.cli.run import Settings, run

DEMO_TOKENS = 128
DEFAULT_NUM_ASSISTANT_TOKENS = 7  # on two CPU cores a forward of 5 to 8 tokens costs the same

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
Command = TypeVar("Command", bound=Callable[..., None])


def no_traceback(command: Command) -> Command:
    """Turn the errors a user can cause into one line."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            if isinstance(error, typer.Exit | typer.Abort):
                raise
            fail(str(error) or type(error).__name__)
        except KeyboardInterrupt:
            fail("interrupted")
        except Exception as error:
            if isinstance(error, ClickException):
                raise
            fail(f"unexpected {type(error).__name__}: {error}")

    return wrapped  # type: ignore[return-value]


PromptText = Annotated[str | None, typer.Option("--prompt", help="One prompt.")]
PromptFile = Annotated[
    Path | None, typer.Option("--prompts", help='JSON lines with "turns" (Spec-Bench format).')
]
ModelFolder = Annotated[
    str, typer.Option("--model", help="embedded (SmolLM2-135M-Instruct), or a model folder.")
]
DrafterName = Annotated[
    str,
    typer.Option(
        "--drafter",
        help="prompt_lookup, none, layers:N (the model's first N layers), or a model folder.",
    ),
]
NumAssistantTokens = Annotated[
    int | None,
    typer.Option("--num-assistant-tokens", "--gamma", help="Tokens to draft per round, 7."),
]
TreeShape = Annotated[
    str | None, typer.Option("--tree", help="Draft a tree: children at each depth, such as 4,2,1.")
]
Schedule = Annotated[
    str, typer.Option("--num-assistant-tokens-schedule", help="constant or heuristic.")
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Per answer.")]
Temperature = Annotated[float, typer.Option("--temperature", help="0 is greedy.")]
TopK = Annotated[int, typer.Option("--top-k", help="0 keeps all.")]
TopP = Annotated[float, typer.Option("--top-p", help="In (0, 1].")]
MinP = Annotated[float, typer.Option("--min-p", help="In [0, 1].")]
Seed = Annotated[int, typer.Option("--seed")]
Rule = Annotated[
    str, typer.Option("--rule", help="auto, token, block, greedy, match, or one for trees.")
]
Limit = Annotated[int | None, typer.Option("--limit", help="Only the first N prompts.")]
Compare = Annotated[
    bool, typer.Option("--compare/--no-compare", help="Also run without speculation.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write texts, times and counts here.")
]


@app.command("generate")
@no_traceback
def generate_command(
    prompt: PromptText = None,
    prompts: PromptFile = None,
    model: ModelFolder = "embedded",
    drafter: DrafterName = "prompt_lookup",
    num_assistant_tokens: NumAssistantTokens = None,
    tree: TreeShape = None,
    num_assistant_tokens_schedule: Schedule = "constant",
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    seed: Seed = 0,
    rule: Rule = "auto",
    limit: Limit = None,
    compare: Compare = True,
    json_file: JsonFile = None,
) -> None:
    """Generate text with and without speculation, in colour, with figures."""
    if prompt is None and prompts is None:
        fail("give either --prompt TEXT or --prompts FILE")
    if num_assistant_tokens is None and tree is None:
        num_assistant_tokens = DEFAULT_NUM_ASSISTANT_TOKENS
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    chosen = _chosen(prompt, prompts)
    check_ranges(sampling, max_new_tokens, num_assistant_tokens, seed, limit, json_file)
    run(
        chosen[:limit],
        Settings(
            model=model,
            drafter=drafter,
            num_assistant_tokens=num_assistant_tokens,
            tree=parse_branching(tree),
            num_assistant_tokens_schedule=num_assistant_tokens_schedule,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            rule=rule,
        ),
        compare=compare,
        json_file=json_file,
    )


@app.command("demo")
@no_traceback
def demo_command(
    prompt: PromptText = None,
    prompts: PromptFile = None,
    max_new_tokens: MaxNewTokens = DEMO_TOKENS,
    limit: Limit = None,
    json_file: JsonFile = None,
) -> None:
    """Greedy generation over the shipped prompts: embedded model, prompt lookup, defaults."""
    generate_command(
        prompt, prompts or (shipped_prompts() if prompt is None else None),
        max_new_tokens=max_new_tokens, limit=limit, json_file=json_file,
    )  # fmt: skip


@app.command("info")
@no_traceback
def info_command(
    json_file: JsonFile = None,
) -> None:
    """Versions, the provider of each op, the instruction set, the GPU."""
    check_json(json_file)
    facts = collect_info()
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts["versions"].items():
        table.add_row(name, value)
    for op, by_device in facts["providers"].items():
        table.add_row(op, ", ".join(f"{device}: {name}" for device, name in by_device.items()))
    table.add_row("cpu instructions", facts["cpu_capability"])
    table.add_row("threads", str(facts["threads"]))
    table.add_row("gpu", facts["gpu"])
    console.print(table)
    write_json(json_file, facts)


def _chosen(prompt: str | None, prompts: Path | None) -> list[Prompt]:
    if prompt is None:
        return read_prompts(prompts or shipped_prompts())
    if prompts is not None:
        fail("give either --prompt TEXT or --prompts FILE, not both")
    if not prompt.strip():
        fail("empty prompt")
    return [Prompt("prompt", "", [prompt])]


def main() -> None:
    """Entry point of ``python -m specdec_hf``."""
    app(prog_name="python -m specdec_hf")
