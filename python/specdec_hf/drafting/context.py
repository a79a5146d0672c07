"""The call, the committed tokens, their states and the target's candidates, for drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specdec_hf.drafting.lease import Lease
from specdec_hf.request.encoder import EncoderSource
from specdec_hf.rules import text_depends_on_drafts
from specdec_hf.runner.compiled.compiled_call import CompileStats
from specdec_hf.runner.packed.twin import PackedStats, report_packed
from specdec_hf.runner.protocol import ROPES_BY_LENGTH, HiddenStates, Lengths, to_device
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


class CommittedStates:
    """Collects the states of every committed token that the target has read, until they are taken.

    The pending token has none yet. Tokens whose forward was not seen, such as those of a cache that
    the caller gave, are left out at the beginning of a sequence.

    Args:
        layers: after how many layers the states are read, in the order that they are given in.
        known: [B], how many tokens of each sequence need no states.
    """

    def __init__(self, layers: Sequence[int], known: Lengths) -> None:
        self.layers = tuple(layers)
        self._known = known.copy()
        self._rounds: list[tuple[torch.Tensor, NDArray[np.int64]]] = []

    def adopt(self, b: int, other: CommittedStates, index: int) -> None:
        """Keep the states of sequence ``index`` of another call as those of sequence ``b``."""
        for _, counts in self._rounds:
            counts[b] = 0
        for states, counts in other._rounds:
            taken = np.zeros_like(self._known)
            taken[b] = counts[index]
            self._rounds.append((states[index : index + 1].expand(len(taken), -1, -1), taken))
        self._known[b] = other._known[index]

    @property
    def counts(self) -> NDArray[np.int64]:
        """[B], how many tokens of each sequence wait to be taken."""
        waiting = [counts for _, counts in self._rounds]
        return np.sum(waiting, axis=0) if waiting else np.zeros_like(self._known)

    def record(
        self, hidden: HiddenStates, lengths: Lengths, rows: NDArray[np.int64], scored: int
    ) -> None:
        """Keep the states of the tokens that a round has read and committed.

        Args:
            hidden: of the round's forward, or empty.
            lengths: [B], tokens that each sequence had when the round began, the pending one
                included.
            rows: [B, n], which rows of logits the emitted tokens were chosen from, then -1.
            scored: number of the rows of logits, which belong to the last columns of the forward.
        """
        emitted = (rows >= 0).sum(axis=1)
        if hidden:
            before = hidden[self.layers[0]].shape[1] - scored
            columns, counts = rows, emitted
            if before:
                # Column `before` holds the pending token, at position lengths - 1.
                positions = lengths[:, None] - 1 - before + np.arange(before)
                new = (positions >= self._known[:, None]) & (emitted > 0)[:, None]
                earlier = np.where(new, np.arange(before), -1)
                later = np.where(rows < 0, -1, rows + before)
                columns, counts = _first(np.concatenate([earlier, later], axis=1))
            states = [hidden[layer] for layer in self.layers]
            self._rounds.append((_at(states, columns[:, : counts.max()]), counts))
        self._known = np.where(emitted > 0, lengths - 1 + emitted, self._known)

    def take(self) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """States [B, n, layers * H] of the tokens since the last call, and [B] how many they are.

        The rows of a sequence come first, those after them have no meaning. Raises IndexError where
        nothing was recorded.
        """
        rounds, self._rounds = self._rounds, []
        if len(rounds) == 1:
            return rounds[0]
        columns, end = [], 0
        for states, counts in rounds:
            numbers = np.arange(states.shape[1])
            columns.append(np.where(numbers < counts[:, None], end + numbers, -1))
            end += states.shape[1]
        taken, counts = _first(np.concatenate(columns, axis=1))
        return _at([torch.cat([states for states, _ in rounds], dim=1)], taken), counts

    def take_first(self, size: int) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """As `take`, but of each sequence at most ``size`` tokens; its last one always waits."""
        states, counts = self.take()
        taken = np.clip(counts - 1, 0, size)
        left = counts - taken
        columns = taken[:, None] + np.arange(left.max())
        self._rounds = [(_at([states], np.minimum(columns, states.shape[1] - 1)), left)]
        return states[:, : taken.max()], taken


def _at(states: list[torch.Tensor], columns: NDArray[np.int64]) -> torch.Tensor:
    """Gather columns [B, n] of each layer's states and join them; -1 gives any state."""
    device = states[0].device
    taken = to_device(columns.clip(0), device)
    sequences = torch.arange(len(columns), device=device)[:, None]
    return torch.cat([layer[sequences, taken] for layer in states], dim=-1)


def _first(columns: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Move the columns that are not -1 to the front of each row, and count them."""
    order = np.argsort(columns < 0, axis=1, kind="stable")
    counts = (columns >= 0).sum(axis=1)
    return np.take_along_axis(columns, order, axis=1)[:, : counts.max()], counts


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
        compile: how draft models and heads run; see `generate`.
        compiled: what that did for each of them; None where nobody asks.
        packed: what was packed for each of them; None where nobody asks.
        lease: refers to the lease that is held until the call ends; gives None where there is none.
        encoder: what the encoder of an encoder-decoder read, or None. `EncoderSource.texts` gives
            its ids, to copy from, and `EncoderSource.encode` what another encoder makes of it.
        runner: that of the target. Only a drafter that computes a part of the target's forward, see
            `Drafter.forward`, may use it.
        continue_drafting: for drafters that draw token by token; set after `start`. It takes the
            index of the token drawn last and its `TokenStats`, and says for each sequence [B]
            whether to draw another one. A token is never taken back. None where the schedule reads
            no token statistics, which cost a read from the device each.
        nodes: `Schedule.nodes`, for trees on the host whose drafts no rule reads; set after
            `start`. None takes all nodes.
        num_proposals: how many chains of each sequence a drafter with `Drafter.several` may draft.
        first_draft_index: index of this drafter's first draft in the round. Only the loop sets it.
        asked_for_noise: whether `noise_positions` was called in this round.
        kept_states: what `keep_states` keeps; None where the loop records none.
        sampled: what `sampled_seeds` gives to a part of a drafter whose seeds or temperature are
            not those of the call; None where they are.
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
    compile: bool | None = None
    compiled: list[CompileStats] | None = None
    packed: list[PackedStats] | None = None
    lease: Callable[[], Lease | None] = lambda: None
    encoder: EncoderSource | None = None
    runner: Any = None
    continue_drafting: Callable[[int, TokenStats], NDArray[np.bool_]] | None = None
    nodes: Callable[[int, NDArray[np.float64]], int] | None = None
    num_proposals: int = 1
    first_draft_index: int = 0
    asked_for_noise: bool = False
    kept_states: list[CommittedStates] | None = None
    sampled: dict[int, int] | None = None

    def adopt(self, b: int, other: DraftContext, index: int) -> None:
        """Let sequence ``b`` have what this says of sequence ``index`` of another call."""
        for name in ("temperature", "top_k", "top_p", "min_p", "seeds"):
            values: Any = getattr(self, name)
            values[b] = getattr(other, name)[index]

    def sampled_seeds(self) -> dict[int, int]:
        """The call's seed of each sequence that is sampled, by its number; reads the device."""
        if self.sampled is not None:
            return self.sampled
        given = torch.as_tensor(self.temperature, dtype=torch.float32, device=self.seeds.device)
        pairs = zip(self.seeds.tolist(), given.expand(self.batch_size).tolist(), strict=True)
        return {b: seed for b, (seed, temperature) in enumerate(pairs) if temperature > 0}

    def report_compiled(self, name: str, stats: CompileStats) -> None:
        """Add what ``compile`` did for a draft model or a head to the statistics of the call."""
        if self.compiled is not None:
            self.compiled.append(stats)
        if stats.eager:
            self.note(f"{name} runs eagerly: {stats.eager}")

    def report_packed(self, model: Any, stats: PackedStats) -> None:
        """Add what was packed of a draft model to the statistics of the call."""
        if self.packed is not None:
            self.packed.append(stats)
        report_packed(
            model, stats, lambda note: self.note(f"draft model {note}"), asked=self.compile is True
        )

    def note_ropes(self, name: str, kinds: Iterable[str]) -> None:
        """Say that the drafts of a sequence depend on others of its batch, where a text does so.

        Args:
            name: of what drafts.
            kinds: of its rotary embeddings, by the names of Transformers.
        """
        by_length = sorted(set(kinds).intersection(ROPES_BY_LENGTH))
        if by_length and self.batch_size > 1 and text_depends_on_drafts(self.rule):
            self.note(
                f"rotary embedding {by_length[0]!r} of {name} turns by the longest sequence of a "
                f"forward: under rule {self.rule!r} the text depends on the rest of the batch"
            )

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
        docs/rules.md#noise. A drafter that returns a distribution calls this in every round: rules
        that read the distribution refuse one whose drafter has not, because other noise may bias
        the text.

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
            lengths = to_device(lengths, self.seeds.device)
        if self.rule != "match":
            offsets = (self.first_draft_index + indices + 1) << 32
        else:
            offsets = indices if depth is None else np.full_like(indices, depth - 1)
        if indices.ndim == 0:
            return lengths + int(offsets)
        return lengths[:, None] + to_device(offsets, lengths.device)


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
