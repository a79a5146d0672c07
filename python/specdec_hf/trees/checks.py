"""Validation of the numbers that describe a tree."""

from __future__ import annotations

from typing import Any

from specdec_hf.arguments import check_number, check_sequence

MAX_NODES = 1024


def check_probabilities(name: str, values: Any) -> list[float]:
    """The values as probabilities, at least one of them."""
    listed = check_sequence(name, values)
    if not listed:
        raise ValueError(f"{name} must have at least one entry, got none")
    return [check_number(f"{name}[{k}]", value, 0, 1) for k, value in enumerate(listed)]
