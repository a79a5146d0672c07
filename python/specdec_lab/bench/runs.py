"""Measured answers: each config in turns with what it is compared with, so that all meet one noise.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from specdec_hf.cli.compare import prompt_width, synchronize
from specdec_hf.cli.load import Loaded
from specdec_hf.cli.speeds import GENERATE
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import run_stream
from transformers import StoppingCriteria, StoppingCriteriaList

from specdec_lab.bench.baselines import Baseline
from specdec_lab.bench.peer_process import PeerProcess

WITHOUT = "without drafts, specdec"
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
        without_drafts: whether it is this library without drafts, which takes part in the turns of
            each config that drafts.
        reference: whether other answers of this library must equal those of this config, in place
            of those of ``model.generate``, whose forwards have other widths.
    """

    name: str
    decoder: SpeculativeDecoder | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    schedule: str = ""
    model: Any = None
    single: bool = False
    drafts_on_host: bool = True
    peer: bool = False
    without_drafts: bool = False
    reference: bool = False


@dataclass
class PromptBatch:
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
class TimedAnswer:
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
class Turns:
    """A config's answer to a batch, and those that were made in turns with it.

    Attributes:
        mine: of the config.
        generate: of ``model.generate``; None where it took no part.
        orders: who answered first, second and third in each run: "m" is the config, "p"
            ``model.generate``, "w" this library without drafts.
        without_drafts: of this library without drafts, where the config drafts.
    """

    mine: TimedAnswer
    generate: TimedAnswer | None
    orders: list[str]
    without_drafts: TimedAnswer | None = None


def turns_of(configs: Sequence[Config]) -> list[dict[str, Config]]:
    """Who answers in turns, by the letters of `Turns.orders`.

    A config of this library that drafts takes turns with ``model.generate`` and with this library
    without drafts, all others with ``model.generate``, each if it is there. Where a config drafts,
    this library without drafts has no turns of its own.
    """
    generate, others = dict[str, Config](), list[Config]()
    for one in configs:
        if one.name == GENERATE:
            generate["p"] = one
        else:
            others.append(one)
    without = next((one for one in others if one.without_drafts), None)
    drafting = [one for one in others if one.decoder is not None and one is not without]
    turns = []
    for one in others:
        if without is not None and one in drafting:
            turns.append({**generate, "w": without, "m": one})
        elif one is not without or not drafting:
            turns.append({**generate, "m": one})
    return turns


def run_turns(
    loaded: Loaded,
    configs: list[Config],
    batches: list[PromptBatch],
    arguments: dict[str, Any],
    runs: int,
    advance: Callable[[str], None],
    first: int = 0,
) -> dict[str, list[Turns]]:
    """Answer every batch with every config.

    An answer is made right before or after those that it is compared with, in an order that
    changes. In run 0, 1, ... all configs of a batch draw the same seed, so that a run can be
    repeated.

    Args:
        loaded: the target.
        configs: those that `warm_up` took.
        batches: all of the same number of sequences.
        arguments: of generation.
        runs: how often each config answers each batch.
        advance: called with a config's name before each answer of its turns.
        first: number of the first batch, on which order and seeds depend.

    Returns:
        The turns of each config that has some, by its name.
    """
    every = turns_of(configs)
    found: dict[str, list[Turns]] = {turn["m"].name: [] for turn in every}
    for number, batch in enumerate(batches, start=first):
        made = [{role: list[TimedAnswer]() for role in turn} for turn in every]
        orders: list[list[str]] = [[] for _ in every]
        for run in range(runs):
            for k, turn in enumerate(every):
                orders[k].append(_order("".join(turn), number + k, run))
                for role in orders[k][-1]:
                    advance(turn["m"].name)
                    torch.manual_seed(number * runs + run)
                    made[k][role].append(_answer(loaded.model, turn[role], batch, arguments))
        texts = own = next(iter(made[0].values()))[0].texts
        for turn, answers in zip(every, made, strict=True):
            reference = [role for role, one in turn.items() if one.reference]
            if reference:
                own = answers[reference[0]][0].texts
                break
        for turn, answers, order in zip(every, made, orders, strict=True):
            wanted = {role: texts if one.decoder is None else own for role, one in turn.items()}
            of = {role: _of_runs(each, wanted[role]) for role, each in answers.items()}
            found[turn["m"].name].append(Turns(of["m"], of.get("p"), order, of.get("w")))
    return found


def _order(roles: str, turn: int, run: int) -> str:
    """The roles from another one on in each run, and of three backwards in every second turn."""
    start = (turn + run) % len(roles)
    order = roles[start:] + roles[:start]
    return order[::-1] if len(roles) > 2 and turn % 2 else order


def warm_up(
    loaded: Loaded,
    configs: list[Config],
    batches: list[PromptBatch],
    arguments: dict[str, Any],
    advance: Callable[[str], None],
    first_tokens: int = WARM_UP_TOKENS,
) -> tuple[list[Config], dict[str, str]]:
    """The configs that can take part, after an answer each to the longest batch and the first.

    Args:
        loaded, configs, batches, arguments, advance: as in `run_turns`.
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


def _of_runs(each: list[TimedAnswer], wanted: list[list[int]]) -> TimedAnswer:
    """One answer of those of all runs; ``wanted`` are the texts that they must equal."""
    seconds = [answer.seconds for answer in each]
    middle = sorted(each, key=lambda answer: answer.seconds)[(len(each) - 1) // 2]
    return replace(
        middle,
        seconds=median(seconds),
        seconds_of_runs=seconds,
        identical=all(answer.texts == wanted for answer in each),
        notes=sorted({note for answer in each for note in answer.notes}),
    )


def _answer(
    model: Any, config: Config, batch: PromptBatch, arguments: dict[str, Any]
) -> TimedAnswer:
    stamps = _Stamps()
    if config.name == GENERATE:
        arguments = {**arguments, "stopping_criteria": StoppingCriteriaList([stamps])}
    graphs = _graphs()
    began = time.perf_counter()
    sequences, stats = _generate(model, config, batch.inputs, arguments)
    seconds = time.perf_counter() - began
    width = prompt_width(model, batch.inputs)
    texts = [_until_end(row, model) for row in sequences[:, width:].tolist()]
    answer = TimedAnswer(batch.prompts, batch.category, texts, seconds, [seconds], stats=stats)
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
    if isinstance(config.model, PeerProcess):
        answer.later_tokens = config.model.later_tokens
        answer.later_seconds = config.model.later_seconds
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
