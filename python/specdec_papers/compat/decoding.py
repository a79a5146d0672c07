"""Speculative and plain decoding of one sequence, and the residual that recovers a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from specdec_hf.api import generate
from specdec_hf.arguments import check_flag, check_integer, shown
from specdec_hf.loop.output import SpecOutput
from specdec_hf.loop.streaming import TracedRound
from specdec_hf.schedules.egag import EgagSchedule
from torch import Tensor

from specdec_papers.compat.logits_processors import GREEDY, LogitsProcessor, sampling_arguments
from specdec_papers.compat.text_arguments import (
    check_model,
    check_tokenizer,
    readable,
    text_arguments,
)


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
    check_model("target", target)
    for name, flag in (
        ("use_egag", use_egag), ("use_cache", use_cache), ("first_target", first_target),
        ("skip_sample_adjustment", skip_sample_adjustment), ("debug", debug),
    ):  # fmt: skip
        check_flag(name, flag)
    sampling = sampling_arguments(logits_processor)
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
    check_tokenizer(tokenizer)
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
    check_model("model", model)
    check_flag("use_cache", use_cache)
    check_flag("debug", debug)
    out = _generate(
        model, inputs, max_gen_len, eos_tokens_id, pad_token_id,
        drafter=None, **sampling_arguments(logits_processor),
    )  # fmt: skip
    return _new_tokens(out, inputs, debug=debug)


def _generate(
    model: Any, inputs: Any, max_gen_len: int, eos_tokens_id: Any, pad_token_id: int, **own: Any
) -> SpecOutput:
    text = text_arguments(model, inputs, max_gen_len, eos_tokens_id, pad_token_id)
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
                print(f"  {name}: {readable(tokenizer, tokens)}")

    return print_round
