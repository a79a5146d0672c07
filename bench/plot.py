"""Draws a results file: of `bench.sweep`, `bench.forward` or `python -m specdec_hf bench --json`.

A sweep is drawn as time against batch, vocabulary and nodes with the byte floor, forwards as time
against the tokens that they read, and answers to prompts as two factors: this library without
drafts over ``model.generate``, and drafts over no drafts.

python -m bench.plot RESULTS.json [--out FOLDER]
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

mpl.use("agg")
import matplotlib.pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullFormatter

from bench.results import Row, Run, read

# Pages show a figure of two panels at about 0.7 of its width, where smaller words cannot be read.
mpl.rcParams |= {
    "font.size": 10, "axes.titlesize": 10, "axes.labelsize": 10, "legend.fontsize": 9,
    "figure.titlesize": 11,
}  # fmt: skip

AXES = {"batch": "B", "vocabulary": "V", "nodes": "N"}
MOST = 6  # series in one figure: the first ones of the grid
LIBRARY, OTHER = "#5c6bc0", "#9e9e9e"
GAIN = {"color": "#ef9a3c"}
LOSS = {"fill": False, "edgecolor": "#d62728", "hatch": "///"}
IDLE = {"fill": False, "edgecolor": OTHER, "hatch": "///"}  # drafts that were all rejected
LEGEND = {
    "gain": (GAIN, "speculation: with drafts over without"),
    "loss": (LOSS, "speculation that costs more than it gives"),
    "idle": (IDLE, "drafts of which none was accepted"),
}
PLAIN_NUMBERS = FuncFormatter(lambda value, _: f"{value:g}")  # powers have a font of their own


def _rest(config: dict[str, Any], axis: str) -> tuple[Any, ...]:
    return tuple((k, v) for k, v in config.items() if k not in (axis, "id"))


def series(run: Run, axis: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that differ in one field of their config only, if it takes three values or more."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in run.rows:
        if axis in row.config:
            found.setdefault(_rest(row.config, axis), []).append(row)
    several = [(k, rows) for k, rows in found.items() if len({r.config[axis] for r in rows}) >= 3]
    return dict(several[:MOST])


def _title(rest: tuple[Any, ...]) -> str:
    values = dict(rest)
    words = [f"{AXES[k]}={values[k]}" for k in AXES if k in values]
    words += [f"gamma={values['gamma']}" if "gamma" in values else values["rule"]]
    words += [values["dtype"], values["filters"]]
    how = [f"acceptance {values['acceptance']:g}", f"from {values['start']}"]
    return ", ".join(words) + "\n" + ", ".join(how)


def _panel(panel: Any, rows: list[Row], axis: str, kind: str, title: str) -> None:
    for provider in dict.fromkeys(row.provider for row in rows):
        ordered = sorted(
            (row for row in rows if row.provider == provider and getattr(row, kind)),
            key=lambda row: row.config[axis],
        )
        x = [row.config[axis] for row in ordered]
        line = panel.plot(x, [getattr(r, kind) for r in ordered], marker="o", label=provider)
        low, high = ([getattr(r, f"{kind}_{end}") for r in ordered] for end in ("low", "high"))
        panel.fill_between(x, low, high, alpha=0.2, color=line[0].get_color())
    floor = sorted({row.config[axis]: row.floor_us for row in rows}.items())
    panel.plot(*zip(*floor, strict=True), "k--", label="byte floor")
    panel.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="microseconds")
    panel.set_title(title)
    panel.minorticks_off()
    panel.yaxis.set_major_formatter(PLAIN_NUMBERS)
    panel.set_xticks([x for x, _ in floor], [str(x) for x, _ in floor])
    panel.grid(alpha=0.3)


def _save(figure: Any, path: Path) -> None:
    """Write a figure; the same data gives the same file."""
    mpl.rcParams |= {"svg.hashsalt": path.stem, "svg.fonttype": "none"}  # words stay words
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(run: Run, axis: str, path: Path) -> bool:
    """Draw each series as a row of panels: host calls and, if measured, CUDA graph replays.

    Returns False if there is no series along this axis.
    """
    found = series(run, axis)
    if not found:
        return False
    kinds = {"us": "call from the host", "graph_us": "replay as a CUDA graph"}
    if not any(row.graph_us for row in run.rows):
        del kinds["graph_us"]
    size = (4.8 * len(kinds), 4.2 * len(found) + 0.4)
    figure, panels = plt.subplots(len(found), len(kinds), figsize=size, squeeze=False, sharey="row")
    figure.set_layout_engine("constrained")
    for line, (rest, rows) in zip(panels, found.items(), strict=True):
        for panel, (kind, name) in zip(line, kinds.items(), strict=True):
            _panel(panel, rows, axis, kind, f"{_title(rest)}: {name}")
        handles, names = line[0].get_legend_handles_labels()
        line[-1].legend(handles, names, loc="upper left", bbox_to_anchor=(1.01, 1))
    machine = run.machine
    figure.suptitle(f"{machine['device']}, {machine['bandwidth'] / 1e9:.0f} GB/s read")
    _save(figure, path)
    return True


@dataclass(frozen=True)
class Bar:
    """Ratios of speeds over ``model.generate``, or of drafts over no drafts (speculation)."""

    name: str
    together: float
    library: float | None = None
    speculation: float | None = None
    interval: tuple[float, float] | None = None

    @classmethod
    def of_row(cls, row: dict[str, Any], name: str | None = None) -> Bar:
        speeds = row["speeds"] or {"library": None, "speculation": None}
        ratios = {key: speeds[key] for key in ("library", "speculation")}
        return cls(name or row["name"], row["ratio"], interval=row["interval"], **ratios)

    @property
    def drafts(self) -> str | None:
        """What drafts did, a name of `LEGEND`; None where it is not known."""
        if self.library is None:
            return None
        if self.speculation is None:
            return "idle"
        return "gain" if self.speculation >= 1 else "loss"

    @property
    def label(self) -> str:
        """The total, and the factors where drafts were accepted."""
        if self.library is None or self.speculation is None:
            return f"{self.together:.2f}"
        return f"{self.together:.2f} = {self.library:.2f} × {self.speculation:.2f}"


def _draw_bars(panel: Any, bars: list[Bar], title: str, places: int) -> None:
    """Bars from 1 on an axis where factors add up, the first on top of as many places."""
    for y, bar in enumerate(bars):
        end = bar.together
        if bar.library is None:
            panel.barh(y, end - 1, left=1, color=OTHER)
        else:
            panel.barh(y, bar.library - 1, left=1, color=LIBRARY)
            style, _ = LEGEND[bar.drafts]
            panel.barh(y, end - bar.library, left=bar.library, **style)
            end = max(end, bar.library)
        if bar.interval is not None:
            panel.plot(bar.interval, (y, y), color="black", linewidth=1.5)
            end = max(end, bar.interval[1])
        panel.annotate(
            bar.label, (max(end, 1), y), xytext=(5, 0), textcoords="offset points", va="center"
        )
    panel.axvline(1, color="black", linewidth=0.8)
    ends = [1.0, *(bar.together for bar in bars), *(bar.library or 1.0 for bar in bars)]
    panel.set(xscale="log", xlim=(0.97 * min(ends), 1.05 * max(ends) ** 1.5))
    panel.set_yticks(range(len(bars)), [bar.name for bar in bars])
    panel.set_ylim(places - 0.4, -0.6)
    ticks = [tick for tick in (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10) if tick <= 1.1 * max(ends)]
    panel.set_xticks([tick for tick in ticks if tick >= min(ends)])
    panel.xaxis.set_major_formatter(PLAIN_NUMBERS)
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.set_xlabel("tokens a second over model.generate (logarithmic)")
    panel.set_title(title)
    panel.spines[["top", "right"]].set_visible(False)


def draw_speeds(table: dict[str, Any], path: Path) -> None:
    """Draw a table of `python -m specdec_hf bench`: its configs, and the categories of the last."""
    last = table["rows"][-1]
    # The blue part of each bar tells what a row of its own has.
    others = [row for row in table["rows"][1:-1] if not row["name"].startswith("without drafts")]
    categories = [Bar(name, **ratios) for name, ratios in last["categories"].items()]
    by_category = [Bar.of_row(last, "all prompts"), *categories]
    shown = [(by_category, last["name"])]
    if others:
        every = ([Bar.of_row(row) for row in [*others, last]], "all prompts")
        shown = [every, *shown] if categories else [every]
    places = max(len(bars) for bars, _ in shown)
    size = (7.5 * len(shown), 1.9 + 0.3 * places)
    figure, axes = plt.subplots(1, len(shown), figsize=size, squeeze=False)
    figure.set_layout_engine("constrained")
    for panel, (bars, title) in zip(axes[0], shown, strict=True):
        _draw_bars(panel, bars, title, places)
    handles = [Patch(color=LIBRARY, label="this library without drafts over model.generate")]
    drafts = {bar.drafts for bars, _ in shown for bar in bars}
    handles += [
        Patch(label=name, **style) for key, (style, name) in LEGEND.items() if key in drafts
    ]
    columns = min(len(handles), 2 * len(shown))  # more do not fit
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    figure.suptitle(textwrap.fill(table["title"], 90 * len(shown)))
    _save(figure, path)


def draw_forwards(content: dict[str, Any], path: Path) -> None:
    """Draw the linear layers of one model: milliseconds against the tokens of a forward."""
    runs, machine = content["runs"], content["machine"]
    size = (5.2 * len(runs), 3.8)
    figure, axes = plt.subplots(1, len(runs), figsize=size, squeeze=False, sharey=True)
    for panel, run in zip(axes[0], runs, strict=True):
        for name, ms in run["ms"].items():
            floor = name == "floor"
            style = "k--" if floor else "-"
            panel.plot(run["rows"], ms, style, marker=None if floor else "o", label=name)
        panel.set(xscale="log", yscale="log", xlabel="tokens of a forward", ylabel="milliseconds")
        panel.minorticks_off()
        panel.set_xticks(run["rows"], list(map(str, run["rows"])))
        panel.set_title(f"{content['model']}, {run['dtype']}, {run['threads']} threads")
        panel.yaxis.set_major_formatter(PLAIN_NUMBERS)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle(f"{machine['device']}, commit {machine['commit'][:8]}")
    figure.tight_layout()
    _save(figure, path)


def plots(path: Path, folder: Path) -> list[Path]:
    """Draw a results file; the SVG files written, of a sweep one for each axis that it varies."""
    content = json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    if "results" in content:
        tables = content["results"]
        if any("speeds" not in row for table in tables for row in table["rows"]):
            raise SystemExit(f"{path} has no answers without drafts in turns; measure it again")
        ends = [f"-{n}" for n, _ in enumerate(tables, start=1)] if len(tables) > 1 else [""]
        files = [folder / f"{path.stem}{end}.svg" for end in ends]
        for table, file in zip(tables, files, strict=True):
            draw_speeds(table, file)
        return files
    if "runs" in content:
        draw_forwards(content, folder / f"{path.stem}.svg")
        return [folder / f"{path.stem}.svg"]
    run = read(path)
    made = [(axis, folder / f"{path.stem}-{axis}.svg") for axis in AXES]
    return [file for axis, file in made if draw(run, axis, file)]


def main(
    results: Annotated[Path, typer.Argument(help="A JSON file of results.")],
    out: Annotated[Path | None, typer.Option(help="Folder; beside the file by default.")] = None,
) -> None:
    """Draw a results file."""
    made = plots(results, out or results.parent)
    for path in made:
        typer.echo(path)
    if not made:
        typer.echo(f"{results} has no three configs that differ in B, V or N only: nothing to draw")


if __name__ == "__main__":
    typer.run(main)
