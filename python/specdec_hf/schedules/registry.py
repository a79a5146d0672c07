"""The schedules that have a name, for ``num_assistant_tokens_schedule`` and the command line.

This module does without torch, because the command line checks its options before it loads torch.
"""

from __future__ import annotations

import copy
import inspect
import pkgutil
from dataclasses import dataclass
from typing import Any

from specdec_hf.arguments import Refused, did_you_mean, read_number, split_options
from specdec_hf.schedules.base import Schedule


@dataclass(frozen=True)
class ScheduleEntry:
    """A schedule that has a name.

    Attributes:
        place: of its class, ``module:Class``.
        summary: one line for users.
    """

    place: str
    summary: str


SCHEDULES: dict[str, ScheduleEntry] = {
    "constant": ScheduleEntry(
        "specdec_hf.schedules.base:ConstantSchedule",
        "the same number in every round",
    ),
    "heuristic": ScheduleEntry(
        "specdec_hf.schedules.heuristic:HeuristicSchedule",
        "two more after full acceptance, else one fewer",
    ),
    "heuristic_transient": ScheduleEntry(
        "specdec_hf.schedules.heuristic:HeuristicSchedule",
        "the same as heuristic",
    ),
    "confidence": ScheduleEntry(
        "specdec_hf.schedules.confidence:ConfidenceSchedule",
        "stops after a token whose draft probability is below threshold",
    ),
    "confidence_tuned": ScheduleEntry(
        "specdec_hf.schedules.confidence:TunedConfidenceSchedule",
        "the same, with a threshold tuned as it runs",
    ),
    "draft_exit": ScheduleEntry(
        "specdec_hf.schedules.confidence:DraftExitSchedule",
        "the same, with a threshold that keeps the acceptance rate at alpha",
    ),
    "specdec++": ScheduleEntry(
        "specdec_hf.schedules.confidence:SpecDecPlusPlusSchedule",
        "stops where the predicted probability of a rejection exceeds h",
    ),
    "egag": ScheduleEntry(
        "specdec_hf.schedules.egag:EgagSchedule",
        "fewer tokens where the drafter's entropy is larger",
    ),
    "optimal": ScheduleEntry(
        "specdec_hf.schedules.optimal:OptimalSchedule",
        "the length with the most measured tokens per second",
    ),
}


def make_schedule(schedule: str | Schedule) -> Schedule:
    """A schedule that has not been started yet.

    Args:
        schedule: a name; a name with parameters, such as ``"egag:gamma_max=8,beta=0.5"``; or a
            schedule, which is copied.

    Raises:
        TypeError: a parameter of a wrong type.
        ValueError: an unknown name or parameter, or a value out of range.
    """
    if isinstance(schedule, Schedule):
        return copy.deepcopy(schedule)
    name, colon, text = schedule.partition(":")
    entry = SCHEDULES.get(name)
    if entry is None:
        raise ValueError(
            f"num_assistant_tokens_schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}"
            + did_you_mean(schedule, SCHEDULES)
        )
    kind = _kind(entry)
    return kind(**(_parameters(name, kind, text) if colon else {}))


def check_takes(drafter: str, schedule: Schedule, *, trees: bool, has_stats: bool) -> None:
    """Check that a schedule fits a drafter.

    Args:
        drafter: its name, for messages.
        schedule: of `make_schedule`.
        trees: whether trees are drafted.
        has_stats: whether chains come with their distribution or a confidence.

    Raises:
        Refused: it does not.
    """
    if trees:
        if not schedule.trees:
            raise Refused(
                "num_assistant_tokens_schedule must be "
                f"{' or '.join(map(repr, tree_schedules()))} with trees, got {schedule.name!r}"
            )
    elif schedule.reads_token_stats and not has_stats:
        raise Refused(
            f"num_assistant_tokens_schedule {schedule.name!r} needs a drafter with a draft "
            f"distribution or a confidence, got {drafter}"
        )


def tree_schedules() -> list[str]:
    """The names of the schedules that can choose the depth of trees."""
    return [name for name, entry in SCHEDULES.items() if _kind(entry).trees]


def _kind(entry: ScheduleEntry) -> type[Schedule]:
    kind: type[Schedule] = pkgutil.resolve_name(entry.place)
    return kind


def _parameters(name: str, kind: type[Schedule], text: str) -> dict[str, Any]:
    known = [k for k in inspect.signature(kind).parameters if k != "inner"]
    unknown, options = split_options(text, known)
    if unknown or not options:
        *_, last = unknown.split(",")  # the options stand after all that is unknown
        raise ValueError(
            f"schedule {name!r} takes {', '.join(known) or 'no parameters'}, got {last!r}"
        )
    owner = f"schedule {name!r}"
    return {key: read_number(key, owner, value) for key, value in options.items()}
