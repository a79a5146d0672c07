"""Which drafts of a chain are accepted, and the recovered or bonus token; docs/rules.md#token."""

from __future__ import annotations

import math

from ...arguments.status import Status
from ..row.distribution import TargetRow, prob_of
from .block import decide_block
from .residual import ratio, recovered_token
from .sequence import ChainSequence


def decide(s: ChainSequence) -> None:
    if s.a.rule_name == "block" and s.params.temperature != 0:
        decide_block(s)
    else:
        _decide_in_order(s)


def _decide_in_order(s: ChainSequence) -> None:
    """Accepts drafts from the first on, up to the first rejection; every rule but block."""
    for i, token in enumerate(s.drafts):
        row = s.target(i, token)
        if not row.valid:
            s.status |= s.target_fault(i)
            return
        if s.params.temperature == 0 or s.a.rule_name == "match":
            accepted = _accept_by_target_token(s, i, token, row)
        else:
            accepted = _accept_by_probability(s, i, token, row)
        if not accepted:
            return
        s.num_accepted += 1
    if not s.no_bonus:
        _emit_bonus(s)


def _emit_bonus(s: ChainSequence) -> None:
    """Emits the token after the drafts, all of which were accepted."""
    s.status |= s.status_after_drafts
    i = len(s.drafts)
    row = s.target(i)
    if not row.valid:
        s.status |= s.target_fault(i)
    elif s.params.temperature == 0 or s.a.rule_name == "match":
        s.emit(row, s.target_token(i, row))
    else:
        s.emit(row, s.draw_after(i, row.probs))


def _accept_by_target_token(s: ChainSequence, i: int, token: int, row: TargetRow) -> bool:
    """Accepts draft i if it is the token that the target decides on, and else emits that one."""
    wanted = s.target_token(i, row)
    if s.a.rule_name == "synthetic":
        accepted = _accept_at_rate(s, i)
    else:
        accepted = token == wanted or _accept_near_maximum(s, i, token)
        accepted |= s.a.rule_name == "top_beta" and s.in_top_beta(s.unprocessed_logprobs(i), token)
        s.accept_probs[i] = float(accepted)
    s.emit(row, token if accepted else wanted)
    return accepted


def _accept_near_maximum(s: ChainSequence, i: int, token: int) -> bool:
    """Rule lenient at temperature 0: P(x) >= lenience * max P, with P at temperature 1."""
    if s.a.rule_name != "lenient" or token >= s.v:
        return False
    row = s.unprocessed(i)
    if s.a.kind_name == "probs":
        return float(row[token]) >= s.lenience * float(row.max())
    return float(row[token] - row.max()) >= math.log(s.lenience)


def _accept_at_rate(s: ChainSequence, i: int) -> bool:
    """Rule synthetic: accepts draft i at a given rate, whatever its probability."""
    assert s.a.synthetic_rates is not None
    rate = float(s.a.synthetic_rates[i])
    s.accept_probs[i] = min(max(rate, 0.0), 1.0)
    return s.uniform_of(i) < rate


def _accept_by_probability(s: ChainSequence, i: int, token: int, row: TargetRow) -> bool:
    """Accepts draft i, or emits a recovered token."""
    rule = s.a.rule_name
    p = prob_of(row.probs, token)
    draft = None
    if rule == "typical":
        accepted = p > s.typical_bound(row)
        s.accept_probs[i] = float(accepted)
    elif rule == "top_beta":
        accepted = s.in_top_beta(row.logprobs, token)
        s.accept_probs[i] = float(accepted)
    elif rule == "synthetic":
        accepted = _accept_at_rate(s, i)
    else:
        draft = s.draft(i)
        q = s.lenience * draft.token_prob
        accepted = draft.valid_at_token and s.uniform_of(i) * q < p
        if draft.valid_at_token:
            s.accept_probs[i] = min(1.0, ratio(p, q))
    if accepted:
        s.emit(row, token)
        return True
    row = s.target(i)  # all of it has to be valid now
    if not row.valid:
        s.status |= Status.TARGET_INVALID
    elif draft is None:
        s.emit(row, s.draw_after(i, row.probs))
    else:
        s.emit(row, recovered_token(s, i, row.probs, draft, lenience=s.lenience))
    return False
