"""Beam search whose scores have the length penalty of GNMT."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from specdec_hf.arguments import check_flag, check_integer, check_number, shown
from specdec_hf.loop.draft_choice import asked_choice
from specdec_hf.options import Options
from specdec_hf.request.call import Call
from specdec_hf.request.entry import prepare_call

from specdec_papers.beams.gnmt import GnmtBeams
from specdec_papers.beams.search import BeamSearch
from specdec_papers.compat.decoding import autoregressive_generate
from specdec_papers.compat.logits_processors import GREEDY
from specdec_papers.compat.text_arguments import (
    check_model,
    check_tokenizer,
    readable,
    text_arguments,
)

# Penalties up to the largest float32 leave float64 scores all of their digits.
_LOG_LARGEST = math.log(torch.finfo(torch.float32).max)


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
    check_model("model", model)
    check_flag("debug", debug)
    width, top_k = check_integer("num_beams", num_beams, 1), check_integer("top_k", top_k, 1)
    shift, power = _check_finite("min_length", min_length), _check_finite("alpha", alpha)
    longest = check_integer("max_gen_len", max_gen_len, 1)
    check_tokenizer(tokenizer)

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
        model, **text_arguments(model, inputs, max_gen_len, eos_tokens_id, pad_token_id),
        do_sample=False, num_beams=width,
    )  # fmt: skip

    def make(model: Any, call: Call, steps: int) -> GnmtBeams:
        return GnmtBeams(model, call, steps, top_k, penalty)

    options = Options(drafter=None)
    search = BeamSearch(model, call, options, asked_choice(options, call.assistant), make)
    beams = search.beams
    assert isinstance(beams, GnmtBeams)
    while not beams.done:
        search.run_round()
        if debug:
            for text, score in beams.ranked():
                print(f"{score:.4f}", readable(tokenizer, text))
    return beams.ranked()[0][0]


def _check_finite(name: str, value: Any) -> float:
    """The value as a float, which must be finite and at least 0."""
    number = check_number(name, value, 0)
    if number == math.inf:
        raise ValueError(f"{name} must be finite, got {shown(value)}")
    return number
