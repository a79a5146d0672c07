"""A round whose drafts follow one another, or a round without drafts."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.forward import forward_window
from specdec_hf.cache.protocol import vocab_size_of
from specdec_hf.decode.commit import DraftCounts, HostVerdict
from specdec_hf.decode.session import Session
from specdec_hf.drafters.checks import ask
from specdec_hf.drafters.drafter import Drafter
from specdec_kernels import Rule, SampledDraft, Tree, Verdict, verify_chain


class ChainRound:
    """Drafts with a `Drafter` and verifies with `verify_chain`; see `rounds.Round`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lengths = session.history.lengths.copy()
        self.counts = np.zeros_like(self.lengths)
        self.draft_token_ids = torch.empty(
            (len(self.lengths), 0), dtype=torch.int64, device=session.model.device
        )
        self.distribution: SampledDraft | None = None

    def draft(self, limits: NDArray[np.int64]) -> None:
        s = self.session
        assert isinstance(s.drafter, Drafter)
        assert s.context is not None
        draft = ask(s.drafter, s.history.shown(), limits, s.context)
        if draft is None:
            return
        tokens, size = draft.tokens, draft.tokens.shape[1]
        self.counts = s.length_policy.kept(draft, s.context)
        if (self.counts < size).any():
            # -1 means "no draft from here on": what a sequence drafts must not depend on how many
            # drafts the others of its batch may have.
            bounds = torch.from_numpy(self.counts).to(tokens.device, non_blocking=True)
            columns = torch.arange(size, device=tokens.device)
            tokens = tokens.masked_fill(columns >= bounds[:, None], -1)
        if s.call.encoded is not None and s.call.encoded.padding_id is not None:
            # Whether a token is drafted depends on those before it, and not on itself.
            last = torch.from_numpy(s.history.last(1)).to(tokens.device, non_blocking=True)
            before = torch.cat([last, tokens[:, :-1]], dim=1) == s.call.encoded.padding_id
            tokens = tokens.masked_fill(before.cumsum(dim=1) > 0, -1)
        self.draft_token_ids = tokens.to(s.model.device, non_blocking=True)
        self.distribution = draft.distribution

    def forward(self) -> torch.Tensor:
        # The cache lacks the pending token of every sequence, and the whole prompt at first.
        s = self.session
        missing = int((self.lengths - s.cache.lengths).max())
        last = s.history.last(missing)
        if s.cache.kind == "plain":
            # Its state goes on where a sequence has ended, as that of plain generation does.
            last[:, -1] = np.where(s.padding_fed > 0, s.call.pad, last[:, -1])
        tokens = torch.from_numpy(last).to(s.model.device, non_blocking=True)
        size = self.draft_token_ids.shape[1]
        if size:
            vocab_size = vocab_size_of(s.model)
            tokens = torch.cat([tokens, self.draft_token_ids.clamp(0, vocab_size - 1)], dim=1)
        if isinstance(s.drafter, Drafter):
            logits = s.drafter.forward(tokens, self.lengths - missing, size + 1)
            if logits is not None:
                return logits
        return forward_window(s.model, s.cache, tokens, self.lengths - missing, keep=size + 1)

    def layout(self) -> Tree:
        ids = self.draft_token_ids
        above = torch.arange(-1, ids.shape[1] - 1, device=ids.device)
        return Tree(ids, above.expand_as(ids))

    def verify(self, logits: torch.Tensor) -> tuple[Verdict, list[torch.Tensor]]:
        s = self.session
        verdict = verify_chain(
            logits,
            self.draft_token_ids,
            self.distribution,
            rule=cast(Rule, s.rule),
            **s.call.sampling.to_dict(),
            seeds=s.seeds,
            positions=torch.from_numpy(self.lengths).to(s.model.device, non_blocking=True),
            with_accept_probs=s.trace is not None,
        )
        return verdict, []

    def count(self, verdict: HostVerdict) -> DraftCounts:
        return DraftCounts(self.counts, self.counts, self.counts)

    def rows(self, verdict: HostVerdict) -> NDArray[np.int64]:
        return np.broadcast_to(np.arange(verdict.tokens.shape[1]), verdict.tokens.shape)

    def inform_drafter(self, verdict: HostVerdict, kept: NDArray[np.int64]) -> None:
        if isinstance(self.session.drafter, Drafter):
            self.session.drafter.commit(self.lengths, kept)
