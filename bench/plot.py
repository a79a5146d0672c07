"""Draws a results file: of `bench.sweep`, `bench.forward` or `python -m specdec_hf bench --json`.

A sweep is drawn as time against batch, vocabulary and nodes with the byte floor, forwards as time
against the tokens that they read, and answers to prompts as speeds over plain Transformers.

python -m bench.plot RESULTS.json [--out FOLDER]
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

mpl.use("agg")
import matplotlib.pyplot as plt

from bench.results import Row, Run, read

AXES = {"batch": "B", "vocabulary": "V", "nodes": "N"}
MOST = 6  # series in one figure: the first ones of the grid


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
    words += [f"acceptance {values['acceptance']:g}", f"from {values['start']}"]
    return ", ".join(words)


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
    panel.set_title(title, fontsize=8)
    panel.minorticks_off()
    panel.set_xticks([x for x, _ in floor], [str(x) for x, _ in floor], rotation=45)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="x-small")


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
    size = (6.5 * len(kinds), 4.4 * len(found) + 0.4)
    figure, panels = plt.subplots(len(found), len(kinds), figsize=size, squeeze=False, sharey="row")
    for line, (rest, rows) in zip(panels, found.items(), strict=True):
        for panel, (kind, name) in zip(line, kinds.items(), strict=True):
            _panel(panel, rows, axis, kind, f"{_title(rest)}: {name}")
    machine = run.machine
    figure.suptitle(f"{machine['device']}, {machine['bandwidth'] / 1e9:.0f} GB/s read", fontsize=10)
    figure.tight_layout()
    _save(figure, path)
    return True


def _bars(
    panel: Any, speeds: dict[str, float], intervals: dict[str, list[float]], title: str
) -> None:
    names = list(speeds)[::-1]
    panel.barh(names, [speeds[name] for name in names], color="#5c6bc0")
    panel.margins(y=max(0.02, 0.5 - 0.05 * len(names)))  # few bars are no broader than many
    for name in names:
        low, high = intervals.get(name, (speeds[name],) * 2)
        panel.plot((low, high), (name, name), color="black", linewidth=1.5)
        panel.annotate(
            f"{speeds[name]:.2f}", (high, name), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, bbox={"color": "white", "pad": 0.5},
        )  # fmt: skip
    panel.axvline(1, color="black", linestyle="--", linewidth=0.8)
    ends = [*speeds.values(), *(high for _, high in intervals.values())]
    panel.set_xlim(0, 1.2 * max(ends))
    panel.set_xlabel("tokens a second over plain Transformers", fontsize=9)
    panel.set_title(title, fontsize=9)
    panel.tick_params(labelsize=8)


def draw_speeds(table: dict[str, Any], path: Path) -> None:
    """Draw one table of `python -m specdec_hf bench`: its rows, and categories of the last one."""
    rows = table["rows"][1:]
    speeds = {row["name"]: row["ratio"] for row in rows}
    intervals = {row["name"]: row["interval"] for row in rows if "interval" in row}
    categories = rows[-1].get("categories")
    panels = 2 if categories else 1
    height = 1.4 + 0.26 * max(len(speeds), len(categories or ()))
    figure, axes = plt.subplots(
        1, panels, figsize=(5.2 * panels if panels > 1 else 7.5, height), squeeze=False
    )
    _bars(axes[0, 0], speeds, intervals, "all prompts" + ", with 90 % intervals" * bool(intervals))
    if categories:
        _bars(axes[0, 1], categories, {}, f"{rows[-1]['name']}, by category")
    figure.suptitle(table["title"], fontsize=9)
    figure.tight_layout()
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
        panel.set_title(f"{content['model']}, {run['dtype']}, {run['threads']} threads", fontsize=9)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="x-small")
    figure.suptitle(f"{machine['device']}, commit {machine['commit'][:8]}", fontsize=9)
    figure.tight_layout()
    _save(figure, path)


def plots(path: Path, folder: Path) -> list[Path]:
    """Draw a results file; the SVG files written, of a sweep one for each axis that it varies."""
    content = json.loads(path.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    if "results" in content:
        tables = content["results"]
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
