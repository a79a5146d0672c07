"""`verify_chain` from float32 logits against the eager rule on the same inputs."""

from __future__ import annotations

import eager
import pytest
import torch

from specdec_kernels import verify_chain
from specdec_kernels.testing import noisy_draft, zipf_logits

FILTERS = {
    "plain": {},
    "topk50-topp.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "topp.9": {"temperature": 0.8, "top_p": 0.9},
}


def bytes_visited(b: int, gamma: int, v: int, accepted: float, element: int) -> int:
    """Rows read once for their law, the last one again for the draw: the least any rule can."""
    rows = accepted + 1
    return int(b * v * element * (2 * rows))


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize(("b", "gamma", "v"), [(8, 5, 49152), (1, 5, 49152), (1, 5, 128256)])
def test_verify_chain(compare, b, gamma, v, dtype, filters):
    g = torch.Generator().manual_seed(0)
    full = zipf_logits(b * (gamma + 1), v, g).reshape(b, gamma + 1, v)
    drafted = noisy_draft(full[:, :gamma].reshape(-1, v), 0.8, g)
    tokens = torch.multinomial(drafted.softmax(-1), 1, generator=g).reshape(b, gamma)
    target, draft = full.to(dtype), drafted.reshape(b, gamma, v).to(dtype)
    state = {"seeds": torch.arange(b), "accepted": [], "positions": torch.full((b,), 100)}
    options = FILTERS[filters]

    def ours():
        state["seeds"] = state["seeds"] + b
        verdict = verify_chain(
            target,
            tokens,
            draft,
            seeds=state["seeds"],
            positions=state["positions"],
            **options,
        )
        state["accepted"].append(verdict.num_accepted)

    for _ in range(50):
        ours()
    accepted = torch.cat(state["accepted"]).float().mean().item()
    compare(
        ours,
        lambda: eager.verify_chain(target, tokens, draft, **options),
        touched=bytes_visited(b, gamma, v, accepted, target.element_size()),
    )
