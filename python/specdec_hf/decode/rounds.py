"""One round of speculative decoding: draft, one forward of the target, verify, commit.

Terms:

- pending token: the last committed token of a sequence. The target's next forward reads it, and its
  key and value are then cached.
- round: one forward of the target over the pending token and the drafts of every sequence. It emits
  the accepted drafts, then the recovered token after a rejection or else the bonus token.
- chain: drafts that follow one another; see chain_round.py. Tree: drafts with several continuations
  of one prefix; see tree_round.py. They differ in how a round drafts, lays out the forward and
  verifies. Everything else, the commit above all, is the same code for both.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.hidden_states import take_hidden_states
from specdec_hf.decode.chain_round import ChainRound
from specdec_hf.decode.commit import DraftCounts, HostVerdict, commit, read_verdict
from specdec_hf.decode.phases import Phases
from specdec_hf.decode.processors import process_ended, process_logits
from specdec_hf.decode.round_record import RoundRecord
from specdec_hf.decode.session import Session
from specdec_hf.decode.streaming import Step
from specdec_hf.decode.tracing import TracedRound
from specdec_hf.decode.tree_round import TreeRound
from specdec_hf.drafters.context import Candidates
from specdec_hf.drafters.tree_drafter import TreeDrafter
from specdec_hf.schedules.base import Outcome
from specdec_kernels import Tree, TreeVerdict, Verdict


class Round(Protocol):
    """The parts of a round in which chains and trees differ.

    `step` calls the methods once each, in this order.
    """

    def draft(self, limits: NDArray[np.int64]) -> None:
        """Draft up to ``limits[b]`` tokens deep for each sequence. Not called without drafts."""
        ...

    def forward(self) -> torch.Tensor:
        """The target's logits [B, N+1, V] of the pending token and the N drafts."""
        ...

    def layout(self) -> Tree:
        """The drafts as a tree, for the logits processors."""
        ...

    def verify(self, logits: torch.Tensor) -> tuple[Verdict | TreeVerdict, list[torch.Tensor]]:
        """The op's verdict, and what else the host must read."""
        ...

    def count(self, verdict: HostVerdict) -> DraftCounts:
        """How much was drafted for each sequence."""
        ...

    def rows(self, verdict: HostVerdict) -> NDArray[np.int64]:
        """[B, n], the row of logits that each emitted token was chosen from."""
        ...

    def inform_drafter(self, verdict: HostVerdict, kept: NDArray[np.int64]) -> None:
        """Tell the drafter which drafts each sequence kept."""
        ...


@torch.inference_mode()
def step(session: Session) -> list[Step]:
    """Run one round; returns what it appended to each sequence that was still active."""
    s = session
    phases, active = Phases(s.clock, getattr(s.cache, "watch", None)), s.history.active.copy()
    reads_prompt = s.first_round
    graphs = s.stats.cuda_graphs
    this: Round = TreeRound(s) if isinstance(s.drafter, TreeDrafter) else ChainRound(s)
    limits = draft_limits(s)
    if limits.any():
        this.draft(limits)
    phases.end("draft")

    logits, s.first_logits = s.first_logits, None
    if logits is None:
        logits = this.forward()
    phases.end("target")

    raw = logits
    if any(s.call.processors):
        logits = process_logits(s, logits, this.layout())
    verdict, extra = this.verify(logits)
    observed = [] if s.drafter is None else _observed(s.drafter.candidates, this.layout(), logits)
    read = read_verdict(verdict, *extra, *observed)
    phases.end_if_real("verification")
    if observed:
        _inform_of_candidates(s, read.extra[-len(observed) :])
    counts, lengths = this.count(read), s.history.lengths.copy()
    behind = s.padding_fed
    steps, kept = commit(s, read, counts)
    phases.end_if_real("host")
    this.inform_drafter(read, kept)
    phases.end_if_real("draft")
    new = s.history.lengths - lengths
    kept_states = (s.context and s.context.kept_states) or []
    hidden = take_hidden_states(s.cache) if kept_states or s.outputs is not None else {}
    for states in kept_states:
        rows = this.rows(read)
        chosen = np.where(np.arange(rows.shape[1]) < new[:, None], rows, -1)
        states.record(hidden, lengths, chosen, raw.shape[1])
    if s.outputs is not None:
        if s.cache.kind == "plain":
            # Every sequence has a row of every round, also where it had ended.
            logits, new = process_ended(s, logits, 1 - new, behind), np.ones_like(new)
        s.outputs.record(raw, logits, hidden, this.rows(read), new)

    phases.end("host" if phases.real else "verification")
    drafted = logits.shape[1] - 1
    record = RoundRecord(
        began=phases.began - s.started,
        **phases.seconds,
        drafted=np.where(active, counts.drafted, 0).tolist(),
        accepted=kept.tolist(),
        emitted=(s.history.lengths - lengths).tolist(),
    )
    s.stats.record_round(drafted, record)
    undecided = s.history.lengths - lengths <= kept  # the text ended before the next decision
    outcome = Outcome(
        drafted=np.where(active, counts.depths, 0),
        accepted=kept,
        rejected=(counts.tried > kept) & active & ~undecided,
    )
    recorded = s.stats.cuda_graphs != graphs
    s.length_policy.learn(record, outcome, drafted, reads_prompt=reads_prompt, recorded=recorded)
    phases.end_if_real("host")
    record.host = phases.seconds["host"]
    if s.trace is not None:
        assert isinstance(this, ChainRound)
        s.trace(
            TracedRound(
                s.rule, s.seeds, this.lengths, logits, this.draft_token_ids, this.distribution,
                verdict.accept_probs, steps,
            )
        )  # fmt: skip
    return steps


def _observed(count: int, drafts: Tree, logits: torch.Tensor) -> list[torch.Tensor]:
    """The integers that `Candidates` is made of, on the device; empty for ``count`` 0."""
    if count == 0:
        return []
    ids = logits.topk(min(count, logits.shape[-1]), dim=-1).indices
    return [drafts.tokens, drafts.parents, ids.flatten(1)]


def _inform_of_candidates(session: Session, read: list[NDArray[np.int64]]) -> None:
    """Hand the drafter what `_observed` gave, once it is on the host."""
    s, (drafts, parents, ids) = session, read
    assert s.drafter is not None
    tokens = np.concatenate([s.history.last(1), drafts], axis=1)
    above = np.concatenate([np.full_like(tokens[:, :1], -1), parents + 1], axis=1)
    candidates = Candidates(tokens, above, ids.reshape(*tokens.shape, -1))
    s.drafter.observe(s.history.shown(), candidates)


def draft_limits(session: Session) -> NDArray[np.int64]:
    """[B], how deep to draft for each sequence; 0 everywhere in a round without drafts."""
    s = session
    if s.drafter is None or s.first_round:
        return np.zeros_like(s.budgets)
    # The round emits one token beyond the drafts, so the last budgeted token is never drafted.
    most = np.where(s.history.active, s.budgets - s.new_tokens - 1, 0)
    return s.length_policy.limits(most)
