"""Verification over a vocabulary that is sharded between ranks, as tensor parallelism leaves it.

Each rank keeps its part of the logits; what the ranks exchange does not grow with the vocabulary.
See docs/vocabulary-parallel.md.
"""

from .arguments import SHARDED_RULES
from .verify_chain import verify_chain_sharded

__all__ = ["SHARDED_RULES", "verify_chain_sharded"]
