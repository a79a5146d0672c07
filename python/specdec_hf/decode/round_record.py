"""The counts and times of one round; `SpecStats.round_log` holds one record for each."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

PHASES = ("draft", "target", "verification", "cache", "host")


@dataclass
class RoundRecord:
    """One forward of the target over the batch, and the drafts that it verified.

    The phases of a round add up to its duration. On a GPU the first two only queue their work, and
    ``verification`` includes the wait for it.

    Attributes:
        began: seconds from the start of the call to the start of the round.
        draft: seconds of drafting.
        target: seconds of the target's forward.
        verification: seconds of logits processors, of the op that decides, and of reading its
            verdict.
        cache: seconds of the target's cache: positions and masks, compaction and roll back. It is
            measured for the cache "spec"; the others do such work within the forward.
        host: seconds of all else: commit, statistics, schedule.
        drafted: [B] tokens that were drafted for each sequence, 0 for those that had ended.
        accepted: [B] how many of them were committed.
        emitted: [B] committed tokens, the recovered or bonus token included.
        schedule: what `Schedule.record` gives of the round, by name, ready for JSON.
    """

    began: float
    draft: float
    target: float
    verification: float
    cache: float
    host: float
    drafted: list[int]
    accepted: list[int]
    emitted: list[int]
    schedule: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Duration of the round."""
        return self.draft + self.target + self.after_target

    @property
    def after_target(self) -> float:
        """Seconds of verification, cache and host."""
        return self.verification + self.cache + self.host

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)
