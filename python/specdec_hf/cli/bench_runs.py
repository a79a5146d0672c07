"""Measured answers: each config on each prompt, in turns, so that all meet the same noise.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from specdec_hf.cli.load import Loaded
from specdec_hf.decode.generate import SpeculativeDecoder
from specdec_hf.decode.streaming import run_stream

PLAIN = "plain, Transformers"


@dataclass
class Config:
    """One way to generate.

    Attributes:
        name: to print.
        decoder: the loop of this library, or None for ``model.generate``.
        arguments: more arguments of ``model.generate``.
        schedule: for the table.
    """

    name: str
    decoder: SpeculativeDecoder | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""


@dataclass
class Answer:
    """The answer of a config to a prompt; seconds are wall time of the whole call with its prefill.

    Attributes:
        prompt, category: of the prompt.
        tokens: new ones; of several runs those of median time, as are the counts (of an even
            number of runs, those of the faster of the middle two).
        seconds: median of the runs; of an even number, the mean of the middle two.
        seconds_of_runs: in the order in which they were made.
        identical: whether the text equals that of plain generation, in every run.
        rounds, drafted, accepted: counts of the loop; 0 for ``model.generate``.
        notes: remarks of the loop in any of the runs.
    """

    prompt: str
    category: str
    tokens: list[int]
    seconds: float
    seconds_of_runs: list[float]
    identical: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    notes: list[str] = field(default_factory=list)


@dataclass
class Row:
    """The figures of a config over all prompts.

    Attributes:
        tokens_per_second: all tokens over all seconds.
        ratio: of it to that of plain generation with Transformers.
        median_ratio: median over the prompts of plain seconds per token to the config's.
        tokens_per_round: tokens per forward of the target, None for ``model.generate``.
        identical: how many texts equal that of plain generation, in every run.
        texts: how many texts there are.
        notes: remarks of the loop.
    """

    name: str
    schedule: str
    tokens_per_second: float
    ratio: float
    median_ratio: float
    tokens_per_round: float | None
    identical: int
    texts: int
    notes: list[str]
    answers: list[Answer]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_configs(
    loaded: Loaded,
    configs: list[Config],
    prompts: list[tuple[str, str, dict[str, torch.Tensor]]],
    arguments: dict[str, Any],
    runs: int,
    advance: Callable[[str], None],
) -> list[Row]:
    """Generate with every config on every prompt; the first config is the plain one.

    Args:
        loaded: the target.
        configs: their order changes from prompt to prompt.
        prompts: name, category, and ``input_ids`` with ``attention_mask`` of each.
        arguments: of generation.
        runs: how often each config answers each prompt.
        advance: called with a config's name before each of its answers.
    """
    warm = {key: value[:, :8] for key, value in prompts[0][2].items()}
    for config in configs:
        advance(f"warming up: {config.name}")
        _generate(loaded.model, config, warm, {**arguments, "max_new_tokens": 8})
    answers: dict[str, list[Answer]] = {config.name: [] for config in configs}
    for number, prompt in enumerate(prompts):
        found: dict[str, list[Answer]] = {config.name: [] for config in configs}
        for run in range(runs):
            first = (number + run) % len(configs)
            for config in [*configs[first:], *configs[:first]]:
                advance(config.name)
                found[config.name].append(_answer(loaded.model, config, prompt, arguments))
        plain = found[PLAIN][0].tokens
        for name, each in found.items():
            answers[name].append(_of_runs(each, plain))
    return [_row(config, answers[config.name], answers[PLAIN]) for config in configs]


def _of_runs(each: list[Answer], plain: list[int]) -> Answer:
    """One answer of those of all runs; ``plain`` is the text of plain generation."""
    seconds = [answer.seconds for answer in each]
    middle = sorted(each, key=lambda answer: answer.seconds)[(len(each) - 1) // 2]
    return replace(
        middle,
        seconds=median(seconds),
        seconds_of_runs=seconds,
        identical=all(answer.tokens == plain for answer in each),
        notes=sorted({note for answer in each for note in answer.notes}),
    )


def _answer(
    model: Any,
    config: Config,
    prompt: tuple[str, str, dict[str, torch.Tensor]],
    arguments: dict[str, Any],
) -> Answer:
    name, category, inputs = prompt
    began = time.perf_counter()
    sequences, stats = _generate(model, config, inputs, arguments)
    seconds = time.perf_counter() - began
    tokens = sequences[0, inputs["input_ids"].shape[1] :].tolist()
    answer = Answer(name, category, tokens, seconds, [seconds])
    if stats is not None:
        answer.rounds, answer.drafted = stats.rounds, stats.drafted
        answer.accepted = stats.accepted
        answer.notes = [note.split(": ", 1)[-1] for note in stats.notes]
    return answer


def _generate(
    model: Any, config: Config, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]
) -> tuple[torch.Tensor, Any]:
    """[1, W] token ids, and the statistics of this library's loop."""
    if config.decoder is None:
        sequences = model.generate(**inputs, **arguments, **config.arguments)
        stats = None
    else:
        stream = config.decoder.stream(model, **inputs, **arguments)
        _, output = run_stream(stream, lambda step: None)
        sequences, stats = output.sequences, output.stats
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return sequences, stats


def _row(config: Config, answers: list[Answer], plain: list[Answer]) -> Row:
    speed, plain_speed = _tokens_per_second(answers), _tokens_per_second(plain)
    pairs = list(zip(answers, plain, strict=True))
    rounds = sum(answer.rounds for answer in answers)
    return Row(
        name=config.name,
        schedule=config.schedule,
        tokens_per_second=speed,
        ratio=speed / plain_speed,
        median_ratio=median(
            len(mine.tokens) / mine.seconds / (len(theirs.tokens) / theirs.seconds)
            for mine, theirs in pairs
        ),
        tokens_per_round=None
        if config.decoder is None
        else sum(len(answer.tokens) for answer in answers) / rounds,
        identical=sum(answer.identical for answer in answers),
        texts=len(answers),
        notes=sorted({note for answer in answers for note in answer.notes}),
        answers=answers,
    )


def _tokens_per_second(answers: list[Answer]) -> float:
    return sum(len(answer.tokens) for answer in answers) / sum(one.seconds for one in answers)
