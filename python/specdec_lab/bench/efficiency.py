"""The speed-up of Theorem 3.8 with measured acceptance and costs, and the share of it reached.

The theorem is that of Leviathan et al. 2023 (arXiv 2211.17192). It charges a round gamma draft
steps and one forward of the target that costs as much as any other. Here a forward of g + 1 tokens
costs v(g) forwards of one, as measured with the bare model, and rounds may differ in length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from specdec_hf.cli.compare import synchronize
from specdec_hf.loop.statistics import SpecStats
from specdec_hf.runner.protocol import CACHE_NAME
from specdec_hf.schedules.costs import MonotoneCost
from transformers import DynamicCache, PreTrainedModel

from specdec_kernels.analysis import expected_tokens

REPEATS = 5


@dataclass(frozen=True)
class Prediction:
    """What a drafter could reach without any other work than forwards and drafting.

    Attributes:
        alpha: accepted over visited drafts; None for trees.
        tokens: a second, of the whole batch.
        loop_share: share of the time after the first round that no forward of a model took.
    """

    alpha: float | None
    tokens: float
    loop_share: float


def predict(
    calls: Sequence[SpecStats], forward: MonotoneCost, *, drafts_on_host: bool
) -> Prediction | None:
    """The theorem's figures for the rounds of these calls; None where no later round was made.

    The first round of each call, which reads the prompt, is left out. The tokens of a round with a
    chain of g drafts are those that the theorem expects with the acceptance rate of all calls; the
    tokens of a tree, for which it has no formula, are those that were emitted.

    Args:
        calls: statistics of one drafter.
        forward: seconds of the target for each number of tokens per sequence, measured
            with as many sequences.
        drafts_on_host: whether drafting is no forward of a model.
    """
    chains = not any(stats.tree for stats in calls)
    visits = [  # accepted and visited drafts; a rejection ends a round
        (accepted, min(accepted + 1, drafted))
        for stats in calls
        for record in stats.round_log
        for drafted, accepted in zip(record.drafted, record.accepted, strict=True)
    ]
    alpha = sum(a for a, _ in visits) / max(1, sum(n for _, n in visits)) if chains else None
    tokens = seconds = models = wall = 0.0
    for stats in calls:
        first, last = stats.round_log[0], stats.round_log[-1]
        wall += last.began + last.seconds - first.began - first.seconds
        for record, width in zip(stats.round_log[1:], stats.gammas[1:], strict=True):
            tokens += _tokens(record.drafted, record.emitted, alpha)
            seconds += record.draft + forward.at(1 + width)
            models += record.target + (0.0 if drafts_on_host else record.draft)
    if not tokens or not wall:
        return None
    return Prediction(alpha, tokens / seconds, 1 - models / wall)


def _tokens(drafted: Sequence[int], emitted: Sequence[int], alpha: float | None) -> float:
    if alpha is None:
        return sum(emitted)
    return sum(expected_tokens(alpha, n) for n, e in zip(drafted, emitted, strict=True) if e)


def forward_costs(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], widths: Iterable[int]
) -> MonotoneCost:
    """Median seconds of forwards of n tokens per sequence behind a prompt, for each n in turns.

    Args:
        model: target, with Transformers' own cache.
        inputs: ``input_ids`` and ``attention_mask`` [B, W] of the prompts.
        widths: the numbers n; a forward of one token is always measured.
    """
    widths = sorted({1, *widths})
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    cost, cache = MonotoneCost(), DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids, attention_mask=mask, logits_to_keep=1, **{CACHE_NAME: cache})
        for repeat in range(1 + REPEATS):
            for n in widths:
                following = ids[:, -1:].expand(-1, n)
                wide = torch.cat([mask, torch.ones_like(following)], dim=1)
                synchronize(model)
                began = time.perf_counter()
                model(input_ids=following, attention_mask=wide, **{CACHE_NAME: cache})
                synchronize(model)
                if repeat:  # the first of each width is slower
                    cost.observe(n, time.perf_counter() - began)
                cache.crop(-n)
    return cost


def round_costs(calls: Sequence[SpecStats]) -> MonotoneCost:
    """The same from the later rounds of calls; only where the host waits for a forward."""
    cost = MonotoneCost(max_times=10_000)
    for stats in calls:
        for record, width in zip(stats.round_log[1:], stats.gammas[1:], strict=True):
            cost.observe(1 + width, record.target)
    return cost
