"""Measured answers: each config in turns with plain generation, so that both meet the same noise.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from specdec_hf.api import SpeculativeDecoder
from specdec_hf.cli.compare import prompt_width, synchronize
from specdec_hf.cli.load import Loaded
from specdec_hf.lab.bench.baselines import Baseline
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import run_stream

PLAIN = "plain, Transformers"
WARM_UP_TOKENS = 8


@dataclass
class Config:
    """One way to generate.

    Attributes:
        name: to print.
        decoder: the loop of this library, or None for ``model.generate``.
        arguments: more arguments of ``model.generate``.
        schedule: for the table.
        model: whose ``generate`` is called in place of the target's.
        single: whether it takes one sequence only.
        drafts_on_host: whether its drafter computes nothing of a model.
        peer: whether it is left out, with a remark, where it fails.
        reference: whether other answers of this library must equal its, in place of those of plain
            Transformers, whose forwards have other widths.
    """

    name: str
    decoder: SpeculativeDecoder | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""
    model: Any = None
    single: bool = False
    drafts_on_host: bool = True
    peer: bool = False
    reference: bool = False


@dataclass
class Batch:
    """Prompts that are answered together.

    Attributes:
        prompts: their names.
        category: of all of them, "" where they are of several.
        inputs: ``input_ids`` and ``attention_mask`` [B, W], padded on the left, and on the right
            for an encoder.
    """

    prompts: list[str]
    category: str
    inputs: dict[str, torch.Tensor]


@dataclass
class Answer:
    """The answer of a config to a batch; seconds are wall time of the whole call with its prefill.

    Attributes:
        prompts, category: of the batch.
        texts: new tokens of each sequence; of several runs those of median time, as are the counts
            (of an even number of runs, those of the faster of the middle two).
        seconds: median of the runs; of an even number, the mean of the middle two.
        seconds_of_runs: in the order in which they were made.
        later_tokens, later_seconds: those after the first round; 0 where it was not timed.
        identical: whether the texts equal those of plain generation, in every run; with forwards of
            one width, those of plain decoding in this library.
        rounds: of the loop or of a `Baseline`; 0 for ``model.generate``.
        drafted, accepted: counts of the loop; 0 elsewhere.
        notes: remarks of the loop in any of the runs.
        stats: of the loop.
    """

    prompts: list[str]
    category: str
    texts: list[list[int]]
    seconds: float
    seconds_of_runs: list[float]
    later_tokens: int = 0
    later_seconds: float = 0.0
    identical: bool = False
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    notes: list[str] = field(default_factory=list)
    stats: SpecStats | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(map(len, self.texts))


@dataclass
class Pair:
    """A config's answer to a batch, and the plain ones that were made in turns with it.

    ``plain_first`` tells for each run which of the two was made first.
    """

    mine: Answer
    plain: Answer
    plain_first: list[bool]


def run_pairs(
    loaded: Loaded,
    configs: list[Config],
    batches: list[Batch],
    arguments: dict[str, Any],
    runs: int,
    advance: Callable[[str], None],
    first: int = 0,
) -> dict[str, list[Pair]]:
    """Answer every batch with every config; the first config is the plain one.

    Each answer is made right before or after a plain one, in turns. In run 0, 1, ... all configs of
    a batch draw the same seed, so that a run can be repeated.

    Args:
        loaded: the target.
        configs: those that `warm_up` took, the plain one first.
        batches: all of the same number of sequences.
        arguments: of generation.
        runs: how often each config answers each batch.
        advance: called with a config's name before each pair.
        first: number of the first batch, on which order and seeds depend.

    Returns:
        The pairs of each config but the plain one, by its name.
    """
    plain_config, *others = configs
    pairs: dict[str, list[Pair]] = {config.name: [] for config in others}
    for number, batch in enumerate(batches, start=first):
        made: list[tuple[list[Answer], list[Answer], list[bool]]] = [([], [], []) for _ in pairs]
        for run in range(runs):
            for k, config in enumerate(others):
                advance(config.name)
                mine, plain, plain_first = made[k]
                both = [(plain_config, plain), (config, mine)]
                plain_first.append((number + run + k) % 2 == 0)
                for one, answers in both if plain_first[-1] else reversed(both):
                    torch.manual_seed(number * runs + run)
                    answers.append(_answer(loaded.model, one, batch, arguments))
        texts = own = made[0][1][0].texts
        for config, (mine, _, _) in zip(others, made, strict=True):
            own = mine[0].texts if config.reference else own
        for config, (mine, plain, plain_first) in zip(others, made, strict=True):
            wanted = texts if config.decoder is None else own
            pair = Pair(_of_runs(mine, wanted), _of_runs(plain, texts), plain_first)
            pairs[config.name].append(pair)
    return pairs


def warm_up(
    loaded: Loaded,
    configs: list[Config],
    batches: list[Batch],
    arguments: dict[str, Any],
    advance: Callable[[str], None],
    first_tokens: int = WARM_UP_TOKENS,
) -> tuple[list[Config], dict[str, str]]:
    """The configs that can take part, after an answer each to the longest batch and the first.

    Args:
        loaded, configs, batches, arguments, advance: as in `run_pairs`.
        first_tokens: most new tokens of the answer to the first batch.

    Returns:
        Those configs, and why others were left out, by name.
    """
    longest = max(batches, key=lambda batch: batch.inputs["input_ids"].shape[1])
    several = len(batches[0].prompts) > 1
    taken, left_out = [], {}
    for config in configs:
        advance(f"warming up: {config.name}")
        if several and config.single:
            left_out[config.name] = "it takes one sequence only"
            continue
        try:
            # The cache of a compiled model gets its size from the longest answer.
            most = WARM_UP_TOKENS if config.model is None else arguments["max_new_tokens"]
            for batch, tokens in ((longest, most), (batches[0], first_tokens)):
                few = {**arguments, "max_new_tokens": min(tokens, arguments["max_new_tokens"])}
                _generate(loaded.model, config, batch.inputs, few)
        except Exception as error:
            if not config.peer:
                raise
            left_out[config.name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            taken.append(config)
    return taken, left_out


def _of_runs(each: list[Answer], plain: list[list[int]]) -> Answer:
    """One answer of those of all runs; ``plain`` are the texts that they must equal."""
    seconds = [answer.seconds for answer in each]
    middle = sorted(each, key=lambda answer: answer.seconds)[(len(each) - 1) // 2]
    return replace(
        middle,
        seconds=median(seconds),
        seconds_of_runs=seconds,
        identical=all(answer.texts == plain for answer in each),
        notes=sorted({note for answer in each for note in answer.notes}),
    )


def _answer(model: Any, config: Config, batch: Batch, arguments: dict[str, Any]) -> Answer:
    stamps = _Stamps()
    if config.name == PLAIN:
        arguments = {**arguments, "stopping_criteria": StoppingCriteriaList([stamps])}
    graphs = _graphs()
    began = time.perf_counter()
    sequences, stats = _generate(model, config, batch.inputs, arguments)
    seconds = time.perf_counter() - began
    width = prompt_width(model, batch.inputs)
    texts = [_until_end(row, model) for row in sequences[:, width:].tolist()]
    answer = Answer(batch.prompts, batch.category, texts, seconds, [seconds], stats=stats)
    if stamps.first:
        answer.later_seconds = began + seconds - stamps.first
        answer.later_tokens = answer.tokens - len(texts)
    if stats is not None:
        first = stats.round_log[0]
        answer.later_seconds = stats.total_seconds - first.began - first.seconds
        answer.later_tokens = answer.tokens - sum(first.emitted)
        answer.rounds, answer.drafted = sum(s.rounds for s in stats.sequences), stats.drafted
        answer.accepted = stats.accepted
        answer.notes = stats.remarks
    if isinstance(config.model, Baseline):
        answer.rounds = config.model.rounds
    if _graphs() > graphs:
        answer.notes.append("torch.compile made graphs while this was measured")
    return answer


def _generate(
    model: Any, config: Config, inputs: dict[str, torch.Tensor], arguments: dict[str, Any]
) -> tuple[torch.Tensor, SpecStats | None]:
    """[B, W] token ids, and the statistics of this library's loop."""
    stats: SpecStats | None = None
    if config.decoder is None:
        sequences = (config.model or model).generate(**inputs, **arguments, **config.arguments)
    else:
        stream = config.decoder.stream(model, **inputs, **arguments)
        _, output = run_stream(stream, lambda step: None)
        sequences, stats = output.sequences, output.stats
    synchronize(model)
    return sequences, stats


class _Stamps(StoppingCriteria):
    """Stops nothing; keeps the time of the first token."""

    def __init__(self) -> None:
        self.first = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.first = self.first or time.perf_counter()
        return input_ids.new_zeros(len(input_ids), dtype=torch.bool)


def _until_end(tokens: list[int], model: Any) -> list[int]:
    """The tokens up to the end of the sequence, behind which a batch is padded."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    found = [i for i, token in enumerate(tokens) if token in ends]
    return tokens[: found[0] + 1] if found else tokens


def _graphs() -> int:
    """How many graphs torch.compile has made in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return 0 if compiler is None else int(compiler.counters["stats"]["unique_graphs"])
