"""Speculative decoding on NumPy arrays, without torch.

`sample` draws the drafts, `verify_chain` and `verify_tree` decide which of them are accepted and
sample the recovered or bonus token: with the kernels of specdec_kernels on the CPU, and with their
results bit for bit. `kept_tokens` gives the tokens that the filters keep. Arrays may also be of any
library with DLPack or the buffer protocol.

`SuffixAutomaton` and `Corpus` copy drafts from text. An automaton follows a text that grows, such
as one sequence of a batch; a corpus is a text that does not change, in memory or in a file.

`digests` tells whether arrays have changed, at the speed of reading them.
"""

from specdec_host._library import cpu_capability
from specdec_host.arguments.arrays import bfloat16
from specdec_host.arguments.draft_forms import DraftMap, SampledDraft, SparseDraft
from specdec_host.arguments.noise import draft_positions
from specdec_host.arguments.rules import RULES, TREE_RULES, Rule, TreeRule
from specdec_host.arguments.status import Status
from specdec_host.corpus import Corpus
from specdec_host.digests import digests
from specdec_host.ops.kept_tokens import KeptTokens, kept_tokens
from specdec_host.ops.sample import Sampled, sample
from specdec_host.ops.verify_chain import Verdict, verify_chain
from specdec_host.ops.verify_tree import Tree, TreeVerdict, verify_tree
from specdec_host.proposal import Proposal
from specdec_host.suffix_automaton import SuffixAutomaton
from specdec_host.threads import get_num_threads, set_num_threads

__all__ = [
    "RULES",
    "TREE_RULES",
    "Corpus",
    "DraftMap",
    "KeptTokens",
    "Proposal",
    "Rule",
    "Sampled",
    "SampledDraft",
    "SparseDraft",
    "Status",
    "SuffixAutomaton",
    "Tree",
    "TreeRule",
    "TreeVerdict",
    "Verdict",
    "bfloat16",
    "cpu_capability",
    "digests",
    "draft_positions",
    "get_num_threads",
    "kept_tokens",
    "sample",
    "set_num_threads",
    "verify_chain",
    "verify_tree",
]
