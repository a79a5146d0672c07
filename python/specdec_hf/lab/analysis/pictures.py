"""The figures and the page that the command ``analyze`` writes.

Importing this module imports torch and matplotlib.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specdec_hf.cli.checks import Settings
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.prompts import Prompt
from specdec_hf.cli.terminal import console, visible
from specdec_hf.decode.statistics import SpecStats
from specdec_hf.lab.analysis import figures
from specdec_hf.lab.analysis.measure import DrafterAnalysis
from specdec_hf.lab.analysis.page import Answer, render_page


def write_pictures(
    output: Path,
    loaded: Loaded,
    prompts: Sequence[Prompt],
    settings: Settings,
    found: Sequence[DrafterAnalysis],
    plain: Sequence[SpecStats],
) -> None:
    """Write Figures 2 to 5 and the page of tokens, and say where.

    Args:
        output: folder, made where it is missing.
        loaded: names the model.
        prompts, settings: what was asked.
        found: what was measured of each drafter at the temperature of ``settings``.
        plain: statistics of each prompt without drafts.
    """
    marks = [
        figures.Measured(one.name, s.alpha, s.gamma, s.cost, s.measured_tokens, s.measured)
        for one in found
        for s in one.speeds
    ]
    rows = [
        (f"{one.name}, γ = {gamma}", calls[0].round_log)
        for one in found
        for gamma, calls in sorted(one.calls.items(), reverse=True)
    ]
    drawn = {
        "figure-2.svg": figures.draw_expected_tokens(marks),
        "figure-3.svg": figures.draw_optimal_gamma(marks),
        "figure-4.svg": figures.draw_speed_and_operations(marks),
        "figure-5.svg": figures.draw_timeline([*rows, ("plain", plain[0].round_log)]),
    }
    output.mkdir(exist_ok=True)
    for name, figure in drawn.items():
        figure.savefig(output / name, metadata={"Date": None})
    answers = [
        Answer(f"{one.name}: {prompt}", prompt.turns[0], answer.rounds)
        for one in found
        for prompt, answer in zip(prompts, one.answers, strict=True)
    ]
    header = {
        "model": loaded.title,
        "dtype": loaded.dtype,
        "drafters": ", ".join(one.name for one in found),
        **{name.replace("_", "-"): f"{value:g}" for name, value in settings.sampling.items()},
        "seed of the first prompt": str(settings.seed),
    }
    page = output / "figure-1.html"
    page.write_text(render_page("How each token came about", header, answers), encoding="utf-8")
    names = ", ".join(["figure-1.html", *drawn])
    console.print(visible(f"wrote {names} to {output}"), style="dim")
