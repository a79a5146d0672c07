"""Compile every Triton kernel ahead of time for devices that are not here.

    python tests/device/triton_aot.py [--all] [cuda:90 hip:gfx942 ...]

The variants are those that the ops launch on their cases: the launches are recorded, and nothing
runs. Of each kernel so many are compiled that every type and constant occurs.
Every target gets one variant of each kernel and a quarter of the others, so that each of these is
compiled for one target; with --all every target gets all of them. --specialized prints as JSON for
which arguments Triton would compile a kernel anew, and compiles nothing.

`tests/chain/test_triton_chain.py` runs it in a process of its own, because one process cannot use
both the interpreter and the compiler.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import proofs
import torch
import triton
from proofs.tree_layout import expand_case
from support.lanes import covering
from support.providers import serves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from specdec_kernels import triton as implementations
from specdec_kernels._library import OPS, TRITON_OPS

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "cuda:120": GPUTarget("cuda", 120, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
# Rows of many tiles whose sizes and strides are multiples of 16.
ALIGNED = (
    proofs.sample_case(1, 128_000, torch.bfloat16, filters="scalar"),
    proofs.chain_case(1, 1, 128_000, torch.bfloat16, rule="block", filters="topk"),
    expand_case(1, 1, 128_000, 8, torch.bfloat16),
)


class Variant(NamedTuple):
    kernel: Any
    arguments: dict[str, Any]  # by name, tensors and constants among them
    options: dict[str, Any]


@functools.cache
def binder(kernel: Any, target: str = "cuda:90") -> Any:
    """A function of arguments: (the same by name, their types and what is known of them, ..)."""
    backend = make_backend(TARGETS[target])
    return create_function_from_signature(kernel.signature, kernel.params, backend)


def launches() -> list[Variant]:
    """What all ops launch on all their cases."""
    recorded = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: Any, **kwargs: Any) -> None:
        del grid, warmup
        options = {n: x for n, x in kwargs.items() if n not in kernel.arg_names}
        own = {n: x for n, x in kwargs.items() if n in kernel.arg_names}
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | own
        recorded.append(Variant(kernel, arguments, options))

    JITFunction.run = record
    for op in TRITON_OPS:
        call = implementations.implementation(op, OPS[op])
        for case in (*proofs.cases(op), *(c for c in ALIGNED if c.op == op)):
            if serves("triton", case):
                call(*case.args())
    return recorded


def entries() -> set[str]:
    """The kernels of the package. Other functions of Triton's say nothing about their arguments."""
    modules = [m for name, m in sys.modules.items() if name.startswith("specdec_kernels.triton")]
    functions = [f for m in modules for f in vars(m).values() if isinstance(f, JITFunction)]
    return {f.__name__ for f in functions if any(p.do_not_specialize for p in f.params)}


def kinds(variant: Variant) -> tuple[str, ...]:
    """What decides about the machine code: types, alignment and constants, in the order of the
    arguments, and the options."""
    bound, found, _ = binder(variant.kernel)(**variant.arguments)
    words = [str(x if kind[0] == "constexpr" else kind)
             for kind, x in zip(found, bound.values(), strict=True)]  # fmt: skip
    return *words, str(variant.options)


def variants() -> dict[str, list[Variant]]:
    """Of each kernel those with which every type and constant occurs."""
    of_kernel: dict[str, dict[tuple[str, ...], Variant]] = {}
    for variant in launches():
        of_kernel.setdefault(variant.kernel.__name__, {}).setdefault(kinds(variant), variant)
    return {
        name: [different[row] for i, row in enumerate(different) if i in chosen]
        for name, different in of_kernel.items()
        for chosen in [covering([*different], 1)]
    }


def compiled(variant: Variant, target: str) -> Any:
    kernel, backend = variant.kernel, make_backend(TARGETS[target])
    bound, found, _ = binder(kernel, target)(**variant.arguments)
    signature, constants, attributes = {}, {}, {}
    for i, ((kind, known), (name, value)) in enumerate(zip(found, bound.items(), strict=True)):
        signature[name] = kind
        if kind == "constexpr":
            constants[(i,)] = value
        elif isinstance(known, str):
            attributes[(i,)] = backend.parse_attr(known)
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGETS[target], options=dict(variant.options))


def specialized(found: dict[str, list[Variant]]) -> dict[str, list[str]]:
    """Kernel -> the arguments for which Triton compiles it anew, by value or by alignment."""
    words, out = torch.zeros(64, dtype=torch.int64), {}
    for kernel_name, (first, *_) in found.items():
        kernel, bind = first.kernel, binder(first.kernel)
        values: dict[str, list[Any]] = {}
        for name, given in first.arguments.items():
            every = [v.arguments[name] for v in found[kernel_name] if name in v.arguments]
            kind = next((x for x in every if x is not None), given)
            if isinstance(kind, torch.Tensor):
                values[name] = [words, words[1:]]
            else:
                values[name] = [3.0, 1.0] if isinstance(kind, float) else [3, 1, 16]
        usual = {name: options[0] for name, options in values.items()}
        out[kernel_name] = [
            name
            for name, options in values.items()
            if not kernel.params[kernel.arg_names.index(name)].is_constexpr
            and len({str(bind(**{**usual, name: value})[1]) for value in options}) > 1
        ]
    return out


def main(names: list[str]) -> int:
    found = variants()
    if names == ["--specialized"]:
        print(json.dumps(specialized(found)))
        return 0
    if missing := entries() - found.keys():
        print("no launch of", ", ".join(missing))
        return 1
    targets = [name for name in names if name != "--all"] or list(TARGETS)
    first, others = [f[0] for f in found.values()], [v for f in found.values() for v in f[1:]]
    count = 0
    for target in targets:
        own = others[list(TARGETS).index(target) :: len(TARGETS)]
        for variant in [*first, *(others if "--all" in names else own)]:
            count, start = count + 1, time.perf_counter()
            compiled(variant, target)
            took = time.perf_counter() - start
            print(f"{target:11} {variant.kernel.__name__:18} {took:5.1f} s", flush=True)
    print(f"compiled {count} variants for {', '.join(targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
