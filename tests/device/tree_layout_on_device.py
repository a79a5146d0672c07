"""The layout ops of trees on a CUDA device, where Triton serves them.

test_cuda.py and bench/gpu.sh run this file in a process of its own, as on_device.py.
"""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_outputs_equal
from proofs.tree_layout import attention_case, expand_case, rerank_case, trie_case
from proofs.tree_layout_oracles import check_expansion

import specdec_kernels as sk

OPS = ("tree_attention", "rerank_tree", "build_trie", "expand_tree")
LARGE = [
    attention_case(8, 64, 5000, window=100), attention_case(2, 300, 33000, torch.int32),
    rerank_case(16, 700, 60, levels=50), trie_case(8, 100, 20, 700),
    expand_case(8, 10, 128256, 10, torch.bfloat16), expand_case(2, 3, 128256, 64, rows="ties"),
]  # fmt: skip
CASES = [*(c for op in OPS for c in proofs.cases(op, heavy=True)), *LARGE]


def call(op, args):
    return getattr(torch.ops.specdec_kernels, op).default(*args)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}-{c}")
def test_agrees_with_the_cpp_kernels(case):
    assert sk.providers()[case.op]["cuda"] == "triton"
    got = [t.cpu() for t in call(case.op, case.args("cuda"))]
    if case.op == "expand_tree":
        check_expansion(case.args(), got)
    else:
        assert_outputs_equal(case.op, got, call(case.op, case.args()))


@pytest.mark.parametrize("case", LARGE, ids=lambda c: f"{c.op}-{c}")
def test_a_call_never_waits_for_the_device_and_a_graph_replays(case):
    """The outputs of a captured call follow inputs that change on the device."""
    args = case.args("cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call(case.op, args)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(case.op, args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(case.op, args)
    for _ in range(3):
        for a in args:
            if torch.is_tensor(a):
                a.copy_(a.roll(1, 0))
        graph.replay()
        assert_outputs_equal(
            case.op, [t.cpu() for t in out], [t.cpu() for t in call(case.op, args)]
        )
