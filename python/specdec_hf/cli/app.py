"""Command line: ``python -m specdec_hf generate | demo | info``."""

# ruff: noqa: PLC0415  # torch and transformers load inside the commands: --help stays quick, and an
# import that fails (a missing native library) still gets its one line.
from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from click import ClickException
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from specdec_hf.cli.checks import check_json, check_ranges, errors, fail, parse_branching
from specdec_hf.cli.prompts import Prompt, read_prompts, shipped_prompts
from specdec_hf.cli.report import (
    collect_info,
    console,
    print_summary,
    print_turn,
    summarize,
    write_json,
)

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn

DEMO_TOKENS = 128
DEFAULT_GAMMA = 7  # on two CPU cores a forward of 5 to 8 tokens costs the same

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
Gamma = Annotated[
    int | None,
    typer.Option("--num-assistant-tokens", "--gamma", help="Tokens to draft per round, 7."),
]
TreeShape = Annotated[
    str | None, typer.Option("--tree", help="Draft a tree: children at each depth, such as 4,2,1.")
]
GammaPolicyName = Annotated[str, typer.Option("--gamma-policy", help="constant or heuristic.")]
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
    gamma: Gamma = None,
    tree: TreeShape = None,
    gamma_policy: GammaPolicyName = "constant",
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
    _run(
        _chosen(prompt, prompts), model, drafter, gamma, tree, gamma_policy, max_new_tokens,
        {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p},
        seed, rule, limit, compare, json_file,
    )  # fmt: skip


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
    _run(
        _chosen(prompt, prompts), "embedded", "prompt_lookup", None, None, "constant",
        max_new_tokens,
        {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        0, "auto", limit, True, json_file,
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


def _run(
    prompts: list[Prompt],
    model_name: str,
    drafter_name: str,
    gamma: int | None,
    tree: str | None,
    gamma_policy: str,
    max_new_tokens: int,
    sampling: dict[str, Any],
    seed: int,
    rule: str,
    limit: int | None,
    compare: bool,
    json_file: Path | None,
) -> None:
    if gamma is None and tree is None:
        gamma = DEFAULT_GAMMA
    check_ranges(sampling, max_new_tokens, gamma, seed, limit, json_file)
    branching = parse_branching(tree)
    with _progress() as progress:
        task = progress.add_task("importing", total=None)
        say = functools.partial(_describe, progress, task)
        from specdec_hf.cli.compare import run_turn
        from specdec_hf.decode.generate import SpeculativeDecoder

        model, tokenizer = _load_model(model_name, say)
        drafter = _load_drafter(drafter_name, model)
        decoder = SpeculativeDecoder(
            drafter,
            num_assistant_tokens=gamma,
            tree=branching,
            gamma_policy=gamma_policy,
            acceptance=rule,
            seed=seed,
        )
        settings: dict[str, Any] = {"do_sample": sampling["temperature"] > 0}
        if settings["do_sample"]:
            settings |= sampling
        chosen = prompts[:limit]
        _check_prompts(model, tokenizer, chosen)
        say("warming up")
        warm = tokenizer("Hello there, hello there", return_tensors="pt").to(model.device)
        run_turn(model, dict(warm), decoder, {**settings, "max_new_tokens": 4}, compare=compare)
        settings["max_new_tokens"] = max_new_tokens

    report: list[dict[str, Any]] = []
    turns: list[Turn] = []
    failure = ""
    try:
        for number, prompt in enumerate(chosen, start=1):
            made: list[dict[str, Any]] = []
            entry = {"question_id": prompt.name, "category": prompt.category, "turns": made}
            chat: list[dict[str, str]] = []
            for text in prompt.turns:
                chat.append({"role": "user", "content": text})
                inputs = _encode(tokenizer, chat, model.device)
                with _progress() as progress:
                    total = max_new_tokens * (2 if compare else 1)
                    task = progress.add_task(f"prompt {number} of {len(chosen)}", total=total)
                    turn = run_turn(
                        model, inputs, decoder, settings, compare=compare,
                        on_tokens=functools.partial(_advance, progress, task),
                    )  # fmt: skip
                answer = tokenizer.decode(turn.tokens, skip_special_tokens=True)
                chat.append({"role": "assistant", "content": answer})
                print_turn(tokenizer, prompt, text, turn)
                turns.append(turn)
                made.append(turn.to_dict(tokenizer))
                if len(made) == 1:
                    report.append(entry)
    except (Exception, KeyboardInterrupt) as error:  # what was done is still shown and written
        failure = f"prompt {prompt.name}: {str(error) or type(error).__name__}"
        if not turns:
            fail(failure)
    summary = summarize(turns, greedy=not settings["do_sample"], rule=turns[0].stats.rule)
    print_summary(summary)
    write_json(
        json_file,
        {
            "info": collect_info(),
            "model": model_name,
            "device": str(model.device),
            "drafter": drafter_name,
            "num_assistant_tokens": gamma,
            "tree": branching,
            "gamma_policy": gamma_policy,
            "max_new_tokens": max_new_tokens,
            "sampling": sampling,
            "seed": seed,
            "rule": turns[0].stats.rule,
            "summary": summary,
            "prompts": report,
            "error": failure or None,
        },
    )
    if failure:
        fail(failure)
    if summary.get("greedy_outputs_identical") is False:
        errors.print("error: greedy output with speculation differs from model.generate")
        raise typer.Exit(1)


def _load_model(name: str, say: Callable[[str], None]) -> tuple[Any, Any]:
    import torch

    from specdec_hf.cli.weights import load_embedded, load_folder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "embedded":
        return load_embedded(device=device, progress=say)
    say(f"loading {name}")
    return load_folder(name, device=device)


def _load_drafter(name: str, model: Any) -> Any:
    from specdec_hf.cli.weights import load_folder, with_fewer_layers

    if name in ("none", ""):
        return None
    if name == "prompt_lookup":
        return name
    if name.startswith("layers:"):
        layers = name.removeprefix("layers:")
        if not layers.isdecimal():
            fail(f"--drafter layers:N needs a number, got {name}")
        return with_fewer_layers(model, int(layers))
    if not Path(name).is_dir():
        fail(f"--drafter must be prompt_lookup, none, layers:N or a model folder, got {name}")
    return load_folder(name, device=model.device)[0]


def _encode(tokenizer: Any, chat: list[dict[str, str]], device: Any) -> dict[str, Any]:
    if tokenizer.chat_template is None:
        return dict(tokenizer(chat[-1]["content"], return_tensors="pt").to(device))
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return {name: encoded[name].to(device) for name in ("input_ids", "attention_mask")}


def _check_prompts(model: Any, tokenizer: Any, prompts: list[Prompt]) -> None:
    """Refuse prompts beyond the context before the first of them runs."""
    from specdec_hf.cache.rows import context_of

    context = context_of(model)
    for prompt in prompts if context is not None else ():
        first = _encode(tokenizer, [{"role": "user", "content": prompt.turns[0]}], "cpu")
        tokens = first["input_ids"].shape[1]
        if tokens >= context:
            fail(f"prompt {prompt.name} has {tokens} tokens, but the model's context is {context}")


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    )


def _describe(progress: Progress, task: Any, text: str) -> None:
    progress.update(task, description=text)


def _advance(progress: Progress, task: Any, count: int) -> None:
    progress.advance(task, count)


def main() -> None:
    """Entry point of ``python -m specdec_hf``."""
    app(prog_name="python -m specdec_hf")
