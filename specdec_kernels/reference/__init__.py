"""The specification in code: each op, one row at a time, in float64.

Same signatures as the ops of `torch.ops.specdec_kernels`; CPU tensors. Slow and short on purpose.
"""

from specdec_kernels.reference.chain.verify_chain import verify_chain
from specdec_kernels.reference.kv.dense import (
    kv_append_,
    kv_compact_,
    kv_realign_,
    kv_truncate_,
    ring_truncate_,
)
from specdec_kernels.reference.kv.paged import paged_compact_, paged_truncate_
from specdec_kernels.reference.row.distribution import (
    TAIL,
    Distribution,
    exponentials,
    philox,
    pick,
    uniform,
)
from specdec_kernels.reference.row.sample import sample
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
