"""One call's rounds: draft, one pass of the target, verify, read once, cut, roll back."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specdec_hf.cache import DynamicRow, context_of, make_cache
from specdec_hf.drafters import (
    Draft,
    DraftContext,
    Drafter,
    History,
    ModelDrafter,
    PromptLookupDrafter,
)
from specdec_hf.drafters.base import RATIO_RULES
from specdec_hf.forward import forward_window
from specdec_hf.handover import export_cache, import_cache
from specdec_hf.policies import BenefitGuard, make_policy
from specdec_hf.session import Options, RoundRead, Session, SpecOutput
from specdec_hf.settings import Call, resolve_rule, row_seeds
from specdec_hf.stats import RowStats, SpecStats
from specdec_hf.streaming import Step, step_kinds
from specdec_kernels import Verdict, verify_chain

SLOTS_AHEAD = 512  # cache slots allocated beyond the prompt before the first growth
TARGET_NOT_FINITE, BAD_PARAMETER = 1, 16  # status bits of verify_chain


def begin(model: Any, call: Call, options: Options) -> Session:
    """Set up caches, drafter and policy for one call.

    Raises:
        ValueError: prompt longer than the context, drafter that does not fit, bad option.
    """
    drafter = resolve_drafter(options.drafter)
    rule = resolve_rule(options.acceptance, call.do_sample, isinstance(drafter, ModelDrafter))
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

    gamma = options.num_assistant_tokens
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
            )
        )  # fmt: skip
    stats = SpecStats(
        rows=[RowStats(prompt_tokens=int(n)) for n in lengths],
        rule=rule,
        drafter="none" if drafter is None else drafter.name,
        cache="dynamic" if isinstance(cache, DynamicRow) else "spec",
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


@torch.inference_mode()
def step(session: Session) -> list[Step]:
    """One round: what it added to each row that was still decoding."""
    s, history, clock = session, session.history, session.clock
    began = clock()
    draft = propose(s)
    drafted_at = clock()

    # The pending token, and whatever else the cache lacks: the whole prompt in the first round.
    feed = int((history.lengths - s.cache.lengths).max())
    tokens = torch.from_numpy(history.last(feed)).to(s.model.device, non_blocking=True)
    if draft is None:
        draft_tokens = torch.empty(
            (len(history.lengths), 0), dtype=torch.int64, device=s.model.device
        )
    else:
        draft_tokens = draft.tokens.to(s.model.device, non_blocking=True)
        vocab_size = s.model.config.get_text_config(decoder=True).vocab_size
        tokens = torch.cat([tokens, draft_tokens.clamp(0, vocab_size - 1)], dim=1)
    logits = forward_window(
        s.model, s.cache, tokens, history.lengths - feed, keep=draft_tokens.shape[1] + 1
    )
    verified_at = clock()

    if any(s.call.processors):
        logits = process_logits(s, logits, draft_tokens)
    verdict = verify_chain(
        logits,
        draft_tokens,
        None if draft is None else draft.law,
        rule=s.rule,  # type: ignore[arg-type]
        **s.call.sampling.to_dict(),
        seeds=s.seeds,
        positions=torch.from_numpy(history.lengths.copy()).to(s.model.device, non_blocking=True),
    )
    read = read_round(verdict)
    s.stats.device_reads += 1
    steps = cut_and_append(s, read, None if draft is None else draft.counts)
    ended = clock()

    s.stats.rounds += 1
    s.stats.draft_seconds += drafted_at - began
    s.stats.verify_seconds += verified_at - drafted_at
    s.stats.accept_seconds += ended - verified_at
    s.stats.gammas.append(draft_tokens.shape[1])
    if s.guard is not None and feed == 1:
        emitted = sum(len(made.tokens) for made in steps) / len(steps)
        note = s.guard.observe(draft_tokens.shape[1], emitted, ended - began)
        if note is not None:
            s.stats.notes.append(f"round {s.stats.rounds}: {note}")
    return steps


def propose(session: Session) -> Draft | None:
    """The round's drafts, cut to what each row can use; ``counts`` is set."""
    s, history = session, session.history
    if s.drafter is None or (s.guard is not None and not s.guard.allows_drafting()):
        return None
    wanted = np.array([policy.next_gamma() for policy in s.policies], dtype=np.int64)
    limits = np.where(history.active, np.minimum(wanted, s.budgets - s.new - 1), 0)
    gamma = int(limits.max())
    draft = s.drafter.propose(history, gamma) if gamma > 0 else None
    if draft is None:
        return None
    if (
        draft.tokens.ndim != 2
        or not 0 < draft.tokens.shape[1] <= gamma
        or (draft.tokens.shape[0] != len(limits))
    ):
        raise ValueError(
            f"{type(s.drafter).__name__}.propose must return tokens [{len(limits)}, 1..{gamma}], "
            f"got {list(draft.tokens.shape)}"
        )
    size = draft.tokens.shape[1]
    counts = np.full_like(limits, size) if draft.counts is None else draft.counts
    draft.counts = np.minimum(counts, limits)
    if (draft.counts < size).any():
        # No draft from here on: such a row then decodes as it would alone.
        bounds = torch.from_numpy(draft.counts).to(draft.tokens.device, non_blocking=True)
        columns = torch.arange(size, device=draft.tokens.device)
        draft.tokens = draft.tokens.masked_fill(columns >= bounds[:, None], -1)
    return draft


def read_round(verdict: Verdict) -> RoundRead:
    """The round's one read from the device: everything the host needs, packed in one tensor."""
    width = verdict.tokens.shape[1]
    packed = torch.cat(
        [
            verdict.tokens.to(torch.int64),
            verdict.num_accepted[:, None].to(torch.int64),
            verdict.status[:, None].to(torch.int64),
            verdict.logprobs.view(torch.int32).to(torch.int64),
        ],
        dim=1,
    )
    host = packed.cpu().numpy()
    return RoundRead(
        tokens=host[:, :width],
        num_accepted=host[:, width],
        status=host[:, width + 1],
        logprobs=host[:, width + 2 :].astype(np.int32).view(np.float32),
    )


def cut_and_append(
    session: Session, read: RoundRead, counts: NDArray[np.int64] | None
) -> list[Step]:
    """Append what stands to every active row, up to where plain decoding would have stopped.

    Args:
        session: the session, changed in place.
        read: the round's verdict.
        counts: [B] drafts proposed to each row, None for none at all.
    """
    s, history = session, session.history
    columns = s.call.mask.shape[1]
    old_lengths = history.lengths.copy()
    kept_drafts = np.zeros_like(old_lengths)
    steps: list[Step] = []
    for b in np.flatnonzero(history.active).tolist():
        room = int(s.budgets[b] - s.new[b])
        accepted = int(read.num_accepted[b])
        proposed = 0 if counts is None else int(counts[b])
        tokens = [t for t in read.tokens[b, : accepted + 1].tolist() if t >= 0][:room]
        tokens, reason = _cut(s, b, tokens, room)
        if not reason and len(tokens) <= accepted:
            _raise_fault(b, int(old_lengths[b]) + len(tokens), int(read.status[b]))
        count, start = len(tokens), int(s.new[b])
        s.sequences[b, columns + start : columns + start + count] = tokens
        history.tokens[b, old_lengths[b] : old_lengths[b] + count] = tokens
        history.lengths[b] += count
        s.new[b] += count
        logprobs = read.logprobs[b, :count].tolist()
        s.logprobs[b] += logprobs
        kept_drafts[b] = min(accepted, count)
        s.stats.rows[b].record(proposed, int(kept_drafts[b]), count)
        s.policies[b].observe(proposed, int(kept_drafts[b]))
        if reason:
            history.active[b] = False
            s.stats.rows[b].stop_reason = reason
        kinds = step_kinds(count, accepted, proposed)
        steps.append(Step(b, tokens, kinds, logprobs, reason))
    s.cache.truncate(history.lengths - 1)
    if s.drafter is not None:
        s.drafter.commit(old_lengths, kept_drafts)
    return steps


def _cut(session: Session, row: int, tokens: list[int], room: int) -> tuple[list[int], str]:
    """The tokens up to the first stop, and why it stopped there ("" when it did not)."""
    s = session
    prompt, new = s.call.mask.shape[1], int(s.new[row])
    for i, token in enumerate(tokens):
        s.sequences[row, prompt + new + i] = token
        if token in s.call.eos:
            return tokens[: i + 1], "eos"
        if s.call.criteria:
            prefix = torch.from_numpy(s.sequences[row, : prompt + new + i + 1].copy())[None]
            stop = s.call.criteria(prefix.to(s.model.device), None)
            if bool(torch.as_tensor(stop).any()):
                return tokens[: i + 1], "criteria"
    if len(tokens) < room:
        return tokens, ""
    if s.budgets[row] < s.call.max_new_tokens:
        s.stats.note("stopped at the model's context length")
        return tokens, "context"
    return tokens, "length"


def _raise_fault(row: int, position: int, status: int) -> None:
    if status & BAD_PARAMETER:
        raise RuntimeError(
            f"sampling parameters of row {row} are out of range at position {position}"
        )
    if status & TARGET_NOT_FINITE:
        raise RuntimeError(f"logits of row {row} at position {position} are not finite")
    raise RuntimeError(f"row {row} emitted no token at position {position} (status {status})")


def process_logits(
    session: Session, logits: torch.Tensor, draft_tokens: torch.Tensor
) -> torch.Tensor:
    """Logits [B, gamma+1, V] float32 after the processors, each row with its own prefix.

    A row stops at its first draft that cannot be accepted, absent or forbidden by a processor:
    verification never reaches what follows, and plain decoding would never have asked about it.
    """
    s = session
    columns = s.call.mask.shape[1]
    processors: list[Any] = s.call.processors
    processed = logits.to(torch.float32, copy=True)
    drafts = draft_tokens.tolist()
    for b in np.flatnonzero(s.history.active).tolist():
        committed = torch.from_numpy(s.sequences[b, : columns + s.new[b]].copy()).to(s.model.device)
        prefix = torch.cat([committed, draft_tokens[b].clamp(min=0)])[None]
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


def resolve_drafter(drafter: Any) -> Drafter | None:
    """A `Drafter` from what `generate` accepts.

    Raises:
        ValueError: anything else.
    """
    if drafter is None or isinstance(drafter, Drafter):
        return drafter
    if drafter == "prompt_lookup":
        return PromptLookupDrafter()
    if isinstance(drafter, PreTrainedModel):
        return ModelDrafter(drafter)
    raise ValueError(
        f"drafter must be None, 'prompt_lookup', a PreTrainedModel or a Drafter, got {drafter!r}"
    )


def _resolve_guard(options: Options, rule: str, drafter: Drafter | None) -> BenefitGuard | None:
    if isinstance(options.guard, BenefitGuard):
        return options.guard
    if drafter is None or options.guard is False:
        return None
    # With these rules the text depends on where drafting happened, hence on time; a caller who
    # names a seed asks for the same text every time.
    stops = options.guard is True or rule not in RATIO_RULES or options.seed is None
    return BenefitGuard(stops=stops)
