"""The self-check: does a model say the same through a cache of the loop as it says alone?

A model may read its positions from the cache's length, make a mask of its own, or keep a state, and
a cache that does not fit it gives wrong text without an error. So the first time a model class and
configuration is used with a cache, two short sequences of different lengths go through it as a call
would send them: prompt and drafts, a roll back by different numbers of drafts, another window, and
where trees are used a tree of which one path is kept. What the model says there is compared with a
forward of each whole sequence alone, without cache or padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from specdec_hf.cache.check_plan import CheckPlan, Row
from specdec_hf.cache.encoded import Encoded
from specdec_hf.cache.fit import Comparison, Fit, compare, tolerance_of
from specdec_hf.cache.make import kind_reason, make_runner
from specdec_hf.cache.own_logits import (
    PASSING,
    WindowError,
    changing,
    logits_alone,
    logits_as_generated,
    one_line,
    padded_prompt,
    undisturbed,
)
from specdec_hf.cache.record import fits_of
from specdec_hf.cache.spec_runner import FIRST, SINGLE, ForwardPolicy, SpecRunner

# The loop itself names logits that are not finite.
_NOT_FINITE = "the model's logits are not finite or all equal"
DIFFERENT = "its logits differ from the model's own"
_SEPARATE = ("dynamic", "none", "snapshot")  # caches that feed one sequence after the other


def check_fit(
    model: Any,
    kind: str,
    *,
    padded: bool = True,
    tree: bool = False,
    encoded: Encoded | None = None,
) -> Fit:
    """Compare a model with itself through a cache; the result is remembered for the process.

    The caller's random state, the model's attributes and buffers, and its training mode are as
    before afterwards, and hooks that the caller registered do not run.

    Args:
        model: a causal LM.
        kind: as in `make_runner`.
        padded: whether sequences will be padded, as those of a batch are. The check then takes two
            of different lengths. The decoders of an encoder-decoder begin alike, so that those of a
            batch may differ in length after the first round only.
        tree: whether a tree is checked too; kind "spec" only.
        encoded: what the decoder of an encoder-decoder reads of its encoder. Its first two
            sequences serve the check.

    Raises:
        torch.OutOfMemoryError, MemoryError: no memory for the check; the next call checks again.
    """
    reason = kind_reason(model, kind)
    if reason is not None or kind == "plain":
        return Fit(reason=reason)
    num_sequences, names = 1 + padded, tuple[str, ...]()
    if encoded is not None:
        names = tuple(sorted(encoded.inputs))
        if kind == "aligned":
            num_sequences = 2  # even without padding
        encoded = encoded.select([b % encoded.batch_size for b in range(num_sequences)])
    key = (kind, padded, tree, names)
    with changing:
        known = fits_of(model)
        fit = known.get(key)
        if fit is None:
            with undisturbed(model), torch.inference_mode():
                fit = _measure(model, kind, CheckPlan(model, num_sequences, padded, tree), encoded)
            if fit.difference is not None or fit.reason is not None:
                known[key] = fit
    return fit


def _measure(model: Any, kind: str, plan: CheckPlan, encoded: Encoded | None) -> Fit:
    if plan.too_short:
        return Fit(unchecked=f"the model's context holds {plan.context} tokens")
    try:
        own, generated = _own_logits(model, kind, plan, encoded)
    except WindowError as error:
        return Fit(reason=f"its forward raised {error}")
    except PASSING:
        raise
    except Exception as error:
        return Fit(unchecked=f"a forward on text alone raised {one_line(error)}")
    if not _comparable(own, generated):
        return Fit(remark=_NOT_FINITE)
    try:
        rows, omitted = _rows_through_cache(model, kind, plan, encoded)
    except PASSING:
        raise
    except Exception as error:
        return Fit(reason=f"its forward raised {one_line(error)}")
    # A sequence must say the same alone, with padding, and as the continuation of a prompt.
    rows += [(b, i, row) for b, text in enumerate(generated) for i, row in enumerate(text)]
    for b, position, row in rows:
        if row.shape != own[b][position].shape:
            return Fit(reason=f"its logits are {list(row.shape)}, not {list(own[b][0].shape)}")
    found = compare_rows(model, rows, own)
    if not math.isfinite(found.difference) and not bool(
        logits_alone(model, plan.fed, encoded).isfinite().all()
    ):
        return Fit(remark=_NOT_FINITE)  # a rejected draft did that, not the cache
    reason = None if found.fault is None else f"{DIFFERENT} {found.fault}"
    return Fit(found.difference, found.tolerance, reason, remark=plan.remark, omitted=omitted)


def _own_logits(
    model: Any, kind: str, plan: CheckPlan, encoded: Encoded | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits [n, V] of each text: those to compare with, and those of plain generation."""
    generated = logits_as_generated(
        model, plan.texts, plan.padded, encoded, singly=kind == "snapshot"
    )
    if kind in _SEPARATE:
        return generated, generated
    own = [logits_alone(model, text, encoded, b) for b, text in enumerate(plan.texts)]
    return own, generated


def _comparable(own: Sequence[torch.Tensor], generated: Sequence[torch.Tensor]) -> bool:
    """Whether logits are finite and tell tokens apart."""
    spread = min(float(x.std(dim=-1).min()) for x in own)
    return spread != 0 and all(bool(x.isfinite().all()) for x in (*own, *generated))


def _rows_through_cache(
    model: Any, kind: str, plan: CheckPlan, encoded: Encoded | None
) -> tuple[list[Row], frozenset[str]]:
    """What the model says through a new cache, and which forwards had no mask."""
    prompt = None
    if kind in _SEPARATE:
        prompt = padded_prompt([text[:n] for text, n in zip(plan.texts, plan.prompts, strict=True)])
    omits_mask = frozenset[str]() if plan.padded else frozenset((FIRST, SINGLE))
    runner = make_runner(
        model, len(plan.prompts), plan.capacity, kind, prompt=prompt, encoded=encoded,
        policy=ForwardPolicy(omits_mask=omits_mask, one_by_one=False),
    )  # fmt: skip
    rows = plan.run(runner)
    return rows, frozenset(runner.omitted if isinstance(runner, SpecRunner) else ())


def compare_rows(model: Any, rows: Sequence[Row], own: Sequence[torch.Tensor]) -> Comparison:
    """Compare rows of logits with those of the texts ``own`` [n, V]."""
    wanted = (own[b][position] for b, position, _ in rows)
    return compare((row for *_, row in rows), wanted, tolerance_of(model))
