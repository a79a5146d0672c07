"""Specification of `specdec_kernels::verify_chain`, one sequence at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.checks import float32
from specdec_kernels.reference.chain.sequence import Verification, ratio, verdicts
from specdec_kernels.reference.row.distribution import (
    DRAFT_NOT_FINITE,
    DRAFT_OUT_OF_RANGE,
    EMPTY_RESIDUAL,
    TARGET_NOT_FINITE,
)
from specdec_kernels.reference.row.draft import Draft, Row, entry, point_mass, target_row


def verify_chain(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Arguments in the order of `ChainArguments`."""
    a = ChainArguments(*args)
    a.check()
    drafted = a.draft_token_ids
    return verdicts(a.new_outputs(), [_Chain(a, b, drafted) for b in range(len(drafted))])


@dataclass
class _Chain(Verification):
    a: ChainArguments

    def judge(self, rows: int) -> None:
        self.lenience = float32(self.a.lenience) if self.a.rule == "lenient" else 1.0
        self._limit(rows)
        if self.a.rule == "block" and self.params[0] != 0:
            self._block()
        else:
            self._walk()

    def _limit(self, rows: int) -> None:
        """The drafts that are judged, and whether anything follows when all of them stand.

        Nothing follows an end-of-sequence token or the last token that may be emitted, so drafts
        beyond it count for nothing.
        """
        self.drafts: list[int] = []
        self.missing = 0  # status of the position after them
        self.cut = self.most == 0
        for i in range(rows - 1):
            x = int(self.drafted[self.b, i])
            if self.cut or x == -1:
                break
            if not 0 <= x < self.a.id_limit:
                self.missing = DRAFT_OUT_OF_RANGE
                break
            self.drafts.append(x)
            self.cut = len(self.drafts) == self.most or x in self.ends

    def _target(self, i: int, x: int = -1) -> Row:
        """P of row i. With a drafted token a `direct` row is judged at that entry alone."""
        row = self.given(i)
        if self.direct and x >= 0:
            return Row(row, row.log(), not 0 <= entry(row, x) < math.inf)
        return target_row(row, self.a.kind, self.params, self.direct)

    def _draft(self, i: int, x: int) -> Draft:
        """Q of draft i. A point mass on x unless a draft row says otherwise."""
        a = self.a
        if a.draft is None or self.q_temperature == 0:
            return point_mass(x, x, self.v)
        at_row = self.begin - self.b + i  # a ragged draft has no row for a bonus token
        if a.ragged_draft and not 0 <= at_row < a.draft.shape[0]:
            return Draft(torch.zeros(self.v), 0.0, fault=True)
        return self.draft_law((at_row,) if a.ragged_draft else (self.b, i), (self.b, i), x)

    def _coin(self, i: int) -> float:
        return self.coin(i, self.position + i)

    def _pick(self, i: int, weights: Tensor) -> int:
        return self.draw(i, weights, -1)

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
                y = self.answer(i, row)
                if self.a.rule == "synthetic":
                    stands = x >= 0 and self._at_its_rate(i)
                else:
                    stands = x >= 0 and (x == y or self._near_the_top(i, x))
                    if x >= 0:
                        self.accept_probs[i] = float(stands)
                self.emit(row, x if stands else y)
            elif x < 0:
                stands = False
                self.emit(row, self._pick(i, row.p))
            else:
                stands = self._judge(i, x, row)
            if not stands:
                return
            self.accepted += 1

    def _near_the_top(self, i: int, x: int) -> bool:
        """Rule lenient at temperature 0: P(x) >= lenience * max P, P at temperature 1."""
        if self.a.rule != "lenient" or x >= self.v:
            return False
        row = self.given(i)
        if self.a.kind == "probs":
            return float(row[x]) >= self.lenience * float(row.max())
        return float(row[x] - row.max()) >= math.log(self.lenience)

    def _at_its_rate(self, i: int) -> bool:
        """Rule synthetic, at every temperature."""
        assert self.a.synthetic_rates is not None
        rate = float(self.a.synthetic_rates[i])
        self.accept_probs[i] = min(max(rate, 0.0), 1.0)
        return self._coin(i) < rate

    def _judge(self, i: int, x: int, row: Row) -> bool:
        """Accepts draft x, or emits the token that follows instead."""
        rule = self.a.rule
        p_x = entry(row.p, x)
        draft = None
        if rule == "typical":
            stands = p_x > self.typical_bound(row)
            self.accept_probs[i] = float(stands)
        elif rule == "synthetic":
            stands = self._at_its_rate(i)
        else:
            draft = self._draft(i, x)
            q_x = self.lenience * draft.q_x
            stands = not draft.fault and self._coin(i) * q_x < p_x
            if not draft.fault:
                self.accept_probs[i] = min(1.0, ratio(p_x, q_x))
        if stands:
            self.emit(row, x)
            return True
        row = self._target(i)  # the whole of it now
        if row.fault:
            self.status |= TARGET_NOT_FINITE
        elif draft is None:
            self.emit(row, self._pick(i, row.p))
        else:
            self.emit(row, self._residual(i, row.p, draft, 1.0, self.lenience))
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
            step = ratio(entry(row.p, x), draft.q_x)
            c.append(min(1.0, c[-1] * step if c[-1] else 0.0))
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
            self.accept_probs[tau - 1] = h
            # A coin of this round alone: it may have shaped what was emitted before its position.
            if self.coin(tau - 1, self.position, tau - 1) < h:
                break
            tau -= 1

        self.accepted = tau
        for i in range(tau):
            self.emit(rows[i], self.drafts[i])
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
            self.emit(row, self._pick(tau, row.p))
        else:
            self.emit(row, self._residual(tau, row.p, drafts[tau], c[tau], 1.0))


def _block_acceptance(c: float, p: Tensor, draft: Draft) -> float:
    """h_i from the two one-sided differences, so that rows need not sum to 1 exactly.

    Nothing of Q above cP means cP = Q, and so c = 1; or a row that is no law.
    """
    more = float((c * p - draft.q).clamp(min=0).sum())
    less = float((draft.q - c * p).clamp(min=0).sum()) + draft.beyond
    return min(1.0, more / less) if less > 0 else c
