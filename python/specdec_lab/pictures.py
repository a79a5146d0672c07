"""The one way in which the laboratory writes figures: matplotlib, as SVG."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure


def write_figure(figure: Figure, path: Path) -> None:
    """Write a figure; equal figures become equal files."""
    with rc_context({"svg.hashsalt": "specdec"}):
        figure.savefig(path, metadata={"Date": None})
