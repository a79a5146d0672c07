"""The tables of the command ``analyze``, in the terminal and as JSON."""

# ruff: noqa: PLC0415  # torch loads at first use; see cli/app.py
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from specdec_hf.cli.terminal import console, visible

if TYPE_CHECKING:
    from specdec_hf.cli.load import Loaded
    from specdec_hf.lab.analysis.measure import Ablation, DrafterAnalysis

Found = Mapping[float, Sequence["DrafterAnalysis"]]
SHOWN_ROUNDS = 12  # of the first answer of each drafter


def to_dict(found: Found) -> dict[str, Any]:
    """All that was measured, as plain values."""
    from specdec_kernels.analysis import TABLE_1, table_1

    return {
        "table_1": [
            {"printed": printed._asdict(), "computed": computed._asdict()}
            for printed, computed in zip(TABLE_1, table_1(), strict=True)
        ],
        "measured": [
            {
                "drafter": one.name,
                "temperature": temperature,
                "acceptance": one.acceptance.to_dict(),
                "speed": [speed.to_dict() for speed in one.speeds],
                "ablation": None if one.ablation is None else one.ablation.to_dict(),
                "calls": {
                    str(gamma): [stats.to_dict() for stats in calls]
                    for gamma, calls in one.calls.items()
                },
                "rounds": [
                    [[token.to_dict() for token in said] for said in answer.rounds]
                    for answer in one.answers
                ],
            }
            for temperature, analyses in found.items()
            for one in analyses
        ],
    }


def print_report(loaded: Loaded, found: Found) -> None:
    """Print every table, and the rounds of the first answer of each drafter."""
    console.print(visible(f"{loaded.title}, {loaded.dtype}, {loaded.model.device}"), style="bold")
    sampled = max(found)
    for one in found[sampled]:
        _print_rounds(one, sampled)
    _print_table_1()
    _print_acceptance(found)
    _print_speed(found)
    if sampled > 0:
        _print_lenience(found[sampled], sampled)
    for one in found[sampled]:
        if one.ablation is not None:
            _print_ablation(one.name, one.ablation)


def _print_rounds(one: DrafterAnalysis, temperature: float) -> None:
    from specdec_hf.cli.trace import legend, marks_of, styled

    marks, rounds = marks_of(console), one.answers[0].rounds
    _head(f"Figure 1: rounds of the first answer, {one.name}, temperature {temperature:g}")
    for number, said in enumerate(rounds[:SHOWN_ROUNDS], start=1):
        pieces = (styled(token.text.replace("\n", "↵"), token.kind, marks) for token in said)
        line = Text().join(pieces)
        console.print(f"{number:3} ", line, sep="", style="" if marks else None)
    if len(rounds) > SHOWN_ROUNDS:
        more = len(rounds) - SHOWN_ROUNDS
        console.print(f"... {more} more rounds; --output writes all of them", style="dim")
    console.print(legend(marks, rejected=True))


def _print_table_1() -> None:
    from specdec_kernels.analysis import TABLE_1, table_1

    _head("Table 1: operations and speed against plain decoding, at c = 0")
    rows = [
        (
            f"{alpha:g}", str(gamma), f"{operations:.2f}x", f"{printed.operations:.2f}x",
            f"{speed:.2f}x", f"{printed.speed:.2f}x",
        )
        for (alpha, gamma, operations, speed), printed in zip(table_1(), TABLE_1, strict=True)
    ]  # fmt: skip
    _print_table(("α", "γ", "operations", "printed", "speed", "printed"), rows)


def _print_acceptance(found: Found) -> None:
    _head("Corollary 3.6: acceptance rate on the target's own texts")
    rows = []
    for temperature, analyses in found.items():
        for one in analyses:
            (alpha, error), *_ = one.acceptance.estimates()
            drafted, positions = one.acceptance.drafted, one.acceptance.positions
            rows.append(
                (visible(one.name), f"{temperature:g}", _estimate(alpha, error),
                 f"{drafted} of {positions}")
            )  # fmt: skip
    _print_table(("drafter", "temperature", "α ± standard error", "positions with a draft"), rows)


def _print_speed(found: Found) -> None:
    _head("Table 4: expected against measured speed-up over plain decoding")
    rows = [
        (
            visible(one.name), f"{temperature:g}", str(s.gamma), f"{s.alpha:.2f}", f"{s.cost:.3f}",
            f"{s.verification:.2f}", f"{s.drafting:.0%}", f"{s.expected_paper:.2f}x",
            f"{s.expected:.2f}x", f"{s.measured:.2f}x",
            f"{s.expected_tokens:.2f}", f"{s.measured_tokens:.2f}",
        )
        for temperature, analyses in found.items()
        for one in analyses
        for s in one.speeds
    ]  # fmt: skip
    if not rows:
        console.print("nothing was drafted after the first round", style="dim")
        return
    names = (
        "drafter", "T", "γ", "α", "c", "v", "drafting", "Exp", "Exp v", "Emp", "tokens", "Emp"
    )  # fmt: skip
    _print_table(names, rows)
    console.print(
        "Exp: Theorem 3.8, with v = 1 and drafts in every round. Exp v: with the measured v and "
        "share of rounds with drafts. tokens: expected per round. Emp: measured.",
        style="dim",
    )


def _print_lenience(analyses: Sequence[DrafterAnalysis], temperature: float) -> None:
    from specdec_kernels.analysis import LENIENCES

    _head(f"Table 5: acceptance rate under lenience l, temperature {temperature:g}")
    rows = [
        (visible(one.name), *(_estimate(*pair) for pair in one.acceptance.estimates()))
        for one in analyses
    ]
    _print_table(("drafter", *(f"l = {l:g}" for l in LENIENCES)), rows)


def _print_ablation(name: str, ablation: Ablation) -> None:
    _head(f"Without the residual: recovered tokens drawn from P, {name}")
    measured = ablation.to_dict()
    if not measured["positions"]:
        console.print("nothing was drafted", style="dim")
        return
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
    _print_table(("", "with the residual", "without"), rows)
    console.print(
        f"Means over {measured['positions']} positions. TV: exact total variation from the "
        "residual for the recovered token, from P for the emitted one.",
        style="dim",
    )


def _estimate(mean: float, error: float) -> str:
    if math.isnan(mean):  # nothing was drafted
        return "-"
    return f"{mean:.3f}" if math.isnan(error) else f"{mean:.3f} ± {error:.3f}"


def _head(title: str) -> None:
    console.rule(visible(title), align="left", style="dim")


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, padding=(0, 1 if len(names) > 6 else 2, 0, 0))
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
