"""Measured acceptance vectors in JSON files, for `TreeSpec.sequoia`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_hf.trees.checks import check_probabilities


def save_acceptance(path: str | Path, acceptance: Sequence[float]) -> None:
    """Write an acceptance vector as JSON, for `load_acceptance` and `TreeSpec.sequoia`."""
    listed = check_probabilities("acceptance", acceptance)
    Path(path).write_text(json.dumps({"acceptance": listed}) + "\n", encoding="utf-8")


def load_acceptance(path: str | Path) -> list[float]:
    """Read an acceptance vector that `save_acceptance` wrote.

    Raises:
        ValueError: the file cannot be read or holds something else; the message says why.
    """
    try:
        content: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"cannot read acceptance file {path}: {reason}") from error
    if not isinstance(content, dict) or not isinstance(content.get("acceptance"), list):
        raise ValueError(f'{path}: needs "acceptance", a list of probabilities')
    try:
        return check_probabilities("acceptance", content["acceptance"])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error
