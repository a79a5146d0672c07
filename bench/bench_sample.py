"""Times `sample` against `torch.softmax` and `torch.multinomial` on the same logits."""

from __future__ import annotations

import pytest
import torch
from proofs import zipf_logits

from bench import eager
from specdec_kernels import sample

FILTERS = {
    "plain": {},
    "gumbel": {"method": "gumbel"},
    "topk50-topp.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(("rows", "v"), [(1, 49152), (8, 49152), (8, 128256)])
def test_sample(compare, rows, v, filters):
    logits = zipf_logits(rows, v, torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    options = FILTERS[filters]
    peer = {name: value for name, value in options.items() if name != "method"}
    peers = {"eager": lambda: eager.sample(logits, **peer)}
    if "top_k" in peer:
        peers["eager-topk"] = lambda: eager.sample_candidates(logits, **peer)
    compare(
        lambda: sample(logits, seeds=seeds, positions=positions, **options),
        peers,
        floor=logits.numel() * logits.element_size(),
    )
