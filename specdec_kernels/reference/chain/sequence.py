"""What sequences of a chain and of a tree have alike: their parameters, rows, laws and noise."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.checks import float32
from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.reference.row.distribution import (
    ACCEPT,
    BAD_PARAMETER,
    RESIDUAL,
    SHARED,
    TARGET_NOT_FINITE,
    at,
    exponentials,
    gumbel_argmax,
    parameters,
    pick,
    uniform,
    valid,
)
from specdec_kernels.reference.row.draft import Draft, Row, draft_row, sparse_row


@dataclass
class Verification(ABC):
    """Of one sequence; `judge` says how its drafts are judged."""

    a: ChainArguments | TreeArguments
    b: int
    drafted: Tensor  # [B, gamma] or [B, N]
    status: int = 0
    accepted: int = 0
    emitted: list[tuple[int, float]] = field(default_factory=list)
    accept_probs: dict[int, float] = field(default_factory=dict)

    @abstractmethod
    def judge(self, rows: int) -> None:
        """With so many rows of the target, at least one."""

    def verify(self) -> None:
        a, b = self.a, self.b
        self.seed, self.position = int(a.seeds[b]), int(a.positions[b])
        self.params = parameters(a.sampling, b)
        self.v = a.target.shape[-1]
        self.q_temperature = self.params[0]
        if a.reads_draft and a.draft_logsumexp is not None:
            self.q_temperature = at(a.draft_temperatures, a.draft_temperature, b)
        if not valid(*self.params) or not valid(self.q_temperature, 0, 1.0, 0.0):
            self.status = BAD_PARAMETER
            return
        if a.rule == "greedy":
            self.params = (0.0, 0, 1.0, 0.0)
        # Probabilities that need no shaping are the law itself; only visited entries are judged.
        shaped = self.params[0] != 1 or 0 < self.params[1] < self.v or self.params[2:] != (1.0, 0.0)
        self.direct = a.kind == "probs" and a.reads_draft and not shaped

        rows = self.drafted.shape[1] + 1
        self.begin = 0
        if a.target_indptr is not None:
            n = a.target.shape[0]
            self.begin = min(max(int(a.target_indptr[b]), 0), n)
            rows = min(rows, min(max(int(a.target_indptr[b + 1]), self.begin), n) - self.begin)
        if rows == 0:
            self.status = TARGET_NOT_FINITE
            return
        self.most = rows if a.max_new_tokens is None else max(0, int(a.max_new_tokens[b]))
        self.ends = set(a.eos_token_ids.tolist()) if a.eos_token_ids is not None else set()
        self.judge(rows)

    def given(self, row: int) -> Tensor:
        """[V] float64, of the target."""
        target = self.a.target
        return (
            target[self.b, row] if self.a.target_indptr is None else target[self.begin + row]
        ).double()

    def draft_law(self, at: tuple[int, ...], statistics: tuple[int, ...], x: int) -> Draft:
        """Q of a row of the draft, at the token x."""
        a = self.a
        assert a.draft is not None
        row = a.draft[at].double()
        if a.draft_ids is not None:
            return sparse_row(row, a.draft_ids[at].long(), x, self.v)
        left = None
        if a.draft_logsumexp is not None and a.draft_threshold is not None:
            left = float(a.draft_logsumexp[statistics]), float(a.draft_threshold[statistics])
        return draft_row(row, x, self.v, a.kind, left, a.draft_columns, self.q_temperature)

    def coin(self, column: int, position: int, lane: int = 0) -> float:
        if self.a.uniforms is not None:
            return float(self.a.uniforms[self.b, column])
        return uniform(self.seed, position, ACCEPT, lane)

    def draw(self, i: int, weights: Tensor, column: int) -> int:
        """What follows i accepted drafts."""
        if self.a.uniforms is not None:
            return pick(weights, float(self.a.uniforms[self.b, column]))
        return pick(weights, uniform(self.seed, self.position + i, RESIDUAL))

    def answer(self, i: int, row: Row) -> int:
        """The token that the target itself says at temperature 0 or under shared noise."""
        if self.params[0] == 0:
            return int(row.lp.argmax())
        return gumbel_argmax(row.lp, exponentials(self.seed, self.position + i, SHARED, self.v))

    def typical_bound(self, row: Row) -> float:
        entropy = -float((row.p * row.lp).nan_to_num(0.0).sum())
        delta = float32(self.a.typical_delta)
        return min(float32(self.a.typical_epsilon), delta * math.exp(-entropy))

    def emit(self, row: Row, token: int) -> None:
        self.emitted.append((token, 0.0 if self.params[0] == 0 else float(row.lp[token])))


def ratio(p_x: float, q_x: float) -> float:
    """P(x) / Q(x); a token that nothing proposes is accepted if the target knows it."""
    return 0.0 if p_x == 0 else p_x / q_x if q_x else math.inf


def verdicts(
    outputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], sequences: Sequence[Verification]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(tokens, num_accepted, status, logprobs, accept_probs), written."""
    tokens, num_accepted, status, logprobs, accept_probs = outputs
    tokens.fill_(-1)
    logprobs.zero_()
    accept_probs.fill_(math.nan)
    for b, sequence in enumerate(sequences):
        sequence.verify()
        status[b] = sequence.status
        num_accepted[b] = sequence.accepted
        for i, (token, logprob) in enumerate(sequence.emitted):
            tokens[b, i] = token
            if sequence.a.with_logprobs:
                logprobs[b, i] = logprob
        for i, probability in sequence.accept_probs.items() if sequence.a.with_accept_probs else ():
            accept_probs[b, i] = probability
    return outputs
