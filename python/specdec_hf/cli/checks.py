"""Arguments that the command line refuses before it loads a model, with one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console

from specdec_hf.trees.layouts import as_layout

ERROR_EXIT = 2
MAX_NUM_ASSISTANT_TOKENS = 1024  # as in decode/session.py, whose import loads torch

errors = Console(stderr=True, highlight=False, soft_wrap=True)


def fail(message: str) -> NoReturn:
    """One clear line on stderr, exit code 2."""
    errors.print(f"error: {' '.join(message.split())}", markup=False)
    raise typer.Exit(ERROR_EXIT)


def check_ranges(
    sampling: dict[str, Any],
    max_new_tokens: int,
    num_assistant_tokens: int | None,
    seed: int,
    limit: int | None,
    json_file: Path | None,
) -> None:
    """Refuse numbers out of range, and a --json path that cannot be written."""
    if not 0 <= sampling["temperature"] < float("inf"):
        fail(f"--temperature must be finite and >= 0, got {sampling['temperature']}")
    if not 0 <= sampling["top_k"] < 2**31:
        fail(f"--top-k must be in [0, 2**31), got {sampling['top_k']}")
    if not 0 < sampling["top_p"] <= 1:
        fail(f"--top-p must be in (0, 1], got {sampling['top_p']}")
    if not 0 <= sampling["min_p"] <= 1:
        fail(f"--min-p must be in [0, 1], got {sampling['min_p']}")
    if not 1 <= max_new_tokens < 2**31:
        fail(f"--max-new-tokens must be in [1, 2**31), got {max_new_tokens}")
    drafts = num_assistant_tokens
    if drafts is not None and not 0 <= drafts <= MAX_NUM_ASSISTANT_TOKENS:
        fail(f"--num-assistant-tokens must be in [0, {MAX_NUM_ASSISTANT_TOKENS}], got {drafts}")
    if not -(2**63) <= seed < 2**63:
        fail(f"--seed must be in [-2**63, 2**63), got {seed}")
    if limit is not None and limit < 1:
        fail(f"--limit must be >= 1, got {limit}")
    check_json(json_file)


def parse_branching(tree: str | None) -> tuple[int, ...] | None:
    """The numbers of children in ``--tree``."""
    if tree is None:
        return None
    widths = tree.split(",")
    if not all(width.isdecimal() and len(width) < 5 for width in widths):
        fail(f"--tree must be numbers of children such as 4,2,1, got {tree}")
    branching = tuple(map(int, widths))
    try:
        as_layout(branching)
    except (TypeError, ValueError) as error:
        fail(f"--{error}")
    return branching


def check_json(path: Path | None) -> None:
    """Refuse a path that cannot be written."""
    if path is not None and path.is_dir():
        fail(f"--json must name a file, {path} is a folder")
    if path is not None and not path.absolute().parent.is_dir():
        fail(f"--json: folder {path.parent} does not exist")
