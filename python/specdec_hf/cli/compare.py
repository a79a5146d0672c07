"""One prompt with and without speculation, and by a model alone: texts, times, and agreement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from specdec_hf.api import SpeculativeDecoder
from specdec_hf.detokenizer import decode_behind
from specdec_hf.drafting.context import text_depends_on_drafts
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.loop.streaming import Step, run_stream
from specdec_hf.runner.encoded import is_encoder_decoder
from specdec_hf.runner.protocol import context_length


@dataclass
class Turn:
    """One generated answer.

    ``prompt`` has the token ids that its text follows; see `prompt_ids`. ``baseline_tokens`` is
    what plain decoding generated, empty when it was not run. Seconds are wall time of the whole
    call, prefill included. ``seed`` repeats a sampled answer; greedy ones have none.
    """

    prompt_tokens: int
    steps: list[Step]
    stats: SpecStats
    seconds: float
    baseline: str = ""
    baseline_tokens: list[int] = field(default_factory=list)
    baseline_seconds: float = 0.0
    seed: int | None = None
    prompt: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The generated token ids."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall time."""
        return len(self.tokens) / self.seconds if self.seconds else 0.0

    @property
    def baseline_tokens_per_second(self) -> float:
        """The same without speculation; 0 when it was not run."""
        return len(self.baseline_tokens) / self.baseline_seconds if self.baseline_seconds else 0.0

    @property
    def ratio(self) -> float:
        """Speed with speculation over speed without; 0 where either is missing."""
        plain = self.baseline_tokens_per_second
        return self.tokens_per_second / plain if plain and self.stats.drafted else 0.0

    @property
    def identical(self) -> bool | None:
        """Whether both generated the same tokens; None when there is nothing to compare.

        Sampled texts are the same only under rules whose text does not depend on the drafts, and
        no texts need be under a lossy rule.
        """
        sampled = self.seed is not None
        if not self.baseline or not self.stats.lossless:
            return None
        if sampled and text_depends_on_drafts(self.stats.rule):
            return None
        return self.tokens == self.baseline_tokens

    @property
    def difference(self) -> str | None:
        """Why this text is not that of the baseline, where both were compared and differ.

        Products of 16 bits round otherwise in other forwards. In float32 that has changed no text
        of ours, and a difference is a fault.
        """
        if self.identical is not False:
            return None
        if self.stats.forwards == "packed" and self.baseline == "model.generate":
            return "packed weights add products up in another order"
        if self.stats.drafted:
            return "a forward of several tokens rounds unlike one of one token"
        return "forwards over another cache round otherwise"

    def text(self, tokenizer: Any) -> str:
        """The generated text."""
        return decode_behind(tokenizer, self.prompt, self.tokens)

    def to_dict(self, tokenizer: Any) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "text": self.text(tokenizer),
            "tokens": self.tokens,
            "seed": self.seed,
            "kinds": [kind for step in self.steps for kind in step.kinds],
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "baseline": self.baseline or None,
            "baseline_seconds": self.baseline_seconds or None,
            "baseline_tokens_per_second": self.baseline_tokens_per_second or None,
            "ratio": self.ratio or None,
            "identical": self.identical,
            "difference": self.difference,
            "stats": self.stats.to_dict(),
        }


def run_turn(
    model: Any,
    inputs: dict[str, torch.Tensor],
    decoder: SpeculativeDecoder,
    settings: dict[str, Any],
    *,
    compare: bool,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Turn:
    """Generate one answer, and once more without speculation where ``compare`` asks for it.

    Greedy text is compared with ``model.generate``, sampled text and that of forwards of one width
    with this library's own plain decoding. Sampled texts are the same token for token under the
    rules "match" and "target_only"; under other rules only the speeds can be compared.

    Args:
        model: target.
        inputs: ``input_ids`` and ``attention_mask`` of one sequence; of an encoder-decoder those of
            its encoder.
        decoder: the speculative decoder.
        settings: generation arguments.
        compare: run the baseline too.
        on_tokens: called with the number of new tokens as they come.
    """
    synchronize(model)
    began = time.perf_counter()
    stream = decoder.stream(model, **inputs, **settings)
    steps, output = run_stream(stream, lambda step: on_tokens(len(step.tokens)))
    synchronize(model)
    seconds = time.perf_counter() - began
    turn = Turn(inputs["input_ids"].shape[1], steps, output.stats, seconds)
    turn.prompt = prompt_ids(model, inputs)
    if settings["do_sample"]:
        turn.seed = output.stats.seeds[0]
    if not compare:
        return turn
    began = time.perf_counter()
    if settings["do_sample"]:
        plain = plain_decoder(decoder, output.stats.rule, turn.seed)
        for step in plain.stream(model, **inputs, **settings):
            turn.baseline_tokens += step.tokens
            on_tokens(len(step.tokens))
        turn.baseline = "plain decoding in this library"
    else:
        width = prompt_width(model, inputs)
        limited = {**settings, "max_new_tokens": _room(model, width, settings)}
        sequences = model.generate(**inputs, **limited, streamer=_Counter(on_tokens))
        turn.baseline_tokens = sequences[0, width:].tolist()
        turn.baseline = "model.generate"
    synchronize(model)
    turn.baseline_seconds = time.perf_counter() - began
    return turn


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
    plain = plain_decoder(decoder, decoder.rule, seed)
    began = time.perf_counter()
    tokens = [x for step in plain.stream(model, **inputs, **settings) for x in step.tokens]
    synchronize(model)
    seconds = time.perf_counter() - began
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


def _room(model: Any, prompt_tokens: int, settings: dict[str, Any]) -> int:
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
