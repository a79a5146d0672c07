"""Counts and times of a `generate` call, for each sequence and for all of them together.

Only committed tokens are counted: drafts that were accepted after a stop are not.

- mean acceptance length (tau, block efficiency): tokens per forward of the target.
- trial: one child of a tree node that is compared with the target; trial 0 is the first child.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from specdec_hf.runner.forwards import CompileStats
from specdec_hf.runner.packed.model import PackedStats

# What `SpecStats.to_dict` holds as it is.
PLAIN = (
    "device_reads", "tokens_per_second", "total_seconds", "time_split", "rule", "lossless",
    "drafter", "tree", "cache", "forwards", "seeds", "gammas", "benefit", "plain_step_seconds",
    "notes",
)  # fmt: skip


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


@dataclass
class SequenceStats:
    """Counts of one sequence.

    Attributes:
        prompt_tokens: tokens of the prompt, without padding.
        new_tokens: generated tokens.
        rounds: forwards of the target while the sequence was active.
        drafted: drafted tokens, in a tree its nodes.
        accepted: drafted tokens that were committed.
        predicted, accepted_predicted: how many of these were of the call's ``prediction``.
        acceptance_histogram: rounds by number of accepted drafts.
        drafted_at, accepted_at: rounds that drafted, and accepted, a token at each position of the
            draft. In a tree the position is the depth less 1.
        trials, accepted_trials: how often trial 0, 1, ... was made, and accepted.
        stop_reason: "eos", "criteria", "length" or "context"; in a batch that sequences join also
            "cancelled", and "error" where a fault of its own ended it.
    """

    prompt_tokens: int = 0
    new_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    accepted_predicted: int = 0
    acceptance_histogram: Counter[int] = field(default_factory=Counter)
    drafted_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    trials: Counter[int] = field(default_factory=Counter)
    accepted_trials: Counter[int] = field(default_factory=Counter)
    stop_reason: str = ""

    @property
    def mean_acceptance_length(self) -> float:
        """new_tokens / rounds: accepted drafts, and the recovered or bonus token of each round.

        A round in which the text ended may have neither of the two.
        """
        return self.new_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted, 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of the drafts at position 0, 1, ... of a draft that were accepted."""
        return _shares(self.accepted_at, self.drafted_at)

    @property
    def acceptance_by_trial(self) -> list[float]:
        """Share of trials 0, 1, ... that accepted their child."""
        return _shares(self.accepted_trials, self.trials)

    def record_trials(self, tried: int, accepted: int | None) -> None:
        """Count the children of one tree node.

        Args:
            tried: how many of them were tried, the accepted one included.
            accepted: number of the trial that accepted, None where all rejected.
        """
        for trial in range(tried):
            self.trials[trial] += 1
        if accepted is not None:
            self.accepted_trials[accepted] += 1

    def record(self, drafted: int, accepted: int, emitted: int, depth: int | None = None) -> None:
        """Count one round.

        Args:
            drafted: tokens that were drafted.
            accepted: how many of them were committed.
            emitted: tokens that were committed, the recovered or bonus token included.
            depth: length of the longest drafted path; None is that of a chain.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.new_tokens += emitted
        self.acceptance_histogram[accepted] += 1
        for i in range(drafted if depth is None else depth):
            self.drafted_at[i] += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def record_prediction(self, drafted: int, predicted: bool, accepted: int) -> None:
        """Count the drafts of a round that were ``predicted``."""
        self.predicted += drafted * predicted
        self.accepted_predicted += accepted * predicted

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "rounds": self.rounds,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "predicted": self.predicted,
            "accepted_predicted": self.accepted_predicted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": {
                str(k): v for k, v in sorted(self.acceptance_histogram.items())
            },
            "acceptance_by_position": self.acceptance_by_position,
            "acceptance_by_trial": self.acceptance_by_trial,
            "trials": [self.trials[i] for i in sorted(self.trials)],
            "stop_reason": self.stop_reason,
        }


def _shares(accepted: Counter[int], tried: Counter[int]) -> list[float]:
    """The share that was accepted at 0, 1, ..., 0 where nothing was tried."""
    numbers = range(max(tried, default=-1) + 1)
    return [accepted[i] / tried[i] if tried[i] else 0.0 for i in numbers]


@dataclass
class SpecStats:
    """Counts and times of one `generate` call.

    Times are seconds of the host. On a GPU a phase only queues its work, and the host waits for all
    of it where the round is read, which is a part of the verification.

    Attributes:
        sequences: the counts of each sequence.
        rounds: forwards of the target over the whole batch.
        device_reads: reads that the loop makes: one a round, and those of token statistics. Reads
            of logits processors and of drafters are not counted.
        total_seconds: the whole call, with the prompt and, at a first use, the self-check.
        rule: acceptance rule of the call, never "auto".
        lossless: whether the rule keeps the target's distribution, or its greedy text.
        drafter: `Drafter.name`, or "none".
        tree: the layout of the draft tree as text, or whose own tree it is; empty for chains.
        cache: kind of the target's cache, see docs/loop.md#caches.
        seeds: of each sequence; the same call with ``seed=seeds`` gives the same text.
        gammas: drafted tokens that the target's forward read for each sequence, per round.
        round_log: counts and times of each round.
        benefit: `BenefitGuard.benefit` at the end; None where it was not measured. It goes by
            `ExpectedCosts` where no clock may decide how much is drafted.
        plain_step_seconds: median seconds of a round without drafts; None where there was none, or
            where no clock may decide.
        notes: remarks for the user.
        packed: what was packed, or why nothing was; None with ``compile=False`` and on a CUDA
            device.
        compiled: what ``compile=True`` did on a CUDA device, else None.
    """

    sequences: list[SequenceStats] = field(default_factory=list)
    rounds: int = 0
    device_reads: int = 0
    total_seconds: float = 0.0
    rule: str = ""
    lossless: bool = True
    drafter: str = ""
    tree: str = ""
    cache: str = ""
    seeds: list[int] = field(default_factory=list)
    gammas: list[int] = field(default_factory=list)
    round_log: list[RoundRecord] = field(default_factory=list)
    benefit: float | None = None
    plain_step_seconds: float | None = None
    notes: list[str] = field(default_factory=list)
    packed: PackedStats | None = None
    compiled: CompileStats | None = None

    @property
    def together(self) -> SequenceStats:
        """The counts of all sequences added up."""
        total = SequenceStats()
        counts = [field.name for field in fields(total) if field.name != "stop_reason"]
        for one in self.sequences:
            for name in counts:
                setattr(total, name, getattr(total, name) + getattr(one, name))
        return total

    @property
    def forwards(self) -> str:
        """How those of the target ran: "packed", "compiled" or "own", the model's."""
        if self.packed is not None and not self.packed.reason:
            return "packed"
        return "own" if self.compiled is None or self.compiled.eager else "compiled"

    @property
    def cuda_graphs(self) -> int:
        """CUDA graphs of the model and of draft models."""
        made = self.compiled
        return 0 if made is None else sum(one.cuda_graphs for one in (made, *made.drafts))

    @property
    def new_tokens(self) -> int:
        """Tokens generated over all sequences."""
        return sum(one.new_tokens for one in self.sequences)

    @property
    def drafted(self) -> int:
        """Drafted tokens over all sequences."""
        return sum(one.drafted for one in self.sequences)

    @property
    def accepted(self) -> int:
        """Accepted tokens over all sequences."""
        return sum(one.accepted for one in self.sequences)

    @property
    def mean_acceptance_length(self) -> float:
        """new_tokens / rounds over all sequences (tau, block efficiency)."""
        return self.together.mean_acceptance_length

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted over all sequences."""
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
    def acceptance_by_trial(self) -> list[float]:
        """The measured acceptance vector of trees, which `TreeSpec.sequoia` takes."""
        return self.together.acceptance_by_trial

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences per second of wall time, prefill included."""
        return self.new_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def time_split(self) -> dict[str, float]:
        """Seconds of all rounds in each phase of `RoundRecord`."""
        return {phase: sum(getattr(one, phase) for one in self.round_log) for phase in PHASES}

    def record_round(self, width: int, record: RoundRecord) -> None:
        """Count a round whose forward read ``width`` drafted tokens for each sequence."""
        self.rounds += 1
        self.device_reads += 1
        self.gammas.append(width)
        self.round_log.append(record)

    def note(self, text: str) -> None:
        """Add a remark unless it is there already."""
        if text not in self.notes:
            self.notes.append(text)

    def note_round(self, text: str) -> None:
        """Add a remark with the number of the round under way, unless an earlier round left it."""
        if not any(note.endswith(f": {text}") for note in self.notes):
            self.notes.append(f"round {self.rounds + 1}: {text}")

    @property
    def remarks(self) -> list[str]:
        """The notes without numbers of rounds, so that those of several calls can be merged."""
        return [re.sub(r"^round \d+: ", "", note) for note in self.notes]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, sequences included."""
        together = self.together.to_dict()
        together.pop("stop_reason")
        return {
            **together,
            "forward_rounds": self.rounds,
            **{name: getattr(self, name) for name in PLAIN},
            "round_log": [record.to_dict() for record in self.round_log],
            "packed": None if self.packed is None else self.packed.to_dict(),
            "compiled": None if self.compiled is None else self.compiled.to_dict(),
            "sequences": [one.to_dict() for one in self.sequences],
        }


class Phases:
    """Adds up the seconds of a round, phase by phase.

    Work on the cache, which happens within the phases, is taken out of them and counted by itself.
    That, and where the host's own work begins, is measured by the real clock only: with another
    one, all that follows the target's forward is verification.

    Args:
        clock: gives seconds.
        runner: the target's, whose ``watch`` counts the seconds of its own work if it has one.

    Attributes:
        seconds: so far, by the names in `PHASES`.
    """

    def __init__(self, clock: Callable[[], float], runner: Any) -> None:
        self.clock, self._watch = clock, getattr(runner, "watch", None)
        self.real = clock is time.perf_counter
        self.seconds: dict[str, Any] = dict.fromkeys(PHASES, 0.0)
        self._phase = PHASES[0]
        self.began = self._last = clock()
        self._cached = self._cache_seconds()

    def begin(self, phase: str) -> None:
        """Count the seconds from here to a phase, until the next one begins."""
        if phase != self._phase and (self.real or self._phase != "verification"):
            self.stop()
            self._phase = phase

    def stop(self) -> None:
        """Count the seconds since the last time to the phase under way."""
        now, cached = self.clock(), self._cache_seconds()
        self.seconds["cache"] += cached - self._cached
        self.seconds[self._phase] += now - self._last - (cached - self._cached)
        self._last, self._cached = now, cached

    def _cache_seconds(self) -> float:
        return 0.0 if self._watch is None or not self.real else self._watch.seconds
