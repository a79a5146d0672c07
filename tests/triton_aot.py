"""Compile every Triton kernel ahead of time for devices that are not here.

    python tests/triton_aot.py [--all] [cuda:90 hip:gfx942 ...]

The two nearest relatives of sm_90 get the variants in BRIEF only, unless --all is given.

Prints a line a kernel and target: variant, seconds, and where cuobjdump is at hand, registers and
bytes spilled. `test_triton.py` runs it in a process of its own, since the interpreter and the
compiler exclude each other in one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec_kernels.triton import chain, launch, sample

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
BRIEF = {
    "cdf-tiles", "race-split-filters", "ragged-law-tiles", "match-tiles", "law-split-filters",
    "sampled-lazy-filters", "greedy-split",
}  # fmt: skip
ENTRIES = (sample.sample_tiles, sample.sample_rows, chain.chain_tiles, chain.chain_sequences)

# Argument types by name; a name that a variant holds is a compile-time constant (None: no tensor).
TYPES = {
    "fp32": [
        "temperature", "top_p", "min_p", "draft_temperature", "lenience", "typical_epsilon",
        "typical_delta",
    ],
    "i32": [
        "top_k", "gamma", "v", "d", "n_rows", "n_draft", "tiles", "d_tiles", "slot_size",
        "draft_slots", "residual_slots", "id_limit", "num_eos",
    ],
    "i64": [
        "row_stride", "target_stride_b", "target_stride_i", "draft_stride_b", "draft_stride_i",
    ],
    "*fp32": [
        "temperatures", "top_ps", "min_ps", "tops", "logprobs", "thresholds", "draft_threshold",
        "draft_temperatures", "synthetic_rates", "acceptance",
    ],
    "*fp64": ["uniforms", "logsumexps", "draft_logsumexp", "marks"],
    "*i32": ["top_ks", "cu_rows", "num_accepted", "status", "draft_columns"],
    "*i64": [
        "seeds", "positions", "sums", "tokens", "draft_tokens", "draft_ids", "eos_ids", "max_emit",
    ],
}  # fmt: skip
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names}
# As the launcher finds them for a vocabulary of 128,000.
ALIGNED = {"v", "d", "row_stride", "target_stride_b", "target_stride_i", "draft_stride_b",
           "draft_stride_i"}  # fmt: skip

SCALARS = dict.fromkeys(
    (
        "temperatures", "top_ks", "top_ps", "min_ps", "draft_temperatures", "cu_rows", "uniforms",
        "eos_ids", "max_emit", "acceptance",
    )
)  # fmt: skip
SHAPE = {"TILE": launch.TILE, "CHUNK": launch.CHUNK, "BLOCK": 32, "LOG_TILES": 5, "WIDTH": 64}
NO_LAW = dict.fromkeys(("draft_logsumexp", "draft_threshold", "draft_temperatures"))
# Rule token without a draft law, and what each rule and form changes.
PLAIN = {"RULE": 0, "WHAT": 1, "DRAFT": 0, "RAGGED_DRAFT": False, "BEYOND": False, "PROBS": False,
         "synthetic_rates": None, "draft_ids": None, "draft_columns": None, "marks": None}  # fmt: skip


def variants() -> list[tuple[str, object, dict[str, object]]]:
    """(name, kernel, its row dtype and constants)."""
    out = []
    for name, what in (("cdf", 1), ("race", 2)):
        base = {"rows": "bf16", "STREAM": 2, "WHAT": what, **SHAPE}
        out += [
            (f"{name}-tiles", sample.sample_tiles, base | SCALARS),
            (f"{name}-lazy", sample.sample_rows, base | SCALARS | {"PRE": False, "FILTERS": False}),
            (f"{name}-split-filters", sample.sample_rows, base | {"PRE": True, "FILTERS": True}),
        ]
    token = PLAIN | SHAPE | {"rows": "bf16"}
    point, law, raw = (NO_LAW | {"DRAFT": n} for n in (0, 1, 2))
    sampled = {"DRAFT": 3}
    sparse = {"DRAFT": 4, **NO_LAW}
    greedy, match = {"RULE": 2, "WHAT": 0, **NO_LAW}, {"RULE": 3, "WHAT": 2, **NO_LAW}
    ragged, probs = {"RAGGED_DRAFT": True}, {"PROBS": True}
    lazy, split = {"PRE": False, "FILTERS": False}, {"PRE": True, "FILTERS": False}
    lazy_filters, split_filters = lazy | {"FILTERS": True}, split | {"FILTERS": True}
    tiles, walk = chain.chain_tiles, chain.chain_sequences
    return [
        *out,
        ("law-tiles", tiles, token | SCALARS | law),
        ("ragged-law-tiles", tiles, token | law | ragged | {"rows": "fp32"}),
        ("match-tiles", tiles, token | SCALARS | match),
        ("probs-tiles", tiles, token | raw | probs),
        ("point-lazy", walk, token | SCALARS | point | lazy),
        ("law-lazy", walk, token | SCALARS | law | lazy | {"rows": "fp32"}),
        ("law-split-filters", walk, token | law | split_filters),
        ("probs-lazy", walk, token | SCALARS | raw | lazy | probs),
        ("probs-ragged-filters", walk, token | raw | ragged | lazy_filters | probs
         | {"rows": "fp16"}),
        ("sampled-lazy-filters", walk, token | sampled | ragged | lazy_filters),
        ("match-lazy-filters", walk, token | match | lazy_filters),
        ("greedy-split", walk, token | SCALARS | greedy | split),
        *new_variants(token, walk),
    ]  # fmt: skip


def new_variants(token, walk) -> list[tuple[str, object, dict[str, object]]]:
    NO_LAW_=NO_LAW
    point, law, raw = (NO_LAW_ | {"DRAFT": n} for n in (0, 1, 2))
    sampled = {"DRAFT": 3}
    sparse = {"DRAFT": 4, **NO_LAW_, "draft_ids": "*i64"}
    sparse.pop("draft_ids")
    tok2 = {k: v for k, v in token.items() if k != "draft_ids"}
    tokm = {k: v for k, v in token.items() if k != "marks"}
    toks = {k: v for k, v in tokm.items() if k != "draft_ids"}
    tokc = {k: v for k, v in tokm.items() if k != "draft_columns"}
    tokr = {k: v for k, v in token.items() if k != "synthetic_rates"}
    ragged, probs = {"RAGGED_DRAFT": True}, {"PROBS": True}
    lazy, split = {"PRE": False, "FILTERS": False}, {"PRE": True, "FILTERS": False}
    lazy_filters, split_filters = lazy | {"FILTERS": True}, split | {"FILTERS": True}
    blk = {"RULE": 1}
    return [
        ("block-law-lazy", walk, tokm | SCALARS | law | lazy | blk),
        ("block-law-split-filters", walk, tokm | law | split_filters | blk),
        ("block-mapped-sampled", walk, tokc | sampled | lazy_filters | blk | {"BEYOND": True}),
        ("block-mapped-raw", walk, tokc | raw | lazy_filters | blk | probs| ragged | {"BEYOND": True}),
        ("block-point", walk, tokm | point | lazy_filters | blk | probs),
        ("block-sparse", walk, toks | sparse | lazy_filters | blk | probs | ragged),
        ("block-sparse-split", walk, toks | sparse | split | blk),
        ("lenient-sparse", walk, tok2 | sparse | lazy_filters | {"RULE": 5}),
        ("lenient-law", walk, token | law | lazy_filters | {"RULE": 5} | {"BEYOND": True}),
        ("typical", walk, token | SCALARS | point | lazy_filters | {"RULE": 4}),
        ("typical-split", walk, token | SCALARS | point | split | {"RULE": 4}),
        ("synthetic", walk, tokr | point | split | {"RULE": 6} | probs),
    ]


def compiled(kernel: object, constants: dict[str, object], target: GPUTarget) -> object:
    rows = "*" + str(constants["rows"])
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        kind = rows if name in ("logits", "target", "draft") else TYPE_OF[name]
        signature[name] = kind
        if kind[0] == "*" or name in ALIGNED:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(source, target=target, options=dict(launch.OPTIONS))


def resources(binary: bytes) -> str:
    """ "157 registers, 0 bytes of stack", from the CUDA binary; empty without cuobjdump."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not tool.exists():
        return ""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=False
        ).stdout
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    if "REG" not in used:
        return ""
    return f"{used['REG']} registers, {int(used['STACK']) + int(used['LOCAL'])} bytes of stack"


def main(names: list[str]) -> int:
    listed = variants()
    if missing := set(ENTRIES) - {kernel for name, kernel, _ in listed if name in BRIEF}:
        print("no variant of", ", ".join(k.__name__ for k in missing))
        return 1
    everything = "--all" in names
    targets = [name for name in names if name != "--all"] or list(TARGETS)
    count = 0
    for target in targets:
        brief = target in ("cuda:80", "cuda:100") and not everything
        for name, kernel, constants in listed:
            if brief and name not in BRIEF:
                continue
            count += 1
            start = time.perf_counter()
            made = compiled(kernel, constants, TARGETS[target])
            seconds = time.perf_counter() - start
            binary = made.asm.get("cubin")
            extra = resources(binary) if binary else ""
            print(f"{target:11} {kernel.__name__:16} {name:22} {seconds:5.1f} s  {extra}",
                  flush=True)  # fmt: skip
    print(f"compiled {count} variants for {', '.join(targets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
