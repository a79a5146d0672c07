"""One prompt with drafts, without, and by `model.generate`: texts, times, and agreement."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from specdec_hf.cli.speeds import GENERATE, WITHOUT, Speeds, Sums
from specdec_hf.decoder import SpeculativeDecoder
from specdec_hf.detokenizer import decode_behind
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import Step, run_stream
from specdec_hf.rules import text_depends_on_drafts
from specdec_hf.runner.protocol import context_length, is_encoder_decoder

NO_DRAFTER = "none"  # in statistics

Result = TypeVar("Result")


@dataclass(frozen=True)
class Run:
    """An answer made in one way: its token ids, and seconds of wall time, prefill included."""

    tokens: list[int]
    seconds: float


@dataclass
class Turn:
    """One generated answer, and the same made in other ways.

    ``prompt`` has the token ids that its text follows; see `prompt_ids`. ``without_drafts`` is the
    run of this library's plain decoding, and ``generate`` that of ``model.generate``; None where
    they were not run. ``seed`` repeats a sampled answer; greedy ones have none.
    """

    prompt_tokens: int
    steps: list[Step]
    stats: SpecStats
    seconds: float
    without_drafts: Run | None = None
    generate: Run | None = None
    seed: int | None = None
    prompt: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The generated token ids."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def plain(self) -> Run | None:
        """The run without drafts, which is the answer itself where there was no drafter."""
        if self.stats.drafter == NO_DRAFTER:
            return Run(self.tokens, self.seconds)
        return self.without_drafts

    @property
    def speeds(self) -> Speeds:
        """Tokens a second of the three ways."""
        return speeds_of([self])

    @property
    def identical(self) -> bool | None:
        """Whether the text is that of plain generation; None when there is nothing to compare.

        A greedy text is compared with that of ``model.generate``, a sampled one with that of this
        library without drafts. Sampled texts are the same only under rules whose text does not
        depend on the drafts, and no texts need be under a lossy rule.
        """
        sampled = self.seed is not None
        other = self.without_drafts if sampled else self.generate
        if other is None or not self.stats.lossless:
            return None
        if sampled and text_depends_on_drafts(self.stats.rule):
            return None
        return self.tokens == other.tokens

    @property
    def compared_with(self) -> str:
        """Whose text this one is compared with."""
        return GENERATE if self.seed is None else WITHOUT

    @property
    def difference(self) -> str | None:
        """Why this text is not the one that it was compared with; None where it is, or was not.

        Products of 16 bits round otherwise in other forwards. In float32 that has changed no text
        of ours, and a difference is a fault.
        """
        if self.identical is not False:
            return None
        if self.stats.forwards == "packed" and self.compared_with == GENERATE:
            return "packed weights add products up in another order"
        if self.stats.drafted:
            return "a forward of several tokens rounds unlike one of one token"
        return "forwards over another cache round otherwise"

    def text(self, tokenizer: Any) -> str:
        """The generated text."""
        return decode_behind(tokenizer, self.prompt, self.tokens)

    def to_dict(self, tokenizer: Any) -> dict[str, Any]:
        """Plain values for JSON."""
        ways = {GENERATE: self.generate, "without_drafts": self.plain}
        seconds = {name: None if run is None else run.seconds for name, run in ways.items()}
        return {
            "text": self.text(tokenizer),
            "tokens": self.tokens,
            "seed": self.seed,
            "kinds": [kind for step in self.steps for kind in step.kinds],
            "seconds": {**seconds, "with_drafts": self.seconds},
            **self.speeds.to_dict(),
            "identical": self.identical,
            "difference": self.difference,
            "stats": self.stats.to_dict(),
        }


def speeds_of(turns: Sequence[Turn]) -> Speeds:
    """Tokens a second of all answers together."""

    def sums(run: Run | None) -> Sums | None:
        return None if run is None else (len(run.tokens), run.seconds)

    return Speeds.of_sums(
        [sums(turn.generate) for turn in turns],
        [sums(turn.plain) for turn in turns],
        [(len(turn.tokens), turn.seconds) for turn in turns],
        drafted=sum(turn.stats.drafted for turn in turns),
        accepted=sum(turn.stats.accepted for turn in turns),
    )


def run_turn(
    model: Any,
    inputs: dict[str, torch.Tensor],
    decoder: SpeculativeDecoder,
    settings: dict[str, Any],
    *,
    compare: bool,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Turn:
    """Generate one answer; with ``compare`` again without drafts and with ``model.generate``.

    Without a drafter the answer itself is that without drafts. ``model.generate`` draws a sampled
    text of its own, of which only the speed counts, from random numbers that it leaves as they
    were.

    Args:
        model: target.
        inputs: ``input_ids`` and ``attention_mask`` of one sequence; of an encoder-decoder those of
            its encoder.
        decoder: the speculative decoder.
        settings: generation arguments.
        compare: measure the other two ways, too.
        on_tokens: called with the number of new tokens as they come.
    """

    def count(step: Step) -> None:
        on_tokens(len(step.tokens))

    stream = decoder.stream(model, **inputs, **settings)
    (steps, output), seconds = timed(model, lambda: run_stream(stream, count))
    turn = Turn(inputs["input_ids"].shape[1], steps, output.stats, seconds)
    turn.prompt = prompt_ids(model, inputs)
    if settings["do_sample"]:
        turn.seed = output.stats.seeds[0]
    if not compare:
        return turn
    if output.stats.drafter != NO_DRAFTER:
        plain = plain_decoder(decoder, output.stats.rule, turn.seed)
        own = plain.stream(model, **inputs, **settings)
        (again, _), seconds = timed(model, lambda: run_stream(own, count))
        turn.without_drafts = Run([token for step in again for token in step.tokens], seconds)
    width = prompt_width(model, inputs)
    limited = {**settings, "max_new_tokens": _most_new_tokens(model, width, settings)}
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        sequences, seconds = timed(
            model, lambda: model.generate(**inputs, **limited, streamer=_Counter(on_tokens))
        )
    turn.generate = Run(sequences[0, width:].tolist(), seconds)
    return turn


def timed(model: Any, action: Callable[[], Result]) -> tuple[Result, float]:
    """What an action returns, and its seconds, for which a CUDA device of the model is waited."""
    synchronize(model)
    began = time.perf_counter()
    result = action()
    synchronize(model)
    return result, time.perf_counter() - began


@dataclass(frozen=True)
class Alone:
    """The answer of one model by itself; seconds are those of the whole call."""

    name: str
    text: str
    tokens: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "tokens_per_second": self.tokens / self.seconds}


def answer_alone(
    name: str,
    model: Any,
    tokenizer: Any,
    inputs: dict[str, torch.Tensor],
    decoder: SpeculativeDecoder,
    settings: dict[str, Any],
    seed: int | None,
) -> Alone:
    """Let one model answer by plain decoding.

    Args:
        name: to print.
        model, tokenizer: the target or a draft model, and the tokenizer of ``inputs``.
        inputs: ``input_ids`` and ``attention_mask`` of one sequence.
        decoder: whose cache, forwards and noise are taken.
        settings: generation arguments.
        seed: of the sampling.
    """
    stream = plain_decoder(decoder, decoder.rule, seed).stream(model, **inputs, **settings)
    tokens, seconds = timed(model, lambda: [x for step in stream for x in step.tokens])
    text = decode_behind(tokenizer, prompt_ids(model, inputs), tokens)
    return Alone(name, text, len(tokens), seconds)


def plain_decoder(decoder: SpeculativeDecoder, rule: str, seed: int | None) -> SpeculativeDecoder:
    """The same without drafts. Then all rules draw alike; only match takes other noise."""
    return SpeculativeDecoder(
        None,
        rule="match" if rule == "match" else "auto",
        cache=decoder.cache,
        seed=seed,
        compile=decoder.compile,
    )


def prompt_width(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    """How many ids of a generated sequence come before the first new one.

    An encoder-decoder's begin with the token that starts its decoder, since its encoder reads the
    prompt.
    """
    return 1 if is_encoder_decoder(model) else inputs["input_ids"].shape[1]


def prompt_ids(model: Any, inputs: dict[str, torch.Tensor]) -> list[int]:
    """The ids that a generated text follows; none of an encoder-decoder, whose encoder has them."""
    return [] if is_encoder_decoder(model) else inputs["input_ids"][0].tolist()


def _most_new_tokens(model: Any, prompt_tokens: int, settings: dict[str, Any]) -> int:
    """New tokens that fit the context; ``model.generate`` itself would go on past it."""
    wanted: int = settings["max_new_tokens"]
    context = context_length(model)
    return wanted if context is None else min(wanted, context - prompt_tokens)


class _Counter:
    """A streamer that only counts, for the progress bar; the first call is the prompt."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self.on_tokens = on_tokens
        self.prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self.prompt_seen:
            self.on_tokens(value.numel())
        self.prompt_seen = True

    def end(self) -> None:
        pass


def synchronize(model: Any) -> None:
    """Wait for a CUDA device of the model."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
