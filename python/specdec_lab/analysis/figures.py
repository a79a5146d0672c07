"""Figures 2 to 5 of Leviathan et al. 2023, with what was measured here drawn into them.

`write_pictures` writes them, and the page of tokens beside them. Importing this module
imports torch and matplotlib.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from specdec_hf.cli.checks import Settings
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.prompts import Question
from specdec_hf.cli.terminal import console, visible
from specdec_hf.loop.statistics import RoundRecord

from specdec_kernels.analysis import (
    expected_tokens,
    operations_factor,
    optimal_gamma,
    walltime_factor,
)
from specdec_lab.analysis.encoders import EncoderSeconds
from specdec_lab.analysis.measure import DrafterAnalysis
from specdec_lab.analysis.page import page
from specdec_lab.analysis.printing import print_answer, print_table
from specdec_lab.analysis.replay import Text
from specdec_lab.analysis.tables import ShownTable
from specdec_lab.pictures import write_figure

GAMMAS = (1, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)
ALPHAS = np.linspace(0, 0.99, 199)
DRAFT, VERIFY, ACCEPT, PROMPT = "#4c78a8", "#7b4ea3", "#bab0ac", "#d8c7e8"
ENCODER, DRAFT_ENCODER = "#eeca3b", "#f58518"  # yellow and orange, as in the paper
MARK: dict[str, Any] = {"color": "#d62728", "markeredgecolor": "white", "zorder": 5}
SIGNS = "osD^v<>P"  # one for each measured point
SHOWN_ROUNDS = 14  # of the timeline's last row


@dataclass(frozen=True)
class Measured:
    """A point to mark in the figures.

    Attributes:
        name: of the drafter.
        alpha: acceptance rate.
        gamma: drafts per round.
        cost: c, of one draft step in plain steps.
        tokens: tokens per round.
        speed: tokens per second over those of plain decoding.
    """

    name: str
    alpha: float
    gamma: int
    cost: float
    tokens: float
    speed: float


def write_pictures(
    output: Path,
    loaded: Loaded,
    prompts: Sequence[Question],
    settings: Settings,
    found: Sequence[DrafterAnalysis],
    plain: Sequence[Text],
    tables: Sequence[ShownTable],
) -> None:
    """Write Figures 2 to 5 and the page of tokens, and say where.

    Args:
        output: folder, made where it is missing.
        loaded: names the model.
        prompts, settings: what was asked.
        found: what was measured of each drafter at the temperature of ``settings``.
        plain: the answer to each prompt without drafts.
        tables: for the page.
    """
    marks = [
        Measured(one.name, s.alpha, s.gamma, s.cost, s.measured_tokens, s.measured)
        for one in found
        for s in one.speeds
        if s.alpha is not None
    ]
    rows = [
        Timeline(
            f"{one.name}, {'depth' if one.trees else 'γ'} = {gamma}", calls[0].round_log,
            one.encoders[gamma], trees=one.trees,
        )
        for one in found
        for gamma, calls in sorted(one.calls.items(), reverse=True)
    ]  # fmt: skip
    rows.append(Timeline("plain", plain[0].stats.round_log, plain[0].encoders))
    drawn = {
        "figure-2.svg": draw_expected_tokens(marks),
        "figure-3.svg": draw_optimal_gamma(marks),
        "figure-4.svg": draw_speed_and_operations(marks),
        "figure-5.svg": draw_timeline(rows, model=f"{loaded.title}, {loaded.dtype}"),
    }
    output.mkdir(exist_ok=True)
    for name, figure in drawn.items():
        write_figure(figure, output / name)
    header = {
        "model": loaded.title,
        "dtype": loaded.dtype,
        "drafters": ", ".join(one.name for one in found),
        **{name.replace("_", "-"): f"{value:g}" for name, value in settings.sampling.items()},
        "seed of the first prompt": str(settings.seed),
    }
    with page(output / "figure-1.html", header) as terminal:
        for one in found:
            for prompt, answer in zip(prompts, one.answers, strict=True):
                print_answer(one.name, prompt, answer, terminal)
        for table in tables:
            print_table(table, terminal)
    names = ", ".join(["figure-1.html", *drawn])
    console.print(visible(f"wrote {names} to {output}"), style="dim")


def draw_expected_tokens(measured: Sequence[Measured] = ()) -> Figure:
    """Figure 2: tokens per round against alpha, for several gamma (Equation 1)."""
    figure, panel = _panel("expected tokens per round")
    colours = _colours(len(GAMMAS) + 1)
    for gamma, colour in zip(GAMMAS, colours, strict=False):
        curve = _curve(expected_tokens, gamma)
        panel.plot(ALPHAS, curve, color=colour, label=f"γ = {gamma}")
    panel.plot(ALPHAS, 1 / (1 - ALPHAS), color=colours[-1], linestyle="--", label="γ = ∞")
    _mark(panel, measured, "tokens")
    panel.set(xlim=(0, 1), ylim=(1, 10.5))
    panel.legend(frameon=False)
    return figure


def draw_optimal_gamma(measured: Sequence[Measured] = ()) -> Figure:
    """Figure 3: the best gamma against alpha, for several costs of a draft step (Theorem 3.8)."""
    figure, panel = _panel("optimal γ")
    alphas = ALPHAS[ALPHAS <= 0.96]
    for cost, colour in zip(COSTS, _colours(len(COSTS)), strict=True):
        best = [optimal_gamma(float(alpha), cost) for alpha in alphas]
        panel.step(alphas, best, color=colour, where="mid", label=f"c = {cost}")
    for point, sign in zip(measured, itertools.cycle(SIGNS), strict=False):
        best_here = optimal_gamma(min(point.alpha, 0.96), point.cost)
        label = f"{point.name}, c = {point.cost:.2g}"
        panel.plot([point.alpha], [best_here], sign, label=label, **MARK)
    panel.set(xlim=(0, 1), ylim=(-0.5, None))
    panel.legend(frameon=False)
    return figure


def draw_speed_and_operations(measured: Sequence[Measured] = ()) -> Figure:
    """Figure 4: speed-up and growth of the operations against alpha, at c = 0."""
    figure, panel = _panel("factor against plain decoding", width=8.2)
    for gamma, colour in zip(GAMMAS, _colours(len(GAMMAS)), strict=True):
        speed = _curve(walltime_factor, gamma, 0.0)
        panel.plot(ALPHAS, speed, color=colour, label=f"speed, γ = {gamma}")
        growth = _curve(operations_factor, gamma, 0.0)
        panel.plot(ALPHAS, growth, color=colour, linestyle=":", label=f"operations, γ = {gamma}")
    _mark(panel, measured, "speed")
    panel.set(xlim=(0, 1), ylim=(0, 10.5))
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    return figure


@dataclass(frozen=True)
class Timeline:
    """A row of Figure 5.

    Attributes:
        title: of the row.
        records: rounds of a call of one sequence; the first round reads the prompt.
        encoders: seconds of the encoders of an encoder-decoder and of its draft model.
        trees: whether rounds draft trees, whose nodes are not drafted one by one.
    """

    title: str
    records: Sequence[RoundRecord]
    encoders: EncoderSeconds = field(default_factory=EncoderSeconds)
    trees: bool = False

    @property
    def offset(self) -> float:
        """Seconds from the start of the target's encoder to the start of the call's rounds.

        The encoder of the draft model runs as the call begins, so it is a part of the time before
        the first round.
        """
        return self.encoders.target + max(0.0, self.encoders.drafter - self.records[0].began)

    @property
    def end(self) -> float:
        """Seconds until the last round has ended."""
        return self.offset + self.records[-1].began + self.records[-1].seconds


def draw_timeline(
    rows: Sequence[Timeline], seconds: float | None = None, model: str = ""
) -> Figure:
    """Figure 5: a timeline of recorded rounds, one row for each way of decoding.

    The time of drafting is divided evenly among the drafts of a round, because only its whole is
    recorded. The number above a round is that of the tokens it emitted. Encoders come first, that
    of the target before that of the draft model. The title says where the figure is cut, and each
    row that goes on says until when.

    Args:
        rows: the last is that of plain decoding.
        seconds: how much is shown; None shows the first rounds of the last row.
        model: for the title.
    """
    shown = seconds
    if shown is None:
        last = rows[-1].records[:SHOWN_ROUNDS][-1]
        shown = rows[-1].offset + last.began + last.seconds
    figure = Figure(figsize=(11, 0.9 + 0.95 * len(rows)), layout="constrained")
    panel = figure.subplots()
    for y, row in enumerate(rows):
        _draw_encoders(panel, y, row.encoders)
        for number, record in enumerate(row.records):
            if row.offset + record.began >= shown:
                break
            _draw_round(panel, y, row, record, reads_prompt=number == 0, shown=shown)
        if row.end > shown:
            panel.text(shown, y, f" … {row.end:.2f} s", va="center", fontsize=8)
    panel.set_yticks(range(len(rows)), [row.title for row in rows])
    panel.set(xlim=(0, shown), ylim=(len(rows) - 0.45, -0.6), xlabel="seconds")
    panel.tick_params(left=False)
    panel.spines[["top", "right", "left"]].set_visible(False)
    longest = max(row.end for row in rows)
    cut = f"cut at {shown:.2f} s of {longest:.2f} s" if longest > shown else "whole"
    panel.set_title(", ".join(filter(None, [model, "first answer", cut])), loc="left", fontsize=10)
    names = {
        "draft step": DRAFT,
        "target verifies": VERIFY,
        "accept and commit": ACCEPT,
        "target reads the prompt": PROMPT,
    }
    if any(row.encoders.target for row in rows):
        names |= {"encoder of the target": ENCODER, "encoder of the drafter": DRAFT_ENCODER}
    handles = [Patch(color=colour, label=name) for name, colour in names.items()]
    handles.append(Patch(facecolor="white", edgecolor=ACCEPT, label="gap: outside of rounds"))
    figure.legend(
        handles=handles, loc="outside lower right", ncols=len(handles), frameon=False,
        fontsize="small",
    )  # fmt: skip
    return figure


def _draw_encoders(panel: Any, y: int, encoders: EncoderSeconds) -> None:
    blocks = ((0.0, encoders.target, ENCODER), (encoders.target, encoders.drafter, DRAFT_ENCODER))
    for began, took, colour in blocks:
        if took:
            _draw_block(panel, y, began, took, colour)


def _draw_round(
    panel: Any, y: int, row: Timeline, record: RoundRecord, *, reads_prompt: bool, shown: float
) -> None:
    began, drafted = row.offset + record.began, record.drafted[0]
    if drafted:
        count = 1 if row.trees else drafted
        step = record.draft / count
        steps = [(began + i * step, step) for i in range(count)]
        panel.broken_barh(steps, (y - 0.3, 0.6), color=DRAFT, edgecolor="white", linewidth=0.6)
    began += record.draft
    _draw_block(panel, y, began, record.target, PROMPT if reads_prompt else VERIFY)
    rest = [(began + record.target, record.after_target)]
    panel.broken_barh(rest, (y - 0.3, 0.6), color=ACCEPT)
    if began + record.target <= shown:
        middle = began + record.target / 2
        panel.text(middle, y - 0.33, f"+{record.emitted[0]}", ha="center", va="bottom", fontsize=7)


def _draw_block(panel: Any, y: int, began: float, took: float, colour: str) -> None:
    block = [(began, took)]
    panel.broken_barh(block, (y - 0.3, 0.6), color=colour, edgecolor="white", linewidth=0.6)


def _panel(ylabel: str, width: float = 6.4) -> tuple[Figure, Any]:
    """An empty panel over the acceptance rate."""
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    panel = figure.subplots()
    panel.set(xlabel="acceptance rate α", ylabel=ylabel)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    return figure, panel


def _curve(formula: Callable[..., float], *arguments: float) -> list[float]:
    return [formula(float(alpha), *arguments) for alpha in ALPHAS]


def _colours(count: int) -> list[str]:
    return [to_hex(colormaps["viridis"](0.05 + 0.8 * i / (count - 1))) for i in range(count)]


def _mark(panel: Any, measured: Sequence[Measured], value: str) -> None:
    """Mark measured points, each gamma by another sign."""
    for point, sign in zip(measured, itertools.cycle(SIGNS), strict=False):
        label = f"{point.name}, γ = {point.gamma}"
        panel.plot([point.alpha], [getattr(point, value)], sign, label=label, **MARK)
