"""The least time that a warp takes along a route through a kernel, counted from its machine code.

In each instruction the assembler encodes for how many cycles its warp issues no other one (its
stall count). Their sum along a path bounds the time of the warp from below: waits for loads, other
warps, busy units and instructions that are not in a cache come on top.

Which path a warp takes is not written in the code. A route names functions that the warp passes
through, in order, and is taken to be the cheapest path through an instruction of each. Line
information tells to which functions an instruction belongs, inlined ones included.
"""

from __future__ import annotations

import functools
import heapq
import re
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.sass.code import BYTES
from bench.sass.loops import opcode

ROOT = Path(__file__).resolve().parents[2]
# The upper half of an instruction has the stall count in these bits from sm_70 on (Jia et al. 2018,
# arXiv 1804.06826, section 2.1).
_STALL_SHIFT, _STALL_MASK = 105 - 64, 15
_DEEPEST_CALL = 3
_ENDS = {"BRA", "BRX", "RET", "EXIT"}
_LABEL = re.compile(r"([.$\w]+):\s*")
_LINE = re.compile(r'\s*//## File "([^"]+)", line (\d+)(?: inlined at "([^"]+)", line (\d+))?')
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_TARGET = re.compile(r"`\(([^)]+)\)")
_TARGETS = re.compile(r"BRANCH_TARGETS ([^\"]+)\"")
# A branch that is taken or not: by a guard, or by an operand.
_CONDITIONAL = re.compile(r"@|BRA\.DIV|BRA\S*\s+!?U?P\d")
_KEYWORDS = {"if", "constexpr", "for", "while", "switch", "return", "sizeof", "decltype", "alignas"}
_BODY = re.compile(r"\s*(const\b\s*)?(noexcept\s*)?(->[^;{]*)?(:[^;{}]*)?\{")


# The next instruction, the stops that lie behind, and the places to which calls return.
_State = tuple[int, int, tuple[int, ...]]


class Instruction(NamedTuple):
    """An instruction, its opcode, the labels that it may branch to, and the functions it is of.

    cycles: its stall count.
    falls_through: whether the next one may follow it, apart from what a call returns to.
    """

    text: str
    opcode: str
    targets: tuple[str, ...]
    falls_through: bool
    cycles: int
    functions: frozenset[str]


@dataclass(frozen=True)
class Program:
    """The instructions of a kernel with the functions that it calls; label -> index of one."""

    name: str
    instructions: Sequence[Instruction]
    labels: Mapping[str, int]


class Route(NamedTuple):
    """A way through a kernel from its first instruction.

    stops: functions that the warp passes through, in order, or opcodes such as EXIT.
    """

    name: str
    stops: tuple[str, ...]


class Cost(NamedTuple):
    """The cheapest path along a route."""

    cycles: int
    instructions: int


def stall_counts(cubin: Path) -> dict[str, list[int]]:
    """Kernel -> the stall count of each of its instructions."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    found = {}
    for at, _, _, _, begin, length in sections:
        name = data[sections[names][4] + at :].split(b"\0", 1)[0].decode()
        if name.startswith(".text."):
            words = struct.unpack_from(f"<{length // 8}Q", data, begin)
            counts = [word >> _STALL_SHIFT & _STALL_MASK for word in words[1::2]]
            found[name.removeprefix(".text.")] = counts
    return found


def read_programs(nvdisasm: str | Path, cubin: Path) -> list[Program]:
    """The kernels of a cubin that was compiled with line information."""
    command = [nvdisasm, "-gi", "-c", cubin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(parse_listing(listing, stall_counts(cubin)))


def parse_listing(listing: str, stalls: Mapping[str, Sequence[int]]) -> Iterator[Program]:
    """The kernels in what nvdisasm prints, with the lines of the sources."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    name, places, complete = "", list[tuple[str, int]](), True
    for line in listing.splitlines():
        if found := _LABEL.fullmatch(line):
            label = found[1]
            if label.startswith(".text."):
                if instructions:
                    yield Program(name, instructions, labels)
                name, instructions, labels = label.removeprefix(".text."), [], {}
            labels[label] = len(instructions)
        elif found := _LINE.match(line):
            if complete:
                places, complete = [], False
            places += [(found[i], int(found[i + 1])) for i in (1, 3) if found[i]]
        elif found := _INSTRUCTION.match(line):
            index, text, complete = int(found[1], 16) // BYTES, found[2], True
            if index != len(instructions):
                raise ValueError(f"instruction {len(instructions)} of {name} is not listed")
            targets = tuple(_TARGET.findall(text))
            for several in _TARGETS.findall(line):
                targets += tuple(several.split(","))
            owners = frozenset(f for file, number in places for f in _functions_at(file, number))
            code = opcode(text)
            falls_through = code not in _ENDS or bool(_CONDITIONAL.match(text))
            cycles = stalls[name][index]
            instructions.append(Instruction(text, code, targets, falls_through, cycles, owners))
    if instructions:
        yield Program(name, instructions, labels)


def _functions_at(file: str, line: int) -> frozenset[str]:
    """The functions of a source of this project whose definitions hold a line."""
    return frozenset(name for name, begin, end in _definitions(ROOT / file) if begin <= line <= end)


@functools.cache
def _definitions(path: Path) -> tuple[tuple[str, int, int], ...]:
    """(name, first line, last line) of the functions that a source defines."""
    if not path.is_relative_to(ROOT) or not path.is_file():
        return ()
    text = re.sub(r"//[^\n]*", "", path.read_text())
    return tuple(definitions(text))


def definitions(text: str) -> Iterator[tuple[str, int, int]]:
    """(name, first line, last line) of the functions that a text without comments defines."""
    for found in re.finditer(r"(\w+)\s*\(", text):
        closed = _closing(text, found.end() - 1, "()")
        body = _BODY.match(text, closed + 1)
        if not body or found[1] in _KEYWORDS:
            continue
        end = _closing(text, body.end() - 1, "{}")
        yield found[1], text.count("\n", 0, found.start()) + 1, text.count("\n", 0, end) + 1


def _closing(text: str, at: int, pair: str) -> int:
    """The place of the bracket that closes the one at `at`; the text's end if none does."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return i
    return len(text)


def cheapest(program: Program, route: Route) -> Cost | None:
    """The path along a route with the smallest sum of stall counts; None if there is none.

    This is Dijkstra's algorithm on the states of a warp.
    """
    stops_at = [
        {i for i, at in enumerate(program.instructions) if stop in (*at.functions, at.opcode)}
        for stop in route.stops
    ]
    start: _State = (0, 0, ())
    costs: dict[_State, tuple[int, int]] = {start: (0, 0)}
    queue = [((0, 0), start)]
    while queue:
        cost, (index, stops, calls) = heapq.heappop(queue)
        if cost > costs[index, stops, calls]:
            continue
        while stops < len(stops_at) and index in stops_at[stops]:
            stops += 1
        total = (cost[0] + max(1, program.instructions[index].cycles), cost[1] + 1)
        if stops == len(route.stops):
            return Cost(*total)
        for successor, then in _successors(program, index, calls):
            state = (successor, stops, then)
            if successor < len(program.instructions) and total < costs.get(state, (1 << 60, 0)):
                costs[state] = total
                heapq.heappush(queue, (total, state))
    return None


def _successors(
    program: Program, index: int, calls: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(index of the next instruction, to where calls return after it)."""
    instruction = program.instructions[index]
    if instruction.opcode == "CALL":
        if len(calls) < _DEEPEST_CALL:
            yield program.labels[instruction.targets[0]], (*calls, index + 1)
        return
    if instruction.opcode == "RET" and calls:
        yield calls[-1], calls[:-1]
    elif instruction.opcode in ("BRA", "BRX"):
        for target in instruction.targets:
            yield program.labels[target], calls
    if instruction.falls_through:
        yield index + 1, calls
