"""Verification of a chain of drafted tokens over a vocabulary that is sharded between ranks.

`verify_chain` of specdec_kernels/ops/verify_chain.py explains the terms. A *shard* is the part of
the vocabulary that one *rank*, one process of a `torch.distributed` group, holds of every row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ..arguments import conversion
from ..arguments.chain import ChainArguments
from ..arguments.checks import require
from ..arguments.conversion import Param
from ..arguments.draft_forms import SampledDraft, SparseDraft
from ..arguments.rules import Rule
from ..ops.verify_chain import Verdict
from . import decide, noise, residual
from .agreement import agree
from .arguments import arguments_of
from .bitmask import masked, name_faults
from .collectives import Collectives
from .decide import Decision
from .distribution import RowStats, Shard, pack_maxima
from .draft import OneHotDraft, draft_on_shard, draft_temperature
from .match import choose
from .sequence import Parameters, Sequences, find_sequences, take


def verify_chain_sharded(
    target_shard: Tensor,
    draft_token_ids: Tensor,
    draft_shard: Tensor | SampledDraft | SparseDraft | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    vocab_start: int | None = None,
    vocab_size: int | None = None,
    rule: Rule = "token",
    temperature: Param = 1.0,
    top_k: int | Tensor = 0,
    top_p: Param = 1.0,
    min_p: Param = 0.0,
    token_bitmask: Tensor | None = None,
    seeds: Tensor,
    positions: Tensor,
    target_indptr: Tensor | None = None,
    uniforms: Tensor | None = None,
    eos_token_ids: Tensor | None = None,
    max_new_tokens: Tensor | None = None,
    with_logprobs: bool = True,
    with_accept_probs: bool = False,
) -> Verdict:
    """`verify_chain` where each rank holds the logits of a part of the vocabulary.

    A collective call: every rank of the group makes it, with equal arguments but for the two
    shards. All get the same verdict. What they exchange for a row does not grow with the
    vocabulary; docs/vocabulary-parallel.md says how much it is.

    The verdict has the same bits for any number of ranks. It equals that of `verify_chain` over the
    whole rows: for rules greedy and match bit for bit, for the others, and where top-p sets a
    threshold, up to rounding.

    Args:
        target_shard: [B, gamma+1, W] float32, bfloat16 or float16 logits, or ragged [R, W] with
            `target_indptr`: columns vocab_start to vocab_start + W of the target's rows. W may
            differ between ranks and be 0. The vocabulary V is the sum of W over the ranks.
        draft_token_ids: [B, gamma] int32 or int64 ids in [0, V); -1 means no draft from here on.
        draft_shard: Q, in the forms of `verify_chain`: None (one-hot), logits [B, gamma, W] of this
            shard, a `SampledDraft` with the logits of this shard and the statistics of the whole
            rows, or a `SparseDraft`, whole on every rank. Read by rules token and block only.
        group: the process group; None is the default group.
        vocab_start: the first id of this rank's shard, of no effect where W is 0; None if the
            shards follow each other in the order of the ranks.
        vocab_size: V, which the shards must add up to; None takes their sum. Give it where a model
            might hand whole rows to every rank, which would count as a vocabulary of ranks * V.
        rule: "token", "block", "match" or "greedy".
        temperature, top_k, top_p, min_p, seeds, positions, target_indptr, uniforms, eos_token_ids,
            max_new_tokens, with_logprobs, with_accept_probs: as in `verify_chain`.
        token_bitmask: as in `verify_chain`, of the whole vocabulary, [.., ceil(V/32)] on every
            rank. A masked copy of the shard is made.

    Returns:
        The `Verdict` of `verify_chain`, with ids of the whole vocabulary.

    Raises:
        RuntimeError: on every rank, if an argument is out of range or differs between ranks, or if
            a rank fails; the message names the argument, or the rank and its error. If a rank dies
            or does not make the call, the collectives of the others raise, at the latest after the
            timeout of the group.

    Source: the rules are those of `verify_chain`; docs/vocabulary-parallel.md explains how their
    decisions are made from few numbers.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> one = torch.zeros(1, dtype=torch.int64)
    >>> v = verify_chain_sharded(
    ...     torch.tensor([[[0.0, 9.0], [9.0, 0.0]]]), torch.tensor([[1]]), rule="greedy",
    ...     seeds=one, positions=one,
    ... )
    >>> dist.destroy_process_group()
    >>> v.tokens, v.num_accepted
    (tensor([[1, 0]]), tensor([1], dtype=torch.int32))
    """
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized, call init_process_group first")
    collectives = Collectives(group, target_shard)
    a, width = None, 0
    try:
        a = arguments_of(
            target_shard, draft_token_ids, draft_shard, rule,
            conversion.sampling(temperature, top_k, top_p, min_p),
            token_bitmask=token_bitmask, seeds=seeds, positions=positions,
            target_indptr=target_indptr, uniforms=uniforms, eos_token_ids=eos_token_ids,
            max_new_tokens=max_new_tokens, with_logprobs=with_logprobs,
            with_accept_probs=with_accept_probs,
        )  # fmt: skip
        width = target_shard.shape[-1]
        collectives.require_device(a.target.device)
        for name, value, low in (("vocab_start", vocab_start, 0), ("vocab_size", vocab_size, 1)):
            if value is not None:
                conversion.require_integer(value, name)
                require(value >= low, f"{name} must be at least {low}, got {value}")
    except Exception as error:
        collectives.fail(error)
    shard, starts = agree(collectives, a, width, vocab_start, vocab_size)
    assert a is not None  # or `agree` has raised
    return _verify(collectives, masked(a, shard), shard, starts)


def _verify(collectives: Collectives, a: ChainArguments, shard: Shard, starts: Tensor) -> Verdict:
    """The verdict, or an error on every rank."""

    def with_one_column() -> Verdict:
        """Makes the same exchanges: neither their number nor their shapes depend on the width."""
        draft = a.draft if a.draft is None or a.draft_ids is not None else a.draft[..., :1]
        narrow = a._replace(target=a.target[..., :1], draft=draft)
        return _decide(collectives, narrow, Shard(shard.start, 1, shard.vocab), starts)

    verdict = collectives.attempt(lambda: _decide(collectives, a, shard, starts), with_one_column)
    collectives.raise_failures()
    return verdict


def _decide(collectives: Collectives, a: ChainArguments, shard: Shard, starts: Tensor) -> Verdict:
    p = Parameters.of(a)
    of_draft = draft_temperature(a, p.temperature)
    in_range = p.in_range
    if a.reads_draft:
        in_range = in_range & of_draft.isfinite() & (of_draft >= 0)
    s = find_sequences(a, in_range, shard.vocab)
    draft = draft_on_shard(a, s, shard, of_draft) if a.reads_draft else OneHotDraft(s, shard)
    target = _measure(collectives, a, p, s, shard, draft)
    greedy = decide.decide_by_choice(s, target.valid, target.argmax)
    only_greedy = a.rule_name == "greedy" or (a.temperatures is None and a.temperature == 0)
    if only_greedy:
        certain, token = torch.zeros_like(target.max), take(target.argmax, greedy.num_accepted)
        return _verdict(a, shard, s, greedy, certain[:, :-1], token, certain[:, 0])

    target.filter(collectives, p, shard)
    is_greedy = p.temperature == 0
    if a.rule_name == "match":
        choice, logits = choose(collectives, a, shard, target)
        mass = collectives.total(lambda: target.sums(shard), *choice.shape)
        target.add_up(mass, shard.vocab)
        log_p = target.log_weights(logits[..., None])[..., 0] - target.log_sum
        d = greedy.where(is_greedy, decide.decide_by_choice(s, target.valid, choice))
        token, logprob = take(choice, d.num_accepted), take(log_p, d.num_accepted)
        log_p = log_p[:, :-1]
    else:
        d, log_p, token, logprob = _verify_with_draft(
            collectives, a, s, shard, starts, target, draft, greedy, is_greedy
        )
    log_p = log_p.where(~is_greedy[:, None], 0.0)
    return _verdict(a, shard, s, d, log_p, token, logprob.where(~is_greedy, 0.0))


def _measure(
    collectives: Collectives,
    a: ChainArguments,
    p: Parameters,
    s: Sequences,
    shard: Shard,
    draft: OneHotDraft,
) -> RowStats:
    """Exchanges the maxima of the rows of target and draft, and gives the draft its own."""
    b, gamma = s.drafted.shape
    rows = a.target
    if a.target_indptr is not None:
        rows = rows if len(rows) else rows.new_full((1, shard.width), -torch.inf)
        rows = rows[s.rows]
    n = gamma + 1 + (gamma if draft.rows is not None else 0)

    def maxima() -> Tensor:
        both = [rows] if draft.rows is None else [rows, draft.rows]
        return torch.cat([pack_maxima(x, shard) for x in both], 1)

    packed = collectives.maximum(maxima, b, n)
    temperature = p.temperature.where(p.temperature > 0, 1.0)[:, None]
    if draft.rows is not None:
        draft.stats = RowStats.of(draft.rows, packed[:, gamma + 1 :], temperature)
    return RowStats.of(rows, packed[:, : gamma + 1], temperature)


def _verify_with_draft(
    collectives: Collectives,
    a: ChainArguments,
    s: Sequences,
    shard: Shard,
    starts: Tensor,
    target: RowStats,
    draft: OneHotDraft,
    greedy: Decision,
    is_greedy: Tensor,
) -> tuple[Decision, Tensor, Tensor, Tensor]:
    """Rules token and block: the decision, log P of the drafts [B, gamma], and the token that
    follows with its log-probability."""
    b, gamma = s.drafted.shape
    n = gamma + 1
    padded = torch.cat([s.drafted, s.drafted.new_full((b, 1), -1)], 1)

    def sums() -> Tensor:
        of_target = torch.stack([target.sums(shard), target.entries(padded, shard)], -1)
        return torch.cat([of_target, draft.entries()], 1)

    added_up = collectives.total(sums, b, n + gamma, 2)
    target.add_up(added_up[:, :n, 0], shard.vocab)
    log_weights = added_up[:, :gamma, 1].contiguous().view(torch.float64)
    log_p = log_weights - target.log_sum[:, :-1]
    tables = draft.tables(added_up[:, n:])
    uniforms = noise.acceptance_uniforms(a)
    if a.rule_name == "token":
        d = decide.decide_token(s, target.valid, log_p, tables, uniforms)
    else:
        scales, end, fault = decide.block_scales(s, target.valid, log_p, tables)
        h = residual.block_accept_probs(collectives, shard, target, draft, scales)
        d = decide.decide_block(s, target.valid, tables, uniforms, scales, h, end, fault)
    d = greedy.where(is_greedy, d)
    drawn, logprob = residual.draw(collectives, a, shard, starts, target, draft, tables, d)
    return d, log_p, torch.where(is_greedy, take(target.argmax, d.num_accepted), drawn), logprob


def _verdict(
    a: ChainArguments,
    shard: Shard,
    s: Sequences,
    d: Decision,
    log_p: Tensor,
    token: Tensor,
    logprob: Tensor,
) -> Verdict:
    """log_p: [B, gamma] of the drafts; token, logprob: [B], of the token that follows them."""
    steps = torch.arange(s.drafted.shape[1] + 1, device=token.device)
    accepted = steps < d.num_accepted[:, None]
    follows = (steps == d.num_accepted[:, None]) & d.emits[:, None]

    def table(of_drafts: Tensor, after: Tensor, rest: float) -> Tensor:
        padded = torch.cat([of_drafts, after[:, None]], 1)
        return torch.where(accepted, padded, torch.where(follows, after[:, None], rest))

    empty = logprob.new_zeros(0, 0, dtype=torch.float32)
    return Verdict(
        table(s.drafted, token, -1).to(a.draft_token_ids.dtype),
        d.num_accepted.to(torch.int32),
        name_faults(a, shard, s, d.num_accepted, d.status).to(torch.int32),
        table(log_p, logprob, 0.0).float() if a.with_logprobs else empty,
        d.accept_probs.float() if a.with_accept_probs else empty,
    )
