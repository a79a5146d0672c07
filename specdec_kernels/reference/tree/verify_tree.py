"""Specification of `verify_tree`, one sequence at a time."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec_kernels.arguments.tree import TreeArguments
from specdec_kernels.reference.chain.sequence import write_outputs
from specdec_kernels.reference.tree.decide import decide
from specdec_kernels.reference.tree.sequence import TreeSequence


def verify_tree(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Takes its arguments in the order of `TreeArguments`."""
    a = TreeArguments(*args)
    a.check()
    sequences = [TreeSequence(a, b, a.tree_tokens) for b in range(len(a.tree_tokens))]
    for sequence in sequences:
        if rows := sequence.open():
            sequence.read_tree(rows - 1)
            decide(sequence)
    out = a.new_outputs()
    write_outputs(out[1:], sequences)
    out[0].fill_(-1)
    for b, sequence in enumerate(sequences):
        for i, node in enumerate(sequence.path):
            out[0][b, i] = node
    return out
