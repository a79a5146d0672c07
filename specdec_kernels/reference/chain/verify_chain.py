"""Specification of `verify_chain`, one sequence at a time."""

from __future__ import annotations

from typing import Any

from ...arguments.chain import ChainArguments
from ...arguments.verification import Outputs
from .decide import decide
from .sequence import ChainSequence, write_outputs


def verify_chain(*args: Any) -> Outputs:
    """Takes its arguments in the order of the schema."""
    a = ChainArguments(*args)
    drafted = a.draft_token_ids
    sequences = [ChainSequence(a, b, drafted) for b in range(len(drafted))]
    for sequence in sequences:
        if rows := sequence.open():
            sequence.find_drafts(rows)
            decide(sequence)
    out = a.new_outputs()
    write_outputs(out, sequences)
    return out
