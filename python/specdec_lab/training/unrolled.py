"""The loss of a head over several draft steps, those of an EAGLE-3 head on its own outputs.

The first step reads the target's features at every place of a text, and the others read the hidden
states that the step before gave there ("training-time test"). A query of step k sees the pairs of
the target's features up to its own place, and of the later steps only those at its place: drafting
has just these in the cache.

Source: EAGLE-3, arXiv 2503.01840, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from specdec_hf.heads.base import Head
from specdec_hf.heads.eagle3.head import Eagle3Head
from specdec_papers.exit_head import ExitHead
from specdec_papers.parallel import ParallelHeads
from specdec_papers.pass_head import PassHead
from torch.nn import functional

from specdec_lab.training.draft_model import DraftLlama, missed_by
from specdec_lab.training.losses import mean_loss
from specdec_lab.training.settings import FORWARD_KL

DECAY = 0.8  # weight of a draft step, relative to the one before it


@dataclass
class TrainingBatch:
    """Texts of a training step, padded on the right.

    Attributes:
        tokens: [B, T] int64.
        embeddings: [B, T, E] of the target.
        features: [B, T, layers * E].
        final: [B, T, E], the input of the target's output matrix.
        lengths: [B] int64.
        answers: [B] int64, where the answer begins.
        cuts: [B, C] int64, the places that are drafted at; None is all.
        counted: [B, T] bool, the last tokens that a drafter has read where its draft counts; None
            is all.
    """

    tokens: torch.Tensor
    embeddings: torch.Tensor
    features: torch.Tensor
    final: torch.Tensor
    lengths: torch.Tensor
    answers: torch.Tensor
    cuts: torch.Tensor | None = None
    counted: torch.Tensor | None = None

    def after(self, step: int, values: torch.Tensor) -> torch.Tensor:
        """The values ``step`` tokens after each place, [B, T - step or C, ...] of [B, T, ...]."""
        if self.cuts is None:
            return values[:, step:]
        ends = (self.cuts + step).clamp(max=values.shape[1] - 1)
        return values[torch.arange(len(ends), device=ends.device)[:, None], ends]

    def places(self, step: int, *, answers: bool = False) -> torch.Tensor:
        """[B, T - step or C] bool, the places whose draft ``step`` has a target.

        Args:
            step: from 1; its pair at place t holds token t + step.
            answers: only where the drafted token belongs to an answer.
        """
        ends = torch.arange(step, self.tokens.shape[1], device=self.tokens.device)
        if self.cuts is not None:
            ends = self.cuts + step
        valid = ends < self.lengths[:, None]
        if self.counted is not None:
            valid = valid & self.after(step, self.counted)
        return valid & (ends + 1 >= self.answers[:, None]) if answers else valid


def unroll(head: Head, batch: TrainingBatch, steps: int) -> Iterator[torch.Tensor]:
    """Logits [B, T - k or C, draft vocabulary] of each draft step k, from 1; or of head k."""
    if isinstance(head, ParallelHeads):
        states = head.states(batch.final.float())
        yield from (head.logits(states[:, :-k, k - 1], k - 1) for k in range(1, steps + 1))
        return
    if isinstance(head, ExitHead):
        # A draft's own state is exact once the drafts before it are accepted: one step says all.
        yield head.logits(batch.features[:, 1:])
        return
    if isinstance(head, PassHead):
        assert batch.cuts is not None
        yield from head.logits(head.states(batch.embeddings, batch.cuts, steps)).unbind(dim=2)
        return
    if isinstance(head, DraftLlama):
        # It reads tokens alone, so that a draft after accepted ones is one after a text.
        yield head.logits(batch.tokens)[:, 1:]
        return
    assert isinstance(head, Eagle3Head)
    hidden = head.fuse(batch.features)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    size = batch.tokens.shape[1]
    places = torch.arange(size, device=batch.tokens.device)[None]
    for step in range(1, steps + 1):
        embeddings = functional.pad(batch.embeddings[:, step:], (0, 0, 0, step))
        turns = head.turns(places + step - 1)
        q, k, v, residual = head.midlayer.project(embeddings, hidden, turns)
        share = q.shape[1] // k.shape[1]
        keys.append(k.repeat_interleave(share, dim=1))
        values.append(v.repeat_interleave(share, dim=1))
        hidden = head.midlayer.finish(residual, _attend(q, keys, values))
        yield head.logits(hidden[:, : size - step])


def _attend(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Attention [B, H, T, D]: causal over the first step's keys, and to its own place in others."""
    if len(keys) == 1:
        return functional.scaled_dot_product_attention(q, keys[0], values[0], is_causal=True)
    size = q.shape[2]
    hidden = torch.ones((size, size), dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ keys[0].transpose(2, 3)).masked_fill(hidden, -torch.inf)
    own = [(q * key).sum(dim=-1, keepdim=True) for key in keys[1:]]
    weights = (torch.cat([scores, *own], dim=-1) / math.sqrt(q.shape[-1])).softmax(dim=-1)
    weights = weights.to(q.dtype)
    out = weights[..., :size] @ values[0]
    for n, value in enumerate(values[1:]):
        out = out + weights[..., size + n, None] * value
    return out


def loss_of(
    head: Head,
    batch: TrainingBatch,
    steps: int,
    loss: str = FORWARD_KL,
    earlier: Sequence[Any] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The weighted loss, and the loss of each draft step.

    The labels are the target's probabilities over the draft vocabulary, not its choices.

    Args:
        head, batch, steps: as in `unroll`.
        loss: one of `LOSSES`.
        earlier: draft models; only places that they miss count. They need a head that drafts the
            whole vocabulary.
    """
    of = partial(_labels, head)
    every = of(batch.final) if batch.cuts is None else None
    if earlier:
        assert every is not None
        batch = replace(batch, counted=missed_by(earlier, batch.tokens, every.argmax(dim=-1)))
    total = torch.zeros((), device=batch.tokens.device)
    losses = []
    for step, logits in enumerate(unroll(head, batch, steps), start=1):
        labels = of(batch.after(step, batch.final)) if every is None else batch.after(step, every)
        mean = mean_loss(loss, logits, labels, batch.places(step))
        losses.append(mean.detach())
        total = total + DECAY ** (step - 1) * mean
    return total, losses


@torch.no_grad()
def _labels(head: Head, final: torch.Tensor) -> torch.Tensor:
    """The target's probabilities over the draft vocabulary, from its final states."""
    return functional.linear(final, head.lm_head.to(final.dtype)).softmax(dim=-1)


@torch.no_grad()
def acceptance_of(
    head: Head, batch: TrainingBatch, steps: int, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums over the answers' places, each [steps] on the host.

    Args:
        head, batch, steps: as above.
        output: [V, E], the target's output matrix.

    Returns:
        The greedy drafts that are the target's most likely token; the shared probability of draft
        and target at temperature 1 (the acceptance probability of a drawn draft); and the number of
        places. All drafts before it are taken for accepted.
    """
    sums = torch.zeros(3, steps)
    for step, logits in enumerate(unroll(head, batch, steps), start=1):
        valid = batch.places(step, answers=True)
        final = batch.after(step, batch.final)[valid]
        rows = functional.linear(final, output.to(final.dtype))
        target, draft = rows.float().softmax(dim=-1), logits[valid].float().softmax(dim=-1)
        equal = head.tokens[draft.argmax(dim=-1)] == target.argmax(dim=-1)
        shared = torch.minimum(target[:, head.tokens], draft).sum(dim=-1)
        sums[:, step - 1] = torch.stack([equal.sum(), shared.sum(), valid.sum()]).float().cpu()
    return sums[0], sums[1], sums[2]


@torch.no_grad()
def covered_by(drafters: Sequence[Any], batch: TrainingBatch, output: torch.Tensor) -> torch.Tensor:
    """[2] on the host: the answers' places where a draft model's choice is the target's, and all.

    Args:
        drafters: causal LMs.
        batch: texts.
        output: [V, E], the target's output matrix.
    """
    choices = functional.linear(batch.final, output.to(batch.final.dtype)).argmax(dim=-1)
    found = ~missed_by(drafters, batch.tokens, choices)[:, 1:]
    valid = batch.places(1, answers=True)
    return torch.stack([(found & valid).sum(), valid.sum()]).float().cpu()
