"""Specification of `verify_tree`, one sequence at a time."""

from __future__ import annotations

from typing import Any

from ...arguments.tree import TreeArguments, TreeOutputs
from ..chain.sequence import write_outputs
from .decide import decide
from .sequence import TreeSequence


def verify_tree(*args: Any) -> TreeOutputs:
    """Takes its arguments in the order of the schema."""
    a = TreeArguments(*args)
    sequences = [TreeSequence(a, b, a.tree_tokens) for b in range(len(a.tree_tokens))]
    for sequence in sequences:
        if rows := sequence.open():
            sequence.read_tree(rows - 1)
            decide(sequence)
    out = a.new_outputs()
    write_outputs(out, sequences)
    out.path.fill_(-1)
    for b, sequence in enumerate(sequences):
        for i, node in enumerate(sequence.path):
            out.path[b, i] = node
    return out
