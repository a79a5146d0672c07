"""Pages that show in colours what the terminal prints, and need nothing beside themselves."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from specdec_hf.cli.terminal import Terminal, visible

WIDTH = 120  # characters of a line


@contextmanager
def page(path: Path, header: Mapping[str, str]) -> Iterator[Terminal]:
    """A terminal, of which what the block prints becomes an HTML page.

    Args:
        path: of the page.
        header: names and values that come first, such as the model's name.
    """
    terminal = Terminal(
        file=io.StringIO(), record=True, width=WIDTH, force_terminal=True,
        color_system="truecolor", legacy_windows=False, _environ={},
    )  # fmt: skip
    for name, value in header.items():
        terminal.print(visible(f"{name}: {value}"))
    yield terminal
    path.write_text(terminal.export_html(), encoding="utf-8")
