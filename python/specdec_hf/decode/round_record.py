"""The counts and times of one round; `SpecStats.round_log` holds one record for each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class RoundRecord:
    """One forward of the target over the batch, and the drafts that it verified.

    A phase begins where the one before it ends: draft, verify, accept. On a GPU the first two only
    queue their work, and ``accept`` includes the wait for it.

    Attributes:
        began: seconds from the start of the call to the start of the round.
        draft, verify, accept: seconds of drafting, of the target's forward, and of the decision
            with the commit.
        drafted: [B] tokens that were drafted for each sequence, 0 for those that had ended.
        accepted: [B] how many of them were committed.
        emitted: [B] committed tokens, the recovered or bonus token included.
        schedule: what `Schedule.record` gives of the round, by name, ready for JSON.
    """

    began: float
    draft: float
    verify: float
    accept: float
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    schedule: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of the round."""
        return self.draft + self.verify + self.accept

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
