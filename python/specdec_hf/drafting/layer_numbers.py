"""Which layers a drafter of the target's own layers may name.

This module does without torch, because the command line checks ``--drafter`` before it loads torch.
"""

from __future__ import annotations

from specdec_hf.drafting.parsed import parse_drafter


def check_first_layers(layers: int, total: int) -> None:
    """Raise ValueError where ``layers:N`` needs more layers than the target's ``total``."""
    if not 1 <= layers <= total:
        raise ValueError(f"drafter layers:N must have N in [1, {total}], got {layers}")


def check_exit(layers: int, total: int) -> None:
    """Raise ValueError where ``early_exit:N`` leaves out no layer of the target."""
    if layers >= total:
        raise ValueError(
            f"layers must be below the target's {total} with drafter early_exit, got {layers}"
        )


def check_last_skipped(last: int, total: int) -> None:
    """Raise ValueError where ``layer_skip:A-B`` names a layer that the target lacks."""
    if last >= total:
        raise ValueError(
            f"last must be below the target's {total} layers with drafter layer_skip, got {last}"
        )


_CHECKS = {"layers": check_first_layers, "early_exit": check_exit, "layer_skip": check_last_skipped}


def check_layers_of(text: str, total: int) -> None:
    """Make the check of a drafter's text; ValueError as above, and none where it names no layer."""
    check, number = _CHECKS.get(text.partition(":")[0]), parse_drafter(text).value.split("-")[-1]
    if check is not None and number.isdecimal() and len(number) < 5:
        check(int(number), total)
