"""The command ``bench``: drafters, schedules and peers against plain generation on prompts."""

# ruff: noqa: PLC0415  # torch loads at first use; see app.py
from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec_hf.cli import options
from specdec_hf.cli.bench_configs import (
    MERGED,
    first_of_each_category,
    in_batches,
    make_configs,
    settings_of,
)
from specdec_hf.cli.bench_tables import markdown_text, print_report
from specdec_hf.cli.checks import DTYPES, Settings, Sources, check, check_choice, check_limit
from specdec_hf.cli.files import check_output
from specdec_hf.cli.prompts import read_prompts
from specdec_hf.cli.report import collect_info, write_json
from specdec_hf.cli.run import load_models, progress, progress_bar
from specdec_hf.cli.terminal import console, fail, visible
from specdec_hf.drafters.registry import DRAFTERS

if TYPE_CHECKING:
    from specdec_hf.cli.bench_figures import Row
    from specdec_hf.cli.bench_runs import Batch, Config, Pair
    from specdec_hf.cli.load import Loaded
    from specdec_hf.schedules.costs import MonotoneCost

ALL = [name for name, entry in DRAFTERS.items() if not entry.needs_value]
MOST_WIDTHS = 8  # of the cost curve
PEERS = ("prompt_lookup", "assisted", "compiled", "llama.cpp")

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
Peers = Annotated[
    list[str],
    typer.Option(
        "--peer",
        metavar="NAME",
        help=f"{', '.join(PEERS)}. May be repeated.  [default: prompt_lookup]",
    ),
]
BatchSizes = Annotated[
    list[int],
    typer.Option(
        "--batch-size",
        metavar="N",
        help="Prompts answered together. May be repeated.  [default: 1]",
    ),
]
Temperatures = Annotated[
    list[float],
    typer.Option(
        "--temperature",
        metavar="X",
        help="0 is greedy, more samples. May be repeated.  [default: 0]",
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
        help="Answers of each drafter to each batch; their median time counts.",
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
    peer: Peers = (),  # type: ignore[assignment]
    dtype: Dtypes = (),  # type: ignore[assignment]
    device: options.Device = None,
    num_assistant_tokens: options.NumAssistantTokens = None,
    batch_size: BatchSizes = (),  # type: ignore[assignment]
    temperature: Temperatures = (),  # type: ignore[assignment]
    top_p: options.TopP = None,
    max_new_tokens: options.MaxNewTokens = 64,
    limit: PerCategory = None,
    runs: Runs = 3,
    json_file: options.JsonFile = None,
    markdown: Markdown = None,
) -> None:
    """Measure drafters and schedules against plain generation and other ways to generate.

    Every answer is made in turns with one of plain Transformers, and speeds are compared within
    these pairs only.
    """
    check_limit(limit)
    if runs < 1:
        fail(f"--runs must be at least 1, got {runs}")
    _check_files(questions, json_file, markdown)
    if num_assistant_tokens is not None and num_assistant_tokens < 1:
        fail(f"--num-assistant-tokens must be at least 1, got {num_assistant_tokens}")
    dtypes, peers = _once(dtype, "float32"), _once(peer, "prompt_lookup")
    for one in dtypes:
        check_choice("--dtype", one, DTYPES)
    for name in peers:
        check_choice("--peer", name, PEERS)
    common = Settings(model=model, drafter=("none",), device=device, max_new_tokens=max_new_tokens)
    samplings = _samplings(_once(temperature, 0.0), top_p)
    drafters = list(drafter) or [*ALL, f"prompt_lookup{MERGED}suffix_automaton"]
    for sampling in samplings:  # each is completed
        plain = replace(common, sampling=sampling)
        chosen = settings_of(plain, drafters, schedule, num_assistant_tokens)
        sources = [check(settings) for settings in (plain, *chosen)]
    prompts = first_of_each_category(read_prompts(questions), limit)
    sizes = _once(batch_size, 1)
    for size in sizes:
        if not 1 <= size <= len(prompts):
            fail(f"--batch-size must be in [1, {len(prompts)}], the prompts, got {size}")
    reports, texts = [], []
    for one in dtypes:
        settings = [replace(common, dtype=one, sampling=sampling) for sampling in samplings]
        loaded, configs, left_out = _load(settings[0], chosen, sources, peers)
        for size in sizes:
            batches = in_batches(loaded, prompts, size)
            for setting in settings:
                title, report, rows = _measure(loaded, configs, batches, setting, runs)
                report["left_out"] = left_out | report["left_out"]
                remarks = [f"left out, {name}: {why}" for name, why in report["left_out"].items()]
                remarks += _curve(report)
                print_report(title, rows, remarks)
                reports.append(report)
                texts.append(markdown_text(title, rows, remarks))
    write_json(json_file, {"info": collect_info(), "results": reports})
    if markdown is not None:
        markdown.write_text("\n".join(texts), encoding="utf-8")
        console.print(visible(f"wrote {markdown}"), style="dim")


def _curve(report: dict[str, Any]) -> list[str]:
    """The cost curve in a line; several tokens in units of one."""
    curve = dict(report["forward_seconds"])
    one = curve.pop(1, None)
    if one is None:
        return []
    others = ", ".join(f"{n} tokens {seconds / one:.2f}" for n, seconds in curve.items())
    return [f"forward of the target alone: 1 token {1000 * one:.1f} ms; in units of it {others}"]


def _once(given: Sequence[Any], default: Any) -> list[Any]:
    return list(dict.fromkeys(given)) or [default]


def _check_files(questions: str, json_file: Path | None, markdown: Path | None) -> None:
    for option, path in (("--json", json_file), ("--markdown", markdown)):
        if path is not None:
            check_output(option, path, [Path(questions)])
    if json_file is not None and markdown is not None and json_file.resolve() == markdown.resolve():
        fail(f"--json and --markdown must name different files, got {markdown} twice")


def _samplings(temperatures: list[float], top_p: float | None) -> list[dict[str, Any]]:
    """The sampling parameters of each temperature; top-p counts where something is sampled."""
    if top_p is not None and not any(temperatures):
        fail("--top-p needs --temperature above 0: greedy decoding does not sample")
    return [{"temperature": x, "top_k": None, "top_p": top_p if x else None} for x in temperatures]


def _load(
    settings: Settings, chosen: list[Settings], sources: list[Sources], peers: list[str]
) -> tuple[Loaded, list[Config], dict[str, str]]:
    """The models in one dtype, the configs, and why a peer is left out."""
    names = [name for each in chosen for name in each.drafter]
    found = Sources(sources[0].model, [one for each in sources[1:] for one in each.drafters])
    with progress_bar() as say:
        loaded = load_models(replace(settings, drafter=names), found, say)
        return loaded, *make_configs(chosen, loaded, peers, found.model)


def _measure(
    loaded: Loaded, configs: list[Config], batches: list[Batch], settings: Settings, runs: int
) -> tuple[str, dict[str, Any], list[Row]]:
    """Title, report for JSON, and rows of one dtype, batch size and temperature."""
    from specdec_hf.cli.bench_figures import rows_of
    from specdec_hf.cli.bench_runs import run_configs

    sampling = {name: settings.sampling[name] for name in ("temperature", "top_p", "top_k")}
    size = len(batches[0].prompts)
    how = "temperature {temperature:g}, top-p {top_p:g}" if settings.do_sample else "greedy"
    info = collect_info()
    title = (
        f"{loaded.title}, {loaded.dtype}, {loaded.model.device}, {info['threads']} threads "
        f"({platform.machine()}, {info['cpu_capability']}), {len(batches)} batches of {size}, "
        f"{how.format(**sampling)}, {settings.max_new_tokens} new tokens, median of {runs}"
    )
    arguments = {"max_new_tokens": settings.max_new_tokens, "do_sample": settings.do_sample}
    if settings.do_sample:
        arguments |= sampling
    with progress() as bar:
        steps = len(configs) + (len(configs) - 1) * len(batches) * runs
        task = bar.add_task("", total=steps)

        def advance(text: str) -> None:
            bar.update(task, advance=1, description=f"{loaded.dtype} {text}")

        pairs, left_out = run_configs(loaded, configs, batches, arguments, runs, advance)
    forward = _forward_costs(loaded, batches, pairs, left_out)
    rows = rows_of(configs, pairs, forward, sampled=settings.do_sample)
    report = {
        "title": title,
        "dtype": settings.dtype,
        "batch_size": size,
        **sampling,
        "runs": runs,
        "left_out": left_out,
        "forward_seconds": {} if forward is None else forward.medians(),
        "rows": [row.to_dict() for row in rows],
    }
    return title, report, rows


def _forward_costs(
    loaded: Loaded, batches: list[Batch], pairs: dict[str, list[Pair]], left_out: dict[str, str]
) -> MonotoneCost | None:
    """Costs of forwards as wide as the rounds were, or in ``left_out`` why they are not known."""
    from specdec_hf.analysis.efficiency import forward_costs

    calls = [pair.mine.stats for each in pairs.values() for pair in each if pair.mine.stats]
    widths = sorted({1 + width for stats in calls for width in stats.gammas})
    few = [*widths[:: 1 + len(widths) // MOST_WIDTHS], *widths[-1:]]
    by_width = sorted(batches, key=lambda batch: batch.inputs["input_ids"].shape[1])
    try:
        return forward_costs(loaded.model, by_width[len(by_width) // 2].inputs, few)
    except (NotImplementedError, RuntimeError, ValueError) as error:  # the cache cannot be cropped
        left_out["efficiency"] = f"{type(error).__name__}: {error}".splitlines()[0]
        return None
