"""Finds the loop of a kernel that does some work, and counts what a warp issues in it.

The path that a warp takes through a loop is not written in its code. It is taken to be the cheapest
closed path that does the work exactly: it loads so many bytes, computes so many exponentials and
stores so many results. A path that does less is another loop, or its slow or its last iteration.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import networkx

from bench.sass.code import Block, Code

# What no loop over a row contains: it calls nothing, and waits for no other warp.
_FOREIGN = re.compile(
    r"(@!?U?P\w+ )?(BAR|CALL|RET|EXIT|BRX|MEMBAR|ATOM[SG]?|RED|WARPSYNC\.COLLECTIVE)\b"
)
_GUARD = re.compile(r"@!?U?P\w+ ")


@dataclass(frozen=True)
class Work:
    """What a warp does for some entries of a row. Regular expressions match from the opcode on.

    exactly: regular expression -> the number of instructions it matches. The first one tells the
        loop: a path begins where it matches, and does the work anew whenever it passes there.
    at_least: the same, where the path may have more.
    loads: regular expression -> the number of loads, which may be made for several rounds at once.
    entries: how many entries of a row the work serves.
    rounds: how often an iteration of the loop may do the work.
    """

    name: str
    exactly: Mapping[str, int]
    loads: Mapping[str, int]
    at_least: Mapping[str, int] = field(default_factory=dict)
    entries: int = 512
    rounds: tuple[int, ...] = (1, 2)


@dataclass(frozen=True)
class Loop:
    """The cheapest path round a loop that does its work `rounds` times.

    instructions: those that a warp issues on the path, also those that a predicate turns off.
    opcodes: how often each opcode is among them.
    path: the basic blocks, in the order in which a warp passes through them.
    """

    work: Work
    rounds: int
    instructions: int
    opcodes: Counter[str]
    path: tuple[Block, ...]

    @property
    def per_512(self) -> float:
        """Warp instructions for 512 entries of a row."""
        return self.instructions * 512 / (self.work.entries * self.rounds)

    @property
    def per_element(self) -> float:
        """Instructions of a lane for one entry, the measure of the kernel's arithmetic."""
        return self.per_512 / 16


Counts = tuple[int, ...]


class State(NamedTuple):
    """A place on a path: the block that comes next, and what lies behind."""

    block: str
    rounds: int
    done: Counts
    loaded: Counts


def opcode(instruction: str) -> str:
    """The opcode without its modifiers."""
    return re.split(r"[ .]", _GUARD.sub("", instruction, count=1), maxsplit=1)[0]


def find_loops(code: Code, work: Work) -> list[Loop]:
    """For every loop that can do the work, its cheapest path; the cheapest loop comes first."""
    blocks = {
        name: block
        for name, block in code.blocks.items()
        if not any(_FOREIGN.match(instruction) for instruction in block.instructions)
    }
    found = []
    for component in _cycles(blocks):
        region = {name: blocks[name] for name in component}
        paths = [_cheapest(region, work, rounds) for rounds in work.rounds]
        paths = [path for path in paths if path]
        if paths:
            found.append(min(paths, key=lambda loop: loop.per_512))
    return sorted(found, key=lambda loop: loop.per_512)


def _cheapest(region: dict[str, Block], work: Work, rounds: int) -> Loop | None:
    """The cheapest closed path of a region that does the work `rounds` times.

    This is Dijkstra's algorithm on states of a block, the rounds before it, what the path has done
    in this round, and what it has loaded in all of them.
    """
    wanted = (*work.exactly.values(), *work.at_least.values())
    exact, loads = len(work.exactly), tuple(n * rounds for n in work.loads.values())
    patterns = [re.compile(text) for text in (*work.exactly, *work.at_least, *work.loads)]
    counts = {name: _counts(block, patterns) for name, block in region.items()}
    for i, needed in enumerate((*wanted, *loads)):
        if needed and not any(count[i] for count in counts.values()):
            return None
    nothing = (0,) * len(wanted)

    def after(state: State) -> tuple[Counts, Counts] | None:
        """What the path has done and loaded after the block of a state; None if it is too much."""
        count = counts[state.block]
        done = [a + b for a, b in zip(state.done, count, strict=False)]
        loaded = tuple(a + b for a, b in zip(state.loaded, count[len(wanted) :], strict=True))
        too_much = any(a > b for a, b in zip(done[:exact], wanted, strict=False))
        if too_much or any(a > b for a, b in zip(loaded, loads, strict=True)):
            return None
        return tuple(min(a, b) for a, b in zip(done, wanted, strict=True)), loaded

    best: Loop | None = None
    left = dict(region)
    for start in (name for name in region if counts[name][0]):
        first = State(start, 0, nothing, (0,) * len(loads))
        costs, before = {first: 0}, dict[State, State]()
        queue = [(0, first)]
        while queue:
            cost, state = heapq.heappop(queue)
            if cost > costs[state] or (best and cost >= best.instructions):
                continue
            if state.rounds == rounds:
                if state.loaded == loads:
                    path = _blocks_before(before, state, region)
                    opcodes = Counter(opcode(text) for block in path for text in block.instructions)
                    best = Loop(work, rounds, cost, opcodes, path)
                    break
                continue
            now = after(state)
            if now is None:
                continue
            done, loaded = now
            total = cost + len(region[state.block].instructions)
            for successor in region[state.block].successors:
                if successor not in left:
                    continue
                then = State(successor, state.rounds, done, loaded)
                if successor == start:
                    if done != wanted:
                        continue
                    then = State(start, state.rounds + 1, nothing, loaded)
                if total < costs.get(then, 1 << 30):
                    costs[then], before[then] = total, state
                    heapq.heappush(queue, (total, then))
        del left[start]  # every path that passes here is known now
    return best


def _counts(block: Block, patterns: list[re.Pattern[str]]) -> tuple[int, ...]:
    bare = [_GUARD.sub("", instruction, count=1) for instruction in block.instructions]
    return tuple(sum(bool(p.match(text)) for text in bare) for p in patterns)


def _blocks_before(
    before: Mapping[State, State], state: State, region: Mapping[str, Block]
) -> tuple[Block, ...]:
    path = []
    while state in before:
        state = before[state]
        path.append(region[state.block])
    return tuple(reversed(path))


def _cycles(blocks: Mapping[str, Block]) -> Iterator[list[str]]:
    """The strongly connected components of the control flow, without single blocks of no loop."""
    edges = ((name, to) for name, block in blocks.items() for to in block.successors)
    graph = networkx.DiGraph((name, to) for name, to in edges if to in blocks)
    for component in networkx.strongly_connected_components(graph):
        if len(component) > 1 or any(graph.has_edge(name, name) for name in component):
            yield sorted(component)
