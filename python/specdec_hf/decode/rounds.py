"""One call's rounds: draft, one pass of the target, verify, read once, cut, roll back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from specdec_hf.cache.handover import export_cache, import_cache
from specdec_hf.cache.rows import DynamicRow, context_of, make_cache
from specdec_hf.decode.commit import RoundDrafts, cut_and_append, read_round, record_round
from specdec_hf.decode.forward import forward_window
from specdec_hf.decode.rules import resolve_rule, resolve_tree_rule
from specdec_hf.decode.session import Options, Session, SpecOutput
from specdec_hf.decode.statistics import RowStats, SpecStats
from specdec_hf.decode.streaming import Step
from specdec_hf.decode.tree_rounds import check_tree_options, tree_step
from specdec_hf.drafters import Draft, DraftContext, Drafter, History, ModelDrafter, TreeDrafter
from specdec_hf.drafters.base import RULES_READING_DRAFT, check_draft
from specdec_hf.drafters.resolve import resolve_drafter, resolve_tree_drafter
from specdec_hf.hf_arguments.call import Call, row_seeds
from specdec_hf.schedules.schedules import BenefitGuard, make_policy
from specdec_kernels import verify_chain

SLOTS_AHEAD = 512  # cache slots allocated beyond the prompt before the first growth


def begin(model: Any, call: Call, options: Options) -> Session:
    """Set up caches, drafter and policy for one call.

    Raises:
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
    """
    drafter: Drafter | TreeDrafter | None
    if options.tree is None:
        drafter = resolve_drafter(options.drafter)
        rule = resolve_rule(options.acceptance, call.do_sample, isinstance(drafter, ModelDrafter))
    else:
        drafter = resolve_tree_drafter(options.drafter, options.tree)
        rule = resolve_tree_rule(options.acceptance, call.do_sample, drafter.rules)
        check_tree_options(options)
    batch_size, columns = call.mask.shape
    lengths = call.mask.sum(axis=1).astype(np.int64)
    budgets = np.full(batch_size, call.max_new_tokens, dtype=np.int64)
    context = context_of(model)
    if context is not None:
        if lengths.max() >= context:
            raise ValueError(
                f"prompt of row {int(lengths.argmax())} has {int(lengths.max())} tokens, "
                f"but the model's context is {context}"
            )
        budgets = np.minimum(budgets, context - lengths)
    max_length = int((lengths + budgets).max())
    tokens = np.zeros((batch_size, max_length), dtype=np.int64)
    for b in range(batch_size):
        tokens[b, : lengths[b]] = call.input_ids[b, call.mask[b]]
    sequences = np.full((batch_size, columns + int(budgets.max())), call.pad, dtype=np.int64)
    sequences[:, :columns] = call.input_ids

    gamma = drafter.size if isinstance(drafter, TreeDrafter) else options.num_assistant_tokens
    seeds = torch.tensor(
        row_seeds(0 if options.seed is None else options.seed, batch_size), device=model.device
    )
    capacity = min(max_length, int(lengths.max()) + SLOTS_AHEAD) + gamma + 1
    if call.past is None:
        cache = make_cache(model, batch_size, capacity, options.cache)
    else:
        cache = import_cache(model, call.past, call.mask, capacity, options.cache)
    if drafter is not None:
        sampling = call.sampling
        drafter.start(
            DraftContext(
                model, rule, **sampling.to_dict(), seeds=seeds, batch_size=batch_size,
                max_length=max_length, max_gamma=max(gamma, 16),
                noise_from=0 if rule == "block" else None,
            )
        )  # fmt: skip
    stats = SpecStats(
        rows=[RowStats(prompt_tokens=int(n)) for n in lengths],
        rule=rule,
        drafter="none" if drafter is None else drafter.name,
        cache="dynamic" if isinstance(cache, DynamicRow) else "spec",
        tree="" if options.tree is None else str(options.tree),
        notes=list(call.notes),
    )
    return Session(
        model=model,
        call=call,
        rule=rule,
        cache=cache,
        drafter=drafter,
        policies=[make_policy(options.gamma_policy, gamma) for _ in range(batch_size)],
        guard=_resolve_guard(options, rule, drafter),
        history=History(tokens, lengths, np.ones(batch_size, dtype=bool)),
        budgets=budgets,
        sequences=sequences,
        logprobs=[[] for _ in range(batch_size)],
        seeds=seeds,
        stats=stats,
        clock=options.clock,
        started=options.clock(),
    )


def step(session: Session) -> list[Step]:
    """One round: what it added to each row that was still decoding."""
    chain = session.drafter is None or isinstance(session.drafter, Drafter)
    return chain_step(session) if chain else tree_step(session)


@torch.inference_mode()
def chain_step(session: Session) -> list[Step]:
    """One round with chains of drafts, or without drafts."""
    s, history, clock = session, session.history, session.clock
    began = clock()
    draft = propose(s)
    drafted_at = clock()

    # The pending token, and whatever else the cache lacks: the whole prompt in the first round.
    feed = int((history.lengths - s.cache.lengths).max())
    tokens = torch.from_numpy(history.last(feed)).to(s.model.device, non_blocking=True)
    if draft is None:
        draft_token_ids = torch.empty(
            (len(history.lengths), 0), dtype=torch.int64, device=s.model.device
        )
    else:
        draft_token_ids = draft.tokens.to(s.model.device, non_blocking=True)
        vocab_size = s.model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.cat([tokens, draft_token_ids.clamp(0, vocab_size - 1)], dim=1)
    logits = forward_window(
        s.model, s.cache, tokens, history.lengths - feed, keep=draft_token_ids.shape[1] + 1
    )
    verified_at = clock()

    if any(s.call.processors):
        logits = process_logits(s, logits, draft_token_ids)
    verdict = verify_chain(
        logits,
        draft_token_ids,
        None if draft is None else draft.law,
        rule=s.rule,  # type: ignore[arg-type]
        **s.call.sampling.to_dict(),
        seeds=s.seeds,
        positions=torch.from_numpy(history.lengths.copy()).to(s.model.device, non_blocking=True),
    )
    read = read_round(verdict)
    s.stats.device_reads += 1
    lengths = history.lengths.copy()
    counts = np.zeros_like(lengths) if draft is None or draft.counts is None else draft.counts
    steps, kept = cut_and_append(s, read, RoundDrafts(counts, counts, counts))
    if isinstance(s.drafter, Drafter):
        s.drafter.commit(lengths, kept)
    record_round(s, steps, draft_token_ids.shape[1], (began, drafted_at, verified_at), feed == 1)
    return steps


def propose(session: Session) -> Draft | None:
    """The round's drafts, cut to what each row can use; ``counts`` is set."""
    s, history = session, session.history
    if not isinstance(s.drafter, Drafter):
        return None
    if s.guard is not None and not s.guard.allows_drafting():
        return None
    wanted = np.array([policy.next_gamma() for policy in s.policies], dtype=np.int64)
    limits = np.where(history.active, np.minimum(wanted, s.budgets - s.new - 1), 0)
    gamma = int(limits.max())
    draft = s.drafter.propose(history, gamma) if gamma > 0 else None
    if draft is None:
        return None
    check_draft(s.drafter, draft, len(limits), gamma)
    size = draft.tokens.shape[1]
    counts = np.full_like(limits, size) if draft.counts is None else draft.counts
    draft.counts = np.minimum(counts, limits)
    if (draft.counts < size).any():
        # No draft from here on: such a row then decodes as it would alone.
        bounds = torch.from_numpy(draft.counts).to(draft.tokens.device, non_blocking=True)
        columns = torch.arange(size, device=draft.tokens.device)
        draft.tokens = draft.tokens.masked_fill(columns >= bounds[:, None], -1)
    return draft


def process_logits(
    session: Session, logits: torch.Tensor, draft_token_ids: torch.Tensor
) -> torch.Tensor:
    """Logits [B, gamma+1, V] float32 after the processors, each row with its own prefix.

    A row stops at its first draft that cannot be accepted, absent or forbidden by a processor:
    verification never reaches what follows, and plain decoding would never have asked about it.
    """
    s = session
    columns = s.call.mask.shape[1]
    processors: list[Any] = s.call.processors
    processed = logits.to(torch.float32, copy=True)
    drafts = draft_token_ids.tolist()
    for b in np.flatnonzero(s.history.active).tolist():
        committed = torch.from_numpy(s.sequences[b, : columns + s.new[b]].copy()).to(s.model.device)
        prefix = torch.cat([committed, draft_token_ids[b].clamp(min=0)])[None]
        for i in range(logits.shape[1]):
            end = committed.shape[0] + i
            processed[b, i] = processors[b](prefix[:, :end], processed[b, i][None])[0]
            draft = drafts[b][i] if i < len(drafts[b]) else -1
            if not 0 <= draft < logits.shape[2] or processed[b, i, draft] == -torch.inf:
                break
    return processed


def finish(session: Session) -> SpecOutput:
    """The output of a session whose rows have all ended."""
    s = session
    batch_size, columns = s.call.mask.shape
    longest = int(s.new.max())
    mask = np.concatenate([s.call.mask, np.arange(longest) < s.new[:, None]], axis=1)
    past = None
    if s.call.return_dict:
        if (s.new < longest).any():
            # A row that ended early owes its last token to the cache, as plain generate leaves it.
            last = torch.from_numpy(s.history.last(1)).to(s.model.device)
            with torch.inference_mode():
                forward_window(s.model, s.cache, last, s.history.lengths - 1, keep=1)
        past = export_cache(s.model, s.cache, mask[:, :-1])
    s.stats.total_seconds = s.clock() - s.started
    if s.guard is not None:
        s.stats.benefit = s.guard.benefit
        s.stats.plain_step_seconds = s.guard.plain_step
    logprobs = np.zeros((batch_size, longest), dtype=np.float32)
    for b, values in enumerate(s.logprobs):
        logprobs[b, : len(values)] = values
    device = s.model.device
    return SpecOutput(
        sequences=torch.from_numpy(s.sequences[:, : columns + longest].copy()).to(device),
        attention_mask=torch.from_numpy(mask.astype(np.int64)).to(device),
        logprobs=torch.from_numpy(logprobs),
        past_key_values=past,
        stats=s.stats,
    )


def _resolve_guard(
    options: Options, rule: str, drafter: Drafter | TreeDrafter | None
) -> BenefitGuard | None:
    if isinstance(options.guard, BenefitGuard):
        return options.guard
    if drafter is None or options.guard is False:
        return None
    # With these rules the text depends on where drafting happened, hence on time; a caller who
    # names a seed asks for the same text every time.
    stops = options.guard is True or rule not in RULES_READING_DRAFT or options.seed is None
    return BenefitGuard(stops=stops)
