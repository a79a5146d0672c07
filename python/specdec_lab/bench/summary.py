"""The figures of the command ``bench``, from answers made in turns; see docs/benchmarks.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from specdec_hf.cli.speeds import GENERATE, Speeds, Sums
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.schedules.costs import MonotoneCost

from specdec_lab.bench.efficiency import predict
from specdec_lab.bench.runs import Config, TimedAnswer, Turns

DRAWS, LEVEL = 2000, 0.9  # of the bootstrap
ORDER_EFFECT = 1.1
SLOW_START = 2.0
MOST_EFFICIENT = 1.05
Side = Literal["generate", "without_drafts"]  # what answers in turns with a config
NAMES: dict[Side, str] = {"generate": GENERATE, "without_drafts": "this library without drafts"}
LETTERS: dict[Side, str] = {"generate": "p", "without_drafts": "w"}  # in `Turns.orders`


@dataclass
class Row:
    """The figures of a config over all batches.

    Attributes:
        speeds: all tokens over all seconds, of the answers that were made in turns.
        interval: 90 % bootstrap interval over the batches of the speed over that of
            ``model.generate``, None for one batch.
        speculation_interval: the same of the speed with drafts over that without; None where
            no draft was accepted.
        median_ratio: median over single batches of the speed over that of ``model.generate``.
        categories: speeds of each category; empty where batches mix them.
        decode: tokens a second after the first round, which reads the prompt; None where it was
            not timed.
        gigabytes: 1e9 bytes of packed weights a second that the target's forwards after the first
            round read; None where other forwards ran.
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
    speeds: Speeds
    interval: tuple[float, float] | None
    speculation_interval: tuple[float, float] | None
    median_ratio: float
    categories: dict[str, Speeds]
    decode: float | None
    gigabytes: float | None
    tokens_per_round: float | None
    alpha: float | None
    theorem: float | None
    efficiency: float | None
    loop_share: float | None
    identical: int | None
    texts: int
    notes: list[str]
    turns: list[Turns] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Tokens a second over those of ``model.generate`` in the same turns."""
        return self.speeds.together or 0.0

    @property
    def drafts(self) -> bool:
        """Whether it took turns with this library without drafts, too."""
        return any(one.without_drafts is not None for one in self.turns)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with the seconds of every answer.

        Each of ``answers`` has the ``orders`` of its runs, and the tokens and seconds of what
        it took turns with, so that all ratios can be computed from the file.
        """
        content = {name: value for name, value in vars(self).items() if name != "turns"}
        speeds = self.speeds.to_dict()
        content |= {"tokens_per_second": self.speeds.with_drafts, "ratio": self.ratio}
        content["speeds"] = speeds["tokens_per_second"] | speeds["ratios"] if self.drafts else None
        content["categories"] = {
            name: of_category.to_dict()["ratios"] for name, of_category in self.categories.items()
        }
        content["answers"] = [_answers(one) for one in self.turns]
        return content


def _answers(turns: Turns) -> dict[str, Any]:
    content = asdict(replace(turns.mine, stats=None))
    del content["stats"]
    if turns.orders:  # model.generate has taken turns with all others
        content["orders"] = turns.orders
        for side, letter in LETTERS.items():
            other = getattr(turns, side)
            if other is not None:
                content[letter] = {"tokens": other.tokens, "seconds_of_runs": other.seconds_of_runs}
    return content


def rows_of(
    configs: list[Config],
    turns: dict[str, list[Turns]],
    forward: MonotoneCost | None,
    *,
    sampled: bool,
) -> list[Row]:
    """A row for each config that answered; those that took turns with others have all answers.

    Args:
        configs: those that were run, and others.
        turns: of each config that had some, by its name.
        forward: what forwards of the target cost; None leaves the efficiency out.
        sampled: whether texts cannot be compared.
    """
    together = {
        GENERATE: [Turns(one, one, []) for one in _of_all(turns.values(), "generate")], **turns
    }  # fmt: skip
    drafting = [each for each in turns.values() if each[0].without_drafts is not None]
    without = next((one.name for one in configs if one.without_drafts), "")
    if drafting:
        mine, generate = (_of_all(drafting, side) for side in ("without_drafts", "generate"))
        every = zip(mine, generate, *drafting, strict=True)
        together[without] = [
            Turns(one, other, [order.replace("m", "").replace("w", "m")
                               for each in same for order in each.orders])
            for one, other, *same in every
        ]  # fmt: skip
    return [
        _row(one, together[one.name], forward, sampled=sampled)
        for one in configs
        if one.name in together
    ]


def _of_all(several: Iterable[list[Turns]], side: Side) -> list[TimedAnswer]:
    """The answers of one side to each batch, in the turns of several configs."""
    found = []
    for same in zip(*several, strict=True):
        answers: list[TimedAnswer] = [getattr(turns, side) for turns in same]
        runs = [seconds for answer in answers for seconds in answer.seconds_of_runs]
        found.append(
            replace(
                answers[0],
                seconds=median(runs),
                seconds_of_runs=runs,
                identical=all(answer.identical for answer in answers),
                notes=sorted({note for answer in answers for note in answer.notes}),
            )
        )
    return found


def _row(config: Config, turns: list[Turns], forward: MonotoneCost | None, *, sampled: bool) -> Row:
    answers = [one.mine for one in turns]
    rounds = sum(answer.rounds for answer in answers)
    notes = {note for answer in answers for note in answer.notes}
    by_category = defaultdict(list)
    for one in turns:
        by_category[one.mine.category].append(one)
    categories = {name: speeds_of(each) for name, each in by_category.items() if name}
    alpha, theorem, efficiency, loop_share = _efficiency(config, turns, forward)
    if efficiency is not None and efficiency > MOST_EFFICIENT:
        notes.add(
            f"wrong: an efficiency of {efficiency:.2f} tells that costs or acceptance are not "
            "those of these answers"
        )
    speeds = speeds_of(turns)
    gains = speeds.speculation is not None
    return Row(
        name=config.name,
        schedule=config.schedule,
        speeds=speeds,
        interval=interval_of(sums_of(turns)),
        speculation_interval=interval_of(sums_of(turns, "without_drafts")) if gains else None,
        median_ratio=median(ratio_of(sums_of([one])) for one in turns),
        categories=categories if config.name != GENERATE else {},
        decode=_rate((a.later_tokens, a.later_seconds) for a in answers),
        gigabytes=_rate(_gigabytes(a.stats) for a in answers if a.stats is not None),
        tokens_per_round=sum(a.tokens for a in answers) / rounds if rounds else None,
        alpha=alpha,
        theorem=theorem,
        efficiency=efficiency,
        loop_share=loop_share,
        identical=None if sampled else sum(answer.identical for answer in answers),
        texts=len(answers),
        notes=[*sorted(notes), *(faults(turns) if config.name != GENERATE else ())],
        turns=turns,
    )


def _rate(amounts: Iterable[tuple[float, float]]) -> float | None:
    """All amounts over all seconds."""
    amount, seconds = map(sum, zip((0.0, 0.0), *amounts, strict=True))
    return amount / seconds if amount and seconds else None


def _gigabytes(stats: SpecStats) -> tuple[float, float]:
    """What forwards of packed weights after the first round read, and their seconds."""
    later = stats.round_log[1:]
    size = stats.packed.bytes if stats.packed is not None and stats.forwards == "packed" else 0
    return len(later) * size / 1e9, sum(record.target for record in later)


def _efficiency(
    config: Config, turns: list[Turns], forward: MonotoneCost | None
) -> tuple[float | None, float | None, float | None, float | None]:
    """Acceptance rate, speed-up by the theorem, efficiency and loop share."""
    calls = [one.mine.stats for one in turns if one.mine.stats is not None]
    seconds = sum(one.mine.later_seconds for one in turns)
    generated = [one.generate for one in turns if one.generate is not None]
    later_tokens = sum(answer.later_tokens for answer in generated)
    if forward is None or not any(stats.drafted for stats in calls) or not later_tokens:
        return None, None, None, None
    found = predict(calls, forward, drafts_on_host=config.drafts_on_host)
    if found is None:
        return None, None, None, None
    steps = sum(max(map(len, answer.texts)) - 1 for answer in generated)
    theorem = found.tokens * forward.at(1) * steps / later_tokens
    reached = sum(one.mine.later_tokens for one in turns) / seconds
    return found.alpha, theorem, reached / found.tokens, found.loop_share


def speeds_of(turns: Sequence[Turns]) -> Speeds:
    """The speeds of a config and of those that it took turns with."""

    def sums(answer: TimedAnswer | None) -> Sums | None:
        return None if answer is None else (answer.tokens, answer.seconds)

    return Speeds.of_sums(
        [sums(one.generate) for one in turns],
        [sums(one.without_drafts) for one in turns],
        [sums(one.mine) for one in turns],
        drafted=sum(one.mine.drafted for one in turns),
        accepted=sum(one.mine.accepted for one in turns),
    )


def sums_of(turns: Sequence[Turns], side: Side = "generate") -> NDArray[np.float64]:
    """[n, 4]: tokens and seconds of the config, and of a side that it is compared with."""
    both = [(one.mine, getattr(one, side)) for one in turns]
    return np.array([(a.tokens, a.seconds, b.tokens, b.seconds) for a, b in both], dtype=np.float64)


def ratio_of(sums: NDArray[np.float64]) -> float:
    """Tokens a second of the config, over those of the other side."""
    tokens, seconds, other_tokens, other_seconds = sums.sum(0)
    return float(tokens / seconds * other_seconds / other_tokens)


def interval_of(sums: NDArray[np.float64]) -> tuple[float, float] | None:
    """The middle 90 % of the ratio over batches drawn with replacement."""
    if len(sums) < 2:
        return None
    drawn = np.random.default_rng(0).integers(len(sums), size=(DRAWS, len(sums)))
    tokens, seconds, other_tokens, other_seconds = sums[drawn].sum(1).T
    ratios = tokens / seconds * other_seconds / other_tokens
    low, high = np.quantile(ratios, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return float(low), float(high)


def faults(turns: list[Turns]) -> list[str]:
    """What shows that a config and those it is compared with were not measured alike.

    - Answers are slower or faster where they come after the others.
    - The first answer of a side, in the first batch, takes far longer than the same later: it paid
      for a warm-up.
    """
    found, sides = [], [side for side in NAMES if getattr(turns[0], side) is not None]
    for side in sides:
        effect = _order_effect(turns, side)
        if effect is not None and abs(np.log(effect)) > np.log(ORDER_EFFECT):
            found.append(
                f"unfair: the ratio over {NAMES[side]} depends on which of the two comes first, "
                f"{effect:.2f} times"
            )
    answers = {"it": turns[0].mine} | {NAMES[side]: getattr(turns[0], side) for side in sides}
    for name, answer in answers.items():
        first, *later = answer.seconds_of_runs
        if len(later) > 1 and first > SLOW_START * max(later):
            found.append(f"unfair: the first answer of {name} took {first / max(later):.1f} times "
                         "the seconds of the same later")  # fmt: skip
    return found


def _order_effect(turns: list[Turns], side: Side) -> float | None:
    """Ratio where the other side came before the config, over that where it came after it.

    None where 99 % of bootstrap draws do not agree on which is larger.
    """
    logs: dict[bool, list[float]] = {True: [], False: []}
    for one in turns:
        runs = (getattr(one, side).seconds_of_runs, one.mine.seconds_of_runs, one.orders)
        for other, mine, order in zip(*runs, strict=True):
            came_first = order.index(LETTERS[side]) < order.index("m")
            logs[came_first].append(float(np.log(other / mine)))
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
