"""The only place where tokens are committed: read the verdict, cut it, append it, roll back.

Committed tokens are those of `History`. The last of them is the pending token: it is part of the
text, but its key and value are not in the cache until the next forward reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.checks import IGNORED, OUTSIDE, describe
from specdec_hf.loop.processors import ends_text
from specdec_hf.loop.session import Session
from specdec_hf.loop.streaming import Step, step_kinds
from specdec_kernels import Status, TreeVerdict, Verdict

DRAFT_FAULTS = {
    Status.DRAFT_OUT_OF_RANGE: OUTSIDE,
    Status.DRAFT_INVALID: f"gave a distribution that is not finite; {IGNORED}",
    Status.EMPTY_RESIDUAL: "drafted a token that was rejected although the residual is empty, by "
    "rounding or because the distribution is not the one that the token was drawn from",
}


@dataclass
class HostVerdict:
    """A round's verdict on the host.

    Attributes:
        tokens: [B, gamma+1], accepted drafts, then the recovered or bonus token, then -1.
        num_accepted: [B].
        status: [B], bits of `Status`.
        logprobs: [B, gamma+1].
        extra: [B, E] each, the tensors that were read along with the verdict.
    """

    tokens: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    status: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    extra: list[NDArray[np.int64]]


@dataclass
class DraftCounts:
    """How much was drafted for each sequence, [B] each.

    Attributes:
        drafted: number of drafted tokens.
        depths: length of the longest path of them; for a chain the same number.
        tried: length of the longest path that the verification compared. It equals the number of
            accepted tokens where nothing was rejected.
        rejected: for each sequence, the tokens that the verification rejected after the accepted
            ones, each once.
    """

    drafted: NDArray[np.int64]
    depths: NDArray[np.int64]
    tried: NDArray[np.int64]
    rejected: list[list[int]]


def read_verdict(verdict: Verdict | TreeVerdict, *extra: torch.Tensor) -> HostVerdict:
    """The loop's one read of a round; from a device it is packed into one tensor.

    Logits processors, token statistics and some drafters read more.

    Args:
        verdict: result of the verification op.
        extra: more integer tensors [B, E] that the host needs.
    """
    width = verdict.tokens.shape[1]
    if verdict.tokens.device.type == "cpu":
        return HostVerdict(
            _integers(verdict.tokens), _integers(verdict.num_accepted), _integers(verdict.status),
            verdict.logprobs.numpy(), [_integers(x) for x in extra],
        )  # fmt: skip
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
    return HostVerdict(
        tokens=host[:, :width],
        num_accepted=host[:, width],
        status=host[:, width + 1],
        logprobs=host[:, width + 2 : ends[0]].astype(np.int32).view(np.float32),
        extra=[host[:, a:b] for a, b in pairwise(ends.tolist())],
    )


def _integers(values: torch.Tensor) -> NDArray[np.int64]:
    return values.numpy().astype(np.int64)


def commit(
    session: Session, verdict: HostVerdict, counts: DraftCounts
) -> tuple[list[Step], NDArray[np.int64]]:
    """Append the verified tokens to every active sequence and roll the cache back to them.

    A sequence takes its tokens up to where plain decoding would have stopped: an end-of-sequence
    token, a stopping criterion, or its length.

    Args:
        session: changed in place.
        verdict: the round's verdict.
        counts: what was drafted.

    Returns:
        A step for each active sequence, and [B] how many drafts each sequence kept.
    """
    history = session.history
    kept_drafts = np.zeros_like(history.lengths)
    steps: list[Step] = []
    for b in np.flatnonzero(history.active).tolist():
        accepted, drafted = int(verdict.num_accepted[b]), int(counts.drafted[b])
        emitted = [t for t in verdict.tokens[b, : accepted + 1].tolist() if t >= 0]
        tokens, reason = _cut(session, b, emitted)
        count, status = len(tokens), Status(int(verdict.status[b]))
        error = _fault(session, b, tokens, reason, None if count > accepted else status)
        if error is not None and not session.isolates:
            raise error
        reason = reason if error is None else "error"
        history.append(b, tokens)
        logprobs = verdict.logprobs[b, :count].tolist()
        session.logprobs[b] += logprobs
        kept_drafts[b] = min(accepted, count)
        number = session.numbers[b]
        stats = session.stats.sequences[number]
        stats.record(drafted, int(kept_drafts[b]), count, int(counts.depths[b]))
        if reason:
            history.active[b] = False
            stats.stop_reason = reason
        kinds = step_kinds(count, accepted, int(counts.tried[b]))
        rejected = counts.rejected[b] if kinds[-1:] == ["recovered"] else []
        steps.append(Step(number, tokens, kinds, logprobs, reason, rejected, error=error))
        if verdict.status[b]:
            _note_draft_faults(session, Status(int(verdict.status[b])))
    session.runner.truncate(history.lengths - 1)
    return steps, kept_drafts


def _cut(session: Session, b: int, tokens: list[int]) -> tuple[list[int], str]:
    """The tokens up to the first stop, and why they stop there ("" where they do not)."""
    most = int(session.budgets[b] - session.new_tokens[b])
    tokens = tokens[:most]
    call, index = session.calls[b]
    prefix = session.padded_ids(b) if call.criteria else None
    for i, token in enumerate(tokens):
        if token in call.eos:
            return tokens[: i + 1], "eos"
        if prefix is not None:
            ids = np.append(prefix, tokens[: i + 1])
            if ends_text(call.criteria, ids, session.model.device, index, len(call.mask)):
                return tokens[: i + 1], "criteria"
    if len(tokens) < most:
        return tokens, ""
    if session.budgets[b] < call.max_new_tokens:
        session.stats.note("stopped at the model's context length")
        return tokens, "context"
    return tokens, "length"


def _note_draft_faults(session: Session, status: Status) -> None:
    if session.drafter is not None:
        for fault, text in DRAFT_FAULTS.items():
            if fault in status:
                session.stats.note_round(f"{describe(session.drafter)} {text}")


def _fault(
    session: Session, b: int, tokens: list[int], reason: str, status: Status | None
) -> Exception | None:
    """Why a sequence cannot go on behind its new tokens, or None.

    Args:
        session: does not hold them yet.
        b: the sequence.
        tokens: as `_cut` gives them, with their ``reason``.
        status: of the row that gave no token behind them; None where it gave one.
    """
    if reason not in ("", "criteria") or (not reason and status is None):
        return None
    (call, index), number = session.calls[b], session.numbers[b]
    position = int(session.history.lengths[b]) + len(tokens)
    guard: Any = call.criteria if reason else call.processors[index]
    errors: dict[Any, Exception] = getattr(guard, "errors", {})
    raised = errors.get((*session.padded_ids(b).tolist(), *tokens)) if errors else None
    if raised is not None or reason or status is None:
        return raised
    if Status.BAD_PARAMETER in status:
        return RuntimeError(
            f"sampling parameters of sequence {number} are out of range at position {position}"
        )
    if Status.TARGET_INVALID in status:
        return RuntimeError(f"logits of sequence {number} at position {position} are not finite")
    return RuntimeError(
        f"sequence {number} emitted no token at position {position} (status {int(status)})"
    )
