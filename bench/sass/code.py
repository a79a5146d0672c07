"""Control flow of the kernels in a cubin, as nvdisasm tells it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Block:
    """A basic block: instructions that a warp issues one after the other."""

    name: str
    instructions: list[str]
    successors: list[str] = field(default_factory=list)


@dataclass
class Code:
    """The machine code of one kernel with the functions that it calls.

    name: the mangled name.
    size: bytes up to the last instruction.
    blocks: name -> basic block.
    """

    name: str
    size: int = 0
    blocks: dict[str, Block] = field(default_factory=dict)


BYTES = 16  # of an instruction
_KERNEL = re.compile(r'subgraph "cluster_(?P<name>[^"]+)"')
_NODE = re.compile(r'\[label="\{(?P<text>.*)\}"\]')
_EDGE = re.compile(r'"(?P<source>[^"]+)":\w+:\w+ -> "(?P<target>[^"]+)"')
_INSTRUCTION = re.compile(r"(?:\|?<\w+>)*(?P<offset>[0-9a-f]{4,}): +(?P<text>.+?) *;?")


def read_code(nvdisasm: str | Path, cubin: Path) -> list[Code]:
    """The kernels of a cubin, with the successors that nvdisasm infers for each basic block."""
    command = [nvdisasm, "-bbcfg", "-poff", cubin]
    graph = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return parse_graph(graph)


def parse_graph(graph: str) -> list[Code]:
    """The kernels in the graph that nvdisasm writes for graphviz."""
    kernels: list[Code] = []
    name = node = ""
    for line in graph.splitlines():
        if found := _KERNEL.match(line):
            name = found["name"]
        elif found := _NODE.match(line):
            instructions, begin, end = _instructions(found["text"])
            if begin == 0:  # functions that a kernel calls follow it in its section
                kernels.append(Code(name))
            kernels[-1].blocks[node] = Block(node, instructions)
            kernels[-1].size = max(kernels[-1].size, end)
        elif found := _EDGE.match(line):
            kernels[-1].blocks[found["source"]].successors.append(found["target"])
        elif line.startswith('"'):
            node = line.strip('"')
    return kernels


def _instructions(label: str) -> tuple[list[str], int, int]:
    """(the instructions of a block, the offsets at which it begins and ends; -1 if it is empty)."""
    found, begin, end = [], -1, -1
    for line in label.split(r"\l"):
        match = _INSTRUCTION.fullmatch(re.sub(r"\\(.)", r"\1", line))
        if match:
            offset = int(match["offset"], 16)
            begin, end = offset if not found else begin, offset + BYTES
            found.append(match["text"])
    return found, begin, end
