"""The functions make their tensors on the device and in the dtypes of their arguments."""

import pytest
import torch
from support.sglang_loops import EXAMPLE, eagle_tree, example_logits, links, outputs

from specdec_kernels.compat import flashinfer, sglang, tensorrt_llm, transformers


def calls():
    """Each function with its arguments, all of them on the CPU."""
    probs, per_row = torch.full((2, 5), 0.2), torch.tensor([0.5, 0.6])
    noise = dict(seed=1, offset=0)
    for kw in ({}, noise):
        yield flashinfer.sampling_from_logits, (probs,), kw
        yield flashinfer.sampling_from_probs, (probs,), kw
        yield flashinfer.top_p_sampling_from_probs, (probs, per_row, torch.tensor([0, 1, 1])), kw
        yield flashinfer.top_k_sampling_from_probs, (probs, torch.tensor([2, 3])), kw
        yield flashinfer.min_p_sampling_from_probs, (probs, 0.1), kw
    joint = dict(filter_apply_order="joint")
    yield flashinfer.softmax, (probs, per_row), {}
    yield flashinfer.top_k_top_p_sampling_from_probs, (probs, 2, per_row), joint
    yield flashinfer.top_k_top_p_sampling_from_logits, (probs, torch.tensor([2, 3]), 0.5), joint
    drafts = torch.full((1, 2, 5), 0.2), torch.zeros(1, 2).int(), torch.full((1, 3, 5), 0.2)
    yield flashinfer.chain_speculative_sampling, drafts, noise
    tree, logits = outputs(2, 6, 4) | EXAMPLE, example_logits()
    yield sglang.verify_tree_greedy, (*tree.values(), logits.argmax(-1)), {}
    yield (
        sglang.tree_speculative_sampling_target_only,
        (*tree.values(), torch.rand(2, 6), torch.rand(2), logits.softmax(-1), logits * 0),
        {},
    )
    lengths, chosen = torch.tensor([3, 4]), eagle_tree(torch.Generator(), 2, 2, 3, 5)
    out = (torch.zeros(10).long(), *links(2, 5).values())
    for mode, mask in enumerate(
        (torch.ones(85).bool(), torch.ones(50).bool(), torch.ones(10).byte())
    ):
        yield sglang.build_tree_kernel_efficient, (*chosen, lengths, mask, *out, 2, 3, 5, mode), {}
    yield (
        sglang.reconstruct_indices_from_tree_mask,
        (torch.ones(50).bool(), lengths, *out, 2, 5),
        {},
    )
    rows = torch.tensor([[3, 1]]), torch.zeros(1, 2, 5), 2, torch.zeros(1, 3, 5)
    yield transformers._speculative_sampling, rows, {}
    yield transformers._speculative_sampling, (*rows, 0.5), {}
    numbers = [torch.tensor(n).int() for n in ([[7, 8]], [[1, 7, 6]], [1], [2], [3])]
    states = torch.zeros(3, 1).byte(), torch.zeros(1).byte()
    yield tensorrt_llm.accept_draft_tokens_by_ids, (*numbers, *states), {}


@pytest.mark.parametrize(("device", "dtype"), [("meta", torch.float32), ("cpu", torch.float64)])
def test_no_function_depends_on_the_default_device_or_dtype(device, dtype):
    prepared = list(calls())
    try:
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)
        results = [function(*arguments, **options) for function, arguments, options in prepared]
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    for result in results:
        for t in result if isinstance(result, tuple) else (result,):
            assert t is None or t.device.type == "cpu"
            assert t is None or t.dtype != torch.float64
