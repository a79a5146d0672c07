"""The state of one sequence while its drafts are verified, for chains and for trees.

See specdec_kernels/ops/verify_chain.py for the terms, and docs/rules.md for each rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...arguments.chain import ChainArguments
from ...arguments.checks import float32
from ...arguments.status import Status
from ...arguments.tree import TreeOutputs
from ...arguments.verification import Outputs, VerifyArguments
from ..row.distribution import (
    GREEDY,
    SequenceParams,
    TargetRow,
    allowed,
    masked,
    prob_of,
    target_row,
    value_at,
)
from ..row.draft import (
    DraftDistribution,
    dense_draft,
    invalid_draft,
    one_hot_draft,
    sparse_draft,
)
from ..row.noise import ACCEPT, RESIDUAL, SHARED, exponentials, uniform
from ..row.sample import gumbel_argmax, pick


@dataclass
class VerifiedSequence:
    """Sequence b of a batch, its rows and its noise, and what was decided so far."""

    a: VerifyArguments
    b: int
    drafted: Tensor  # [B, gamma] or [B, N] token ids
    status: int = 0
    num_accepted: int = 0
    emitted: list[tuple[int, float]] = field(default_factory=list)  # (token, logprob)
    accept_probs: dict[int, float] = field(default_factory=dict)

    def open(self) -> int:
        """Reads parameters and limits; returns the number of target rows, 0 if unverifiable."""
        a, b = self.a, self.b
        self.seed, self.position = int(a.seeds[b]), int(a.positions[b])
        self.params = SequenceParams.of(a, b)
        self.v = a.target.shape[-1]
        self.draft_temperature = self.params.temperature
        if a.reads_draft and a.draft_logsumexp is not None:
            self.draft_temperature = value_at(a.draft_temperatures, a.draft_temperature, b)
        draft_params = SequenceParams(self.draft_temperature, 0, 1.0, 0.0)
        in_range = self.params.in_range and draft_params.in_range
        if a.uniforms is not None:  # also those that no decision would read; NaN is out of range
            in_range &= all(0 <= u < 1 for u in a.uniforms[b].tolist())
        if not in_range:
            self.status = Status.BAD_PARAMETER
            return 0
        if a.rule_name == "greedy":
            self.params = GREEDY
        temperature, top_k, top_p, min_p = self.params
        processed = temperature != 1 or 0 < top_k < self.v or (top_p, min_p) != (1.0, 0.0)
        # Probabilities that need no logits processing are P itself, and only entries that are
        # read have to be valid.
        processed |= a.token_bitmask is not None
        self.direct = a.kind_name == "probs" and a.reads_draft and not processed

        rows = self.drafted.shape[1] + 1
        self.begin = 0  # the sequence's first row of a ragged target
        if a.target_indptr is not None:
            n = a.target.shape[0]
            self.begin = min(max(int(a.target_indptr[b]), 0), n)
            rows = min(rows, min(max(int(a.target_indptr[b + 1]), self.begin), n) - self.begin)
        if rows == 0:
            self.status = Status.TARGET_INVALID
            return 0
        self.max_new_tokens = rows
        if a.max_new_tokens is not None:
            self.max_new_tokens = max(0, int(a.max_new_tokens[b]))
        self.eos_token_ids: set[int] = set()
        if a.eos_token_ids is not None:
            self.eos_token_ids.update(a.eos_token_ids.tolist())
        return rows

    def unprocessed(self, row: int) -> Tensor:
        """[V] float64 row of the target, as it was given, without the tokens not allowed."""
        rest = 0.0 if self.a.kind_name == "probs" else -math.inf
        return masked(self.a.target[self.at(row)].double(), self.bitmask(row), rest)

    def at(self, row: int) -> tuple[int, ...]:
        """Where a row of the sequence is among those of the target."""
        return (self.b, row) if self.a.target_indptr is None else (self.begin + row,)

    def bitmask(self, row: int) -> Tensor | None:
        return None if self.a.token_bitmask is None else self.a.token_bitmask[self.at(row)]

    def target_fault(self, row: int) -> Status:
        """Why a row that is not valid holds no distribution."""
        bitmask = self.bitmask(row)
        nothing = bitmask is not None and not allowed(bitmask, self.v).any()
        return Status.NOTHING_ALLOWED if nothing else Status.TARGET_INVALID

    def draft_at(
        self, index: tuple[int, ...], statistics: tuple[int, ...], token: int
    ) -> DraftDistribution:
        """Q of one row of the draft, and its probability of a token.

        index: where the row is; statistics: where its logsumexp and threshold are.
        """
        a = self.a
        assert a.draft is not None
        bitmask = None if a.draft_bitmask is None else a.draft_bitmask[index]
        row = masked(a.draft[index].double(), bitmask, -math.inf)
        if a.draft_ids is not None:
            return sparse_draft(row, a.draft_ids[index].long(), token, self.v)
        known = None
        if a.draft_logsumexp is not None and a.draft_threshold is not None:
            known = float(a.draft_logsumexp[statistics]), float(a.draft_threshold[statistics])
        return dense_draft(
            row, token, self.v, a.kind_name, known, a.draft_columns, self.draft_temperature
        )

    def acceptance_uniform(self, column: int, position: int, counter: int = 0) -> float:
        """column: of the argument `uniforms`, where it is given."""
        if self.a.uniforms is not None:
            return float(self.a.uniforms[self.b, column])
        return uniform(self.seed, position, ACCEPT, counter)

    def draw(self, i: int, weights: Tensor, column: int) -> int:
        """Draws the recovered or bonus token after i accepted drafts."""
        if self.a.uniforms is not None:
            return pick(weights, float(self.a.uniforms[self.b, column]))
        return pick(weights, uniform(self.seed, self.position + i, RESIDUAL))

    def target_token(self, i: int, row: TargetRow) -> int:
        """The token that the target itself chooses after i accepted drafts.

        It is the argmax at temperature 0, under rule match the Gumbel-max sample with
        shared noise.
        """
        if self.params.temperature == 0:
            return int(row.logprobs.argmax())
        noise = exponentials(self.seed, self.position + i, SHARED, self.v)
        return gumbel_argmax(row.logprobs, noise)

    def typical_bound(self, row: TargetRow) -> float:
        """min(epsilon, delta * exp(-entropy of P)); see docs/rules.md#typical."""
        entropy = -float((row.probs * row.logprobs).nan_to_num(0.0).sum())
        delta = float32(self.a.typical_delta)
        return min(float32(self.a.typical_epsilon), delta * math.exp(-entropy))

    def emit(self, row: TargetRow, token: int) -> None:
        greedy = self.params.temperature == 0
        self.emitted.append((token, 0.0 if greedy else float(row.logprobs[token])))


class ChainSequence(VerifiedSequence):
    """A sequence whose drafts form a chain: draft i is verified against target row i."""

    a: ChainArguments

    def open(self) -> int:
        self.lenience = float32(self.a.lenience) if self.a.rule_name == "lenient" else 1.0
        return super().open()

    def in_top_beta(self, logprobs: Tensor, token: int) -> bool:
        """Whether a token is near enough to the likeliest one; see docs/rules.md#top_beta.

        logprobs: [V] float64, up to a constant.
        """
        own = float(logprobs[token])
        near = own > -math.inf and float(logprobs.max()) - own <= float32(self.a.top_beta_distance)
        return near and int((logprobs > own).sum()) < self.a.top_beta_rank

    def unprocessed_logprobs(self, i: int) -> Tensor:
        """[V] float64: log P of row i at temperature 1 without filters, up to a constant."""
        row = self.unprocessed(i)
        return row.log() if self.a.kind_name == "probs" else row

    def find_drafts(self, rows: int) -> None:
        """Finds the drafts to verify, up to an absent one or to the end of the sequence.

        Nothing is emitted after an end-of-sequence token or beyond `max_new_tokens`. So drafts from
        there on do not count, and `no_bonus` says that no bonus token may follow the last one.
        """
        self.drafts: list[int] = []
        self.status_after_drafts = 0  # reported if all drafts are accepted
        self.no_bonus = self.max_new_tokens == 0
        for i in range(rows - 1):
            token = int(self.drafted[self.b, i])
            if self.no_bonus or token == -1:
                break
            if not 0 <= token < self.a.id_limit:
                self.status_after_drafts = Status.DRAFT_OUT_OF_RANGE
                break
            self.drafts.append(token)
            full = len(self.drafts) == self.max_new_tokens
            self.no_bonus = full or token in self.eos_token_ids

    def target(self, i: int, token: int = -1) -> TargetRow:
        """P of row i. If a token is given, a `direct` row need be valid only there."""
        row = self.unprocessed(i)
        if self.direct and token >= 0:
            return TargetRow(row, row.log(), valid=0 <= prob_of(row, token) < math.inf)
        return target_row(row, self.a.kind_name, self.params, self.direct)

    def draft(self, i: int) -> DraftDistribution:
        """Q of draft i."""
        a, token = self.a, self.drafts[i]
        if a.draft is None or self.draft_temperature == 0:
            return one_hot_draft(token, token, self.v)
        statistic: tuple[int, ...] = (self.b, i)
        row = i
        if a.draft_rows is not None:
            row = int(a.draft_rows[self.b, i])
            statistic = (row,) if a.flat_draft else (self.b, row)
        elif a.ragged_draft:
            # It has one row less than the target for each sequence before this one.
            row = self.begin - self.b + i
        if not 0 <= row < a.draft.shape[-2]:
            return invalid_draft(self.v)
        return self.draft_at((row,) if a.flat_draft else (self.b, row), statistic, token)

    def uniform_of(self, i: int) -> float:
        """The acceptance uniform of draft i."""
        return self.acceptance_uniform(i, self.position + i)

    def draw_after(self, i: int, weights: Tensor) -> int:
        return self.draw(i, weights, -1)


def write_outputs(out: Outputs | TreeOutputs, sequences: Sequence[VerifiedSequence]) -> None:
    """Fills the outputs that chains and trees share."""
    out.tokens.fill_(-1)
    out.logprobs.zero_()
    out.accept_probs.fill_(math.nan)
    for b, sequence in enumerate(sequences):
        out.status[b] = sequence.status
        out.num_accepted[b] = sequence.num_accepted
        for i, (token, logprob) in enumerate(sequence.emitted):
            out.tokens[b, i] = token
            if sequence.a.with_logprobs:
                out.logprobs[b, i] = logprob
        for i, probability in sequence.accept_probs.items() if sequence.a.with_accept_probs else ():
            out.accept_probs[b, i] = probability
