"""Draws time against batch and vocabulary from a results file, with the byte floor.

python -m bench.plot RESULTS.json [--out FOLDER]
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import typer

mpl.use("agg")
import matplotlib.pyplot as plt

from bench.results import Row, Run, read

AXES = {"batch": "B", "vocabulary": "V"}


def _rest(point: dict[str, Any], axis: str) -> tuple[Any, ...]:
    return tuple((k, v) for k, v in point.items() if k not in (axis, "id"))


def series(run: Run, axis: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows that differ along the axis alone, where there are three places or more."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in run.rows:
        found.setdefault(_rest(row.point, axis), []).append(row)
    return {rest: rows for rest, rows in found.items() if len({r.point[axis] for r in rows}) >= 3}


def _title(rest: tuple[Any, ...]) -> str:
    values = dict(rest)
    words = [f"{AXES[k]}={values[k]}" for k in AXES if k in values]
    words += [f"gamma={values['gamma']}", values["dtype"], values["filters"]]
    words += [f"acceptance {values['acceptance']:g}", f"from {values['start']}"]
    return ", ".join(words)


def draw(run: Run, rows: list[Row], axis: str, title: str, path: Path) -> None:
    """One panel of time from the host; where graphs were replayed, one more of their replay."""
    kinds = [("us", "a call from the host")]
    if any(row.graph_us for row in rows):
        kinds.append(("graph_us", "its replay as a CUDA graph"))
    figure, panels = plt.subplots(
        1, len(kinds), figsize=(6.5 * len(kinds), 4.6), squeeze=False, sharey=True
    )
    for panel, (kind, name) in zip(panels[0], kinds, strict=True):
        for provider in dict.fromkeys(row.provider for row in rows):
            ordered = sorted(
                (row for row in rows if row.provider == provider and getattr(row, kind)),
                key=lambda row: row.point[axis],
            )
            x = [row.point[axis] for row in ordered]
            line = panel.plot(x, [getattr(r, kind) for r in ordered], marker="o", label=provider)
            low, high = ([getattr(r, f"{kind}_{end}") for r in ordered] for end in ("low", "high"))
            panel.fill_between(x, low, high, alpha=0.2, color=line[0].get_color())
        floor = sorted({row.point[axis]: row.floor_us for row in rows}.items())
        panel.plot(*zip(*floor, strict=True), "k--", label="byte floor")
        panel.set(xscale="log", yscale="log", xlabel=AXES[axis], ylabel="microseconds", title=name)
        panel.set_xticks([x for x, _ in floor], [str(x) for x, _ in floor], rotation=45)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    bandwidth = run.machine["bandwidth"] / 1e9
    figure.suptitle(f"{run.machine['device']} ({bandwidth:.0f} GB/s read): {title}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def plots(path: Path, folder: Path) -> list[Path]:
    """Every series of a results file as an SVG file in the folder."""
    run, made = read(path), []
    folder.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = path.stem
    for axis in AXES:
        count: Counter[str] = Counter()
        for rest, rows in series(run, axis).items():
            values = dict(rest)
            name = f"{path.stem}-{axis}-{values['filters']}-{values['start']}"
            count[name] += 1
            suffix = f"-{count[name]}" if count[name] > 1 else ""
            made.append(folder / f"{name}{suffix}.svg")
            draw(run, rows, axis, _title(rest), made[-1])
    return made


def main(
    results: Annotated[Path, typer.Argument(help="A JSON file of bench.sweep.")],
    out: Annotated[Path | None, typer.Option(help="Folder; beside the file by default.")] = None,
) -> None:
    """Draw a results file."""
    for path in plots(results, out or results.parent):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
