"""The tables of the command ``analyze``: built once, for the terminal and for the page."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from specdec_lab.analysis.measure import DrafterAnalysis
    from specdec_lab.analysis.residual import Ablation
    from specdec_lab.analysis.speed import Speed

ByTemperature = Mapping[float, Sequence["DrafterAnalysis"]]
BEST_OF = 4  # chains side by side


@dataclass(frozen=True)
class ShownTable:
    """A table as text.

    Attributes:
        title: its heading.
        names: of the columns; the first is aligned left, the others right.
        rows: texts of each row.
        note: remark under the table; where there are no rows it stands in their place.
    """

    title: str
    names: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def tables_of(found: ByTemperature, target: str, task: str) -> list[ShownTable]:
    """Every table, those of the paper alone first.

    Args:
        found: what was measured, by temperature.
        target: name of the model.
        task: name of the prompts.
    """
    sampled = max(found)
    tables = [
        _table_1(),
        _table_2(found, target, task),
        _table_3(found, target),
        _acceptance(found),
        _table_4(found),
        _expected(found),
        _operations(found),
        _first_children(found),
        _baselines(found),
        _schedules(found),
        _lenience(found),
        _lenience_speeds(),
    ]
    ablations = [
        _ablation(one.name, one.ablation) for one in found[sampled] if one.ablation is not None
    ]
    return [*(table for table in tables if table.rows or table.note), *ablations]


def printed_tables() -> list[ShownTable]:
    """Tables 2 to 4 as the paper prints them, to lay beside what was measured."""
    from specdec_kernels.analysis import TABLE_3, TABLE_4, walltime_factor

    rates = [(row.target, row.drafter, f"T={row.temperature}", f"{row.alpha}") for row in TABLE_3]
    speeds = [
        (
            row.task, row.drafter, str(row.temperature), str(row.gamma), f"{row.alpha}",
            f"{row.cost}", f"{walltime_factor(row.alpha, row.gamma, row.cost):.2f}x",
            f"{row.expected}x", f"{row.measured}x",
        )
        for row in TABLE_4
    ]  # fmt: skip
    names = ("TASK", "M_q", "TEMP", "γ", "α", "c", "Theorem 3.8", "Exp", "Emp")
    note = (
        "T5-XXL on a TPU. Theorem 3.8 takes α and c with the digits that are printed; Emp is the "
        "speed of Table 2."
    )
    return [
        ShownTable("Table 3 as printed", ("M_p", "M_q", "SMPL", "α"), rates),
        ShownTable("Tables 2 and 4 as printed", names, speeds, note),
    ]


def _each(found: ByTemperature) -> Iterator[tuple[float, DrafterAnalysis]]:
    for temperature, analyses in found.items():
        for one in analyses:
            yield temperature, one


def _each_speed(found: ByTemperature) -> Iterator[tuple[float, DrafterAnalysis, Speed]]:
    for temperature, one in _each(found):
        for speed in one.speeds:
            yield temperature, one, speed


def _table_1() -> ShownTable:
    from specdec_kernels.analysis import TABLE_1, table_1

    rows = [
        (
            f"{alpha:g}", str(gamma), f"{operations:.2f}x", f"{printed.operations:.2f}x",
            f"{speed:.2f}x", f"{printed.speed:.2f}x",
        )
        for (alpha, gamma, operations, speed), printed in zip(table_1(), TABLE_1, strict=True)
    ]  # fmt: skip
    title = "Table 1: operations and speed against plain decoding, at c = 0"
    return ShownTable(title, ("α", "γ", "operations", "printed", "speed", "printed"), rows)


def _table_2(found: ByTemperature, target: str, task: str) -> ShownTable:
    from specdec_kernels.analysis import fastest

    measured, title = list(_each_speed(found)), f"Table 2: measured speed-up of {target}"
    if not measured:
        return _nothing(title)
    starred = fastest([(temperature, speed.measured) for temperature, _, speed in measured])
    rows = [
        (
            task, one.name + " ★" * (place in starred), f"{temperature:g}", str(speed.gamma),
            _number(speed.alpha), f"{speed.measured:.1f}x",
        )
        for place, (temperature, one, speed) in enumerate(measured)
    ]  # fmt: skip
    names = ("TASK", "M_q", "TEMP", "γ", "α", "SPEED")
    return ShownTable(title, names, rows, "★ the fastest at its temperature")


def _table_3(found: ByTemperature, target: str) -> ShownTable:
    rows = [
        (target, one.name, f"T={temperature:g}", _number(one.acceptance.alpha))
        for temperature, one in _each(found)
        if not one.trees
    ]
    return ShownTable("Table 3: acceptance rates", ("M_p", "M_q", "SMPL", "α"), rows)


def _acceptance(found: ByTemperature) -> ShownTable:
    rows = []
    for temperature, one in _each(found):
        measured = one.acceptance
        rows.append(
            (
                one.name, f"{temperature:g}", _estimate(*measured.estimates()[0]),
                _number(measured.divergence[0], 3), _number(measured.rejection[0], 3),
                f"{measured.drafted} of {measured.positions}",
            )
        )  # fmt: skip
    names = ("drafter", "T", "α ± standard error", "D_LK", "A.2", "positions")
    note = (
        "On the target's own texts, over the positions with a draft. D_LK: mean of Definition 3.2, "
        "1 - α. A.2: acceptance of rejection sampling with the same drafts."
    )
    if any(one.trees for _, one in _each(found)):
        note += " Of a tree α is the probability that a child of its root is accepted."
    return ShownTable("Corollary 3.6: acceptance rate", names, rows, note)


def _table_4(found: ByTemperature) -> ShownTable:
    title = "Table 4: expected against measured speed-up over plain decoding"
    rows = [
        (
            one.name, f"{temperature:g}", str(s.gamma), _number(s.alpha), f"{s.cost:.3f}",
            f"{s.verification:.2f}", f"{s.drafting:.0%}", _factor(s.expected_paper),
            _factor(s.expected), _factor(s.measured), _number(s.expected_tokens),
            f"{s.measured_tokens:.2f}",
        )
        for temperature, one, s in _each_speed(found)
    ]  # fmt: skip
    if not rows:
        return _nothing(title)
    names = (
        "drafter", "T", "γ", "α", "c", "v", "drafting", "Exp", "Exp v", "Emp", "tokens", "Emp"
    )  # fmt: skip
    note = (
        "Exp: Theorem 3.8, with v = 1 and drafts in every round. Exp v: with the measured v and "
        "share of rounds with drafts. tokens: expected per round. Emp: measured."
    )
    if any(one.trees for _, one in _each(found)):
        note += " Of trees γ is the depth and c the cost of a whole tree; the theorem has none."
    return ShownTable(title, names, rows, note)


def _expected(found: ByTemperature) -> ShownTable:
    from specdec_kernels.analysis import (
        improvement_bound,
        optimal_gamma,
        oracle_factor,
        walltime_factor,
    )

    rows = []
    for temperature, one, speed in _each_speed(found):
        alpha, cost = speed.alpha, speed.cost
        if not _is_known(alpha) or speed is not one.speeds[0]:
            continue
        best = optimal_gamma(alpha, cost)
        factor, oracle = walltime_factor(alpha, best, cost), oracle_factor(alpha, cost)
        rows.append(
            (
                one.name, f"{temperature:g}", f"{alpha:.2f}", f"{cost:.3f}",
                _factor(improvement_bound(alpha, cost)), str(best), _factor(factor),
                _factor(oracle), f"{oracle / factor - 1:+.0%}",
            )
        )  # fmt: skip
    names = ("drafter", "T", "α", "c", "at least", "best γ", "Exp", "oracle", "gain")
    note = (
        "at least: Corollary 3.9, 1 where α does not exceed c. Exp: Theorem 3.8 at the best γ. "
        "oracle: γ is in every round what will be accepted, and its gain over Exp."
    )
    title = "Sections 3.3 and 3.5: what α and c make possible, with v = 1"
    return _with_note(title, names, rows, note)


def _operations(found: ByTemperature) -> ShownTable:
    from specdec_kernels.analysis import memory_accesses_factor, operations_factor

    rows = []
    for temperature, one, speed in _each_speed(found):
        grows, reads = None, None
        if _is_known(speed.alpha):
            reads = memory_accesses_factor(speed.alpha, speed.gamma)
            if one.operations is not None:
                grows = operations_factor(speed.alpha, speed.gamma, one.operations)
        rows.append(
            (
                one.name, f"{temperature:g}", str(speed.gamma), _number(speed.alpha),
                _number(one.operations, 3), _factor(grows), _factor(reads),
                _factor(1 / speed.measured_tokens),
            )
        )  # fmt: skip
    names = ("drafter", "T", "γ", "α", "ĉ", "operations", "reads", "Emp")
    note = (
        "Per token, against plain decoding. ĉ: counted operations of a draft step over those of a "
        "token of the target. operations: Theorem 3.11. reads: of the target's weights and KV "
        "cache, expected where every round drafts. Emp: reads as measured."
    )
    title = "Section 3.4: arithmetic operations and memory accesses"
    return _with_note(title, names, rows, note)


def _first_children(found: ByTemperature) -> ShownTable:
    from specdec_kernels.analysis import first_children_acceptance
    from specdec_lab.analysis.acceptance import FIRST

    rows = []
    for temperature, one in _each(found):
        shares = [mean for mean, _ in one.acceptance.first_estimates()]
        if not math.isnan(shares[0]):
            where = "root, texts" if one.trees else "texts"
            rows.append((one.name, f"{temperature:g}", where, *map(_percent, shares)))
        by_trial = one.trials.acceptance_by_trial
        if one.trees and by_trial:
            shares = first_children_acceptance(by_trial)[:FIRST]
            shares += [math.nan] * (FIRST - len(shares))
            rows.append((one.name, f"{temperature:g}", "rounds", *map(_percent, shares)))
    names = ("drafter", "T", "measured in", *(f"k = {k}" for k in range(1, FIRST + 1)))
    note = (
        "texts: the k likeliest tokens at temperature 0, else k that are drawn independently and "
        "tried by rule multi_draft. root, texts: the children of a tree's root. rounds: the "
        "children of every node that was tried, by acceptance_by_trial."
    )
    title = "SpecInfer, Table 1: how often one of the first k drafts is accepted"
    return _with_note(title, names, rows, note)


def _baselines(found: ByTemperature) -> ShownTable:
    from specdec_kernels.analysis import best_of_likeliest_tokens, expected_tokens

    rows = []
    for temperature, one, speed in _each_speed(found):
        if not _is_known(speed.alpha):
            continue
        rejection = one.acceptance.rejection[0]
        first, _ = one.acceptance.first_estimates()[BEST_OF - 1]
        best = best_of_likeliest_tokens(first, speed.alpha, speed.gamma)
        rows.append(
            (
                one.name, f"{temperature:g}", str(speed.gamma),
                _number(expected_tokens(speed.alpha, speed.gamma)),
                _number(expected_tokens(rejection, speed.gamma)),
                _number(None if temperature > 0 else best),
            )
        )  # fmt: skip
    names = ("drafter", "T", "γ", "speculative", "rejection", f"best of {BEST_OF}")
    note = (
        "speculative: Equation 1. rejection: the same with the acceptance of Appendix A.2. best: "
        f"the longest of {BEST_OF} greedy chains that begin with the likeliest tokens, which cost "
        f"{BEST_OF} times as much; the longest of sampled chains would be biased."
    )
    title = "Baselines: expected tokens per round that drafts"
    return _with_note(title, names, rows, note)


def _schedules(found: ByTemperature) -> ShownTable:
    rows, refused = [], []
    for temperature, one in _each(found):
        for made in one.scheduled:
            rows.append(
                (
                    one.name, f"{temperature:g}", made.schedule, f"{made.drafted:.2f}",
                    f"{made.tokens:.2f}", _factor(made.factor), f"{made.share:.0%}",
                )
            )  # fmt: skip
        refused += [f"{one.name}: {message}" for message in one.refused.values()]
    note = "The oracle drafts in each round what is accepted. speed: by c alone, with v = 1."
    left_out = "".join(f" Left out: {message}." for message in dict.fromkeys(refused))
    names = ("drafter", "T", "schedule", "drafts", "tokens", "speed", "of oracle")
    title = "Section 3.5: what each schedule leaves of an oracle for γ"
    return ShownTable(title, names, rows, (note if rows else "") + left_out)


def _lenience(found: ByTemperature) -> ShownTable:
    from specdec_kernels.analysis import LENIENCES

    rows = [
        (
            one.name, f"{temperature:g}",
            *(_estimate(*pair) for pair in one.acceptance.estimates()),
        )
        for temperature, one in _each(found)
        if not one.trees
    ]  # fmt: skip
    names = ("drafter", "T", *(f"l = {l:g}" for l in LENIENCES))
    note = "At T = 0 a draft x is accepted where P(x) >= l max P before the argmax."
    return _with_note(
        "Table 5 and Appendix A.5: acceptance rate under lenience l", names, rows, note
    )


def _lenience_speeds() -> ShownTable:
    from specdec_kernels.analysis import LENIENCE_SPEEDS, LENIENT_COST, lenience_speeds

    rows = [
        (
            f"{row.temperature}", f"{row.lenience:g}", f"{row.alpha:g}", str(row.gamma),
            f"{row.speed:.2f}x", f"{printed.speed:.1f}x",
        )
        for row, printed in zip(lenience_speeds(), LENIENCE_SPEEDS, strict=True)
    ]  # fmt: skip
    return ShownTable(
        f"Appendix A.5: speed under lenience, T5-small for T5-XXL, c = {LENIENT_COST}",
        ("T", "l", "α", "γ", "speed", "printed"), rows,
        "At T = 1 the paper names no γ: it is the best one, and the printed speeds are larger.",
    )  # fmt: skip


def _ablation(name: str, ablation: Ablation) -> ShownTable:
    title = f"Without the residual: recovered tokens drawn from P, {name}"
    measured = ablation.to_dict()
    if not measured["positions"]:
        return ShownTable(title, (), (), "nothing was drafted")
    mean, drawn = measured["mean"], measured["experiment"]
    rows = [
        ("probability of a rejection", f"{mean['rejection']:.3f}", f"{mean['rejection']:.3f}"),
        ("TV of the recovered token", "0", f"{mean['recovered']:.3f}"),
        ("TV of the emitted token", f"{mean['correct']:.1e}",
         f"{mean['ablated']:.3f}"),
    ]  # fmt: skip
    if drawn is not None:
        exact = drawn["exact"]
        rows.append(
            ("the same, worst position", f"{exact['correct']:.1e}",
             f"{exact['ablated']:.3f}")
        )  # fmt: skip
        with_residual, without = (
            f"{test['statistic']:.0f} (df {test['degrees']}), p = {test['p_value']:.2g}"
            for test in (drawn["correct"], drawn["ablated"])
        )
        rows.append((f"chi-square, {drawn['draws']} draws there", with_residual, without))
    note = (
        f"Means over {measured['positions']} positions. TV: exact total variation from the "
        "residual for the recovered token, from P for the emitted one."
    )
    return ShownTable(title, ("", "with the residual", "without"), rows, note)


def _nothing(title: str) -> ShownTable:
    return ShownTable(title, (), (), "nothing was drafted after the first round")


def _with_note(
    title: str, names: Sequence[str], rows: Sequence[Sequence[str]], note: str
) -> ShownTable:
    """A table with a remark about its rows."""
    return ShownTable(title, names, rows, note if rows else "")


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and not math.isnan(value)


def _estimate(mean: float, error: float) -> str:
    if math.isnan(mean):  # nothing was drafted
        return "-"
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


def _number(value: float | None, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if _is_known(value) else "-"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0%}"
