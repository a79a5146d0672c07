"""The call, the committed tokens and the target's candidates, as a drafter sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.cache.hidden_states import CommittedStates
from specdec_hf.compiled.call import CompileStats
from specdec_hf.drafting.lease import Lease
from specdec_hf.hf_arguments.encoder import EncoderSource
from specdec_hf.schedules.base import TokenStats
from specdec_kernels import RULES_READING_DRAFT, TREE_RULES_READING_DRAFT

MAX_DRAFTS_PER_ROUND = 2**16  # drafts of one drafter in one round


def reads_draft(rule: str) -> bool:
    """Whether a rule compares the target's probabilities with those of the draft distribution."""
    return rule in RULES_READING_DRAFT or rule in TREE_RULES_READING_DRAFT


@dataclass(frozen=True, eq=False)
class History:
    """The committed tokens of every sequence, without padding, on the host.

    A drafter cannot write to the arrays that it gets, and the loop reads none of them.

    Attributes:
        tokens: [B, C] int64; sequence ``b`` holds ``lengths[b]`` tokens, and zeros follow them.
        lengths: [B] int64, number of committed tokens, the pending one included.
        active: [B] bool, sequences that have not ended.
    """

    tokens: NDArray[np.int64]
    lengths: NDArray[np.int64]
    active: NDArray[np.bool_]

    def last(self, size: int) -> NDArray[np.int64]:
        """[B, size], a copy of each sequence's last ``size`` tokens; zeros precede short ones."""
        columns = self.lengths[:, None] - size + np.arange(size)
        taken = np.take_along_axis(self.tokens, np.maximum(columns, 0), axis=1)
        taken[columns < 0] = 0
        return taken


@dataclass
class DraftContext:
    """The arguments and sizes of the call that a drafter serves.

    Attributes:
        model: the target.
        rule: acceptance rule of the call.
        temperature, top_k, top_p, min_p: float or int, or a tensor [B] on the target's device.
        seeds: [B] int64 on the target's device.
        batch_size: number of sequences B.
        max_length: no sequence will hold more tokens than this.
        max_draft: no round will ask for more tokens than this.
        note: leaves a remark in the statistics, with the number of the round. A remark that was
            left before is left out.
        self_check: whether a draft model's cache is checked before its first use.
        compile: whether draft models and EAGLE-3 heads run compiled; see `generate`.
        compiled: what that did for each of them; None where nobody asks.
        lease: refers to the lease that is held until the call ends; gives None where there is none.
        encoder: what the encoder of an encoder-decoder read, or None. `EncoderSource.texts` gives
            its ids, to copy from, and `EncoderSource.encode` what another encoder makes of it.
        runner: that of the target. Only a drafter that computes a part of the target's forward, see
            `Drafter.forward`, may use it.
        goes_on: for drafters that draw token by token; set after `start`. Given the index of the
            token drawn last and its `TokenStats`, it says for each sequence [B] whether to draw
            another one. A token is never taken back. None where the schedule reads no
            token statistics, which cost a read from the device each.
        nodes: `Schedule.nodes`, for trees on the host whose drafts no rule reads; set after
            `start`. None takes all nodes.
        num_proposals: how many chains of each sequence a drafter with `Drafter.several` may draft.
        first_draft_index: index of this drafter's first draft in the round. Only the loop sets it.
        asked_for_noise: whether `noise_positions` was called in this round.
        kept_states: what `keep_states` keeps; None where the loop records none.
    """

    model: Any
    rule: str
    temperature: float | torch.Tensor
    top_k: int | torch.Tensor
    top_p: float | torch.Tensor
    min_p: float | torch.Tensor
    seeds: torch.Tensor
    batch_size: int
    max_length: int
    max_draft: int
    note: Callable[[str], None] = field(default=lambda text: None)
    self_check: bool = True
    compile: bool = False
    compiled: list[CompileStats] | None = None
    lease: Callable[[], Lease | None] = lambda: None
    encoder: EncoderSource | None = None
    runner: Any = None
    goes_on: Callable[[int, TokenStats], NDArray[np.bool_]] | None = None
    nodes: Callable[[int, NDArray[np.float64]], int] | None = None
    num_proposals: int = 1
    first_draft_index: int = 0
    asked_for_noise: bool = False
    kept_states: list[CommittedStates] | None = None

    def report_compiled(self, name: str, stats: CompileStats) -> None:
        """Add what ``compile`` did for a draft model or a head to the statistics of the call."""
        if self.compiled is not None:
            self.compiled.append(stats)
        if stats.eager:
            self.note(f"{name} runs eagerly: {stats.eager}")

    def keep_states(self, layers: Sequence[int]) -> CommittedStates:
        """Keep the target's hidden states of every committed token from now on.

        Args:
            layers: after how many layers they are read; 0 is the embeddings.

        Raises:
            ValueError: the drafter does not draft for the model of a call, whose forwards give
                them.
        """
        if self.runner is None or self.kept_states is None:
            raise ValueError(
                "a drafter that reads hidden states must draft for the model of a call itself, not "
                "inside a cascade, for a beam search or in a server"
            )
        self.runner.tap.open(layers)
        self.kept_states.append(CommittedStates(layers, self.runner.lengths))
        return self.kept_states[-1]

    def noise_positions(
        self,
        lengths: NDArray[np.int64] | torch.Tensor,
        index: int | Sequence[int] | NDArray[np.int64],
        *,
        depth: int | None = None,
    ) -> torch.Tensor:
        """The ``positions`` that `specdec_kernels.sample` draws a draft at.

        They give noise of the round, and under rule match that of the token's position; see
        docs/rules.md#noise. A drafter that returns a distribution calls this in every round, or
        declares `Drafter.noise`.

        Args:
            lengths: [B] int64, `History.lengths` of the round.
            index: which draft of the round is drawn, from 0; or n of them. Drafts that are drawn in
                one round have different indices.
            depth: for a tree, how deep below the pending token these drafts are, from 1; index
                + 1, as in a chain, where it is not given.

        Returns:
            int64, [B] for one index and [B, n] for n; on the device of ``lengths`` if that is a
            tensor, else on the target's.

        Raises:
            ValueError: an index outside [0, 65536).
        """
        self.asked_for_noise = True
        indices = np.asarray(index, dtype=np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < MAX_DRAFTS_PER_ROUND:
            raise ValueError(f"index must be in [0, {MAX_DRAFTS_PER_ROUND}), got {index!r}")
        if not isinstance(lengths, torch.Tensor):
            lengths = torch.from_numpy(lengths.copy()).to(self.seeds.device, non_blocking=True)
        if self.rule != "match":
            offsets = (self.first_draft_index + indices + 1) << 32
        else:
            offsets = indices if depth is None else np.full_like(indices, depth - 1)
        if indices.ndim == 0:
            return lengths + int(offsets)
        return lengths[:, None] + torch.from_numpy(offsets).to(lengths.device, non_blocking=True)


@dataclass
class Candidates:
    """The target's most likely next tokens after every token that a round fed to it, on the host.

    Row 0 belongs to the pending token, and row n + 1 to draft n. In a `TrieTree` that holds for
    drafters of trees, and other drafters' tokens follow; a drafter of chains finds its rows by
    `path`.

    Attributes:
        tokens: [B, N+1] int64, the pending token and the drafts; -1 is an absent draft.
        parents: [B, N+1] int64, the row of the token before it; -1 for the pending token.
        ids: [B, N+1, k] int64, next tokens by falling logit, after penalties and other logits
            processors. A row of an absent draft has no meaning.
    """

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    ids: NDArray[np.int64]

    def first(self, count: int) -> Candidates:
        """Only the ``count`` most likely next tokens of each row."""
        return Candidates(self.tokens, self.parents, self.ids[:, :, :count])

    def path(self, b: int, following: Sequence[int]) -> list[int]:
        """Rows of sequence ``b`` from the pending token down, as far as the drafts go.

        Args:
            b: the sequence.
            following: the tokens that were committed after the pending token.
        """
        rows = [0]
        for token in following:
            children = (self.parents[b] == rows[-1]) & (self.tokens[b] == token)
            if not children.any():
                break
            rows.append(int(children.argmax()))
        return rows
