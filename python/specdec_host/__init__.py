"""Drafts that are copied from text: suffix automata and suffix arrays on the host.

NumPy arrays go in and come out; torch is not needed. `SuffixAutomaton` follows a text that grows,
such as one sequence of a batch. `Corpus` is a text that does not change, in memory or in a file.
"""

from specdec_host.corpus import Corpus
from specdec_host.proposal import Proposal
from specdec_host.suffix_automaton import SuffixAutomaton

__all__ = ["Corpus", "Proposal", "SuffixAutomaton"]
