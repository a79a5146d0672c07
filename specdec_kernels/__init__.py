"""Verification of drafted tokens as fused PyTorch ops: exact, portable, fast."""

from specdec_kernels._ops import cpu_capability, has_cuda_kernels, providers
from specdec_kernels.chain import DraftMap, SampledDraft, SparseDraft, Verdict, verify_chain
from specdec_kernels.kv import kv_append_, kv_truncate_
from specdec_kernels.sample import Sampled, sample
from specdec_kernels.tree_layout import TreeAttention, tree_attention

__version__ = "0.1.0"

__all__ = [
    "DraftMap",
    "Sampled",
    "SampledDraft",
    "SparseDraft",
    "TreeAttention",
    "Verdict",
    "cpu_capability",
    "has_cuda_kernels",
    "kv_append_",
    "kv_truncate_",
    "providers",
    "sample",
    "tree_attention",
    "verify_chain",
]
