"""Compile every Triton kernel ahead of time for devices that are not here.

    python tests/support/triton_aot.py [--all] [cuda:90 hip:gfx942 ...]

Every target gets the variants in EVERYWHERE, which have every kernel, and a quarter of the others,
so that each of these is compiled for one target. With --all every target gets all of them, which
takes two minutes for each. --specialized prints as JSON for which arguments Triton would compile a
kernel anew, and compiles nothing.

One line is printed for each kernel and target: variant, seconds and, where cuobjdump is installed,
registers and bytes of stack. `tests/chain/test_triton_chain.py` runs it in a process of its own,
because one process cannot use both the interpreter and the compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from specdec_kernels.arguments.rules import (
    RULES,
    RULES_READING_DRAFT,
    TREE_RULES,
    TREE_RULES_READING_DRAFT,
)
from specdec_kernels.arguments.sample import STREAMS
from specdec_kernels.triton import launch
from specdec_kernels.triton.chain import verify_chain as chain
from specdec_kernels.triton.history import ngram_propose
from specdec_kernels.triton.kv import append as kv_append
from specdec_kernels.triton.kv import compact as kv_compact
from specdec_kernels.triton.kv import paged_append, paged_truncate, ring_truncate
from specdec_kernels.triton.kv import realign as kv_realign
from specdec_kernels.triton.kv import table as kv_table
from specdec_kernels.triton.kv import truncate as kv_truncate
from specdec_kernels.triton.row import draft, sample
from specdec_kernels.triton.row.distribution import GUMBEL, MASSES, MAXIMA
from specdec_kernels.triton.tree import expand_tree
from specdec_kernels.triton.tree import layout as tree_layout
from specdec_kernels.triton.tree import verify_tree as tree

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "cuda:100": GPUTarget("cuda", 100, 32),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
EVERYWHERE = {
    "cdf-tiles", "gumbel-lazy", "match-tiles", "synthetic-row-parallel",
    "attention", "rerank-score", "rerank-choose", "rerank-place", "trie-compare", "trie-number",
    "expand-tiles", "expand-rows", "expand-frontier", "tree-typical",
    "kv-row", "kv-append-8", "kv-zero-8", "kv-lengths", "kv-compact-8", "kv-realign-8",
    "ring-lengths", "paged-append-8", "paged-truncate", "ngram",
}  # fmt: skip
ENTRIES = (
    sample.sample_tiles,
    sample.sample_rows,
    chain.chain_tiles,
    chain.chain_sequences,
    tree_layout.attention_rows,
    tree_layout.score_nodes,
    tree_layout.choose_nodes,
    tree_layout.place_nodes,
    tree_layout.compare_sequences,
    tree_layout.number_nodes,
    expand_tree.expand_tiles,
    expand_tree.expand_rows,
    expand_tree.choose_frontier,
    tree.tree_sequences,
    kv_table.write_rows,
    kv_append.append_words,
    kv_truncate.zero_words,
    kv_truncate.shorten,
    kv_compact.compact_words,
    paged_append.paged_append_words,
    kv_realign.realign_words,
    ring_truncate.shorten_rings,
    paged_truncate.truncate_tables,
    ngram_propose.copy_matches,
)

# Types of arguments by name. An argument that a variant names is a compile-time constant; None
# means a tensor that is not given.
TYPES = {
    "fp32": [
        "temperature", "top_p", "min_p", "draft_temperature", "lenience", "typical_epsilon",
        "typical_delta", "top_beta_distance",
    ],
    "i32": [
        "top_k", "gamma", "v", "d", "n_rows", "n_draft", "tiles", "d_tiles", "stats_size",
        "draft_stats", "residual_stats", "id_limit", "num_eos", "max_depth",
        "num_rows", "slots", "window", "m", "size", "branches", "length", "num_nodes", "width",
        "children", "num_caches", "batch", "path_length", "columns", "num_blocks", "block_size",
        "top_beta_rank",
    ],
    "i64": [
        "row_stride", "target_stride_b", "target_stride_i", "draft_stride_b", "draft_stride_i",
        "parent_stride_b", "parent_stride_n", "parent_stride_m", "token_stride_b", "token_stride_m",
        "score_stride_b", "score_stride_m", "score_stride_f", "stride_b", "stride_k", "stride_l",
        "logits_stride_b", "logits_stride_f", "position_stride", "length_stride",
        "new_length_stride", "start_stride", "shift_stride", "base_stride", "path_stride_b",
        "path_stride_p", "table_stride_b", "table_stride_m", "count_stride",
        "max_ngram", "min_ngram",
        *(f"f{i}" for i in range(kv_table.FIELDS.value)),
    ],
    ("i64",) * kv_table.CACHES: ["addresses", "entry_addresses"],
    "*i1": ["mask"],
    "*fp32": [
        "temperatures", "top_ps", "min_ps", "tile_maxima", "logprobs", "thresholds",
        "draft_threshold", "draft_temperatures", "synthetic_rates", "accept_probs", "scores",
        "out_scores",
    ],
    "*fp64": ["uniforms", "logsumexps", "draft_logsumexp", "workspace"],
    "*i32": [
        "top_ks", "target_indptr", "num_accepted", "status", "draft_columns", "draft_rows",
        "chosen", "first", "shared", "owned", "tables", "blocks", "num_freed", "counts",
    ],
    "*i64": [
        "seeds", "positions", "tile_sums", "tokens", "draft_token_ids", "draft_ids",
        "eos_token_ids", "max_new_tokens", "parents", "lengths", "entries", "places", "out_tokens",
        "out_parents", "nodes", "ends", "sequences", "found", "frontier", "tree_tokens", "path",
        "table", "row", "new_lengths", "starts", "shifts", "base", "history",
    ],
}  # fmt: skip
TYPE_OF = {name: kind for kind, names in TYPES.items() for name in names}
# Arguments that are multiples of 16 for a vocabulary of 128,000.
ALIGNED = {"v", "d", "row_stride", "target_stride_b", "target_stride_i", "draft_stride_b",
           "draft_stride_i", "logits_stride_b", "logits_stride_f"}  # fmt: skip

SCALARS = dict.fromkeys(
    (
        "temperatures", "top_ks", "top_ps", "min_ps", "draft_temperatures", "target_indptr",
        "uniforms", "eos_token_ids", "max_new_tokens", "accept_probs",
    )
)  # fmt: skip
SHAPE = {"TILE": launch.TILE, "CHUNK": launch.CHUNK, "BLOCK": 32, "LOG_TILES": 5, "WIDTH": 64}
# The tensors that only some rules or forms of a draft have.
ABSENT = dict.fromkeys(
    ("draft_logsumexp", "draft_threshold", "draft_temperatures", "draft_ids", "draft_columns",
     "synthetic_rates", "workspace")
)  # fmt: skip
PLAIN = dict.fromkeys(("RAGGED_DRAFT", "BEYOND", "PROBS", "FILTERS"), False)
STATS = {"greedy": MAXIMA.value, "match": GUMBEL.value}  # other rules need masses
FORMS = {
    "one-hot": draft.ONE_HOT.value, "logits": draft.DRAFT_LOGITS.value,
    "probs": draft.DRAFT_PROBS.value, "sampled": draft.SAMPLED.value, "sparse": draft.SPARSE.value,
}  # fmt: skip
TENSORS = {"block": ("workspace",), "synthetic": ("synthetic_rates",), "sparse": ("draft_ids",),
       "sampled": ("draft_logsumexp", "draft_threshold", "draft_temperatures"),
       "mapped": ("draft_columns",), "shared": ("draft_rows",)}  # fmt: skip
ROW_PARALLEL = {"ROW_PARALLEL": True}
FILTERS = {"FILTERS": True}
PROBS = {"PROBS": True}
RAGGED = {"RAGGED_DRAFT": True}
BEYOND = {"BEYOND": True}


def sequences(name: str, rule: str, form: str, *switches: str | dict[str, object],
         rows: str = "bf16") -> tuple[str, object, dict[str, object]]:  # fmt: skip
    """A variant of `chain_sequences`; "mapped" among the switches gives the draft columns."""
    owned = {
        t for key in (rule, form, *switches) if isinstance(key, str) for t in TENSORS.get(key, ())
    }
    own = {"RULE": RULES.index(rule), "STATS": STATS.get(rule, MASSES.value),
           "READS_DRAFT": rule in RULES_READING_DRAFT, "DRAFT": FORMS[form],
           "ROW_PARALLEL": False, "rows": rows}  # fmt: skip
    constants = PLAIN | SHAPE | own
    constants |= {name: None for name in ABSENT if name not in owned}
    for switch in switches:
        constants |= switch if isinstance(switch, dict) else {}
    return name, chain.chain_sequences, constants


def tiles(name: str, rule: str, form: str, *switches: dict[str, object],
          rows: str = "bf16") -> tuple[str, object, dict[str, object]]:  # fmt: skip
    return name, chain.chain_tiles, sequences(name, rule, form, *switches, rows=rows)[2]


def trees(name: str, rule: str, form: str, *switches: str | dict[str, object],
          rows: str = "bf16") -> tuple[str, object, dict[str, object]]:  # fmt: skip
    """A variant of `tree_sequences`, as in `sequences`; "shared" gives the draft rows."""
    owned = {t for key in (form, *switches) if isinstance(key, str) for t in TENSORS.get(key, ())}
    own = {"RULE": TREE_RULES.index(rule), "READS_DRAFT": rule in TREE_RULES_READING_DRAFT,
           "DRAFT": FORMS[form], "FLAT_DRAFT": "shared" in switches,
           "STATS": STATS.get(rule, MASSES.value), "NODES": 64, "rows": rows}  # fmt: skip
    constants = PLAIN | SHAPE | own
    constants |= {
        name: None for name in (*ABSENT, "draft_rows") if name not in owned | {"workspace"}
    }
    for switch in switches:
        constants |= switch if isinstance(switch, dict) else {}
    return name, tree.tree_sequences, constants


def tree_variants() -> list[tuple[str, object, dict[str, object]]]:
    ids, own = {"rows": "i64"}, SHAPE | {"rows": "bf16", "PLACES": 16, "CHUNK": expand_tree.CHUNK}
    rank = ids | {"BLOCK": tree_layout.BLOCK}
    return [
        ("attention", tree_layout.attention_rows, ids | {"SLOTS": tree_layout.SLOTS}),
        ("rerank-score", tree_layout.score_nodes, rank),
        ("rerank-choose", tree_layout.choose_nodes, rank),
        ("rerank-place", tree_layout.place_nodes, rank),
        ("trie-compare", tree_layout.compare_sequences, ids | {"MERGE": True, "BRANCHES": 8}),
        ("trie-apart", tree_layout.compare_sequences, ids | {"MERGE": False, "BRANCHES": 8}),
        ("trie-number", tree_layout.number_nodes, ids | {"LENGTH": 16}),
        ("expand-tiles", expand_tree.expand_tiles, own),
        ("expand-tiles-wide", expand_tree.expand_tiles, own | {"PLACES": 64, "rows": "fp32"}),
        ("expand-rows", expand_tree.expand_rows, own),
        ("expand-rows-scalar", expand_tree.expand_rows, own | {"temperatures": None}),
        ("expand-frontier", expand_tree.choose_frontier, own),
    ]


def cache_variants() -> list[tuple[str, object, dict[str, object]]]:
    dense, paged = {"PAGED": False, "tables": None}, {"PAGED": True}
    lengths = {"rows": "i64", "BLOCK": kv_truncate.LENGTHS, "options": kv_table.OPTIONS}
    out = [
        ("kv-row", kv_table.write_rows, lengths),
        ("kv-lengths", kv_truncate.shorten, lengths),
        ("ring-lengths", ring_truncate.shorten_rings, lengths),
        ("paged-truncate", paged_truncate.truncate_tables,
         lengths | {"BLOCK": paged_truncate.BLOCK, "options": paged_truncate.OPTIONS}),
    ]  # fmt: skip
    for width in (1, 2, 4, 8):
        own = lengths | {"BLOCK": kv_table.BLOCK, "BYTES": width}
        out += [
            (f"kv-append-{width}", kv_append.append_words, own),
            (f"kv-zero-{width}", kv_truncate.zero_words, own | {"RING": False}),
            (f"kv-compact-{width}", kv_compact.compact_words, own | dense),
            (f"paged-append-{width}", paged_append.paged_append_words, own),
            (f"paged-compact-{width}", kv_compact.compact_words, own | paged),
            (f"kv-realign-{width}", kv_realign.realign_words, own | {"ZERO": True}),
        ]
    return [*out, ("ring-zero-8", kv_truncate.zero_words, own | {"RING": True})]


def variants() -> list[tuple[str, object, dict[str, object]]]:
    """(name, kernel, its row dtype and constants)."""
    out = []
    for name, stats in (("cdf", MASSES.value), ("gumbel", GUMBEL.value)):
        base = {"rows": "bf16", "STREAM": STREAMS["draft"], "STATS": stats, **SHAPE}
        out += [
            (f"{name}-tiles", sample.sample_tiles, base | SCALARS),
            (
                f"{name}-lazy",
                sample.sample_rows,
                base | SCALARS | {"ROW_PARALLEL": False, "FILTERS": False},
            ),
            (
                f"{name}-row-parallel-filters",
                sample.sample_rows,
                base | {"ROW_PARALLEL": True, "FILTERS": True},
            ),
        ]
    return [
        *out,
        tiles("logits-tiles", "token", "logits", SCALARS),
        tiles("ragged-logits-tiles", "token", "logits", RAGGED, rows="fp32"),
        tiles("match-tiles", "match", "one-hot", SCALARS),
        tiles("probs-tiles", "token", "probs", PROBS),
        sequences("one-hot-lazy", "token", "one-hot", SCALARS),
        sequences("logits-lazy", "token", "logits", SCALARS, rows="fp32"),
        sequences("logits-row-parallel-filters", "token", "logits", ROW_PARALLEL, FILTERS),
        sequences("probs-ragged-filters", "token", "probs", RAGGED, FILTERS, PROBS, rows="fp16"),
        sequences("sampled-lazy-filters", "token", "sampled", RAGGED, FILTERS),
        sequences("match-lazy-filters", "match", "one-hot", FILTERS),
        sequences("greedy-row-parallel", "greedy", "one-hot", SCALARS, ROW_PARALLEL),
        sequences("block-logits-lazy", "block", "logits", SCALARS),
        sequences(
            "block-wide-logits-row-parallel", "block", "logits", ROW_PARALLEL, BEYOND, rows="fp32"
        ),
        sequences("block-mapped-sampled", "block", "sampled", "mapped", BEYOND),
        sequences(
            "block-probs-ragged", "block", "probs", "mapped", RAGGED, PROBS, BEYOND, rows="fp16"
        ),
        sequences("block-probs-one-hot", "block", "one-hot", SCALARS, PROBS),
        sequences("block-sparse-row-parallel", "block", "sparse", ROW_PARALLEL),
        sequences("lenient-sparse", "lenient", "sparse", SCALARS),
        sequences("typical-lazy", "typical", "one-hot", SCALARS),
        sequences("top-beta-lazy", "top_beta", "one-hot", SCALARS),
        sequences("synthetic-row-parallel", "synthetic", "one-hot", SCALARS, ROW_PARALLEL),
        trees("tree-greedy", "greedy", "one-hot", SCALARS),
        trees("tree-match-filters", "match", "one-hot", FILTERS),
        trees("tree-target-only", "target_only", "one-hot", SCALARS, PROBS),
        trees("tree-typical", "typical", "one-hot", SCALARS, rows="fp16"),
        trees("tree-multi-one-hot", "multi_draft", "one-hot", SCALARS),
        trees("tree-multi-logits", "multi_draft", "logits", BEYOND, "mapped"),
        trees("tree-wor-logits", "multi_draft_wor", "logits", FILTERS, BEYOND, "shared"),
        trees("tree-wor-sparse", "multi_draft_wor", "sparse", SCALARS, BEYOND, "shared"),
        trees("tree-top-probs", "top_k_plus_one", "probs", PROBS, "mapped", BEYOND, rows="fp32"),
        trees("tree-seq-sampled", "k_seq", "sampled", FILTERS, BEYOND),
        trees("tree-seq-logits", "k_seq", "logits", SCALARS, "shared"),
        trees("tree-traversal-one-hot", "traversal", "one-hot", SCALARS, PROBS),
        trees("tree-traversal-sparse", "traversal", "sparse", SCALARS, BEYOND),
        trees("tree-traversal-sampled", "traversal", "sampled", FILTERS, BEYOND),
        *tree_variants(),
        *cache_variants(),
        (
            "ngram",
            ngram_propose.copy_matches,
            {"rows": "i64", "BLOCK": ngram_propose.BLOCK, "options": ngram_propose.OPTIONS},
        ),
    ]


def variants_of(target: str) -> list[tuple[str, object, dict[str, object]]]:
    """The variants of a target: those of EVERYWHERE, and its share of the others."""
    listed = variants()
    others = [name for name, _, _ in listed if name not in EVERYWHERE]
    own = {*EVERYWHERE, *others[list(TARGETS).index(target) :: len(TARGETS)]}
    return [variant for variant in listed if variant[0] in own]


def compiled(kernel: object, constants: dict[str, object], target: GPUTarget) -> object:
    rows = "*" + str(constants["rows"])
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[(i,)] = "constexpr", constants[name]
            continue
        kind = rows if name in ("logits", "target", "draft") else TYPE_OF[name]
        signature[name] = kind
        aligned = kind[0] == "*" or name in ALIGNED
        if aligned and not kernel.params[i].do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    return triton.compile(
        source, target=target, options=dict(constants.get("options", launch.OPTIONS))
    )


def specialized() -> dict[str, list[str]]:
    """Kernel -> the arguments for which Triton compiles it anew, by value or by alignment."""
    backend = make_backend(TARGETS["cuda:90"])
    words, found = torch.zeros(64, dtype=torch.int64), {}
    for kernel in ENTRIES:
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        values = {}
        for name in kernel.arg_names:
            kind = TYPE_OF.get(name, "*")  # rows and constants have none
            if isinstance(kind, tuple):
                addresses = (0, 1, 1 << 34, (1 << 47) + 2)
                values[name] = [(kv_table.encoded(n),) * len(kind) for n in addresses]
            elif kind[0] == "*":
                values[name] = [words, words[1:]]
            else:
                values[name] = [3.0, 1.0] if kind == "fp32" else [3, 1, 16]
        first = {name: options[0] for name, options in values.items()}
        found[kernel.__name__] = [
            name
            for name, options in values.items()
            if not kernel.params[kernel.arg_names.index(name)].is_constexpr
            and len({str(bind(**{**first, name: value})[1]) for value in options}) > 1
        ]
    return found


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
    if names == ["--specialized"]:
        print(json.dumps(specialized()))
        return 0
    kernels = {kernel for name, kernel, _ in variants() if name in EVERYWHERE}
    if missing := set(ENTRIES) - kernels:
        print("no variant of", ", ".join(k.__name__ for k in missing))
        return 1
    targets = [name for name in names if name != "--all"] or list(TARGETS)
    count = 0
    for target in targets:
        for name, kernel, constants in variants() if "--all" in names else variants_of(target):
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
