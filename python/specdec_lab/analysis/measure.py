"""All that is measured of some drafters at one temperature: acceptance, speed, and every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec_hf.cli.explain import Explained, ExplainedTree, Explainer
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.drafting.drafter import Drafter, drafts_trees
from specdec_hf.loop.statistics import SequenceStats, SpecStats
from specdec_hf.loop.streaming import run_stream
from torch import Tensor

from specdec_lab.analysis.acceptance import MeasuredAcceptance
from specdec_lab.analysis.encoders import EncoderSeconds, timed_encoders
from specdec_lab.analysis.operations import measure_operations
from specdec_lab.analysis.replay import Text, replay, rule_for, write_text
from specdec_lab.analysis.residual import Ablation, draw_experiment
from specdec_lab.analysis.speed import (
    ORACLE_DRAFTS,
    Scheduled,
    Speed,
    compare_speed,
    compare_with_oracle,
)

Advance = Callable[[int], None]


@dataclass
class DrafterAnalysis:
    """What was measured of one drafter.

    Attributes:
        name: of the drafter.
        trees: whether it drafts trees, which are verified by rule target_only.
        acceptance: on the target's own texts.
        operations: c-hat, operations of a draft step over those of a token of the target; None for
            trees, and where nothing was drafted.
        speeds: a row of Table 4 for each gamma at which something was drafted.
        calls: statistics of each prompt, by gamma, which is the depth of trees.
        scheduled: what schedules leave of an oracle, which is the first; empty where they were not
            asked for.
        refused: why a schedule was left out, by its name.
        encoders: seconds of the encoders in the first prompt of each gamma.
        answers: the explained rounds of each prompt, of the first gamma.
        first_trees: of the rounds of the first prompt; empty for chains.
        ablation: None where it was not asked for.
    """

    name: str
    trees: bool = False
    acceptance: MeasuredAcceptance = field(default_factory=MeasuredAcceptance)
    operations: float | None = None
    speeds: list[Speed] = field(default_factory=list)
    calls: dict[int, list[SpecStats]] = field(default_factory=dict)
    scheduled: list[Scheduled] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    encoders: dict[int, EncoderSeconds] = field(default_factory=dict)
    answers: list[list[list[Explained]]] = field(default_factory=list)
    first_trees: list[ExplainedTree] = field(default_factory=list)
    ablation: Ablation | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "drafter": self.name,
            "trees": self.trees,
            "acceptance": self.acceptance.to_dict(),
            "operations": self.operations,
            "speed": [asdict(speed) for speed in self.speeds],
            "schedules": [asdict(made) for made in self.scheduled],
            "schedules_left_out": self.refused,
            "ablation": None if self.ablation is None else self.ablation.to_dict(),
            "calls": {
                str(gamma): [stats.to_dict() for stats in calls]
                for gamma, calls in self.calls.items()
            },
            "rounds": [
                [[token.to_dict() for token in said] for said in answer] for answer in self.answers
            ],
        }

    @property
    def trials(self) -> SequenceStats:
        """The counts of all its calls together; of trees, trials among them."""
        every = [stats for calls in self.calls.values() for stats in calls]
        return SpecStats(sequences=[one for stats in every for one in stats.sequences]).together


@dataclass
class Measurement:
    """How to measure: a model, its prompts, and the sampling.

    Attributes:
        model, tokenizer: the target.
        inputs: ``input_ids`` and ``attention_mask`` of each prompt, one sequence each; those of
            the encoder for an encoder-decoder.
        sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``.
        max_new_tokens: of every text.
        gammas: numbers of drafts per round.
        seed: of the first prompt; those of the others count up.
        draws: tokens to draw in the experiment of the ablation; 0 leaves it out.
        schedules: to compare with the oracle of section 3.5; without any, none is.
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
    schedules: Sequence[str] = ()
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
            ValueError: a drafter whose drafts the rule cannot verify.
        """
        greedy, trees = self.sampling["temperature"] == 0, drafts_trees(drafter)
        found = DrafterAnalysis(
            name, trees, MeasuredAcceptance(greedy=greedy),
            ablation=Ablation() if self.draws and not trees else None,
        )  # fmt: skip
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
        found.operations = measure_operations(drafter, self.model, texts[0], self.sampling)
        plain = [text.stats for text in texts]
        for gamma in [drafter.depth] if trees else self.gammas:
            self._measure_speed(found, drafter, gamma, texts)
            speed = compare_speed(
                plain,
                found.calls[gamma],
                alpha=None if trees else found.acceptance.alpha,
                gamma=gamma,
                temperature=self.sampling["temperature"],
            )
            if speed is not None:
                found.speeds.append(speed)
        if self.schedules and found.speeds and not trees:
            self._compare_schedules(found, drafter)
        return found

    def _measure_speed(
        self, found: DrafterAnalysis, drafter: Drafter, gamma: int, texts: Sequence[Text]
    ) -> None:
        """Answer all prompts with the drafter; the tokens of the first gamma are explained."""
        first, found.calls[gamma] = not found.calls, []
        for i, text in enumerate(texts):
            prompt = text.tokens[: text.begin].tolist()
            explainer = Explainer(self.tokenizer, prompt, found.name, self.sampling)
            with timed_encoders(self.model, drafter) as encoders:
                stats = self._decode(
                    drafter, i, num_assistant_tokens=None if found.trees else gamma,
                    trace=explainer if first else None,
                )  # fmt: skip
            found.calls[gamma].append(stats)
            if i == 0:
                found.encoders[gamma] = encoders
                found.first_trees += explainer.trees
            if first:
                found.answers.append(explainer.rounds)

    def _compare_schedules(self, found: DrafterAnalysis, drafter: Drafter) -> None:
        """Answer all prompts with each schedule, and with enough drafts for an oracle."""
        calls: dict[str, Sequence[SpecStats]] = {
            f"constant, γ = {gamma}": stats for gamma, stats in found.calls.items()
        }
        for schedule in self.schedules:
            try:
                calls[schedule] = self._decode_all(
                    drafter, num_assistant_tokens=self.gammas[0],
                    num_assistant_tokens_schedule=schedule,
                )  # fmt: skip
            except ValueError as error:  # it reads what this drafter lacks
                found.refused[schedule] = str(error)
        longest = self._decode_all(drafter, num_assistant_tokens=ORACLE_DRAFTS)
        found.scheduled = compare_with_oracle(longest, calls, found.speeds[0].cost)

    def _decode_all(self, drafter: Drafter, **options: Any) -> list[SpecStats]:
        return [self._decode(drafter, i, **options) for i in range(len(self.inputs))]

    def _decode(self, drafter: Drafter, i: int, **options: Any) -> SpecStats:
        """The statistics of the answer to prompt i."""
        decoder = SpeculativeDecoder(
            drafter,
            rule=rule_for(drafter),
            guard=False,
            seed=self.seed + i,
            tokenizer=self.tokenizer,
            **options,
        )
        stream = decoder.stream(self.model, **self.inputs[i], **self.arguments)
        _, output = run_stream(stream, lambda step: self.advance(len(step.tokens)))
        stats: SpecStats = output.stats
        return stats
