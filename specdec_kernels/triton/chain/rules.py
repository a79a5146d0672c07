"""The numbers of the chain rules as constants of a kernel, their parameters, and the tests of a
drafted token by P alone, or by nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...arguments.chain import ChainArguments
from ...arguments.checks import float32
from ...arguments.rules import CHAIN_PARAMETERS, RULES
from ..row.distribution import count_larger, entropy, entry
from ..row.noise import ACCEPT
from ..row.tile import INF
from .sequence import row_uniform

TOKEN = tl.constexpr(RULES.index("token"))
BLOCK_RULE = tl.constexpr(RULES.index("block"))  # kernels call the width of a scan step BLOCK
GREEDY = tl.constexpr(RULES.index("greedy"))
MATCH = tl.constexpr(RULES.index("match"))
TYPICAL = tl.constexpr(RULES.index("typical"))
LENIENT = tl.constexpr(RULES.index("lenient"))
SYNTHETIC = tl.constexpr(RULES.index("synthetic"))
TOP_BETA = tl.constexpr(RULES.index("top_beta"))


class RuleParams(NamedTuple):
    """The parameters of a call's rule."""

    lenience: Any  # 1 unless the rule is lenient
    first: Any  # of the rule, in the order of ChainParameters; 0 where it has none
    second: Any
    synthetic_rates: Any  # [gamma]; may be None


def first_and_second(a: ChainArguments) -> tuple[float, float]:
    """Two members of `RuleParams`, as a kernel takes them."""
    own = [getattr(a, name) for name, one in CHAIN_PARAMETERS.items() if one.rule == a.rule_name]
    first, second = (*(x if isinstance(x, int) else float32(x) for x in own), 0.0, 0.0)[:2]
    return first, second


@triton.jit
def accept_near_maximum(row, x, best, v, lenience, PROBS: tl.constexpr):
    """Rule lenient at temperature 0: P(x) >= lenience * P(best), with P at temperature 1."""
    known = (x >= 0) & (x < v)
    high = tl.load(row + best).to(tl.float64)
    if PROBS:
        near = tl.load(row + x, mask=known, other=0).to(tl.float64) >= lenience * high
    else:
        low = tl.load(row + x, mask=known, other=float("-inf")).to(tl.float64)
        near = low - high >= tl.log(lenience)
    return known & near


@triton.jit
def accept_at_rate(noise, i, rates):
    """Rule synthetic -> (whether draft i is accepted, its acceptance probability)."""
    rate = tl.load(rates + i).to(tl.float64)
    accepted = row_uniform(noise, i, i, ACCEPT) < rate
    return accepted, tl.where(rate < 0, 0.0, tl.where(rate > 1, 1.0, rate))


@triton.jit
def accept_typical(
    logprob, epsilon, delta, row, v, stats, p_stats, inv_t,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Rule typical: P(x) > min(epsilon, delta * exp(-H)).

    The entropy H takes a pass over the row, so it is computed only where it decides.
    """
    probability = tl.exp(logprob)
    bound = epsilon
    if (probability > 0) & (probability <= epsilon):
        h = entropy(
            row, v, stats, p_stats.maximum, p_stats.threshold, inv_t, PROBS, TILE, BLOCK, LOG_TILES
        )
        bound = tl.minimum(epsilon, delta * tl.exp(-h))
    return probability > bound


@triton.jit
def accept_top_beta(
    row, x, v, stats, maximum, inv_t, rank, distance, PROBS: tl.constexpr, TILE: tl.constexpr
):
    """Rule top_beta: log P(top) - log P(x) <= tau, and fewer than beta tokens are likelier.

    To count these takes a pass over the row, so that is done only where it decides.
    """
    value = entry(row, x, v, PROBS, TILE)
    below = (maximum.to(tl.float64) - value.to(tl.float64)) * inv_t
    near = (value > -INF) & ((value == maximum) | (below <= distance))
    if near & (value < maximum):
        near = count_larger(row, v, stats, value, PROBS, TILE) < rank
    return near


@triton.jit
def accept_by_target(
    rule_params, noise, i, x, logprob, row, v, stats, p_stats, inv_t, RULE: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, LOG_TILES: tl.constexpr,
):  # fmt: skip
    """Rules that do not read Q -> (whether draft i is accepted, its acceptance probability).

    x: its token, with the log-probability `logprob`.
    """
    if RULE == SYNTHETIC:
        hit, accept_prob = accept_at_rate(noise, i, rule_params.synthetic_rates)
    else:
        if RULE == TYPICAL:
            hit = accept_typical(
                logprob, rule_params.first, rule_params.second, row, v, stats, p_stats, inv_t,
                PROBS, TILE, BLOCK, LOG_TILES,
            )  # fmt: skip
        elif RULE == TOP_BETA:
            near = accept_top_beta(
                row, x, v, stats, p_stats.maximum, inv_t.to(tl.float64), rule_params.first,
                rule_params.second, PROBS, TILE,
            )  # fmt: skip
            hit = near & (logprob > -INF)
        accept_prob = hit.to(tl.float64)
    return hit, accept_prob


@triton.jit
def accept_at_temperature_0(
    rule_params, noise, i, x, token, row, v, stats, maximum, RULE: tl.constexpr,
    PROBS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Every rule, where the target chooses `token` -> as `accept_by_target`; not accepted without
    x, with probability NaN."""
    hit = token == x
    accept_prob = tl.full([], float("nan"), tl.float64)
    if x >= 0:
        if RULE == SYNTHETIC:
            hit, accept_prob = accept_at_rate(noise, i, rule_params.synthetic_rates)
        else:
            if RULE == LENIENT:
                hit = hit | accept_near_maximum(row, x, token, v, rule_params.lenience, PROBS)
            elif RULE == TOP_BETA:
                hit = accept_top_beta(
                    row, x, v, stats, maximum, tl.full([], 1.0, tl.float64), rule_params.first,
                    rule_params.second, PROBS, TILE,
                )  # fmt: skip
            accept_prob = hit.to(tl.float64)
    return hit, accept_prob
