"""How many tokens to draft for a sequence in the next round (``num_assistant_tokens_schedule``)."""

from __future__ import annotations

from typing import Protocol


class DraftLengthSchedule(Protocol):
    """Chooses the draft length of one sequence from what its earlier drafts achieved."""

    def next_length(self) -> int:
        """Tokens to draft in the next round."""
        ...

    def observe(self, drafted: int, accepted: int) -> None:
        """Learn how many tokens the last round drafted and how many of them it accepted."""
        ...


class ConstantSchedule:
    """Always the same draft length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def next_length(self) -> int:
        return self.length

    def observe(self, drafted: int, accepted: int) -> None:
        pass


class HeuristicSchedule:
    """Two more tokens after a fully accepted draft, one fewer otherwise, within [1, ``longest``].

    This is the "heuristic" schedule of transformers' assisted generation with an upper bound.
    """

    def __init__(self, length: int, longest: int = 16) -> None:
        self.length = length
        self.longest = max(length, longest)

    def next_length(self) -> int:
        return self.length

    def observe(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        change = 2 if accepted == drafted else -1
        self.length = min(max(self.length + change, 1), self.longest)


def make_schedule(name: str, length: int) -> DraftLengthSchedule:
    """The schedule called ``name``, which begins with drafts of ``length`` tokens.

    Raises:
        ValueError: unknown name.
    """
    if name not in ("constant", "heuristic"):
        raise ValueError(
            f"num_assistant_tokens_schedule must be 'constant' or 'heuristic', got {name!r}"
        )
    if name == "constant" or length == 0:
        return ConstantSchedule(length)
    return HeuristicSchedule(length)
