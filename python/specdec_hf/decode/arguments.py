"""The loop's own arguments: types, and the aliases of one number. Users check other values."""

from __future__ import annotations

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.drafters.resolve import check_drafter_types
from specdec_hf.schedules.base import LONGEST_DRAFT, Schedule
from specdec_hf.schedules.benefit_guard import BenefitGuard


def check_option_types(options: Any) -> None:
    """Raises TypeError for a field of `Options` of a wrong type, by name."""
    check_drafter_types(options.drafter)
    check_string("rule", options.rule)
    check_string("cache", options.cache)
    schedule = options.num_assistant_tokens_schedule
    if not (schedule is None or isinstance(schedule, str | Schedule)):
        raise TypeError(
            f"num_assistant_tokens_schedule must be a string or a Schedule, got {shown(schedule)}"
        )
    width = options.num_assistant_beams
    if width is not None:
        check_integer("num_assistant_beams", width)
    if not (options.guard is None or isinstance(options.guard, bool | np.bool_ | BenefitGuard)):
        raise TypeError(
            f"guard must be None, True, False or a BenefitGuard, got {shown(options.guard)}"
        )
    check_flag("self_check", options.self_check)
    check_flag("compile", options.compile)
    if options.fixed_width is not None:
        check_integer("fixed_width", options.fixed_width, 1)
    if not (options.trace is None or callable(options.trace)):
        raise TypeError(f"trace must be None or a function, got {shown(options.trace)}")
    if not callable(options.clock):
        raise TypeError(f"clock must be a function that gives seconds, got {shown(options.clock)}")


def check_string(name: str, value: Any) -> None:
    """Raises TypeError if the value is no string."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got {shown(value)}")


def check_streamer_type(streamer: Any) -> None:
    """Raises TypeError if the value is neither None nor a streamer."""
    if streamer is None:
        return
    if not all(callable(getattr(streamer, name, None)) for name in ("put", "end")):
        raise TypeError(
            f"streamer must be None or an object with put() and end(), got {shown(streamer)}"
        )


def check_stop_strings(stop_strings: Any, tokenizer: Any) -> None:
    """Raises TypeError for a wrong type, and ValueError for stop strings without a tokenizer."""
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(
            f"tokenizer must be None or a tokenizer of Transformers, got {shown(tokenizer)}"
        )
    if stop_strings is None:
        return
    listed = stop_strings if isinstance(stop_strings, list | tuple) else [stop_strings]
    for one in listed:
        if not isinstance(one, str):
            raise TypeError(f"stop_strings must be a string or a list of them, got {shown(one)}")
    if tokenizer is None:
        raise ValueError(
            f"stop_strings must come with a tokenizer, got {shown(stop_strings)} alone"
        )


def resolve_num_assistant_tokens(*values: int | None, tree: Any = None) -> int | None:
    """The value of the alias that was given, or None.

    Raises:
        TypeError: a value that is not an integer.
        ValueError: two aliases disagree, the value is out of range, or a tree is given.
    """
    given = {
        check_integer("num_assistant_tokens", value, 0, LONGEST_DRAFT)
        for value in values
        if value is not None
    }
    if given and tree is not None:
        raise ValueError(
            "num_assistant_tokens must not be given with tree, which says what is drafted, "
            f"got {sorted(given)}"
        )
    if len(given) > 1:
        raise ValueError(
            "num_assistant_tokens, gamma and num_speculative_tokens are the same argument, "
            f"got {sorted(given)}"
        )
    return given.pop() if given else None
