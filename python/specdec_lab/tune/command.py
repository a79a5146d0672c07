"""The command ``tune``: the drafts that pay on one's own prompts and machine."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from specdec_hf.arguments import split_options
from specdec_hf.cli import options
from specdec_hf.cli.checks import Settings, Sources, takes_settings
from specdec_hf.cli.options import LIMIT, POSITIVE, option
from specdec_hf.cli.prompts import Question, read_prompts
from specdec_hf.cli.run import check_prompts, load_models, progress, progress_bar
from specdec_hf.cli.terminal import INTERRUPTED as EXIT
from specdec_hf.cli.terminal import console, fail, visible
from specdec_hf.options import COMMON

from specdec_lab.bench.configs import categories_in_turns, in_batches
from specdec_lab.bench.results import print_figures
from specdec_lab.tune.candidates import (
    DRAFTERS_TRIED,
    MIN_BATCHES,
    Candidate,
    first_candidates,
)

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded

    from specdec_lab.tune.search import Trial, TuneResult

COLUMNS = ("tokens/s", "speculation", "90 %", "tau", "same")
clock = time.perf_counter
# Of the options of the loop, a candidate or later calls decide all but this one.
KEPT = ("compile",)


@takes_settings(
    without=(
        "system", "chat_template", "cascade", *(name for name in COMMON if name not in KEPT)
    ),
    max_new_tokens=64,
)  # fmt: skip
def tune(
    *,
    prompts: Annotated[
        str,
        option(
            "--prompts FILE",
            'Prompts like those to come, as JSON lines with "turns"; the first turn is asked. '
            "- reads standard input.",
        ),
    ],
    drafter: Annotated[
        list[str],
        options.drafter_option(
            "A drafter to measure beside those that need nothing, as for generate; a+b merges two. "
            f"May be repeated.  [always: {', '.join(DRAFTERS_TRIED)}]"
        ),
    ] = (),  # type: ignore[assignment]
    settings: Settings,
    limit: Annotated[
        int | None, option("--limit N", "Only N prompts, of the categories in turns.", LIMIT)
    ] = None,
    batch_size: Annotated[int, option("--batch-size N", "Prompts answered together.")] = 1,
    minutes: Annotated[
        float, option("--minutes X", "How long to measure at most, once all is loaded.", POSITIVE)
    ] = 10.0,
) -> None:
    """Find the drafts that pay on your prompts and machine, and print the calls that make them.

    Drafters are measured first, then lengths, trees and schedules of the best, each in turns with
    this library without drafts. Ctrl-C ends the search and prints what it has found.
    """
    plain = Candidate.of(replace(settings, drafter=["none"]))
    without_drafts, target = plain.settings, plain.sources.model
    candidates = first_candidates(settings, drafter)
    for name in drafter:
        if name == "none":
            fail("--drafter must not be none: each drafter is compared with no drafts already")
        if "keep" in split_options(name, ("keep",))[1]:
            fail(
                f"--drafter must not keep texts of earlier calls, got {name}: the same prompts are "
                "answered again and again here"
            )
    chosen = categories_in_turns(read_prompts(prompts))[:limit]
    if len(chosen) < MIN_BATCHES:
        fail(f"--prompts must hold at least {MIN_BATCHES} prompts to compare, got {len(chosen)}")
    if not 1 <= batch_size <= len(chosen) // MIN_BATCHES:
        fail(
            f"--batch-size must be in [1, {len(chosen) // MIN_BATCHES}] with {len(chosen)} "
            f"prompts, so that {MIN_BATCHES} batches can be compared, got {batch_size}"
        )
    loaded, drafters, taken, left_out = _load(without_drafts, target, candidates, chosen)
    batches = in_batches(loaded, chosen, batch_size)
    found = _search(loaded, drafters, taken, batches, without_drafts, 60 * minutes, left_out)
    _conclude(found)
    if found.tells:
        best = plain if found.chosen is None else found.chosen.candidate
        for line in ("the same in Python and on the command line:", best.call, best.command):
            console.print(visible(line), soft_wrap=True)
    if found.ended == "interrupted":
        fail("interrupted", EXIT)
    if not found.tells:
        lacks = "are sure to be faster" if found.measured else f"answered {MIN_BATCHES} prompts"
        fail(f"--minutes must be longer, got {minutes:g}: no drafts {lacks}", 1)


def _load(
    without_drafts: Settings, target: Any, candidates: Sequence[Candidate], prompts: list[Question]
) -> tuple[Loaded, dict[str, Any], list[Candidate], dict[str, str]]:
    """The target, the drafters by their names, the candidates, and why others are left out."""
    sources = {
        name: source
        for one in candidates
        for name, source in zip(one.settings.drafter, one.sources.drafters, strict=True)
    }
    named = {name for one in candidates if one.named for name in one.settings.drafter}
    refused: dict[str, str] = {}

    def refuse(name: str, message: str) -> None:
        if name in named:
            fail(f"--drafter {name}: {message}")
        refused[name] = message

    with progress_bar() as say:
        loaded = load_models(
            replace(without_drafts, drafter=list(sources)),
            Sources(target, list(sources.values())), say,
            functools.partial(check_prompts, prompts, without_drafts), refuse,
        )  # fmt: skip
    drafters = dict(zip(sources, loaded.drafters, strict=True))
    taken, left_out = [], {}
    for one in candidates:
        reasons = [refused[name] for name in one.settings.drafter if name in refused]
        if reasons:
            left_out[one.name] = reasons[0]
        else:
            taken.append(one)
    return loaded, drafters, taken, left_out


def _search(
    loaded: Loaded,
    drafters: dict[str, Any],
    candidates: list[Candidate],
    batches: list[Any],
    without_drafts: Settings,
    seconds: float,
    left_out: dict[str, str],
) -> TuneResult:
    """Measure all stages; the table of each is printed when it is done."""
    from specdec_lab.tune.measure import Answers
    from specdec_lab.tune.search import OutOfTimeError, search

    began = clock()
    with progress() as bar:
        task = bar.add_task("", total=seconds)

        def advance(text: str) -> None:
            elapsed = clock() - began
            if elapsed >= seconds:
                raise OutOfTimeError
            bar.update(task, completed=elapsed, description=text)

        answers = Answers(loaded, drafters, batches, without_drafts, advance)
        found = search(
            candidates, answers, seconds - (clock() - began), clock,
            # In 16 bits rounding may tell answers from those of plain decoding.
            exact=not without_drafts.do_sample and loaded.dtype == "float32",
            on_stage=functools.partial(_print_stage, without_drafts),
        )  # fmt: skip
    left_out |= answers.left_out
    for name, reason in left_out.items():
        console.print(visible(f"left out, {name}: {reason}"), style="dim", soft_wrap=True)
    return found


def _print_stage(without_drafts: Settings, stage: str, trials: list[Trial]) -> None:
    *names, last = COLUMNS
    # Only texts without sampling are compared.
    names.append("answers" if without_drafts.do_sample else last)
    lines = []
    for trial in trials:
        speeds = trial.speeds()
        gain, ends, count = speeds.speculation, trial.interval, len(trial.every)
        lines.append((
            trial.candidate.name,
            f"{speeds.with_drafts:.1f}",
            "" if gain is None else f"{gain:.2f}",
            "" if gain is None or ends is None else "{:.2f}-{:.2f}".format(*ends),
            f"{trial.tokens_per_round:.2f}",
            str(count) if without_drafts.do_sample else f"{trial.identical} of {count}",
        ))  # fmt: skip
    print_figures(f"{stage}, compared with this library without drafts", ("", *names), lines)


def _conclude(found: TuneResult) -> None:
    """The choice, and the three speeds that it has."""
    lines, chosen, best = [], found.chosen, found.best
    if found.ended and best is not None:
        lines.append(
            f"ended early, {found.ended}: chance may have favoured what is the best so far"
        )
    if chosen is not None:
        ends = "{:.2f} to {:.2f}".format(*chosen.interval) if chosen.interval else "unknown"
        lines.append(
            f"chosen: {chosen.candidate.name}; {chosen.speeds(found.library)} (90 %: {ends})"
        )
    elif found.tells:
        lines.append("chosen: no drafts, since none are sure to be faster than decoding without")
    elif best is not None:
        name, count = best.candidate.name if best.speed > 1 else "no drafts", len(best.turns)
        needs = "" if found.measured else f" of the {MIN_BATCHES} prompts that a choice needs"
        lines.append(
            f"best so far, on {count}{needs or ' prompts'}: {name}; {best.speeds(found.library)}"
        )
    else:
        lines.append(f"{found.ended} before any drafts were measured")
    if found.library is not None:
        count = found.prompts_generated
        lines.append(
            f"without drafts this library is {found.library:.2f} times as fast as model.generate, "
            f"on {count} prompt{'s' * (count > 1)} that both answered"
        )
    for line in lines:
        console.print(visible(line), soft_wrap=True)
