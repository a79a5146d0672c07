"""The function that SGLang's n-gram worker imports from here."""

from specdec_kernels.compat.sglang import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
