"""The figures of the command ``bench``, from its pairs of answers; see docs/benchmarks.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec_hf.lab.bench.efficiency import predict
from specdec_hf.lab.bench.runs import PLAIN, Answer, Config, Pair
from specdec_hf.schedules.costs import MonotoneCost

SLOWEST_CATEGORY = 0.97  # a ratio below it is flagged
DRAWS, LEVEL = 2000, 0.9  # of the bootstrap
ORDER_EFFECT = 1.1
SLOW_START = 2.0
MOST_EFFICIENT = 1.05


@dataclass
class Row:
    """The figures of a config over all batches.

    Attributes:
        tokens_per_second: all tokens over all seconds.
        ratio: of it to that of the plain answers that were made in turns with it.
        interval: 90 % bootstrap interval of ``ratio`` over the batches, None for one batch.
        median_ratio: median of the ratios of single batches.
        categories: ratio of each category; empty where batches mix them.
        tokens_per_round: tokens per forward of the target and sequence, None where other loops
            made these forwards.
        alpha, theorem: accepted over visited drafts, None for trees; and the speed-up that Theorem
            3.8 gives with it and with measured costs. None where no loop of this library drafted.
        efficiency: speed-up after the first round, over forwards of one token and nothing else,
            divided by ``theorem``.
        loop_share: share of the time after the first round that no forward of a model took; None
            on devices, where the host does not know.
        identical: how many batches have the texts of plain generation, in every run; None where
            texts are sampled.
        texts: how many batches there are.
        notes: remarks of the loop, and on the measurement.
    """

    name: str
    schedule: str
    tokens_per_second: float
    ratio: float
    interval: tuple[float, float] | None
    median_ratio: float
    categories: dict[str, float]
    tokens_per_round: float | None
    alpha: float | None
    theorem: float | None
    efficiency: float | None
    loop_share: float | None
    identical: int | None
    texts: int
    notes: list[str]
    answers: list[Answer] = field(default_factory=list)

    @property
    def slow_categories(self) -> list[str]:
        """The categories in which it is more than 3 % slower than plain generation."""
        return [name for name, ratio in self.categories.items() if ratio < SLOWEST_CATEGORY]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        content = asdict(self)
        for answer in content["answers"]:
            del answer["stats"]
        return content


def rows_of(
    configs: list[Config],
    pairs: dict[str, list[Pair]],
    forward: MonotoneCost | None,
    *,
    sampled: bool,
) -> list[Row]:
    """A row for plain generation, from the plain answers of all pairs, and one for each config.

    Args:
        configs: those that were run, and others.
        pairs: of each config but the plain one, by its name.
        forward: what forwards of the target cost; None leaves the efficiency out.
        sampled: whether texts cannot be compared.
    """
    plain = []
    for same in zip(*pairs.values(), strict=True):
        runs = [seconds for pair in same for seconds in pair.plain.seconds_of_runs]
        answer = replace(same[0].plain, seconds=median(runs), seconds_of_runs=runs)
        plain.append(Pair(answer, answer, []))
    named = {config.name: config for config in configs}
    together = {PLAIN: plain, **pairs}
    return [_row(named[name], each, forward, sampled=sampled) for name, each in together.items()]


def _row(config: Config, pairs: list[Pair], forward: MonotoneCost | None, *, sampled: bool) -> Row:
    answers = [pair.mine for pair in pairs]
    rounds = sum(answer.rounds for answer in answers)
    notes = {note for answer in answers for note in answer.notes}
    by_category = defaultdict(list)
    for pair in pairs:
        by_category[pair.mine.category].append(pair)
    categories = {name: ratio_of(sums_of(each)) for name, each in by_category.items() if name}
    alpha, theorem, efficiency, loop_share = _efficiency(config, pairs, forward)
    if efficiency is not None and efficiency > MOST_EFFICIENT:
        notes.add(
            f"wrong: an efficiency of {efficiency:.2f} tells that costs or acceptance are not "
            "those of these answers"
        )
    return Row(
        name=config.name,
        schedule=config.schedule,
        tokens_per_second=sum(a.tokens for a in answers) / sum(a.seconds for a in answers),
        ratio=ratio_of(sums_of(pairs)),
        interval=interval_of(sums_of(pairs)),
        median_ratio=median(ratio_of(sums_of([pair])) for pair in pairs),
        categories=categories if config.name != PLAIN else {},
        tokens_per_round=sum(a.tokens for a in answers) / rounds if rounds else None,
        alpha=alpha,
        theorem=theorem,
        efficiency=efficiency,
        loop_share=loop_share,
        identical=None if sampled else sum(answer.identical for answer in answers),
        texts=len(answers),
        notes=[*sorted(notes), *(faults(pairs) if config.name != PLAIN else ())],
        answers=answers,
    )


def _efficiency(
    config: Config, pairs: list[Pair], forward: MonotoneCost | None
) -> tuple[float | None, float | None, float | None, float | None]:
    """Acceptance rate, speed-up by the theorem, efficiency and loop share."""
    calls = [pair.mine.stats for pair in pairs if pair.mine.stats is not None]
    seconds = sum(pair.mine.later_seconds for pair in pairs)
    plain_tokens = sum(pair.plain.later_tokens for pair in pairs)
    if forward is None or not any(stats.drafted for stats in calls) or not plain_tokens:
        return None, None, None, None
    found = predict(calls, forward, drafts_on_host=config.drafts_on_host)
    if found is None:
        return None, None, None, None
    steps = sum(max(map(len, pair.plain.texts)) - 1 for pair in pairs)
    theorem = found.tokens * forward.at(1) * steps / plain_tokens
    reached = sum(pair.mine.later_tokens for pair in pairs) / seconds
    return found.alpha, theorem, reached / found.tokens, found.loop_share


def sums_of(pairs: Sequence[Pair]) -> NDArray[np.float64]:
    """[n, 4]: tokens and seconds of the config, and of plain generation."""
    both = [(pair.mine, pair.plain) for pair in pairs]
    return np.array([(a.tokens, a.seconds, b.tokens, b.seconds) for a, b in both], dtype=np.float64)


def ratio_of(sums: NDArray[np.float64]) -> float:
    """Tokens a second of the config, over those of plain generation."""
    tokens, seconds, plain_tokens, plain_seconds = sums.sum(0)
    return float(tokens / seconds * plain_seconds / plain_tokens)


def interval_of(sums: NDArray[np.float64]) -> tuple[float, float] | None:
    """The middle 90 % of the ratio over batches drawn with replacement."""
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    tokens, seconds, plain_tokens, plain_seconds = sums[drawn].sum(1).T
    ratios = tokens / seconds * plain_seconds / plain_tokens
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def faults(pairs: list[Pair]) -> list[str]:
    """What shows that a config and plain generation were not measured alike.

    - An answer that comes second in its pair is slower or faster than one that comes first.
    - The first answer of either side, in the first batch, takes far longer than the same later: it
      paid for a warm-up.
    """
    found = []
    effect = _order_effect(pairs)
    if effect is not None and abs(np.log(effect)) > np.log(ORDER_EFFECT):
        found.append(
            f"unfair: the ratio depends on which of a pair comes first, {effect:.2f} times"
        )
    for side, answer in (("it", pairs[0].mine), ("plain generation", pairs[0].plain)):
        first, *later = answer.seconds_of_runs
        if len(later) > 1 and first > SLOW_START * max(later):
            found.append(f"unfair: the first answer of {side} took {first / max(later):.1f} times "
                         "the seconds of the same later")  # fmt: skip
    return found


def _order_effect(pairs: list[Pair]) -> float | None:
    """Ratio where plain generation came first, over that where it came second.

    None where 99 % of bootstrap draws do not agree on which is larger.
    """
    logs: dict[bool, list[float]] = {True: [], False: []}
    for pair in pairs:
        runs = (pair.plain.seconds_of_runs, pair.mine.seconds_of_runs, pair.plain_first)
        for plain, mine, plain_first in zip(*runs, strict=False):
            logs[plain_first].append(float(np.log(plain / mine)))
    if min(map(len, logs.values())) < 4:
        return None
    draw = np.random.default_rng(0)
    first, second = (np.array(logs[key]) for key in (True, False))
    medians = [
        np.median(draw.choice(values, (DRAWS, len(values))), axis=1) for values in (first, second)
    ]
    low, high = np.quantile(medians[0] - medians[1], (0.005, 0.995))
    if low <= 0 <= high:
        return None
    return float(np.exp(np.median(first) - np.median(second)))
