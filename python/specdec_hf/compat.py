"""The functions of the program Speculative-Decoding, over the loop of this package.

The program (github.com/romsto/Speculative-Decoding) decodes one sequence of a Hugging Face model in
plain Python. Its functions have here their own names, arguments and results, so that code which
calls them changes its imports and nothing else: `speculative_generate`, `autoregressive_generate`,
`beam_search_generate`, `max_fn`, `prune_cache` and the logits processors. Nothing of the program is
imported. docs/compat.md lists every difference.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, LogitsProcessorList

from specdec_hf.api import generate
from specdec_hf.arguments import (
    check_flag,
    check_integer,
    check_integers,
    check_number,
    is_integer,
    shown,
)
from specdec_hf.beams.gnmt import GnmtBeams
from specdec_hf.beams.search import BeamSearch
from specdec_hf.loop.output import SpecOutput
from specdec_hf.loop.streaming import TracedRound
from specdec_hf.loop.token_outputs import filtered
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.entry import has_own_generate, prepare_call
from specdec_hf.request.inputs import check_language_model
from specdec_hf.request.sampling import Sampling, check_value, sequence_seeds
from specdec_hf.runner.encoded import is_encoder_decoder
from specdec_hf.schedules.egag import EgagSchedule
from specdec_kernels import sample

__all__ = [
    "GreedyProcessor",
    "LogitsProcessor",
    "MultinomialProcessor",
    "NucleusProcessor",
    "TopKNucleusProcessor",
    "TopKProcessor",
    "autoregressive_generate",
    "beam_search_generate",
    "max_fn",
    "prune_cache",
    "speculative_generate",
]

Cache = tuple[tuple[Tensor, ...] | None, ...] | DynamicCache | EncoderDecoderCache | None


class LogitsProcessor(abc.ABC):
    """How a token is chosen from a row: the distribution of its logits, and the choice.

    A class of your own overrides ``_process`` and inherits ``sample`` from `GreedyProcessor` or
    `MultinomialProcessor`.

    Args:
        temperature: above 0 and finite; the processed logits are divided by it.

    Raises:
        TypeError: an argument that is no number, by name.
        ValueError: an argument out of range, by name.
    """

    def __init__(self, temperature: float) -> None:
        check_value("temperature", temperature)
        if temperature == 0:
            raise ValueError("temperature must be above 0, got 0; GreedyProcessor is greedy")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """The probabilities [..., V] float32 of logits [..., V], which are not changed."""
        return (self._process(logits.float().clone()) / self.temperature).softmax(-1)

    @abc.abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """The logits [..., V] with -inf at tokens that must not be chosen."""

    @abc.abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """One token id [..., 1] int64 for each row of probabilities [..., V]."""


class GreedyProcessor(LogitsProcessor):
    """The most likely token."""

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        return probs.argmax(-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """A token drawn from the whole distribution.

    ``sample`` calls the op `specdec_kernels.sample` with seeds from torch's default generator.

    >>> torch.manual_seed(0)  # doctest: +SKIP
    >>> processor = MultinomialProcessor(temperature=0.8)
    >>> processor.sample(processor(torch.tensor([[0.0, -torch.inf]])))
    tensor([[0]])
    """

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        rows = probs.reshape(-1, probs.shape[-1])
        seeds = torch.tensor(sequence_seeds(None, len(rows)), device=rows.device)
        drawn = sample(rows.float().log(), seeds=seeds, positions=torch.zeros_like(seeds)).tokens
        invalid = (drawn < 0).nonzero().flatten().tolist()
        if invalid:
            raise RuntimeError(
                f"probs must hold a distribution in every row, got none in rows {shown(invalid)}"
            )
        return drawn.view(*probs.shape[:-1], 1)


class TopKProcessor(MultinomialProcessor):
    """A token drawn from the ``top_k`` most likely, and those as likely as the last of them.

    Args:
        temperature: as in `LogitsProcessor`.
        top_k: at least 1.
    """

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        self.top_k = check_integer("top_k", top_k, 1)

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_k=self.top_k)


class NucleusProcessor(MultinomialProcessor):
    """A token drawn from the most likely that have ``top_p`` together at temperature 1.

    Args:
        temperature: as in `LogitsProcessor`, applied to what is left.
        top_p: in (0, 1].
    """

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        check_value("top_p", top_p)
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_p=self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """`TopKProcessor`, then `NucleusProcessor` over the tokens that it left."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        self.top_k = check_integer("top_k", top_k, 1)
        check_value("top_p", top_p)
        self.top_p = top_p

    def _process(self, logits: Tensor) -> Tensor:
        return _filtered(logits, top_k=self.top_k, top_p=self.top_p)


GREEDY = GreedyProcessor()
# Penalties up to the largest float32 leave float64 scores all of their digits.
_LOG_LARGEST = math.log(torch.finfo(torch.float32).max)


def max_fn(x: Tensor) -> Tensor:
    """The residual: the positive entries of P - Q over their sum, norm(max(x, 0)).

    Args:
        x: [..., V] floating-point.

    Returns:
        [..., V] in the dtype of x; every row sums to 1.

    Raises:
        TypeError: what is no floating-point tensor.
        ValueError: a row without a positive entry, as where P equals Q.

    Source: Leviathan et al. 2023, section 2.3.

    >>> max_fn(torch.tensor([0.5, 0.25, 0.25]) - torch.tensor([0.25, 0.0, 0.75]))
    tensor([0.5000, 0.5000, 0.0000])
    """
    if not (isinstance(x, Tensor) and x.is_floating_point()):
        raise TypeError(f"x must be a floating-point tensor, got {shown(x)}")
    positive = x.clamp(min=0)
    total = positive.sum(-1, keepdim=True)
    if not (total > 0).all():
        raise ValueError(f"x must have a positive entry in every row, got {shown(x)} without one")
    return positive / total


def prune_cache(cache: Cache, num_tokens_to_discard: int) -> Cache:
    """Drop the last tokens of a cache.

    Args:
        cache: a tuple of layers, each a tuple of keys and values [B, H, n, D], of which views are
            returned; or a `DynamicCache` of Transformers, which is changed in place. What an
            encoder gave (the third and fourth tensor of a layer) stays whole. None stays None.
        num_tokens_to_discard: at least 0.

    Returns:
        The cache without them.

    Raises:
        TypeError: a number that is no integer.
        ValueError: a cache of another kind, or more tokens than it holds.
        RuntimeError: a sliding window or a state that cannot be rolled back.
    """
    number = check_integer("num_tokens_to_discard", num_tokens_to_discard, 0)
    if isinstance(cache, tuple):
        return tuple(None if layer is None else _pruned(layer, number) for layer in cache)
    if isinstance(cache, DynamicCache | EncoderDecoderCache):
        _check_held(number, cache.get_seq_length())
        if number:
            cache.crop(-number)
    elif cache is not None:
        raise ValueError(
            f"cache must be None, a tuple of layers or a DynamicCache, got {type(cache).__name__}"
        )
    return cache


def _pruned(layer: tuple[Tensor, ...], number: int) -> tuple[Tensor, ...]:
    for x in layer[:2]:
        _check_held(number, x.shape[2])
    return (*(x[:, :, : x.shape[2] - number] for x in layer[:2]), *layer[2:])


def _check_held(number: int, held: int) -> None:
    if number > held:
        raise ValueError(
            f"num_tokens_to_discard must be at most the {held} tokens of the cache, got {number}"
        )


def speculative_generate(
    inputs: Sequence[int],
    drafter: Any,
    target: Any,
    tokenizer: Any = None,
    gamma: int = 5,
    use_egag: bool = False,
    gamma_min: int = 1,
    gamma_max: int | None = None,
    egag_ema_beta: float = 0.0,
    logits_processor: LogitsProcessor = GREEDY,
    max_gen_len: int = 40,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    skip_sample_adjustment: bool = False,
    first_target: bool = True,
    debug: bool = False,
) -> tuple[list[int], float]:
    """Generate with drafts of a smaller model, which the target verifies.

    The text has the target's distribution under ``logits_processor``, drafts are verified by rule
    token, and greedy text is that of ``target.generate``. Sampled text draws its seed from torch's
    default generator.

    Args:
        inputs: token ids of the prompt.
        drafter: causal LM of the target's vocabulary, or what `generate` takes as ``drafter``.
        target: causal LM.
        tokenizer: decodes what ``debug`` prints; None prints ids.
        gamma: tokens to draft in each round.
        use_egag: let the entropy of the drafter set the number of drafts, as schedule "egag" does.
        gamma_min, gamma_max, egag_ema_beta: `EgagSchedule`'s gamma_min, gamma_max (None is
            ``gamma``) and beta. gamma_min is at most gamma_max.
        logits_processor: of target and drafter.
        max_gen_len: most new tokens, at least 1; the target's context is another limit.
        eos_tokens_id: an id or several, after one of which the text ends.
        pad_token_id: fills up sequences that ended early, of which a call with one sequence has
            none.
        use_cache: without effect: keys and values are always kept.
        skip_sample_adjustment: draw recovered tokens from P and not from the residual, which is
            lossy; see docs/loop.md#without-the-residual. Without effect where the text is greedy.
        first_target: without effect: the first round never drafts.
        debug: print the drafts and the tokens of every round.

    Returns:
        The new token ids, those of an end-of-sequence included, and accepted / drafted, 0 where
        nothing was drafted.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument out of range, a processor whose ``sample`` is its own, or a drafter
            that does not fit, by name.
        RuntimeError: logits that are not finite.

    Source: Leviathan et al. 2023, Algorithm 1.
    """
    _check_model("target", target)
    for name, flag in (
        ("use_egag", use_egag), ("use_cache", use_cache), ("first_target", first_target),
        ("skip_sample_adjustment", skip_sample_adjustment), ("debug", debug),
    ):  # fmt: skip
        check_flag(name, flag)
    sampling = _sampling_arguments(logits_processor)
    own: dict[str, Any] = {"rule": "token" if sampling["do_sample"] else "greedy"}
    if skip_sample_adjustment and sampling["do_sample"]:
        own["ablate"] = "residual"
    gamma = check_integer("gamma", gamma, 0)
    if use_egag:
        schedule = EgagSchedule(gamma_min, gamma_max, egag_ema_beta)
        if gamma_max is None and schedule.gamma_min > gamma:
            raise ValueError(
                f"gamma_min must be at most gamma={gamma}, which is gamma_max, got {gamma_min}"
            )
        own["num_assistant_tokens_schedule"] = schedule
    _check_tokenizer(tokenizer)
    if debug:
        own["trace"] = _round_printer(tokenizer)
    out = _generate(
        target, inputs, max_gen_len, eos_tokens_id, pad_token_id,
        drafter=drafter, gamma=gamma, guard=False, **sampling, **own,
    )  # fmt: skip
    return _new_tokens(out, inputs, debug=debug), out.stats.draft_acceptance_rate


def autoregressive_generate(
    inputs: Sequence[int],
    model: Any,
    max_gen_len: int = 40,
    logits_processor: LogitsProcessor = GREEDY,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    use_cache: bool = False,
    debug: bool = False,
) -> list[int]:
    """Generate token by token, without drafts.

    Args:
        inputs, max_gen_len, logits_processor, eos_tokens_id, pad_token_id, use_cache: as in
            `speculative_generate`.
        model: causal LM.
        debug: print why the text ended.

    Returns:
        The new token ids, those of an end-of-sequence included.

    Raises:
        TypeError, ValueError, RuntimeError: as in `speculative_generate`.
    """
    _check_model("model", model)
    check_flag("use_cache", use_cache)
    check_flag("debug", debug)
    out = _generate(
        model, inputs, max_gen_len, eos_tokens_id, pad_token_id,
        drafter=None, **_sampling_arguments(logits_processor),
    )  # fmt: skip
    return _new_tokens(out, inputs, debug=debug)


def beam_search_generate(
    inputs: Sequence[int],
    model: Any,
    max_gen_len: int = 40,
    num_beams: int = 4,
    top_k: int = 3,
    min_length: float = 5.0,
    alpha: float = 1.2,
    eos_tokens_id: int | Sequence[int] = 1,
    pad_token_id: int = 0,
    debug: bool = False,
    tokenizer: Any = None,
) -> list[int]:
    """Generate by a beam search whose scores have the length penalty of GNMT.

    A text Y of n tokens scores log P(Y) / lp(n), with lp(n) = ((min_length + n) / (min_length +
    1)) ** alpha. Texts that ended keep their place among the beams as long as their score is one of
    the best.

    Args:
        inputs, max_gen_len, eos_tokens_id, pad_token_id: as in `speculative_generate`.
        model: causal LM that the cache "spec" fits; see docs/loop.md#caches.
        num_beams: at least 1; 1 is greedy.
        top_k: how many tokens continue a beam, at least 1. The first step takes ``num_beams``.
        min_length: finite and at least 0.
        alpha: finite and at least 0, and no larger than the penalty of ``max_gen_len`` tokens
            allows, which must be a float32; 0 compares sums of log probabilities.
        debug: print the beams after every step.
        tokenizer: decodes what ``debug`` prints; None prints ids.

    Returns:
        The new token ids of the best text, those of an end-of-sequence included.

    Raises:
        TypeError: an argument of a wrong type, by name.
        ValueError: an argument out of range, or a model that no tree fits, by name.
        RuntimeError: logits that are not finite.

    Source: Wu et al. 2016 (arXiv 1609.08144), equation 14, without its coverage penalty.
    """
    _check_model("model", model)
    check_flag("debug", debug)
    width, top_k = check_integer("num_beams", num_beams, 1), check_integer("top_k", top_k, 1)
    shift, power = _check_finite("min_length", min_length), _check_finite("alpha", alpha)
    longest = check_integer("max_gen_len", max_gen_len, 1)
    _check_tokenizer(tokenizer)

    def penalty(n: int) -> float:
        return float(((shift + n) / (shift + 1)) ** power)

    if power * math.log((shift + longest) / (shift + 1)) > _LOG_LARGEST:
        raise ValueError(
            f"alpha must be so small that the length penalty of max_gen_len={longest} tokens is "
            f"within the range of float32, got {shown(alpha)}"
        )
    if width == 1:
        return autoregressive_generate(
            inputs, model, max_gen_len, GREEDY, eos_tokens_id, pad_token_id, debug=debug
        )
    call = prepare_call(
        model, **_text_arguments(model, inputs, max_gen_len, eos_tokens_id, pad_token_id),
        do_sample=False, num_beams=width,
    )  # fmt: skip

    def make(model: Any, call: Call, steps: int) -> GnmtBeams:
        return GnmtBeams(model, call, steps, top_k, penalty)

    search = BeamSearch(model, call, Options(drafter=None), make)
    beams = search.beams
    assert isinstance(beams, GnmtBeams)
    while not beams.done:
        search.run_round()
        if debug:
            for text, score in beams.ranked():
                print(f"{score:.4f}", _readable(tokenizer, text))
    return beams.ranked()[0][0]


def _filtered(logits: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Logits [..., V] with -inf at the tokens that the filters of the ops remove."""
    rows = logits.reshape(1, -1, logits.shape[-1])
    return filtered(rows, Sampling(1.0, top_k, top_p, 0.0)).reshape(logits.shape)


def _sampling_arguments(processor: LogitsProcessor) -> dict[str, Any]:
    """The arguments of `generate` that choose tokens as a processor does.

    The ops filter after the temperature. So they take a nucleus at temperature 1 themselves, and
    another one is a processor of logits.
    """
    if not isinstance(processor, LogitsProcessor):
        raise TypeError(f"logits_processor must be a LogitsProcessor, got {shown(processor)}")
    kind = type(processor)
    greedy = kind.sample is GreedyProcessor.sample
    if not greedy and kind.sample is not MultinomialProcessor.sample:
        raise ValueError(
            "logits_processor must have the sample method of GreedyProcessor or "
            f"MultinomialProcessor, got {kind.__name__} with its own"
        )
    if kind.__call__ is not LogitsProcessor.__call__:
        raise ValueError(
            f"logits_processor must have the __call__ of LogitsProcessor, got {kind.__name__} with "
            "its own; _process is for its logits"
        )
    arguments: dict[str, Any] = {"do_sample": not greedy}
    if not greedy:
        arguments |= Sampling(float(processor.temperature), 0, 1.0, 0.0).to_dict()
    served = kind in (GreedyProcessor, MultinomialProcessor, TopKProcessor)
    served |= kind in (NucleusProcessor, TopKNucleusProcessor) and processor.temperature == 1
    if served:
        fields = ("top_k", "top_p")
        return arguments | {n: getattr(processor, n) for n in fields if hasattr(processor, n)}

    def process(input_ids: Tensor, scores: Tensor) -> Tensor:
        return processor._process(scores)

    return arguments | {"logits_processor": LogitsProcessorList([process])}


def _check_model(name: str, model: Any) -> None:
    """Raises TypeError or ValueError for what is no decoder-only language model, by name."""
    check_language_model(name, model)
    if is_encoder_decoder(model) or has_own_generate(model):
        raise ValueError(
            f"{name} must be a decoder-only model with the generate of Transformers, got "
            f"{type(model).__name__}"
        )


def _check_finite(name: str, value: Any) -> float:
    """The value as a float, which must be finite and at least 0."""
    number = check_number(name, value, 0)
    if number == math.inf:
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return number


def _check_tokenizer(tokenizer: Any) -> None:
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(
            f"tokenizer must be None or an object with decode(), got {shown(tokenizer)}"
        )


def _text_arguments(
    model: Any, inputs: Sequence[int], max_gen_len: int, eos_tokens_id: Any, pad_token_id: int
) -> dict[str, Any]:
    """Prompt and ends of a text as arguments of `generate`.

    Raises:
        TypeError, ValueError: a wrong one, by name.
    """
    ids = check_integers("inputs", inputs, 0)
    if not ids:
        raise ValueError("inputs must have at least one token, got none")
    given = [eos_tokens_id] if is_integer(eos_tokens_id) else eos_tokens_id
    eos = check_integers("eos_tokens_id", given, 0)
    if not eos:
        raise ValueError("eos_tokens_id must have at least one id, got none")
    prompt = torch.tensor([ids], device=model.device)
    return {
        "input_ids": prompt,
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": check_integer("max_gen_len", max_gen_len, 1),
        "eos_token_id": list(eos),
        "pad_token_id": check_integer("pad_token_id", pad_token_id, 0),
    }


def _generate(
    model: Any, inputs: Any, max_gen_len: int, eos_tokens_id: Any, pad_token_id: int, **own: Any
) -> SpecOutput:
    text = _text_arguments(model, inputs, max_gen_len, eos_tokens_id, pad_token_id)
    out: SpecOutput = generate(
        model, **text, num_beams=1, num_return_sequences=1, return_dict_in_generate=True, **own
    )
    return out


def _new_tokens(out: SpecOutput, inputs: Sequence[int], *, debug: bool) -> list[int]:
    assert out.sequences is not None
    tokens: list[int] = out.sequences[0, len(inputs) :].tolist()
    if debug:
        print(f"{len(tokens)} tokens, ended by {out.stats.sequences[0].stop_reason}")
    return tokens


def _round_printer(tokenizer: Any) -> Callable[[TracedRound], None]:
    """Prints a round: its drafts, and the tokens that came of it by their kinds."""

    def print_round(traced: TracedRound) -> None:
        drafts = [token for token in traced.draft_token_ids[0].tolist() if token >= 0]
        (step,) = traced.steps
        accepted = step.kinds.count("accepted")
        print(f"position {int(traced.lengths[0])}: {accepted} of {len(drafts)} drafts accepted")
        parts: dict[str, list[int]] = {"accepted": [], "rejected": drafts[accepted:]}
        for token, kind in zip(step.tokens, step.kinds, strict=True):
            parts.setdefault(kind, []).append(token)
        for name, tokens in parts.items():
            if tokens:
                print(f"  {name}: {_readable(tokenizer, tokens)}")

    return print_round


def _readable(tokenizer: Any, tokens: list[int]) -> str:
    return repr(tokens if tokenizer is None else tokenizer.decode(tokens))
