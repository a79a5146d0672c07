"""Verification of drafted tokens as fused PyTorch ops: exact, portable, fast."""

from specdec_kernels._ops import cpu_capability, has_cuda_kernels, providers
from specdec_kernels.chain import DraftMap, SampledDraft, SparseDraft, Verdict, verify_chain
from specdec_kernels.kv import kv_append_, kv_truncate_
from specdec_kernels.sample import Sampled, sample
from specdec_kernels.tree import Tree, TreeVerdict, verify_tree

__version__ = "0.1.0"

__all__ = [
    "DraftMap",
    "Sampled",
    "SampledDraft",
    "SparseDraft",
    "Tree",
    "TreeVerdict",
    "Verdict",
    "cpu_capability",
    "has_cuda_kernels",
    "kv_append_",
    "kv_truncate_",
    "providers",
    "sample",
    "verify_chain",
    "verify_tree",
]
