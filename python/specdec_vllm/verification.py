"""A batch of a server, verified or sampled by the ops: nothing here knows vLLM.

The target rows of a batch are ragged: those of sequence b are `indptr[b]` to `indptr[b+1]`, one for
each of its drafts and one for the bonus token. A server counts on at least one token of every
sequence in each step. Where a row holds no distribution or a parameter is out of range, the op
emits nothing, and its status says why. On the CPU the sequence then gets the token with the largest
finite logit of its first row. Elsewhere the host would have to wait for the device to know of it,
so the sequence gets token 0, and no row is read again. A warning names the sequence and its faults,
elsewhere in a later step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Rule, SampledDraft, sample, verify_chain
from specdec_vllm import faults
from specdec_vllm.parameters import Parameters
from specdec_vllm.settings import Settings
from specdec_vllm.tensors import as_wide_as


class Acceptance(NamedTuple):
    """The rule and its parameters: see `verify_chain`.

    synthetic_rates: [gamma] float32 or longer, for rule synthetic.
    """

    rule: Rule = "token"
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3
    synthetic_rates: Tensor | None = None


def acceptance_of(settings: Settings, rule: Rule, rates: Tensor | None) -> Acceptance:
    """Rule synthetic where vLLM gives rates for it, otherwise `rule`."""
    if rates is not None:
        return Acceptance("synthetic", synthetic_rates=rates)
    if rule == "typical":
        return Acceptance(rule, settings.typical_epsilon, settings.typical_delta)
    return Acceptance(rule)


def rule_of(settings: Settings, block: bool) -> Rule:
    """The rule that the settings name, or the one that vLLM's configuration asks for."""
    return settings.rule or ("block" if block else "token")


def verify(
    rows: Tensor,
    draft_token_ids: Tensor,
    draft: Tensor | SampledDraft | None,
    indptr: Tensor,
    parameters: Parameters,
    acceptance: Acceptance,
    draft_rows: Tensor | None = None,
) -> Tensor:
    """The emitted tokens [B, gamma+1] of each sequence, at least one of each, then -1.

    Args:
        rows: [R, V] float32, bfloat16 or float16 logits, ragged.
        draft_token_ids: [B, gamma], -1 where a sequence has fewer drafts.
        draft: None, logits [B, gamma, D] or [R-B, D] to be divided by the target's temperature, or
            what `probabilities` and `scaled_logits` return.
        indptr: [B+1] int32.
        parameters: of each sequence.
        acceptance: the rule.
        draft_rows: as in `verify_chain`.
    """
    rates = acceptance.synthetic_rates
    verdict = verify_chain(
        rows,
        draft_token_ids,
        as_wide_as(draft, rows) if isinstance(draft, Tensor) else draft,
        rule=acceptance.rule,
        **parameters._asdict(),
        target_indptr=indptr,
        draft_rows=draft_rows,
        typical_epsilon=acceptance.typical_epsilon,
        typical_delta=acceptance.typical_delta,
        synthetic_rates=None if rates is None else rates[: draft_token_ids.shape[1]],
        with_logprobs=False,
    )
    first = _never_missing(verdict.tokens[:, 0], verdict.status, rows, indptr[:-1])
    return torch.cat([first[:, None], verdict.tokens[:, 1:]], dim=1)


def sample_rows(rows: Tensor, parameters: Parameters, rule: Rule) -> Tensor:
    """One token [R] int64 of each row, equal to what `verify` emits for a row without drafts."""
    sampled = sample(
        rows, **parameters._asdict(), noise="shared" if rule == "match" else "residual"
    )
    return _never_missing(sampled.tokens, sampled.status, rows, None)


def _never_missing(tokens: Tensor, status: Tensor, rows: Tensor, index: Tensor | None) -> Tensor:
    """Tokens [B], with another one in place of each -1: see the top of this file."""
    missing = tokens < 0
    if not on_host(tokens):
        faults.name_later(torch.where(missing, status, 0), "token 0")
        return tokens.clamp_min(0)
    if not bool(missing.any()):
        return tokens
    faults.name(torch.where(missing, status, 0), "the token with the largest finite logit")
    chosen = rows if index is None else rows[index]
    finite = torch.where(chosen.isfinite(), chosen, -torch.inf)
    return torch.where(missing, finite.argmax(-1).to(tokens.dtype), tokens)


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read it without waiting for a device."""
    return tensor.is_cpu
