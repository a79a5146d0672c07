"""Specification of `specdec_kernels::verify_chain`, one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specdec_kernels._chain_arguments import RATIO_RULES, ChainArguments
from specdec_kernels._checks import float32
from specdec_kernels.reference.law import (
    ACCEPT,
    BAD_PARAMETER,
    DRAFT_NOT_FINITE,
    DRAFT_OUT_OF_RANGE,
    EMPTY_RESIDUAL,
    RESIDUAL,
    SHARED,
    TARGET_NOT_FINITE,
    at,
    exponentials,
    pick,
    race,
    uniform,
    valid,
)
from specdec_kernels.reference.rows import (
    Draft,
    Row,
    draft_row,
    point_mass,
    sparse_row,
    target_row,
)


def verify_chain(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments in the order of `ChainArguments`."""
    a = ChainArguments(*args)
    a.check()
    tokens, num_accepted, status, logprobs, acceptance = a.new_outputs()
    tokens.fill_(-1)
    logprobs.zero_()
    acceptance.fill_(math.nan)
    for b in range(len(tokens)):
        sequence = _Sequence(a, b)
        sequence.verify()
        status[b] = sequence.status
        num_accepted[b] = sequence.accepted
        for i, (token, logprob) in enumerate(sequence.emitted):
            tokens[b, i] = token
            if a.with_logprobs:
                logprobs[b, i] = logprob
        for i, probability in sequence.acceptance.items() if a.with_acceptance else ():
            acceptance[b, i] = probability
    return tokens, num_accepted, status, logprobs, acceptance


@dataclass
class _Sequence:
    a: ChainArguments
    b: int
    status: int = 0
    accepted: int = 0
    emitted: list[tuple[int, float]] = field(default_factory=list)
    acceptance: dict[int, float] = field(default_factory=dict)

    def verify(self) -> None:
        a, b = self.a, self.b
        k = a.top_k if a.top_ks is None else int(a.top_ks[b])
        self.params = (
            at(a.temperatures, a.temperature, b), k, at(a.top_ps, a.top_p, b),
            at(a.min_ps, a.min_p, b),
        )  # fmt: skip
        self.v = a.target.shape[-1]
        self.q_temperature = self.params[0]
        if a.rule in RATIO_RULES and a.draft_logsumexp is not None:
            self.q_temperature = at(a.draft_temperatures, a.draft_temperature, b)
        if not valid(*self.params) or not valid(self.q_temperature, 0, 1.0, 0.0):
            self.status = BAD_PARAMETER
            return
        if a.rule == "greedy":
            self.params = (0.0, 0, 1.0, 0.0)
        # Probabilities that need no shaping are the law itself; only visited entries are judged.
        shaped = self.params[0] != 1 or 0 < k < self.v or self.params[2:] != (1.0, 0.0)
        self.direct = a.kind == "probs" and a.rule in RATIO_RULES and not shaped
        self.lenience = float32(a.lenience) if a.rule == "lenient" else 1.0

        rows = self._rows()
        if rows == 0:
            self.status = TARGET_NOT_FINITE
            return
        self._limit(rows)
        if a.rule == "block" and self.params[0] != 0:
            self._block()
        else:
            self._walk()

    def _rows(self) -> int:
        a, b = self.a, self.b
        gamma = a.draft_tokens.shape[1]
        self.begin, rows = 0, gamma + 1
        if a.cu_rows is not None:
            n = a.target.shape[0]
            self.begin = min(max(int(a.cu_rows[b]), 0), n)
            rows = min(max(int(a.cu_rows[b + 1]), self.begin), n) - self.begin
        return min(rows, gamma + 1)

    def _limit(self, rows: int) -> None:
        """The drafts that are judged, and whether anything follows when all of them stand.

        Nothing follows an end-of-sequence token or the last token that may be emitted, so drafts
        beyond it count for nothing.
        """
        a, b = self.a, self.b
        most = rows if a.max_emit is None else max(0, int(a.max_emit[b]))
        ends = set(a.eos_ids.tolist()) if a.eos_ids is not None else set()
        self.drafts: list[int] = []
        self.missing = 0  # status of the position after them
        self.cut = most == 0
        for i in range(rows - 1):
            x = int(a.draft_tokens[b, i])
            if self.cut or x == -1:
                break
            if not 0 <= x < a.id_limit:
                self.missing = DRAFT_OUT_OF_RANGE
                break
            self.drafts.append(x)
            self.cut = len(self.drafts) == most or x in ends

    def _target(self, i: int, x: int = -1) -> Row:
        """P of row i. With a drafted token a `direct` row is judged at that entry alone."""
        a = self.a
        row = (a.target[self.b, i] if a.cu_rows is None else a.target[self.begin + i]).double()
        if self.direct and x >= 0:
            p_x = float(row[x]) if x < self.v else 0.0
            return Row(row, row.log(), not (math.isfinite(p_x) and p_x >= 0))
        return target_row(row, a.kind, self.params, self.direct)

    def _draft(self, i: int, x: int) -> Draft:
        """Q of draft i. A point mass on x unless a draft row says otherwise."""
        a = self.a
        if a.draft is None or self.q_temperature == 0:
            return point_mass(x, x, self.v)
        at_row = self.begin - self.b + i  # a ragged draft has no row for a bonus token
        if a.ragged_draft and not 0 <= at_row < a.draft.shape[0]:
            return Draft(torch.zeros(self.v), 0.0, fault=True)
        row = (a.draft[at_row] if a.ragged_draft else a.draft[self.b, i]).double()
        if a.draft_ids is not None:
            ids = (a.draft_ids[at_row] if a.ragged_draft else a.draft_ids[self.b, i]).long()
            return sparse_row(row, ids, x, self.v)
        left = None
        if a.draft_logsumexp is not None and a.draft_threshold is not None:
            left = float(a.draft_logsumexp[self.b, i]), float(a.draft_threshold[self.b, i])
        return draft_row(row, x, self.v, a.kind, left, a.draft_columns, self.q_temperature)

    def _coin(self, i: int) -> float:
        if self.a.uniforms is not None:
            return float(self.a.uniforms[self.b, i])
        return uniform(int(self.a.seeds[self.b]), int(self.a.positions[self.b]) + i, ACCEPT)

    def _block_coin(self, i: int) -> float:
        """A coin of this round alone: it may have shaped what was emitted before its position."""
        if self.a.uniforms is not None:
            return self._coin(i)
        return uniform(int(self.a.seeds[self.b]), int(self.a.positions[self.b]), ACCEPT, i)

    def _pick(self, i: int, weights: Tensor) -> int:
        if self.a.uniforms is not None:
            return pick(weights, float(self.a.uniforms[self.b, -1]))
        seed, position = int(self.a.seeds[self.b]), int(self.a.positions[self.b]) + i
        return pick(weights, uniform(seed, position, RESIDUAL))

    def _emit(self, row: Row, token: int) -> None:
        self.emitted.append((token, float(row.lp[token])))

    def _walk(self) -> None:
        """Every rule that judges its drafts from the first one on."""
        for i, x in enumerate([*self.drafts, -1]):
            if x < 0:
                if self.cut:
                    return
                self.status |= self.missing
            row = self._target(i, x)
            if row.fault:
                self.status |= TARGET_NOT_FINITE
                return
            if self.params[0] == 0 or self.a.rule == "match":
                y = self._answer(i, row)
                if self.a.rule == "synthetic":
                    stands = x >= 0 and self._at_its_rate(i)
                else:
                    stands = x >= 0 and (x == y or self._near_the_top(i, x))
                    if x >= 0:
                        self.acceptance[i] = float(stands)
                token = x if stands else y
                self.emitted.append((token, 0.0 if self.params[0] == 0 else float(row.lp[token])))
            elif x < 0:
                stands = False
                self._emit(row, self._pick(i, row.p))
            else:
                stands = self._judge(i, x, row)
            if not stands:
                return
            self.accepted += 1

    def _answer(self, i: int, row: Row) -> int:
        """The token that the target itself says at temperature 0 or under shared noise."""
        if self.params[0] == 0:
            return int(row.lp.argmax())
        position = int(self.a.positions[self.b]) + i
        noise = exponentials(int(self.a.seeds[self.b]), position, SHARED, self.v)
        return race(row.lp, noise)

    def _near_the_top(self, i: int, x: int) -> bool:
        """Rule lenient at temperature 0: P(x) >= lenience * max P, P at temperature 1."""
        if self.a.rule != "lenient" or x >= self.v:
            return False
        a = self.a
        row = (a.target[self.b, i] if a.cu_rows is None else a.target[self.begin + i]).double()
        if a.kind == "probs":
            return float(row[x]) >= self.lenience * float(row.max())
        return float(row[x] - row.max()) >= math.log(self.lenience)

    def _at_its_rate(self, i: int) -> bool:
        """Rule synthetic, at every temperature."""
        assert self.a.synthetic_rates is not None
        rate = float(self.a.synthetic_rates[i])
        self.acceptance[i] = min(max(rate, 0.0), 1.0)
        return self._coin(i) < rate

    def _judge(self, i: int, x: int, row: Row) -> bool:
        """Accepts draft x, or emits the token that follows instead."""
        rule = self.a.rule
        p_x = float(row.p[x]) if x < self.v else 0.0
        draft = None
        if rule == "typical":
            entropy = -float((row.p * row.lp).nan_to_num(0.0).sum())
            bound = min(
                float32(self.a.typical_epsilon),
                float32(self.a.typical_delta) * math.exp(-entropy),
            )
            stands = p_x > bound
            self.acceptance[i] = float(stands)
        elif rule == "synthetic":
            stands = self._at_its_rate(i)
        else:
            draft = self._draft(i, x)
            q_x = self.lenience * draft.q_x
            stands = not draft.fault and self._coin(i) * q_x < p_x
            if not draft.fault:
                self.acceptance[i] = 0.0 if p_x == 0 else min(1.0, p_x / q_x) if q_x else 1.0
        if stands:
            self._emit(row, x)
            return True
        row = self._target(i)  # the whole of it now
        if row.fault:
            self.status |= TARGET_NOT_FINITE
        elif draft is None:
            self._emit(row, self._pick(i, row.p))
        else:
            self._emit(row, self._residual(i, row.p, draft, 1.0, self.lenience))
        return False

    def _residual(self, i: int, p: Tensor, draft: Draft, c: float, lenience: float) -> int:
        """A draw from norm(max(c * P - lenience * Q, 0)), or from P where there is none."""
        if draft.fault or not draft.whole:
            self.status |= DRAFT_NOT_FINITE
            return self._pick(i, p)
        residual = (c * p - lenience * draft.q).clamp(min=0)
        if not float(residual.sum()) > 0:
            self.status |= EMPTY_RESIDUAL
            residual = p
        return self._pick(i, residual)

    def _block(self) -> None:
        """Rule block (Sun et al. 2024): the last i with u_i < h_i.

        A faulty row ends the block before it, as if nothing had been drafted from there on.
        """
        c = [1.0]
        rows: list[Row] = []
        drafts: list[Draft] = []
        end, fault = len(self.drafts), 0
        for i, x in enumerate(self.drafts):
            row, draft = self._target(i, x), self._draft(i, x)
            if row.fault or draft.fault:
                end, fault = i, TARGET_NOT_FINITE if row.fault else DRAFT_NOT_FINITE
                break
            p_x = float(row.p[x]) if x < self.v else 0.0
            ratio = 0.0 if p_x == 0 else p_x / draft.q_x if draft.q_x else math.inf
            c.append(min(1.0, c[-1] * ratio if c[-1] else 0.0))
            rows.append(row)
            drafts.append(draft)

        tau = end
        while tau > 0:
            h = c[tau]
            if tau < end:
                whole = self._target(tau)
                if whole.fault or not drafts[tau].whole:
                    end, fault = tau, TARGET_NOT_FINITE if whole.fault else DRAFT_NOT_FINITE
                else:
                    h = _block_acceptance(c[tau], whole.p, drafts[tau])
            self.acceptance[tau - 1] = h
            if self._block_coin(tau - 1) < h:
                break
            tau -= 1

        self.accepted = tau
        for i in range(tau):
            self._emit(rows[i], self.drafts[i])
        if tau == end:
            if not fault and self.cut:
                return
            self.status |= fault or self.missing
            if fault == TARGET_NOT_FINITE:
                return
        row = self._target(tau)
        if row.fault:
            self.status |= TARGET_NOT_FINITE
        elif tau == end:
            self._emit(row, self._pick(tau, row.p))
        else:
            self._emit(row, self._residual(tau, row.p, drafts[tau], c[tau], 1.0))


def _block_acceptance(c: float, p: Tensor, draft: Draft) -> float:
    """h_i from the two one-sided differences, so that rows need not sum to 1 exactly.

    Nothing of Q above cP means cP = Q, and so c = 1; or a row that is no law.
    """
    more = float((c * p - draft.q).clamp(min=0).sum())
    less = float((draft.q - c * p).clamp(min=0).sum()) + draft.beyond
    return min(1.0, more / less) if less > 0 else c
