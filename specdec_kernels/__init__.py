"""Verification of drafted tokens as fused PyTorch ops: exact, portable, fast."""

from specdec_kernels._ops import cpu_capability, has_cuda_kernels, providers
from specdec_kernels.chain import DraftMap, SampledDraft, SparseDraft, Verdict, verify_chain
from specdec_kernels.kv import (
    kv_append_,
    kv_compact_,
    kv_truncate_,
)
from specdec_kernels.paged import (
    paged_compact_,
)
from specdec_kernels.sample import Sampled, sample

__version__ = "0.1.0"

__all__ = [
    "DraftMap",
    "Sampled",
    "SampledDraft",
    "SparseDraft",
    "Verdict",
    "cpu_capability",
    "has_cuda_kernels",
    "kv_append_",
    "kv_compact_",
    "kv_truncate_",
    "paged_compact_",
    "providers",
    "sample",
    "verify_chain",
]
