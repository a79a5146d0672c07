"""The command ``bench``: drafters, schedules and peers against ``model.generate`` on prompts."""

# torch loads at first use; see cli/app.py
from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from specdec_hf.cli import options
from specdec_hf.cli.checks import Settings, Sources, check, takes_settings
from specdec_hf.cli.options import DTYPES, LIMIT, Check, at_least, one_of, option
from specdec_hf.cli.paths import check_output
from specdec_hf.cli.prompts import Question, read_prompts
from specdec_hf.cli.run import check_prompts, load_models, progress_bar
from specdec_hf.cli.sources import Source
from specdec_hf.cli.terminal import fail
from specdec_hf.drafting.registry import drafters as all_drafters
from specdec_hf.rules import LOSSY_RULES

from specdec_lab.bench.configs import (
    MERGED,
    first_of_each_category,
    in_batches,
    make_configs,
    settings_of,
)
from specdec_lab.bench.results import Results

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded

    from specdec_lab.bench.runs import Config

PEERS = ("prompt_lookup", "assisted", "compiled", "llama.cpp", "openvino", "rejection", "best_of")
MEASURED = ("guard", "rule", "ablate", *(name for names in LOSSY_RULES.values() for name in names))


def repeated(usage: str, text: str, default: str, *checks: Check) -> Any:
    """An option that may be given several times."""
    return option(usage, f"{text} May be repeated.  [default: {default}]", *checks)


Questions = Annotated[
    str,
    option(
        "--questions FILE",
        'Prompts as JSON lines with "turns" and "category" (Spec-Bench); the first turn is asked.',
    ),
]
Drafters = Annotated[
    list[str],
    options.drafter_option(
        "A drafter to measure, as for generate; a+b merges two. May be repeated.  [default: "
        "each name that needs no value, and prompt_lookup+suffix_automaton]"
    ),
]
Schedules = Annotated[
    list[str],
    repeated(
        "--num-assistant-tokens-schedule NAME",
        "A schedule to measure with each drafter; trees that take none of those given are "
        "measured with constant.",
        "optimal for auto, else constant",
    ),
]
Peers = Annotated[
    list[str],
    repeated(
        "--peer NAME", f"{', '.join(PEERS)}, or none.", "prompt_lookup", one_of(*PEERS, "none")
    ),
]
Temperatures = Annotated[
    list[float], repeated("--temperature X", "0 is greedy, more samples.", "0")
]
Dtypes = Annotated[
    list[str],
    repeated(
        "--dtype DTYPE", f"{', '.join(DTYPES)}.", "auto; float32 for random weights",
        one_of(*DTYPES),
    ),
]  # fmt: skip
BatchSizes = Annotated[list[int], repeated("--batch-size N", "Prompts answered together.", "1")]
Runs = Annotated[
    int,
    option(
        "--runs N", "Answers of each drafter to each batch; their median time counts.", at_least(1)
    ),
]
Markdown = Annotated[Path | None, option("--markdown FILE", "Write the tables here.")]


@takes_settings(
    without=(
        "system", "chat_template", "dtype", "temperature", "top_k", "min_p", "seed",
        "drafter", "cascade", "tree", "num_assistant_tokens_schedule",
    ),
    max_new_tokens=64,
)  # fmt: skip
def bench(
    *,
    questions: Questions,
    drafter: Drafters = (),  # type: ignore[assignment]
    schedule: Schedules = (),  # type: ignore[assignment]
    peer: Peers = (),  # type: ignore[assignment]
    dtype: Dtypes = (),  # type: ignore[assignment]
    batch_size: BatchSizes = (),  # type: ignore[assignment]
    temperature: Temperatures = (),  # type: ignore[assignment]
    settings: Settings,
    limit: Annotated[
        int | None, option("--limit N", "Only the first N prompts of each category.", LIMIT)
    ] = None,
    runs: Runs = 3,
    json_file: options.JsonFile = None,
    markdown: Markdown = None,
) -> None:
    """Measure drafters and schedules against model.generate, and against other ways to generate.

    Each answer with drafts is made in turns with one of model.generate and one of this library
    without drafts, so that a ratio tells which of the two made it. Other answers are made in turns
    with model.generate.
    """
    check_outputs([Path(questions)], json_file, markdown)
    number = settings.num_assistant_tokens
    if number is not None:
        at_least(1)("--num-assistant-tokens", number)
    dtypes, peers = once(dtype, "auto"), once(peer, "prompt_lookup")
    if "none" in peers and len(peers) > 1:
        fail(f"--peer none must be the only one, got {', '.join(peers)}")
    peers = [name for name in peers if name != "none"]
    samplings = samplings_of(once(temperature, 0.0), settings.sampling["top_p"])
    completed, source, checked = _checked(settings, samplings, list(drafter), schedule)
    prompts = first_of_each_category(read_prompts(questions), limit)
    sizes = once(batch_size, 1)
    for size in sizes:
        if not 1 <= size <= len(prompts):
            fail(f"--batch-size must be in [1, {len(prompts)}], the prompts, got {size}")
    results = Results()
    for one in dtypes:
        settings_without_drafts = [replace(each, dtype=one) for each in completed]
        loaded, configs, left_out = _load(
            settings_without_drafts[0], checked, source, peers, prompts, named=bool(drafter)
        )
        for size in sizes:
            batches = in_batches(loaded, prompts, size)
            for without_drafts in settings_without_drafts:
                results.measure(loaded, configs, batches, without_drafts, runs, left_out)
    results.write(json_file, markdown)


def once(given: Sequence[Any], default: Any) -> list[Any]:
    """What was given, each once, or the default alone."""
    return list(dict.fromkeys(given)) or [default]


def check_outputs(read: list[Path], json_file: Path | None, markdown: Path | None) -> None:
    """Refuse files that cannot be written, or that are one another or among those read."""
    for name, path in (("--json", json_file), ("--markdown", markdown)):
        if path is not None:
            check_output(name, path, read)
    if json_file is not None and markdown is not None and json_file.resolve() == markdown.resolve():
        fail(f"--json and --markdown must name different files, got {markdown} twice")


def samplings_of(temperatures: list[float], top_p: float | None) -> list[dict[str, Any]]:
    """The sampling parameters of each temperature; top-p counts where something is sampled."""
    if top_p is not None and not any(temperatures):
        fail("--top-p needs --temperature above 0: greedy decoding does not sample")
    return [{"temperature": x, "top_k": None, "top_p": top_p if x else None} for x in temperatures]


def _checked(
    settings: Settings, samplings: list[dict[str, Any]], drafters: list[str], schedules: list[str]
) -> tuple[list[Settings], Source, list[tuple[Settings, Sources]]]:
    """Settings without drafts by sampling, the target, and the settings of each drafter."""
    named = (name for name, one in all_drafters().items() if one.serves_all and not one.needs_value)
    drafters = drafters or [*named, f"prompt_lookup{MERGED}suffix_automaton"]
    # Plain generation, which is compared with, takes none of what is measured.
    measured = {name: getattr(settings, name) for name in MEASURED}
    defaults = {one.name: one.default for one in fields(Settings)}
    unmeasured: dict[str, Any] = {name: defaults[name] for name in MEASURED}
    common = replace(settings, drafter=("none",), num_assistant_tokens=None, **unmeasured)
    completed = []
    for sampling in samplings:
        plain = replace(common, sampling=sampling)
        number = settings.num_assistant_tokens
        drafting = settings_of(replace(plain, **measured), drafters, schedules, number)
        (without_drafts, sources), *checked = map(check, (plain, *drafting))
        completed.append(replace(plain, sampling=without_drafts.sampling))
    return completed, sources.model, checked


def _load(
    settings: Settings,
    checked: list[tuple[Settings, Sources]],
    source: Source,
    peers: list[str],
    prompts: list[Question],
    *,
    named: bool,
) -> tuple[Loaded, list[Config], dict[str, str]]:
    """The models in one dtype, the configs, and why a peer is left out."""
    chosen = [each for each, _ in checked]
    names = [name for each in chosen for name in each.drafter]
    found = Sources(source, [one for _, each in checked for one in each.drafters])
    with progress_bar() as say:
        check_fit = functools.partial(check_prompts, prompts, settings)
        loaded = load_models(replace(settings, drafter=names), found, say, check_fit)
        return loaded, *make_configs(chosen, loaded, peers, source, named=named)
