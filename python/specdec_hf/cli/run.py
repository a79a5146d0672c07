"""The run of the commands ``generate`` and ``demo``: load models, answer prompts, report."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from specdec_hf.cli.checks import errors, fail
from specdec_hf.cli.prompts import Prompt
from specdec_hf.cli.report import (
    collect_info,
    print_summary,
    print_turn,
    summarize,
    write_json,
)

if TYPE_CHECKING:
    from specdec_hf.cli.compare import Turn


@dataclass
class Settings:
    """The options of the command line, after its own checks."""

    model: str
    drafter: str
    num_assistant_tokens: int | None
    tree: tuple[int, ...] | None
    num_assistant_tokens_schedule: str
    max_new_tokens: int
    sampling: dict[str, Any]
    seed: int
    rule: str


def run(
    prompts: list[Prompt], settings: Settings, *, compare: bool, json_file: Path | None
) -> None:
    """Answer all prompts, print every answer and a summary, and write the report."""
    with _progress_bar() as progress:
        task = progress.add_task("importing", total=None)
        say = functools.partial(_describe, progress, task)
        from specdec_hf.cli.compare import run_turn
        from specdec_hf.decode.generate import SpeculativeDecoder

        model, tokenizer = _load_model(settings.model, say)
        decoder = SpeculativeDecoder(
            _load_drafter(settings.drafter, model),
            num_assistant_tokens=settings.num_assistant_tokens,
            tree=settings.tree,
            num_assistant_tokens_schedule=settings.num_assistant_tokens_schedule,
            rule=settings.rule,
            seed=settings.seed,
        )
        arguments: dict[str, Any] = {"do_sample": settings.sampling["temperature"] > 0}
        if arguments["do_sample"]:
            arguments |= settings.sampling
        _check_prompts(model, tokenizer, prompts)
        say("warming up")
        warm = tokenizer("Hello there, hello there", return_tensors="pt").to(model.device)
        run_turn(model, dict(warm), decoder, {**arguments, "max_new_tokens": 4}, compare=compare)
        arguments["max_new_tokens"] = settings.max_new_tokens

    report: list[dict[str, Any]] = []
    turns: list[Turn] = []
    failure = ""
    try:
        for number, prompt in enumerate(prompts, start=1):
            answers: list[dict[str, Any]] = []
            entry = {"question_id": prompt.name, "category": prompt.category, "turns": answers}
            chat: list[dict[str, str]] = []
            for text in prompt.turns:
                chat.append({"role": "user", "content": text})
                inputs = _encode(tokenizer, chat, model.device)
                with _progress_bar() as progress:
                    total = settings.max_new_tokens * (2 if compare else 1)
                    task = progress.add_task(f"prompt {number} of {len(prompts)}", total=total)
                    turn = run_turn(
                        model, inputs, decoder, arguments, compare=compare,
                        on_tokens=functools.partial(_advance, progress, task),
                    )  # fmt: skip
                answer = tokenizer.decode(turn.tokens, skip_special_tokens=True)
                chat.append({"role": "assistant", "content": answer})
                print_turn(tokenizer, prompt, text, turn)
                turns.append(turn)
                answers.append(turn.to_dict(tokenizer))
                if len(answers) == 1:
                    report.append(entry)
    except (Exception, KeyboardInterrupt) as error:  # earlier answers are still shown and written
        failure = f"prompt {prompt.name}: {str(error) or type(error).__name__}"
        if not turns:
            fail(failure)
    rule = turns[0].stats.rule
    summary = summarize(turns, greedy=not arguments["do_sample"], rule=rule)
    print_summary(summary)
    write_json(
        json_file,
        {
            "info": collect_info(),
            "device": str(model.device),
            **asdict(settings),
            "rule": rule,
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
    """Refuse prompts longer than the context before the first of them runs."""
    from specdec_hf.cache.protocol import context_length

    context = context_length(model)
    for prompt in prompts if context is not None else ():
        first = _encode(tokenizer, [{"role": "user", "content": prompt.turns[0]}], "cpu")
        tokens = first["input_ids"].shape[1]
        if tokens >= context:
            fail(f"prompt {prompt.name} has {tokens} tokens, but the model's context is {context}")


def _progress_bar() -> Progress:
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
