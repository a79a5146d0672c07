"""The least time that a warp takes along a route through a kernel, counted from its machine code.

In each instruction the assembler encodes for how many cycles its warp issues no other one (its
stall count), and for which earlier results it waits. Stall counts and the waits for results whose
latency is published bound the time of the warp from below. Loads from global memory, other warps
and busy units come on top.

The code itself comes from memory the first time. It is fetched in lines, and a stream buffer asks
for the lines behind ahead of time: of the designs that Huerta et al. 2025 (MICRO,
doi:10.1145/3725843.3756041, section 5.2 and table 5) compare, eight lines fit NVIDIA's GPUs best.
That no cache keeps the code from one call to the next is an assumption: it holds for the L2 cache
where other work fills it in between.

Which path a warp takes is not written in the code. A route names functions that the warp passes
through, in order, and is taken to be the path through an instruction of each whose stall counts
add up to the least. Line information tells to which functions an instruction belongs, inlined ones
included.
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
NONE, COUNTERS = 7, 6
# The first bit of each field of a Control, and a mask of its length (Jia et al. 2018, arXiv
# 1804.06826, section 2.1).
_FIELDS = (105, 15), (110, 7), (116, 63)
# Cycles until the result of an instruction can be used. Shared memory: Hopper, Luo et al. 2024
# (arXiv 2402.13499, table 4). Constants: Ampere, Huerta et al. 2025, table 2. Special functions:
# Ampere, as Accel-Sim (Khairy et al. 2020) is configured. Of others that are waited for, such as
# shuffles, conversions and special registers, no source is known: they take no time here.
LATENCIES = {"LDS": 29, "LDC": 29, "ULDC": 29, "MUFU": 20}
# Until a line of code comes from memory: data on Hopper, in the nearer half of the L2 cache, Luo et
# al. 2025 (arXiv 2501.12084).
CODE_LATENCY = 555.5
LINE = 128 // BYTES  # instructions; the lines of Accel-Sim's instruction caches have 128 bytes
AHEAD = 8  # lines of the stream buffer
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


class Control(NamedTuple):
    """What the assembler encodes of an instruction for the scheduler of its warp.

    cycles: its stall count.
    written: the dependence counter that it holds until its result is written; NONE.
    awaited: a bit for each of the COUNTERS that has to be free before it is issued.
    """

    cycles: int
    written: int = NONE
    awaited: int = 0

    @classmethod
    def of(cls, word: int) -> Control:
        """What the upper half of an instruction says, from sm_70 on (Jia et al. 2018)."""
        return cls(*(word >> at - 64 & mask for at, mask in _FIELDS))


class Instruction(NamedTuple):
    """An instruction, its opcode, the labels that it may branch to, and the functions it is of.

    falls_through: whether the next one may follow it, apart from what a call returns to.
    """

    index: int
    text: str
    opcode: str
    targets: tuple[str, ...]
    falls_through: bool
    control: Control
    functions: frozenset[str]

    @property
    def cycles(self) -> int:
        """For how long its warp issues no other instruction, a cycle at least."""
        return max(1, self.control.cycles)


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
    """The cheapest path along a route, and the cycles that a warp takes for it.

    cycles: its stall counts alone.
    warm: with waits for results, if all code lies in the cache that the warp fetches from.
    cold: if all code comes from memory.
    """

    cycles: int
    instructions: int
    warm: int
    cold: int


def controls(cubin: Path) -> dict[str, list[Control]]:
    """Kernel -> what is encoded of each of its instructions."""
    data = cubin.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    found = {}
    for at, _, _, _, begin, length in sections:
        name = data[sections[names][4] + at :].split(b"\0", 1)[0].decode()
        if name.startswith(".text."):
            words = struct.unpack_from(f"<{length // 8}Q", data, begin)
            found[name.removeprefix(".text.")] = [Control.of(word) for word in words[1::2]]
    return found


def read_programs(nvdisasm: str | Path, cubin: Path) -> list[Program]:
    """The kernels of a cubin that was compiled with line information."""
    command = [nvdisasm, "-gi", "-c", cubin]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(parse_listing(listing, controls(cubin)))


def parse_listing(listing: str, encoded: Mapping[str, Sequence[Control]]) -> Iterator[Program]:
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
            control = encoded[name][index]
            instructions.append(
                Instruction(index, text, code, targets, falls_through, control, owners)
            )
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
    """The path along a route with the smallest sum of stall counts; None if there is none."""
    path = _cheapest_path(program, route)
    if path is None:
        return None
    cycles = sum(instruction.cycles for instruction in path)
    return Cost(cycles, len(path), elapsed(path), elapsed(path, CODE_LATENCY))


def elapsed(path: Sequence[Instruction], code_latency: float = 0) -> int:
    """Cycles in which a warp alone issues the instructions of a path.

    code_latency: cycles until a line of code comes from memory; 0 if all are in the cache.
    """
    now = 0.0
    free = [0.0] * COUNTERS
    arrival: dict[int, float] = {}
    line = None
    for instruction in path:
        if code_latency and instruction.index // LINE != line:
            line = instruction.index // LINE
            if line not in arrival:  # nobody asked for it
                for behind in range(AHEAD + 1):
                    arrival.setdefault(line + behind, now + code_latency)
            now = max(now, arrival[line])
            arrival.setdefault(line + AHEAD, now + code_latency)
        control = instruction.control
        now = max([now, *(free[c] for c in range(COUNTERS) if control.awaited >> c & 1)])
        if control.written != NONE:
            written = now + LATENCIES.get(instruction.opcode, 0)
            free[control.written] = max(free[control.written], written)
        now += instruction.cycles
    return round(now)


def _cheapest_path(program: Program, route: Route) -> list[Instruction] | None:
    """By Dijkstra's algorithm on the states of a warp."""
    stops_at = [
        {i for i, at in enumerate(program.instructions) if stop in (*at.functions, at.opcode)}
        for stop in route.stops
    ]
    start: _State = (0, 0, ())
    costs: dict[_State, tuple[int, int]] = {start: (0, 0)}
    before: dict[_State, _State] = {}
    queue = [((0, 0), start)]
    while queue:
        cost, at = heapq.heappop(queue)
        if cost > costs[at]:
            continue
        index, stops, calls = at
        while stops < len(stops_at) and index in stops_at[stops]:
            stops += 1
        total = (cost[0] + program.instructions[index].cycles, cost[1] + 1)
        if stops == len(route.stops):
            path = [program.instructions[index]]
            while at in before:
                at = before[at]
                path.append(program.instructions[at[0]])
            return path[::-1]
        for successor, then in _successors(program, index, calls):
            state = (successor, stops, then)
            if successor < len(program.instructions) and total < costs.get(state, (1 << 60, 0)):
                costs[state], before[state] = total, at
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
