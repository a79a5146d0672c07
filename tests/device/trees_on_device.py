"""`verify_tree` on a CUDA device against the C++ kernels.

test_cuda.py and bench/gpu.sh run this file in a process of its own, as on_device.py.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from device.on_device import (
    PROVIDERS,
    WIDE,
    assert_bits_equal,
    capture,
    implementation,
    replayed,
)
from proofs import assert_outputs_close, tree_case

from specdec_kernels.arguments.tree import TreeArguments

bf16 = torch.bfloat16
LARGE = [
    tree_case(3, 12, WIDE, bf16, "multi_draft", rows="shared", filters="tensor"),
    tree_case(3, 12, WIDE, bf16, "multi_draft_wor", rows="shared"),
    tree_case(3, 12, WIDE, rule="traversal"),
    tree_case(3, 8, WIDE, bf16, "top_k_plus_one", rows="shared"),
    tree_case(3, 12, WIDE, bf16, "k_seq", rows="shared"),
    tree_case(4, 16, WIDE, bf16, "target_only", filters="scalar", layout="ragged"),
]
SMALL = proofs.cases("verify_tree", heavy=True)
NAMES = [n for n in PROVIDERS if n == "cuda"]  # Triton has no kernels of trees
EACH = [pytest.param(n, c, id=f"{n}-{c}") for n in NAMES for c in [*SMALL, *LARGE]]
SOME = [pytest.param(n, c, id=f"{n}-{c}") for n in NAMES for c in LARGE]


def on_device(name, case):
    return [t.cpu() for t in implementation(name, case.op)(*case.args("cuda"))]


@pytest.mark.parametrize(("name", "case"), EACH)
def test_trees_agree_with_the_cpu(name, case):
    want = proofs.providers(case.op)["cpp"](*case.args())
    assert_outputs_close(case.op, on_device(name, case), want)


@pytest.mark.parametrize(("name", "case"), SOME)
def test_a_sequence_does_not_depend_on_the_others(name, case):
    """A batch of two copies gives the same bits for both halves as one copy."""
    args = TreeArguments(*case.args("cuda"))
    b = len(args.tree_tokens)
    cut = [isinstance(a, torch.Tensor) and a.dim() > 0 and len(a) == b for a in args]
    if args.target.dim() == 2:
        pytest.skip("ragged rows have offsets of their own")
    twice = [torch.cat([a, a]) if c else a for a, c in zip(args, cut, strict=True)]
    call = implementation(name, case.op)
    want, got = call(*args), call(*twice)
    for half in (slice(None, b), slice(b, None)):
        assert_bits_equal(case.op, [t[half] if len(t) else t for t in got], want)


@pytest.mark.parametrize(("name", "case"), SOME)
def test_a_graph_replays_with_other_rows_and_trees(name, case):
    args = TreeArguments(*case.args("cuda"))
    graph, out = capture(name, case.op, args)
    for _ in range(4):
        for a in (args.target, args.tree_tokens, args.parents):
            a.copy_(a.roll(1, 0))
        replayed(graph, out)
        assert_bits_equal(case.op, out, implementation(name, case.op)(*args))
