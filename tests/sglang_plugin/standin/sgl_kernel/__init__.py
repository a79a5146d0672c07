"""In place of SGLang's kernels for CPUs, which are not on the package index.

Trees are built and read by `specdec_kernels.compat.sglang`, caches by PyTorch. A function that the
tests do not reach raises an error.
"""

import ctypes

from specdec_kernels.compat.sglang import (
    build_tree_kernel_efficient as build_tree_kernel_efficient_cpu,
)
from specdec_kernels.compat.sglang import verify_tree_greedy as verify_tree_greedy_cpu

__all__ = ["build_tree_kernel_efficient_cpu", "verify_tree_greedy_cpu"]


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args, **kwargs):
        raise NotImplementedError(f"the stand-in of sgl_kernel has no {name}")

    return absent


def assign_req_to_token_pool_cpu(requests, req_to_token, begin, end, slots, width):
    """Writes the slots [begin, end) of each request, one request after the other."""
    for request, first, last in zip(requests.tolist(), begin.tolist(), end.tolist(), strict=True):
        req_to_token[request, first:last] = slots[: last - first].to(req_to_token.dtype)
        slots = slots[last - first :]


def assign_extend_cache_locs_cpu(requests, req_to_token, begin, end, slots, width):
    """Reads them."""
    for request, first, last in zip(requests.tolist(), begin.tolist(), end.tolist(), strict=True):
        slots[: last - first] = req_to_token[request, first:last]
        slots = slots[last - first :]


def copy_all_layer_kv_cache_cpu(pointers, strides, targets, sources):
    """Moves slots of `stride` bytes in the cache of each layer."""
    for pointer, stride in zip(pointers.tolist(), strides.tolist(), strict=True):
        moved = [ctypes.string_at(pointer + source * stride, stride) for source in sources.tolist()]
        for target, content in zip(targets.tolist(), moved, strict=True):
            ctypes.memmove(pointer + target * stride, content, stride)


def fill_accept_out_cache_loc_cpu(index, slots, accepted):
    """The slots of the accepted nodes, one after the other."""
    kept = index.flatten()
    kept = kept[kept >= 0].long()
    accepted[: len(kept)] = slots[kept]
