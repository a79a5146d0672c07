"""Draws time against batch, vocabulary and nodes from a results file, with the byte floor.

python -m bench.plot RESULTS.json [--out FOLDER]
"""

from __future__ import annotations

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
    figure.savefig(path)
    plt.close(figure)
    return True


def plots(path: Path, folder: Path) -> list[Path]:
    """Draw a results file against each axis that its configs vary; the SVG files written."""
    run = read(path)
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = path.stem
    made = [(axis, folder / f"{path.stem}-{axis}.svg") for axis in AXES]
    return [file for axis, file in made if draw(run, axis, file)]


def main(
    results: Annotated[Path, typer.Argument(help="A JSON file of bench.sweep.")],
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
