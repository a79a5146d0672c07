"""The command ``bench``: drafters and schedules against plain generation, on a file of prompts."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from specdec_hf.cli import options
from specdec_hf.cli.checks import (
    DTYPES,
    Settings,
    Sources,
    check,
    check_choice,
    check_limit,
    has_own_tree,
)
from specdec_hf.cli.files import check_output
from specdec_hf.cli.prompts import Prompt, read_prompts
from specdec_hf.cli.report import collect_info, write_json
from specdec_hf.cli.run import encode, generation_arguments, load_models, make_decoder, progress
from specdec_hf.cli.terminal import console, fail, visible
from specdec_hf.drafters.registry import DRAFTERS, value_of
from specdec_hf.schedules.registry import tree_schedules

if TYPE_CHECKING:
    from specdec_hf.cli.bench_runs import Config, Row
    from specdec_hf.cli.load import Loaded

MERGED = "+"
ALL = [name for name, entry in DRAFTERS.items() if not entry.needs_value]

Questions = Annotated[
    str,
    typer.Option(
        "--questions",
        metavar="FILE",
        help='Prompts as JSON lines with "turns" and "category" (Spec-Bench); the first turn is '
        "asked.",
    ),
]
Measured = Annotated[
    list[str],
    options.drafter_option(
        "A drafter to measure, as for generate; a+b merges two. May be repeated.  [default: "
        "each name that needs no value, and prompt_lookup+suffix_automaton]"
    ),
]
Schedules = Annotated[
    list[str],
    typer.Option(
        "--num-assistant-tokens-schedule",
        metavar="NAME",
        help="A schedule to measure with each drafter; trees that take none of those given are "
        "measured with constant. May be repeated.  [default: constant]",
    ),
]
Dtypes = Annotated[
    list[str],
    typer.Option(
        "--dtype",
        metavar="DTYPE",
        help=f"{', '.join(DTYPES)}. May be repeated.  [default: float32]",
    ),
]
PerCategory = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", help="Only the first N prompts of each category."),
]
Runs = Annotated[
    int,
    typer.Option(
        "--runs",
        metavar="N",
        help="Answers of each drafter to each prompt; their median time counts.",
    ),
]
Markdown = Annotated[
    Path | None, typer.Option("--markdown", metavar="FILE", help="Write the tables here.")
]


def bench(
    questions: Questions,
    model: options.ModelName = "embedded",
    drafter: Measured = (),  # type: ignore[assignment]
    schedule: Schedules = (),  # type: ignore[assignment]
    dtype: Dtypes = (),  # type: ignore[assignment]
    device: options.Device = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    max_new_tokens: options.MaxNewTokens = 64,
    limit: PerCategory = None,
    runs: Runs = 1,
    json_file: options.JsonFile = None,
    markdown: Markdown = None,
) -> None:
    """Measure drafters and schedules against plain generation and Transformers' prompt lookup.

    Every prompt is answered greedily with each of them, in turns. Speeds are compared within this
    run only.
    """
    check_limit(limit)
    if runs < 1:
        fail(f"--runs must be at least 1, got {runs}")
    read = [Path(questions)]
    for option, path in (("--json", json_file), ("--markdown", markdown)):
        if path is not None:
            check_output(option, path, read)
    if json_file is not None and markdown is not None and json_file.resolve() == markdown.resolve():
        fail(f"--json and --markdown must name different files, got {markdown} twice")
    if num_assistant_tokens is not None and num_assistant_tokens < 1:
        fail(f"--num-assistant-tokens must be at least 1, got {num_assistant_tokens}")
    dtypes = list(dict.fromkeys(dtype)) or ["float32"]
    for one in dtypes:
        check_choice("--dtype", one, DTYPES)
    drafters = list(drafter) or [*ALL, f"prompt_lookup{MERGED}suffix_automaton"]
    common = Settings(model=model, drafter=("none",), device=device, max_new_tokens=max_new_tokens)
    chosen = [
        _settings(common, name, kind, num_assistant_tokens)
        for name in dict.fromkeys(drafters)
        for kind in _schedules(name, list(dict.fromkeys(schedule)) or ["constant"])
    ]
    sources = [check(settings) for settings in (common, *chosen)]
    prompts = _first_of_each_category(read_prompts(questions), limit)
    reports, texts = [], []
    for one in dtypes:
        rows, title = _measure(one, common, chosen, sources, prompts, runs)
        table = _markdown(rows, title)
        print_rows(rows, title)
        texts.append(table)
        listed = [row.to_dict() for row in rows]
        reports.append({"title": title, "dtype": one, "runs": runs, "rows": listed})
    write_json(json_file, {"info": collect_info(), "results": reports})
    if markdown is not None:
        markdown.write_text("\n".join(texts), encoding="utf-8")
        console.print(visible(f"wrote {markdown}"), style="dim")


def _settings(
    common: Settings, name: str, schedule: str, num_assistant_tokens: int | None
) -> Settings:
    """The options of one config, checked as those of ``generate`` are."""
    parts = _merged(name)
    own_tree = len(parts) == 1 and has_own_tree(parts[0])
    return Settings(
        model=common.model,
        drafter=parts,
        device=common.device,
        num_assistant_tokens=None if own_tree else num_assistant_tokens,
        num_assistant_tokens_schedule=schedule,
        max_new_tokens=common.max_new_tokens,
    )


def _merged(name: str) -> list[str]:
    """The drafters that ``a+b`` merges; a + in the path of a file or folder belongs to the path."""
    pieces, parts = name.split(MERGED), []
    while pieces:
        joined = (pieces[:size] for size in range(len(pieces), 1, -1))
        paths = (MERGED.join(some) for some in joined if not DRAFTERS.keys() >= set(some))
        parts.append(next(filter(_names_a_path, paths), pieces[0]))
        del pieces[: parts[-1].count(MERGED) + 1]
    return parts


def _names_a_path(drafter: str) -> bool:
    named = drafter.partition(":")[0] in DRAFTERS
    return os.path.exists(value_of(drafter) if named else os.path.expanduser(drafter))


def _schedules(name: str, schedules: Sequence[str]) -> list[str]:
    """Those that a drafter takes; constant for trees that take none of them."""
    parts = _merged(name)
    if len(parts) == 1 and not has_own_tree(parts[0]):
        return list(schedules)
    trees = tree_schedules()
    return [one for one in schedules if one.partition(":")[0] in trees] or ["constant"]


def _first_of_each_category(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    seen: defaultdict[str, int] = defaultdict(int)
    chosen = []
    for prompt in prompts:
        seen[prompt.category] += 1
        if limit is None or seen[prompt.category] <= limit:
            chosen.append(prompt)
    return chosen


def _measure(
    dtype: str,
    common: Settings,
    chosen: list[Settings],
    sources: list[Sources],
    prompts: list[Prompt],
    runs: int,
) -> tuple[list[Row], str]:
    names = [name for settings in chosen for name in settings.drafter]
    together = Settings(model=common.model, drafter=names, dtype=dtype, device=common.device)
    found = Sources(sources[0].model, [one for each in sources[1:] for one in each.drafters])
    with progress() as bar:
        task = bar.add_task("", total=None)
        loaded = load_models(together, found, lambda text: bar.update(task, description=text))
        from specdec_hf.cli.bench_runs import run_configs

        configs = _configs(chosen, loaded)
        answered = _encoded(loaded, prompts)
        bar.update(task, total=len(configs) * (len(prompts) * runs + 1), description="")

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=f"{dtype} {text}")

        rows = run_configs(loaded, configs, answered, generation_arguments(common), runs, advance)
    info = collect_info()
    title = (
        f"{loaded.title}, {loaded.dtype}, {loaded.model.device}, {info['threads']} threads "
        f"({platform.machine()}, {info['cpu_capability']}), {len(prompts)} prompts, "
        f"{common.max_new_tokens} new tokens, {runs} {'run' if runs == 1 else 'runs'}"
    )
    return rows, title


def _configs(chosen: list[Settings], loaded: Loaded) -> list[Config]:
    from specdec_hf.cli.bench_runs import PLAIN, Config
    from specdec_hf.decode.generate import SpeculativeDecoder

    number = options.CLI_NUM_ASSISTANT_TOKENS
    configs = [
        Config(PLAIN),
        Config("prompt lookup, Transformers", arguments={"prompt_lookup_num_tokens": number}),
        Config("plain, specdec", SpeculativeDecoder()),
    ]
    left = list(loaded.drafters)
    for settings in chosen:
        mine = [left.pop(0) for _ in settings.drafter]
        decoder = make_decoder(settings, mine if len(mine) > 1 else mine[0])
        schedule = settings.num_assistant_tokens_schedule
        words = [MERGED.join(settings.drafter), *["tree"] * (settings.tree is not None)]
        if schedule != "constant":
            words.append(schedule)
        configs.append(Config(", ".join(words), decoder, {}, schedule))
    return configs


def _encoded(loaded: Loaded, prompts: list[Prompt]) -> list[tuple[str, str, dict[str, Any]]]:
    encoded = []
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt.turns[0]}]
        inputs = encode(loaded.tokenizer, chat, loaded.model.device)
        encoded.append((prompt.name, prompt.category, inputs))
    return encoded


COLUMNS = ("config", "tokens/s", "ratio", "median ratio", "tokens a round", "identical texts")


def _cells(row: Row) -> tuple[str, ...]:
    rounds = "" if row.tokens_per_round is None else f"{row.tokens_per_round:.2f}"
    return (
        row.name,
        f"{row.tokens_per_second:.1f}",
        f"{row.ratio:.2f}",
        f"{row.median_ratio:.2f}",
        rounds,
        f"{row.identical} of {row.texts}",
    )


def print_rows(rows: list[Row], title: str) -> None:
    """Print a table of all configs and the loop's remarks."""
    table = Table(*COLUMNS, title=visible(title), title_justify="left")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)
    for row in rows:
        for note in row.notes:
            console.print(visible(f"{row.name}: {note}"), style="dim")


def _markdown(rows: list[Row], title: str) -> str:
    lines = [f"{title}:", "", "| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    notes = [f"- {row.name}: {note}" for row in rows for note in row.notes]
    return "\n".join([*lines, "", *notes, ""])
