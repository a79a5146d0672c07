"""What rounds cost: measured times of drafting and of the target's forward, or expected ones.

Measurements of earlier calls with the same target and drafter spare a call its first plain rounds.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import median
from typing import Any
from weakref import WeakKeyDictionary

# Where no clock may decide, nothing is measured: a forward reads the weights once, and
# so many more rows are taken to cost as much again. Rows add less on a device, which has arithmetic
# to spare: a guess.
ROWS_OF_A_READ = 48
SHARE_ON_DEVICE = 0.25


class MonotoneCost:
    """Seconds as a function of a number of tokens, which never falls and is smooth in between.

    The median of the last times at each number, made monotone by isotonic regression (pool adjacent
    violators) and joined by straight lines. Beyond the largest number goes the line through the
    first and the last.

    Args:
        max_times: how many times are kept for each number.
        from_zero: whether zero tokens take zero seconds.

    Example:
        >>> cost = MonotoneCost()
        >>> for n, seconds in ((1, 1.0), (5, 2.0), (9, 2.0)):
        ...     cost.observe(n, seconds)
        >>> cost.at(3), cost.at(7), cost.at(17)
        (1.5, 2.0, 3.0)
    """

    def __init__(self, max_times: int = 9, *, from_zero: bool = False) -> None:
        self._max_times, self._from_zero = max_times, from_zero
        self._times: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._line: list[tuple[int, float]] | None = None

    def begin_at_zero(self, begins: bool) -> None:
        """Say anew whether zero tokens take zero seconds."""
        self._from_zero, self._line = begins, None

    def observe(self, n: int, seconds: float) -> None:
        """Record one measurement."""
        times = self._times.setdefault(n, deque(maxlen=self._max_times))
        times.append(seconds)
        self._medians[n] = median(times)
        self._line = None

    def median(self, n: int) -> float | None:
        """The median at one number, None where it was not measured."""
        return self._medians.get(n)

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest number that was measured, 0 before any."""
        return min(self._times, default=0), max(self._times, default=0)

    def medians(self) -> dict[int, float]:
        """The median at each number that was measured."""
        return dict(sorted(self._medians.items()))

    def scaled(self, factor: float) -> MonotoneCost:
        """The medians, ``factor`` times as long."""
        other = MonotoneCost()
        for n, seconds in self.medians().items():
            other.observe(n, factor * seconds)
        return other

    def at(self, n: float) -> float:
        """Seconds for ``n`` tokens; something must have been measured."""
        if self._line is None:
            self._line = self._fitted()
        line = self._line
        if n <= line[0][0] or len(line) == 1:
            return line[0][1]
        if n >= line[-1][0]:
            (a, low), (b, high) = line[0], line[-1]
            return high + (high - low) * (n - b) / (b - a)
        k = bisect_right(line, (n, math.inf))
        (a, low), (b, high) = line[k - 1], line[k]
        return low + (high - low) * (n - a) / (b - a)

    def _fitted(self) -> list[tuple[int, float]]:
        blocks: list[tuple[float, int, list[int]]] = []  # mean, weight, numbers
        for n in sorted(self._times):
            mean, weight, numbers = self._medians[n], len(self._times[n]), [n]
            while blocks and blocks[-1][0] > mean:
                before, heavier, earlier = blocks.pop()
                mean = (mean * weight + before * heavier) / (weight + heavier)
                weight, numbers = weight + heavier, earlier + numbers
            blocks.append((mean, weight, numbers))
        line = [(n, mean) for mean, _, numbers in blocks for n in numbers]
        return [(0, 0.0), *line] if self._from_zero else line


class Costs:
    """What a round costs, by draft length.

    Args:
        relative_cost: seconds of a draft step in forwards of the target, until one is measured.
        drafts_at_once: whether that is what all drafts of a round take together.
        reads_prompt: whether a drafter with a ``relative_cost`` reads the prompt before its first
            draft.

    Attributes:
        measured: whether a clock tells them; `ExpectedCosts` need none.
        drafted: whether a round with drafts was measured.
        prefill: seconds of the target's forward that read the prompt.
        padded: the width of a forward of so many tokens, with padding; `DraftLengthPolicy` sets it.
    """

    measured = True

    def __init__(
        self,
        relative_cost: float = 0.0,
        *,
        drafts_at_once: bool = False,
        reads_prompt: bool = True,
    ) -> None:
        self.prefill = 0.0
        self.padded: Callable[[int], int] = _unpadded
        self._prompt = (0, 0.0)  # tokens and seconds of the forward that read it
        self.drafted = False
        self._draft, self._forward = MonotoneCost(), MonotoneCost()
        self._width = MonotoneCost(from_zero=True)  # tokens of a tree by its depth
        self.expect(relative_cost, drafts_at_once, reads_prompt)

    def expect(self, relative_cost: float, drafts_at_once: bool, reads_prompt: bool) -> None:
        """Say what the arguments of the class say, at the beginning of a call."""
        self.relative_cost, self.drafts_at_once = relative_cost, drafts_at_once
        self.reads_prompt = reads_prompt and relative_cost > 0
        self._draft.begin_at_zero(not drafts_at_once)
        # A draft model reads the whole prompt in its first round, which says nothing about others.
        self._next_reads_prompt = self.reads_prompt

    @property
    def draft_prefill(self) -> float:
        """Seconds in which the drafter is expected to read the prompt."""
        return self.relative_cost * self.prefill if self.reads_prompt else 0.0

    def start_from(self, earlier: Costs) -> None:
        """Begin a call with the times of earlier ones."""
        self.drafted = earlier.drafted
        self._draft, self._forward, self._width = earlier._draft, earlier._forward, earlier._width

    def observe_prompt(self, width: int, seconds: float) -> None:
        """Record the forward that read the prompt.

        Args:
            width: tokens that it read for each sequence; 0 where the model's own prefill had read
                them.
            seconds: of its round.
        """
        self.prefill += seconds
        self._prompt = (self.padded(width), seconds) if width else (0, 0.0)

    def observe(self, length: int, width: int, draft: float, rest: float) -> None:
        """Record one round of a call that had read the prompt.

        Args:
            length: the longest draft, or the depth of the tree.
            width: drafted tokens that the target's forward read for each sequence.
            draft: seconds of drafting.
            rest: seconds of the other phases.
        """
        self._forward.observe(self.padded(1 + width), rest)
        if width == 0 or length == 0:  # nothing was drafted, or only absent nodes
            return
        self._width.observe(length, width)
        if self._next_reads_prompt:
            self._next_reads_prompt = False
        else:
            self.drafted = True
            self._draft.observe(length, draft)

    @property
    def plain(self) -> float | None:
        """Median seconds of a round without drafts, None before one was seen."""
        return self._forward.median(self.padded(1))

    @property
    def known(self) -> bool:
        """Whether any round was seen that did not read the prompt."""
        return self.drafted or self.plain is not None

    def round(self, length: int) -> float | None:
        """Seconds of a round that drafts ``length`` tokens, None before any round was seen."""
        width = self.padded(1 + self._drafted_tokens(length))
        if self.drafted and length:
            return self._draft.at(length) + self._forward.at(width)
        if self.plain is None or length == 0:
            return self.plain
        steps = 1 if self.drafts_at_once else length
        return self._wider_than_plain(width, self.plain) + self.plain * self.relative_cost * steps

    def _drafted_tokens(self, length: int) -> int:
        """How many drafted tokens of each sequence a forward reads, by the length of the draft."""
        return round(self._width.at(length)) if any(self._width.range) else length

    def _wider_than_plain(self, width: int, plain: float) -> float:
        """Seconds of a forward before any with drafts was measured.

        Up to the width of the prompt they lie on the line between a plain round and the forward
        that read the prompt. Beyond it they lie halfway between the bounds of any machine: a plain
        round, and a plain round for each token.
        """
        narrow, (wide, seconds) = self.padded(1), self._prompt
        most = plain * max(width / narrow, 1.0)
        if narrow < width <= wide:
            line = plain + (seconds - plain) * (width - narrow) / (wide - narrow)
            return min(max(line, plain), most)
        return (plain + most) / 2

    def trees(self, depth: int, most: int) -> list[float]:
        """Seconds of rounds that draft so deep and verify 0, 1, ... ``most`` nodes of the draft.

        The list is empty before a round with drafts was measured. A forward wider than the widest
        one is taken to cost as much, up to twice its width, where the list ends. One narrower than
        all measured ones is taken to cost a value halfway between its bounds, as much as the
        narrowest and as much per token, so that narrower trees are tried.
        """
        if not self.drafted:
            return []
        narrowest, widest = self._forward.range
        draft, forward = self._draft.at(depth), dict[int, float]()
        seconds = []
        for nodes in range(most + 1):
            width = self.padded(1 + nodes)
            if width > 2 * widest:
                break
            if width not in forward:
                forward[width] = self._forward.at(min(width, widest))
                if width < narrowest:
                    forward[width] *= (1 + width / narrowest) / 2
            seconds.append(draft + forward[width])
        return seconds


class ExpectedCosts(Costs):
    """Costs that follow from the numbers of tokens alone, in plain rounds of one sequence.

    In bfloat16 and float16 a text depends on how many tokens each forward has. If a clock chose
    these numbers, the same call with the same seeds would not give its text again. So what decides
    there by default are the acceptance so far, which the text fixes, and these costs.

    Args:
        batch_size: number of sequences B.
        share: how much of what rows add on a CPU they add here.
        prompt: tokens of the longest prompt.
    """

    measured = False

    def __init__(self, batch_size: int, share: float = 1.0, prompt: int = 0) -> None:
        super().__init__()
        self._batch_size = batch_size
        for reads in (0, 1):
            self._forward.observe(1 + reads * ROWS_OF_A_READ, 1 + share * reads)
        self.prefill = self.forward(prompt)

    def forward(self, width: int) -> float:
        """The cost of a forward over ``width`` tokens of each sequence."""
        return self._forward.at(self._batch_size * self.padded(width))

    def observe_prompt(self, width: int, seconds: float) -> None:
        """Ignored, as all times are."""

    def observe(self, length: int, width: int, draft: float, rest: float) -> None:
        """Record how wide a tree of this depth is; times are ignored."""
        if width and length:
            self._width.observe(length, width)

    def seconds(self, length: int, width: int) -> float:
        """The cost of a round that drafted ``length`` tokens deep, ``width`` tokens in all."""
        return self.forward(1 + width) + (self._drafting(length) if width else 0.0)

    @property
    def plain(self) -> float:
        return self.forward(1)

    @property
    def known(self) -> bool:
        return True

    def round(self, length: int) -> float:
        return self.seconds(length, self._drafted_tokens(length))

    def trees(self, depth: int, most: int) -> list[float]:
        draft = self._drafting(depth)
        return [draft + self.forward(1 + nodes) for nodes in range(most + 1)]

    def _drafting(self, length: int) -> float:
        return self.plain * self.relative_cost * (1 if self.drafts_at_once else length)


def _unpadded(size: int) -> int:
    return size


# Earlier benefit from which on a call may begin to draft at once.
TRUSTED_BENEFIT = 1.05
# How much the last call counts against all before it. The benefit of one short text is noisy: where
# a drafter is known to fit its target, several calls must disagree.
WEIGHT_OF_A_CALL, WEIGHT_BESIDE_EXPECTED = 0.5, 0.25


@dataclass(frozen=True)
class Measurements:
    """Measurements of the calls so far.

    Attributes:
        costs: times by number of tokens.
        benefit: of speculation, as `BenefitGuard` measured it; None where nothing was drafted.
    """

    costs: Costs = field(default_factory=Costs)
    benefit: float | None = None

    @property
    def trusted(self) -> bool:
        """Whether drafting was worth it."""
        return self.benefit is not None and self.benefit >= TRUSTED_BENEFIT


# The measurements of one target, by what drafts (a draft model, or a class) and then by the shape
# of a round. Stored objects are replaced and never written to, because other threads read them.
Measured = WeakKeyDictionary[Any, dict[Hashable, Measurements]]


def recall(measured: Measured, drafts: Any, shape: Hashable) -> Measurements:
    """A copy of what earlier calls have measured.

    Args:
        measured: of the target.
        drafts: the draft model, or the class of a drafter that has none.
        shape: of a round: batch size, tree, how its forwards run, and its smallest width.
    """
    found = measured.get(drafts, {}).get(shape)
    return Measurements() if found is None else copy.deepcopy(found)


def remember(
    measured: Measured,
    drafts: Any,
    shape: Hashable,
    costs: Costs,
    benefit: float | None,
    expected: float | None = None,
) -> None:
    """Keep the measurements of a call; without a benefit, the earlier one stays.

    ``expected`` is the benefit of the drafter's calls before the first one, of which a single
    unlucky text is not to be the measure.
    """
    earlier = recall(measured, drafts, shape).benefit
    if earlier is None:
        earlier = expected
    if benefit is None:
        benefit = earlier
    elif earlier is not None:
        weight = WEIGHT_OF_A_CALL if expected is None else WEIGHT_BESIDE_EXPECTED
        benefit = earlier + weight * (benefit - earlier)
    by_shape = measured.setdefault(drafts, {})
    by_shape[shape] = Measurements(copy.deepcopy(costs), benefit)
