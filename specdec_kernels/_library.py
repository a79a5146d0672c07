"""The table of the ops, and which provider serves each of them on each device.

A provider is one implementation of an op behind PyTorch's dispatcher: "cpp" (the CPU kernels in
`_C.so`), "cuda" (its CUDA kernels), "triton" or "indexing" (PyTorch's own ops). The reference is no
provider: it is called by name.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import indexing
from . import triton as _triton
from ._ops import ops

# Op -> the module that implements it, in `specdec_kernels.reference` and in
# `specdec_kernels.triton` alike. This is the only list of the ops.
OPS = {
    "sample": "row.sample",
    "apply_penalties_": "row.apply_penalties",
    "kept_tokens": "row.kept_tokens",
    "verify_chain": "chain.verify_chain",
    "verify_tree": "tree.verify_tree",
    "kv_append_": "kv.append",
    "kv_truncate_": "kv.truncate",
    "kv_compact_": "kv.compact",
    "paged_append_": "kv.paged_append",
    "paged_compact_": "kv.compact",
    "paged_truncate_": "kv.paged_truncate",
    "kv_realign_": "kv.realign",
    "ring_truncate_": "kv.ring_truncate",
    "tree_attention": "tree.layout",
    "rerank_tree": "tree.layout",
    "build_trie": "tree.layout",
    "expand_tree": "tree.expand_tree",
    "ngram_propose": "history.ngram_propose",
    "pack_linear": "forward.linear",
    "pack_blocks": "forward.weight_blocks",
    "unpack_blocks": "forward.weight_blocks",
    "packed_linear": "forward.linear",
    "cached_attention": "forward.attention",
    "norm_qkv_rope": "forward.decoder_layer",
    "output_norm_mlp": "forward.decoder_layer",
    "decoder_layers_": "forward.decoder_layer",
    "grow_tree_": "forward.grow_tree",
}
# Those with a variant `<op>_out`, which writes its results into tensors of the caller.
OUT_OPS = ("sample", "verify_chain", "verify_tree")
REGISTERED = (*OPS, *(f"{op}_out" for op in OUT_OPS))
CACHE_OPS = tuple(op for op, module in OPS.items() if module.startswith("kv."))
# Ops of forwards on the CPU: they exist for no other device.
CPU_OPS = tuple(op for op, module in OPS.items() if module.startswith("forward."))
# Ops without CUDA kernels in `_C.so`: on CUDA devices Triton always serves them.
_TRITON_ONLY = tuple(op for op, m in OPS.items() if m in ("tree.layout", "tree.expand_tree"))
TRITON_OPS = ("sample", "verify_chain", *_TRITON_ONLY)
# Ops that PyTorch's own indexing serves on CUDA devices without our CUDA kernels.
INDEXED_OPS = (*CACHE_OPS, "ngram_propose")

# csrc/torch/build_info.cpp returns an index into it. The first two are AVX-512 with products of
# bfloat16.
CPU_CAPABILITIES = ("amx_bf16", "avx512_bf16", "avx512", "avx2", "plain")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def _environment(variable: str, allowed: tuple[str, ...]) -> str:
    """The value of an environment variable, "" if it is not set; others than `allowed` raise."""
    value = os.environ.get(variable, "")
    if value and value not in allowed:
        raise ImportError(f"{variable} must be one of {', '.join(allowed)}, got {value}")
    return value


# The library reads this variable itself and ignores an unknown value, so it is checked here.
_environment("SPECDEC_CPU_CAPABILITY", CPU_CAPABILITIES)


def has_cuda_kernels() -> bool:
    """Whether `_C.so` was built with its CUDA kernels. Whether they run here, `warm_up` tells."""
    return bool(ops.built_with_cuda.default())


def cpu_capability() -> str:
    """The instruction set that the CPU kernels use in this process: avx512, avx2 or plain.

    It is the widest one that the processor has. The environment variable SPECDEC_CPU_CAPABILITY,
    read when the package is imported, asks for a narrower one.
    """
    return CPU_CAPABILITIES[max(ops.cpu_capability.default(), 2)]


def bfloat16_products() -> str:
    """How `packed_linear` multiplies bfloat16 in this process: amx_bf16, avx512_bf16 or floats."""
    number = ops.cpu_capability.default()
    return CPU_CAPABILITIES[number] if number < 2 else "floats"


def _cuda_provider() -> str:
    """The provider of `sample` and the verifiers on CUDA devices: cuda, triton or none.

    SPECDEC_CUDA_PROVIDER asks for one. By default the CUDA kernels come first, if `_C.so` has them.
    """
    available = {"cuda": has_cuda_kernels(), "triton": _HAS_TRITON}
    asked = _environment("SPECDEC_CUDA_PROVIDER", tuple(available))
    if asked and not available[asked]:
        lacks = {"cuda": "_C.so has no CUDA kernels", "triton": "triton is not installed"}
        raise ImportError(f"SPECDEC_CUDA_PROVIDER is {asked}, but {lacks[asked]}")
    return asked or next((name for name, is_there in available.items() if is_there), "none")


_CUDA_PROVIDER = _cuda_provider()


def _on_cuda() -> dict[str, str]:
    """Op -> its provider on CUDA devices: cuda, triton, indexing or none."""
    if _CUDA_PROVIDER == "cuda":
        served = dict.fromkeys(OPS, "cuda")
    else:
        served = dict.fromkeys(OPS, "none") | dict.fromkeys(INDEXED_OPS, "indexing")
        served |= dict.fromkeys(TRITON_OPS, _CUDA_PROVIDER)
    served |= dict.fromkeys(_TRITON_ONLY, "triton" if _HAS_TRITON else "none")
    return served | dict.fromkeys(CPU_OPS, "none")


def _register_on_cuda() -> None:
    """Register what Python implements; `_C.so` registers its own kernels when it is loaded."""
    implementations = {
        "triton": lambda op: _triton.implementation(op, OPS[op]),
        "indexing": indexing.implementation,
        "none": _refusal,
    }
    with warnings.catch_warnings():
        # SPECDEC_CUDA_PROVIDER=triton replaces the CUDA kernels on purpose.
        warnings.filterwarnings(
            "ignore", message="(?s).*[Oo]verriding a previously registered kernel.*"
        )
        for op, provider in _on_cuda().items():
            if provider != "cuda" and op not in CPU_OPS:
                implementation = implementations[provider](op)
                _FOR_ALL.impl(op, implementation, "CUDA")
                if op in OUT_OPS:
                    _FOR_ALL.impl(f"{op}_out", _triton.copying(op, implementation), "CUDA")


def _refusal(op: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise NotImplementedError(
            f"{op} must run on the CPU or with the CUDA kernels of _C.so, because Triton has no "
            "kernel of it, got tensors on a CUDA device of a build without CUDA kernels"
        )

    return refuse


def _pass_by_autograd() -> None:
    """No op is differentiable: outputs do not require gradients, whatever the arguments do.

    Without this, autograd would attach a node to the outputs that warns in the backward pass. To
    pass by autograd also makes each call cheaper.
    """
    for op in REGISTERED:
        _FOR_ALL.impl(op, torch.library.fallthrough_kernel, "Autograd")


def _refuse_layouts() -> None:
    """Sparse and quantised tensors are refused by name, not with the dispatcher's list of backends.

    The dispatcher finds them, so that calls with dense tensors look at no layout.
    """
    for op in REGISTERED:
        for layout in ("Sparse", "SparseCsr", "Quantized"):
            for device in ("CPU", "CUDA"):
                _FOR_ALL.impl(op, functools.partial(_refuse_layout, op), f"{layout}{device}")


def _refuse_layout(op: str, *values: Any) -> None:
    for argument, value in zip(getattr(ops, op).default._schema.arguments, values, strict=True):
        for x in value if isinstance(value, list) else [value]:
            if isinstance(x, torch.Tensor) and (x.is_quantized or x.layout is not torch.strided):
                got = x.dtype if x.is_quantized else x.layout
                raise RuntimeError(f"{argument.name} must be a dense tensor, got {got}")


# A registration lasts as long as the object that made it.
_FOR_ALL = torch.library.Library(ops.name, "IMPL")
_register_on_cuda()
_pass_by_autograd()
_refuse_layouts()


def providers() -> dict[str, dict[str, str]]:
    """Op name -> device type -> provider ("cpp", "cuda", "triton", "indexing" or "none").

    >>> providers()["verify_chain"]["cpu"]
    'cpp'
    """
    on_cuda = _on_cuda()
    return {op: {"cpu": "cpp", "cuda": on_cuda[op]} for op in OPS}
