"""Prints what the loops and the kernels of verify_chain and sample cost, counted from machine code.

    python -m bench.sass [--library] [--opcodes] [--routes]

Nothing runs on a GPU. The sources in csrc/cuda are compiled for sm_90, which takes a minute;
--library reads specdec_kernels/_C.so instead. --routes adds up what one warp does outside of the
loops, and nothing else: that needs line information, which a library does not have.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.sass.budgets import KERNELS, LOOPS, NAMES, ROUTES, SOURCES
from bench.sass.kernels import (
    Kernel,
    blocks_per_multiprocessor,
    cubins,
    programs,
    read_kernels,
    shared_bytes,
)
from bench.sass.loops import Loop, find_loops
from bench.sass.routes import cheapest


def loops_table(kernels: list[Kernel], *, opcodes: bool) -> Table:
    table = Table(title="Warp instructions on the path of a whole, aligned warp tile")
    for heading in ("kernel", "loop", "per 512", "per element", "ceiling", "goal"):
        table.add_column(heading, justify="left" if heading in ("kernel", "loop") else "right")
    for budget in LOOPS:
        for kernel in (k for k in kernels if budget.kernel in k.code.name):
            loop = next(iter(find_loops(kernel.code, budget.work)), None)
            row = [f"{budget.ceiling:g}", _goal(budget.goal)]
            counted = [f"{loop.per_512:g}", f"{loop.per_element:.2f}"] if loop else ["none", "none"]
            name = budget.work.name + ("\n" + _opcodes(loop) if opcodes and loop else "")
            table.add_row(NAMES[budget.kernel], name, *counted, *row)
    return table


def _goal(goal: float | None) -> str:
    return "-" if goal is None else f"{goal:g}"


def _opcodes(loop: Loop) -> str:
    entries = loop.rounds * loop.work.entries / 512
    return ", ".join(f"{name} {n / entries:g}" for name, n in loop.opcodes.most_common(20))


def kernels_table(kernels: list[Kernel], shared: int) -> Table:
    table = Table(
        title=f"Kernels for sm_90: counted (ceiling, goal). "
        f"A block has 256 threads and {shared} B of shared memory."
    )
    for heading in (
        "kernel",
        "registers",
        "blocks a multiprocessor",
        "KiB of code",
        "stack; LDL, STL",
    ):
        table.add_column(heading, justify="left" if heading == "kernel" else "right")
    for budget in KERNELS:
        for kernel in (k for k in kernels if budget.kernel in k.code.name):
            blocks = blocks_per_multiprocessor(kernel.registers, shared)
            counted = (
                (f"{kernel.registers}", f"{budget.registers}", _goal(budget.goal_registers)),
                (f"{blocks}", f"{budget.least_blocks}", _goal(budget.goal_blocks)),
                (
                    f"{kernel.code.size / 1024:.1f}",
                    f"{budget.code_kib:g}",
                    _goal(budget.goal_code_kib),
                ),
            )
            registers, held, code = ("{} ({}, {})".format(*texts) for texts in counted)
            stack = f"{kernel.stack} B; {kernel.local_accesses}"
            table.add_row(NAMES[budget.kernel], registers, held, code, stack)
    return table


def routes_table() -> Table:
    table = Table(
        title="Cycles of a warp on its cheapest path outside of the loops: counted (ceiling)"
    )
    counts = "stall counts", "and waits", "and code from memory"
    for heading in ("kernel", "route", "instructions", *counts):
        table.add_column(heading, justify="left" if heading in ("kernel", "route") else "right")
    compiled = programs(dict.fromkeys(SOURCES[budget.kernel] for budget in ROUTES))
    for budget in ROUTES:
        for program in (p for p in compiled if budget.kernel in p.name):
            cost = cheapest(program, budget.route)
            of_cost = (cost.cycles, cost.warm, cost.cold) if cost else ("none",) * 3
            ceilings = budget.cycles, budget.warm, budget.cold
            counted = [f"{n} ({most})" for n, most in zip(of_cost, ceilings, strict=True)]
            issued = str(cost.instructions) if cost else ""
            table.add_row(NAMES[budget.kernel], budget.route.name, issued, *counted)
    return table


def main(
    library: Annotated[bool, typer.Option(help="read _C.so instead of compiling")] = False,
    opcodes: Annotated[bool, typer.Option(help="also count each opcode of the loops")] = False,
    routes: Annotated[bool, typer.Option(help="only add up the cycles of routes")] = False,
) -> None:
    if routes:
        Console(width=160).print(routes_table())
        return
    with cubins(list(SOURCES.values()), library=library) as files:
        kernels = [kernel for file in files for kernel in read_kernels(file, NAMES)]
    with tempfile.TemporaryDirectory() as folder:
        shared = shared_bytes(Path(folder))
    console = Console(width=160)
    console.print(loops_table(kernels, opcodes=opcodes))
    console.print(kernels_table(kernels, shared))


if __name__ == "__main__":
    typer.run(main)
