"""A round's verdict: read once, cut where plain decoding would have stopped, appended."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.decode.session import RoundRead, Session
from specdec_hf.decode.streaming import Step, step_kinds
from specdec_kernels import TreeVerdict, Verdict

TARGET_NOT_FINITE, BAD_PARAMETER = 1, 16  # status bits of verify_chain and verify_tree


@dataclass
class RoundDrafts:
    """What was proposed to each row, [B] each.

    Attributes:
        counts: drafted tokens.
        depths: the longest path of them.
        tried: the longest path that the verdict came to look at: as long as what was accepted where
            nothing was rejected.
    """

    counts: NDArray[np.int64]
    depths: NDArray[np.int64]
    tried: NDArray[np.int64]


def read_round(verdict: Verdict | TreeVerdict, *extra: torch.Tensor) -> RoundRead:
    """The round's one read from the device: everything the host needs, packed in one tensor.

    Args:
        verdict: what the op decided.
        extra: more integers [B, E] that the host asks for.
    """
    width = verdict.tokens.shape[1]
    packed = torch.cat(
        [
            verdict.tokens.to(torch.int64),
            verdict.num_accepted[:, None].to(torch.int64),
            verdict.status[:, None].to(torch.int64),
            verdict.logprobs.view(torch.int32).to(torch.int64),
            *(x.to(torch.int64) for x in extra),
        ],
        dim=1,
    )
    host = packed.cpu().numpy()
    ends = np.cumsum([2 * width + 2, *(x.shape[1] for x in extra)])
    return RoundRead(
        tokens=host[:, :width],
        num_accepted=host[:, width],
        status=host[:, width + 1],
        logprobs=host[:, width + 2 : ends[0]].astype(np.int32).view(np.float32),
        extra=[host[:, a:b] for a, b in pairwise(ends.tolist())],
    )


def cut_and_append(
    session: Session, read: RoundRead, drafts: RoundDrafts
) -> tuple[list[Step], NDArray[np.int64]]:
    """Append what stands to every active row, up to where plain decoding would have stopped.

    Args:
        session: the session, changed in place; its cache keeps what stands.
        read: the round's verdict.
        drafts: what was proposed.

    Returns:
        What was added to each row, and [B] how many of its drafts were kept.
    """
    s, history = session, session.history
    columns = s.call.mask.shape[1]
    old_lengths = history.lengths.copy()
    kept_drafts = np.zeros_like(old_lengths)
    steps: list[Step] = []
    for b in np.flatnonzero(history.active).tolist():
        room = int(s.budgets[b] - s.new[b])
        accepted = int(read.num_accepted[b])
        proposed, tried = int(drafts.counts[b]), int(drafts.tried[b])
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
        s.stats.rows[b].record(proposed, int(kept_drafts[b]), count, int(drafts.depths[b]))
        s.policies[b].observe(proposed, int(kept_drafts[b]))
        if reason:
            history.active[b] = False
            s.stats.rows[b].stop_reason = reason
        kinds = step_kinds(count, accepted, tried)
        steps.append(Step(b, tokens, kinds, logprobs, reason))
    s.cache.truncate(history.lengths - 1)
    return steps, kept_drafts


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


def record_round(
    session: Session, steps: list[Step], drafted: int, times: tuple[float, ...], typical: bool
) -> None:
    """Count a round.

    Args:
        session: the session.
        steps: what the round added.
        drafted: tokens drafted to each row.
        times: of the clock when the round began, had drafted, and had verified.
        typical: whether the round is like those to come; the first one also reads the prompt.
    """
    s, (began, drafted_at, verified_at) = session, times
    ended = s.clock()
    s.stats.rounds += 1
    s.stats.draft_seconds += drafted_at - began
    s.stats.verify_seconds += verified_at - drafted_at
    s.stats.accept_seconds += ended - verified_at
    s.stats.gammas.append(drafted)
    if s.guard is not None and typical:
        emitted = sum(len(made.tokens) for made in steps) / len(steps)
        note = s.guard.observe(drafted, emitted, ended - began)
        if note is not None:
            s.stats.notes.append(f"round {s.stats.rounds}: {note}")
