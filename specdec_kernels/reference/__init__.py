"""The specification in code: each op in float64, one row or sequence at a time.

The ops have the signatures of `torch.ops.specdec_kernels` and take CPU tensors. They are slow and
short on purpose, and every other implementation is compared with them. The rules themselves are
explained in docs/rules.md.
"""

from specdec_kernels.reference.chain.verify_chain import verify_chain
from specdec_kernels.reference.kv.append import kv_append_
from specdec_kernels.reference.kv.compact import kv_compact_, paged_compact_
from specdec_kernels.reference.kv.paged_truncate import paged_truncate_
from specdec_kernels.reference.kv.realign import kv_realign_
from specdec_kernels.reference.kv.ring_truncate import ring_truncate_
from specdec_kernels.reference.kv.truncate import kv_truncate_
from specdec_kernels.reference.row.distribution import Distribution
from specdec_kernels.reference.row.noise import TAIL, exponentials, philox, uniform
from specdec_kernels.reference.row.sample import pick, sample
from specdec_kernels.reference.tree.expand_tree import expand_tree
from specdec_kernels.reference.tree.layout import build_trie, rerank_tree, tree_attention
from specdec_kernels.reference.tree.verify_tree import verify_tree

__all__ = [
    "TAIL",
    "Distribution",
    "build_trie",
    "expand_tree",
    "exponentials",
    "kv_append_",
    "kv_compact_",
    "kv_realign_",
    "kv_truncate_",
    "paged_compact_",
    "paged_truncate_",
    "philox",
    "pick",
    "rerank_tree",
    "ring_truncate_",
    "sample",
    "tree_attention",
    "uniform",
    "verify_chain",
    "verify_tree",
]
