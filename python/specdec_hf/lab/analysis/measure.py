"""All that is measured of some drafters at one temperature: acceptance, speed, and every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from specdec_hf.api import SpeculativeDecoder
from specdec_hf.cli.explain import Explainer
from specdec_hf.drafting.drafter import Drafter
from specdec_hf.lab.analysis.replay import (
    REPLAY_RULE,
    MeasuredAcceptance,
    Position,
    Text,
    replay,
    write_text,
)
from specdec_hf.lab.analysis.residual import Ablated, Experiment, ablate_residual, draw_experiment
from specdec_hf.loop.round_record import RoundRecord
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import run_stream
from specdec_kernels.analysis import expected_tokens, walltime_factor

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Speed:
    """One row of Table 4, measured here at batch size 1.

    The first round of each text, which reads the prompt, is left out of all figures.

    Attributes:
        temperature, gamma, alpha: as in the table.
        cost: c, time of one draft step in units of one plain step.
        verification: v, time to verify the drafts of a round, with what a round does beside it, in
            the same units; the paper assumes 1.
        drafting: share of the rounds that drafted. A drafter that copies cannot always.
        expected_paper: Theorem 3.8, for rounds that all draft gamma tokens and v = 1.
        expected: the same with measured v and share of rounds that drafted.
        measured: tokens per second over those of plain decoding.
        expected_tokens, measured_tokens: tokens per round.
    """

    temperature: float
    gamma: int
    alpha: float
    cost: float
    verification: float
    drafting: float
    expected_paper: float
    expected: float
    measured: float
    expected_tokens: float
    measured_tokens: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def compare_speed(
    plain: Sequence[SpecStats],
    speculative: Sequence[SpecStats],
    *,
    alpha: float,
    gamma: int,
    temperature: float,
) -> Speed | None:
    """A row of Table 4; None where no round after the first drafted anything.

    Args:
        plain, speculative: statistics of the same prompts without and with drafts, one sequence
            each.
        alpha: measured acceptance rate.
        gamma: drafts per round.
        temperature: of both.
    """
    steps, rounds = later_rounds(plain), later_rounds(speculative)
    with_drafts = [r for r in rounds if r.drafted[0]]
    if not steps or not with_drafts:
        return None
    step = sum(r.seconds for r in steps) / _emitted(steps)
    drafted = sum(r.drafted[0] for r in with_drafts)
    cost = sum(r.draft for r in with_drafts) / drafted / step
    verification = sum(r.target + r.after_target for r in with_drafts) / len(with_drafts) / step
    share = len(with_drafts) / len(rounds)
    tokens = share * expected_tokens(alpha, gamma) + 1 - share
    seconds = share * (gamma * cost + verification) + 1 - share
    return Speed(
        temperature=temperature,
        gamma=gamma,
        alpha=alpha,
        cost=cost,
        verification=verification,
        drafting=share,
        expected_paper=walltime_factor(alpha, gamma, cost),
        expected=tokens / seconds,
        measured=step / (sum(r.seconds for r in rounds) / _emitted(rounds)),
        expected_tokens=tokens,
        measured_tokens=_emitted(rounds) / len(rounds),
    )


def later_rounds(calls: Sequence[SpecStats]) -> list[RoundRecord]:
    """The rounds of calls of one sequence, without the first of each, which reads the prompt."""
    return [record for stats in calls for record in stats.round_log[1:]]


def _emitted(rounds: Sequence[RoundRecord]) -> int:
    return sum(record.emitted[0] for record in rounds)


@dataclass
class Ablation:
    """The effect of leaving out the residual, at every position with a draft.

    Attributes:
        positions: exact effect at each.
        worst: the position where the emitted token's distribution is most wrong.
        experiment: tokens drawn there, once they are.
    """

    positions: list[Ablated] = field(default_factory=list)
    worst: Position | None = None
    experiment: Experiment | None = None
    _largest: float = -1.0

    def add(self, position: Position) -> None:
        """Gather one position of `replay`."""
        if position.q is None:
            return
        effect = ablate_residual(position.p, position.q)
        self.positions.append(effect)
        if effect.ablated > self._largest:
            self._largest, self.worst = effect.ablated, position

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: means over the positions, and the experiment."""
        count = len(self.positions)
        means = {
            name: sum(getattr(one, name) for one in self.positions) / count if count else None
            for name in ("rejection", "recovered", "correct", "ablated")
        }
        largest = max((one.ablated for one in self.positions), default=None)
        return {
            "positions": count,
            "mean": means,
            "largest": largest,
            "experiment": None if self.experiment is None else self.experiment.to_dict(),
        }


@dataclass
class DrafterAnalysis:
    """What was measured of one drafter.

    Attributes:
        name: of the drafter.
        acceptance: on the target's own texts.
        speeds: a row of Table 4 for each gamma at which something was drafted.
        calls: statistics of each prompt, by gamma.
        answers: the explained tokens of each prompt, of the first gamma.
        ablation: None where it was not asked for.
    """

    name: str
    acceptance: MeasuredAcceptance = field(default_factory=MeasuredAcceptance)
    speeds: list[Speed] = field(default_factory=list)
    calls: dict[int, list[SpecStats]] = field(default_factory=dict)
    answers: list[Explainer] = field(default_factory=list)
    ablation: Ablation | None = None


@dataclass
class Measurement:
    """How to measure: a model, its prompts, and the sampling.

    Attributes:
        model, tokenizer: the target.
        inputs: ``input_ids`` and ``attention_mask`` of each prompt, one sequence each.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``.
        max_new_tokens: of every text.
        gammas: numbers of drafts per round.
        seed: of the first prompt; those of the others count up.
        draws: tokens to draw in the experiment of the ablation; 0 leaves it out.
        advance: called with the number of tokens that were handled.
    """

    model: Any
    tokenizer: Any
    inputs: Sequence[dict[str, Tensor]]
    sampling: dict[str, Any]
    max_new_tokens: int
    gammas: Sequence[int]
    seed: int = 0
    draws: int = 0
    advance: Advance = lambda count: None

    @property
    def arguments(self) -> dict[str, Any]:
        """Sampling and length as arguments of ``generate``."""
        sampled = self.sampling["temperature"] > 0
        shape = self.sampling if sampled else {}
        return {"do_sample": sampled, "max_new_tokens": self.max_new_tokens, **shape}

    def write_texts(self) -> list[Text]:
        """The target's own answers."""
        return [
            write_text(self.model, inputs, self.arguments, self.seed + i, self.advance)
            for i, inputs in enumerate(self.inputs)
        ]

    def analyze(self, name: str, drafter: Drafter, texts: Sequence[Text]) -> DrafterAnalysis:
        """Measure one drafter on texts of `write_texts`.

        Raises:
            ValueError: a drafter whose drafts cannot be verified by rule token.
        """
        found = DrafterAnalysis(name, ablation=Ablation() if self.draws else None)
        for i, text in enumerate(texts):
            found.acceptance.begin_text()
            for position in replay(drafter, self.model, text, self.sampling, self.seed + i):
                found.acceptance.add(position)
                if found.ablation is not None:
                    found.ablation.add(position)
                self.advance(1)
        if found.ablation is not None and found.ablation.worst is not None:
            found.ablation.experiment = draw_experiment(
                found.ablation.worst, self.sampling, self.draws, self.seed
            )
        plain = [text.stats for text in texts]
        for gamma in self.gammas:
            self._decode(found, drafter, gamma)
            speed = compare_speed(
                plain,
                found.calls[gamma],
                alpha=found.acceptance.alpha,
                gamma=gamma,
                temperature=self.sampling["temperature"],
            )
            if speed is not None:
                found.speeds.append(speed)
        return found

    def _decode(self, found: DrafterAnalysis, drafter: Drafter, gamma: int) -> None:
        """Answer all prompts with the drafter; the tokens of the first gamma are explained."""
        first = gamma == self.gammas[0]
        found.calls[gamma] = []
        for i, inputs in enumerate(self.inputs):
            prompt = inputs["input_ids"][0].tolist()
            explainer = Explainer(self.tokenizer, prompt, found.name, self.sampling)
            decoder = SpeculativeDecoder(
                drafter, num_assistant_tokens=gamma, rule=REPLAY_RULE, guard=False,
                seed=self.seed + i, trace=explainer if first else None,
            )  # fmt: skip
            stream = decoder.stream(self.model, **inputs, **self.arguments)
            _, output = run_stream(stream, lambda step: self.advance(len(step.tokens)))
            found.calls[gamma].append(output.stats)
            if first:
                found.answers.append(explainer)
