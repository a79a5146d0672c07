"""Prints what the loops and the kernels of verify_chain and sample cost, counted from machine code.

    python -m bench.sass [--library] [--opcodes]

Nothing runs on a GPU. The sources in csrc/cuda are compiled for sm_90, which takes a minute;
--library reads specdec_kernels/_C.so instead.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.sass.budgets import KERNELS, LOOPS, NAMES, SOURCES
from bench.sass.kernels import (
    Kernel,
    blocks_per_multiprocessor,
    cubins,
    read_kernels,
    shared_bytes,
)
from bench.sass.loops import Loop, find_loops


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
        title=f"Kernels for sm_90: counted (ceiling). "
        f"A block has 256 threads and, with filters, {shared} B of shared memory."
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
            registers = f"{kernel.registers} ({budget.registers})"
            held = f"{blocks} ({budget.least_blocks})"
            code = f"{kernel.code.size / 1024:.1f} ({budget.code_kib:g})"
            stack = f"{kernel.stack} B; {kernel.local_accesses}"
            table.add_row(NAMES[budget.kernel], registers, held, code, stack)
    return table


def main(
    library: Annotated[bool, typer.Option(help="read _C.so instead of compiling")] = False,
    opcodes: Annotated[bool, typer.Option(help="also count each opcode of the loops")] = False,
) -> None:
    with cubins(SOURCES, library=library) as files:
        kernels = [kernel for file in files for kernel in read_kernels(file, NAMES)]
    with tempfile.TemporaryDirectory() as folder:
        shared = shared_bytes(Path(folder))
    console = Console(width=160)
    console.print(loops_table(kernels, opcodes=opcodes))
    console.print(kernels_table(kernels, shared))


if __name__ == "__main__":
    typer.run(main)
