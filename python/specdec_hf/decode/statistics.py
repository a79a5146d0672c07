"""What a run of speculative decoding did, counted after every cut: per row and together."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class RowStats:
    """Counts of one sequence. A round is one pass of the target in which the row still decoded."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    tried_at_rank: Counter[int] = field(default_factory=Counter)
    accepted_at_rank: Counter[int] = field(default_factory=Counter)
    stop_reason: str = ""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, bonus included: 1 + accepted / rounds (tau, block efficiency)."""
        return 1.0 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted, 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts accepted at position 0, 1, ... of a draft, of those proposed there."""
        last = max(self.drafted_at, default=-1)
        return [
            self.accepted_at[i] / self.drafted_at[i] if self.drafted_at[i] else 0.0
            for i in range(last + 1)
        ]

    @property
    def acceptance_by_rank(self) -> list[float]:
        """Of trees: share of first, second, ... children accepted where those before were not."""
        last = max(self.tried_at_rank, default=-1)
        return [
            self.accepted_at_rank[i] / self.tried_at_rank[i] if self.tried_at_rank[i] else 0.0
            for i in range(last + 1)
        ]

    def record_children(self, tried: int, accepted: int | None) -> None:
        """Count one point of a tree: how many of its children were tried, and the rank that stood.

        The children before the accepted one were tried and not accepted; ``tried`` counts it too.
        """
        self.tried_at_rank.update(range(tried))
        if accepted is not None:
            self.accepted_at_rank[accepted] += 1

    def record(self, drafted: int, accepted: int, emitted: int, depth: int | None = None) -> None:
        """Count one round: drafts proposed, drafts kept, tokens emitted; depth of a tree."""
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.new_tokens += emitted
        self.acceptance_histogram[accepted] += 1
        for i in range(drafted if depth is None else depth):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": {
                str(k): v for k, v in sorted(self.acceptance_histogram.items())
            },
            "acceptance_by_position": self.acceptance_by_position,
            "acceptance_by_rank": self.acceptance_by_rank,
            "tried_at_rank": [self.tried_at_rank[i] for i in sorted(self.tried_at_rank)],
            "stop_reason": self.stop_reason,
        }


@dataclass
class SpecStats:
    """Counts and times of one `generate` call.

    Times are host seconds. On a GPU work is queued: what a phase queued may be paid where the
    round is read, in ``accept_seconds``.
    """

    rows: list[RowStats] = field(default_factory=list)
    rounds: int = 0
    device_reads: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    total_seconds: float = 0.0
    rule: str = ""
    lossless: bool = True
    drafter: str = ""
    tree: str = ""
    cache: str = ""
    gammas: list[int] = field(default_factory=list)
    benefit: float | None = None
    plain_step_seconds: float | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def together(self) -> RowStats:
        """The counts of all rows added up."""
        total = RowStats()
        for row in self.rows:
            total.prompt_tokens += row.prompt_tokens
            total.new_tokens += row.new_tokens
            total.rounds += row.rounds
            total.drafted += row.drafted
            total.accepted += row.accepted
            total.acceptance_histogram.update(row.acceptance_histogram)
            total.drafted_at.update(row.drafted_at)
            total.accepted_at.update(row.accepted_at)
            total.tried_at_rank.update(row.tried_at_rank)
            total.accepted_at_rank.update(row.accepted_at_rank)
        return total

    @property
    def new_tokens(self) -> int:
        """Tokens generated over all rows."""
        return sum(row.new_tokens for row in self.rows)

    @property
    def drafted(self) -> int:
        """Draft tokens proposed over all rows."""
        return sum(row.drafted for row in self.rows)

    @property
    def accepted(self) -> int:
        """Draft tokens kept over all rows."""
        return sum(row.accepted for row in self.rows)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / rounds over all rows (tau, block efficiency, bonus included)."""
        return self.together.mean_acceptance_length

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted over all rows."""
        return self.together.draft_acceptance_rate

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Rounds by number of accepted drafts."""
        return dict(sorted(self.together.acceptance_histogram.items()))

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts accepted at each position of a draft."""
        return self.together.acceptance_by_position

    @property
    def acceptance_by_rank(self) -> list[float]:
        """Of trees: the acceptance vector that `TreeSpec.sequoia` takes, as measured."""
        return self.together.acceptance_by_rank

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows per second of wall time, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds drafting, in the target's forward, and deciding what stands."""
        return {
            "draft": self.draft_seconds,
            "verify": self.verify_seconds,
            "accept": self.accept_seconds,
        }

    def note(self, text: str) -> None:
        """Say something once."""
        if text not in self.notes:
            self.notes.append(text)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, rows included."""
        together = self.together.to_dict()
        together.pop("stop_reason")
        return {
            **together,
            "forward_rounds": self.rounds,
            "device_reads": self.device_reads,
            "tokens_per_second": self.tokens_per_second,
            "total_seconds": self.total_seconds,
            "time_split": self.time_split,
            "rule": self.rule,
            "lossless": self.lossless,
            "drafter": self.drafter,
            "tree": self.tree,
            "cache": self.cache,
            "gammas": self.gammas,
            "benefit": self.benefit,
            "plain_step_seconds": self.plain_step_seconds,
            "notes": self.notes,
            "rows": [row.to_dict() for row in self.rows],
        }
