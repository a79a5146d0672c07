"""The only place where tokens are committed: read the verdict, cut it, append it, roll back.

A round may draw more than the text takes, because the text ends inside of it. `cut` is where this
is decided. Statistics, steps, drafters and schedules see `Taken`; only who traces a round sees the
verdict itself.

Committed tokens are those of `History`. The last of them is the pending token: it is part of the
text, but its key and value are not in the cache until the next forward reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.checks import IGNORED, OUTSIDE, describe
from specdec_hf.loop.endings import reason_to_end
from specdec_hf.loop.session import Session
from specdec_hf.loop.streaming import Step, step_kinds
from specdec_kernels import Status, TreeVerdict, Verdict

DRAFT_FAULTS = {
    Status.DRAFT_OUT_OF_RANGE: OUTSIDE,
    Status.DRAFT_INVALID: f"gave a distribution that is not finite; {IGNORED}",
    Status.EMPTY_RESIDUAL: "drafted a token that was rejected although the residual is empty, by "
    "rounding or because the distribution is not the one that the token was drawn from",
}


@dataclass(frozen=True)
class HostVerdict:
    """A round's verdict on the host: what was drawn.

    Attributes:
        tokens: [B, gamma+1], accepted drafts, then the recovered or bonus token, then -1.
        num_accepted: [B].
        status: [B], bits of `Status`.
        logprobs: [B, gamma+1].
        draft: [B, E] each, what `DraftedRound.to_read` names of the draft.
    """

    tokens: NDArray[np.int64]
    num_accepted: NDArray[np.int64]
    status: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    draft: dict[str, NDArray[np.int64]]


@dataclass(frozen=True)
class Taken:
    """What the texts take of a round; nothing for sequences that had ended before it.

    Attributes:
        tokens: for each sequence its new tokens, up to where plain decoding would have stopped.
        num_accepted: [B], how many of them were drafted.
        reasons: for each sequence why it ends with the last of them, "" where it goes on.
        errors: for each sequence the exception that ended it, else None.
        status: [B], bits of `Status`.
        logprobs: for each sequence those of its new tokens.
        draft: as in `HostVerdict`; the path is that of the verdict, which the text may not take.
    """

    tokens: list[list[int]]
    num_accepted: NDArray[np.int64]
    reasons: list[str]
    errors: list[Exception | None]
    status: NDArray[np.int64]
    logprobs: list[list[float]]
    draft: dict[str, NDArray[np.int64]]

    @property
    def ends_in_draft(self) -> NDArray[np.bool_]:
        """[B], whether a text takes nothing behind its accepted drafts, which then count alone.

        So it is where a text ends with a draft or by a fault, or had ended before. A text that goes
        on takes a recovered or bonus token behind them.
        """
        ends: NDArray[np.bool_] = self.num_accepted == [len(ids) for ids in self.tokens]
        return ends


@dataclass(frozen=True)
class DraftCounts:
    """How much was drafted for each sequence, [B] each; drafts behind its end are not counted.

    Attributes:
        drafted: number of drafted tokens.
        depths: length of the longest path of them; for a chain the same number.
        tried: length of the longest path that the verification compared. It equals the number of
            accepted tokens where nothing was rejected.
        rejected: for each sequence, the tokens that the verification rejected after the accepted
            ones, each once.
        trials: for each sequence of a tree, at each node of its path how many children were tried
            and the number of the trial that accepted, or None.
    """

    drafted: NDArray[np.int64]
    depths: NDArray[np.int64]
    tried: NDArray[np.int64]
    rejected: list[list[int]]
    trials: list[list[tuple[int, int | None]]]


def read_verdict(
    verdict: Verdict | TreeVerdict | torch.Tensor, draft: Mapping[str, torch.Tensor]
) -> HostVerdict:
    """The loop's one read of a round; from a device it is packed into one tensor.

    Logits processors, token statistics and some drafters read more.

    Args:
        verdict: result of the verification op, or what `packed` made of it and the draft.
        draft: integer tensors [B, E] by name that the host needs, too.
    """
    if not isinstance(verdict, torch.Tensor):
        if verdict.tokens.device.type == "cpu":
            return HostVerdict(
                _integers(verdict.tokens), _integers(verdict.num_accepted),
                _integers(verdict.status), verdict.logprobs.numpy(),
                {name: _integers(x) for name, x in draft.items()},
            )  # fmt: skip
        verdict = packed(verdict, draft)
    host, sizes = verdict.cpu().numpy(), [x.shape[1] for x in draft.values()]
    width = (host.shape[1] - sum(sizes)) // 2 - 1
    ends = np.cumsum([2 * width + 2, *sizes]).tolist()
    return HostVerdict(
        tokens=host[:, :width],
        num_accepted=host[:, width],
        status=host[:, width + 1],
        logprobs=host[:, width + 2 : ends[0]].astype(np.int32).view(np.float32),
        draft={name: host[:, a:b] for name, (a, b) in zip(draft, pairwise(ends), strict=True)},
    )


def packed(verdict: Verdict | TreeVerdict, draft: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A verdict and integers of its draft in one tensor, int64."""
    return torch.cat(
        [
            verdict.tokens.to(torch.int64),
            verdict.num_accepted[:, None].to(torch.int64),
            verdict.status[:, None].to(torch.int64),
            verdict.logprobs.view(torch.int32).to(torch.int64),
            *(x.to(torch.int64) for x in draft.values()),
        ],
        dim=1,
    )


def _integers(values: torch.Tensor) -> NDArray[np.int64]:
    return values.numpy().astype(np.int64)


def cut(session: Session, verdict: HostVerdict, errors: dict[int, Exception]) -> Taken:
    """The part of a round that the texts take; the session is not changed.

    Args:
        session: one that isolates faults lets a sequence end with its own.
        verdict: the round's verdict.
        errors: of the logits processors, by the index of the sequence.

    Raises:
        RuntimeError: a sequence that goes on has no token to go on with.
        Exception: whatever a stopping criterion raises. A session that isolates faults raises
            neither.
    """
    size = len(session.history.lengths)
    taken = Taken(
        [[] for _ in range(size)], np.zeros(size, dtype=np.int64), [""] * size, [None] * size,
        verdict.status, [[] for _ in range(size)], verdict.draft,
    )  # fmt: skip
    for b in np.flatnonzero(session.history.active).tolist():
        accepted = int(verdict.num_accepted[b])
        drawn = [t for t in verdict.tokens[b, : accepted + 1].tolist() if t >= 0]
        tokens, reason, error = _cut(session, b, drawn)
        count = len(tokens)
        if not reason and count <= accepted:
            status = Status(int(verdict.status[b]))
            reason, error = "error", errors.get(b) or _fault(session, b, count, status)
        if error is not None and not session.isolates:
            raise error
        taken.tokens[b], taken.reasons[b], taken.errors[b] = tokens, reason, error
        taken.num_accepted[b] = min(accepted, count)
        taken.logprobs[b] = verdict.logprobs[b, :count].tolist()
    return taken


def commit(
    session: Session,
    taken: Taken,
    counts: DraftCounts,
    top_logprobs: dict[int, list[dict[int, float]]],
    predicted: NDArray[np.bool_],
) -> list[Step]:
    """Append what was taken to every active sequence and roll the cache back to it.

    Args:
        session: changed in place.
        taken: the tokens of the round.
        counts: what was drafted.
        top_logprobs: `Step.top_logprobs`, by the index of the sequence.
        predicted: [B], `Step.predicted`.

    Returns:
        A step for each active sequence.
    """
    history = session.history
    steps: list[Step] = []
    for b in np.flatnonzero(history.active).tolist():
        tokens, reason, logprobs = taken.tokens[b], taken.reasons[b], taken.logprobs[b]
        accepted, number = int(taken.num_accepted[b]), session.sequences.numbers[b]
        history.append(b, tokens)
        session.sequences.logprobs[b] += logprobs
        stats = session.stats.sequences[number]
        stats.record(int(counts.drafted[b]), accepted, len(tokens), int(counts.depths[b]))
        for trial in counts.trials[b]:
            stats.record_trials(*trial)
        if reason:
            history.active[b] = False
            stats.stop_reason = reason
        if reason == "context":
            session.stats.note("stopped at the model's context length")
        kinds = step_kinds(len(tokens), accepted, int(counts.tried[b]))
        rejected, error = counts.rejected[b], taken.errors[b]
        top = top_logprobs.get(b, [])
        made = int(counts.drafted[b]), bool(predicted[b])
        steps.append(Step(number, tokens, kinds, logprobs, reason, rejected, top, *made, error))
        stats.record_prediction(*made, accepted)
        if taken.status[b]:
            _note_draft_faults(session, Status(int(taken.status[b])))
    session.runner.truncate(history.lengths - 1)
    return steps


def _cut(session: Session, b: int, tokens: list[int]) -> tuple[list[int], str, Exception | None]:
    """The tokens up to the first stop, why they stop there ("" where they do not), and a fault."""
    most = int(session.sequences.budgets[b] - session.new_tokens[b])
    tokens = tokens[:most]
    (call, index), device = session.sequences.calls[b], session.device
    text = session.padded_ids(b) if call.stopping.criteria else np.empty(0, dtype=np.int64)
    for i in range(len(tokens)):
        try:
            reason = reason_to_end(call, index, np.append(text, tokens[: i + 1]), device)
        except Exception as error:  # whatever a criterion raises
            return tokens[: i + 1], "error", error
        if reason:
            return tokens[: i + 1], reason, None
    if len(tokens) < most:
        return tokens, "", None
    short = session.sequences.budgets[b] < call.stopping.max_new_tokens
    return tokens, "context" if short else "length", None


def _note_draft_faults(session: Session, status: Status) -> None:
    if session.drafter is not None:
        for fault, text in DRAFT_FAULTS.items():
            if fault in status:
                session.stats.note_round(f"{describe(session.drafter)} {text}")


def _fault(session: Session, b: int, count: int, status: Status) -> Exception:
    """Why a sequence has no next token behind ``count`` new ones."""
    position = int(session.history.lengths[b]) + count
    where = f"sequence {session.sequences.numbers[b]} at position {position}"
    if Status.BAD_PARAMETER in status:
        return RuntimeError(f"sampling parameters of {where} are out of range")
    if Status.NOTHING_ALLOWED in status:
        return RuntimeError(f"no token is allowed for {where}")
    if Status.TARGET_INVALID in status:
        return RuntimeError(f"logits of {where} are not finite")
    return RuntimeError(f"no token was emitted for {where} (status {int(status)})")
