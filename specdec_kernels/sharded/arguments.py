"""The arguments of one rank and their validation, which is that of `verify_chain`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..arguments import conversion
from ..arguments.chain import ChainArguments
from ..arguments.checks import FLOATS, require
from ..arguments.draft_forms import SampledDraft, SparseDraft, split_draft
from ..arguments.rules import CHAIN_PARAMETERS, KINDS, RULES, Rule
from ..arguments.sample import SamplingArguments
from ..arguments.validation import validate
from ..arguments.values import require_flag

SHARDED_RULES: tuple[Rule, ...] = ("token", "block", "greedy", "match")


def arguments_of(
    target: Tensor,
    drafted: Tensor,
    draft: Tensor | SampledDraft | SparseDraft | None,
    rule: Rule,
    sampling: tuple[Any, ...],
    **others: Any,
) -> ChainArguments:
    """The arguments of this rank by name, validated as those of `verify_chain`.

    A shard without entries gets a column of -inf, which no sum, count or maximum over the ranks
    notices: so nothing that reads the rows has to tell whether they have entries.
    """
    given = {name: others[name] for name in ("seeds", "positions")}
    conversion.require_tensors(target_shard=target, draft_token_ids=drafted, **given)
    optional = ("token_bitmask", "target_indptr", "uniforms", "eos_token_ids", "max_new_tokens")
    conversion.require_tensors_or_none(**{name: others[name] for name in optional})
    for name in ("with_logprobs", "with_accept_probs"):
        require_flag(others[name], name)
    require(
        rule in SHARDED_RULES,
        f"rule must be one of {', '.join(SHARDED_RULES)} over a sharded vocabulary, got {rule}",
    )
    with _shards_named():
        rows, ids, logsumexp, threshold, temperatures, temperature, bitmask = split_draft(draft)
        a = ChainArguments(
            target=_with_a_column(target), draft_token_ids=drafted,
            draft=rows if rows is None or ids is not None else _with_a_column(rows),
            draft_ids=ids, draft_columns=None, draft_logsumexp=logsumexp,
            draft_threshold=threshold, draft_temperatures=temperatures,
            draft_temperature=temperature, draft_bitmask=bitmask, draft_rows=None,
            kind=KINDS.index("logits"),
            rule=RULES.index(rule),
            synthetic_rates=None, **{name: one.default for name, one in CHAIN_PARAMETERS.items()},
            **others,
            **dict(zip(SamplingArguments.__annotations__, sampling, strict=True)),
        )  # fmt: skip
        # Those of the whole vocabulary wait until its size is known: see bitmask.py.
        validate("verify_chain", a._replace(token_bitmask=None, draft_bitmask=None))
    # Here they are combined with other numbers; the ops read either width.
    a = a._replace(
        seeds=a.seeds.to(torch.int64),
        positions=a.positions.to(torch.int64),
        target_indptr=_int64(a.target_indptr),
        eos_token_ids=_int64(a.eos_token_ids),
        max_new_tokens=_int64(a.max_new_tokens),
    )
    if rows is not None and ids is None:
        width = target.shape[-1]
        require(
            rows.shape[-1] == width,
            f"draft_shard must have the W = {width} columns of target_shard, got {rows.shape[-1]}",
        )
    return a


def _with_a_column(rows: Tensor) -> Tensor:
    if rows.dim() == 0 or rows.shape[-1] > 0 or rows.dtype not in FLOATS:
        return rows
    return rows.new_full((*rows.shape[:-1], 1), -torch.inf)


def _int64(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to(torch.int64)


@contextmanager
def _shards_named() -> Iterator[None]:
    """Errors of the validation of `verify_chain`, with the names of this function's arguments."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        rule, got, value = str(error).partition(", got ")
        rule = re.sub(r"\b(target|draft)\b", r"\1_shard", rule)
        raise type(error)(re.sub(r"\b[VD]\]", "W]", rule) + got + value) from error
