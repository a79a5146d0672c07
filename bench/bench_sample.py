"""Times `sample` and `kept_tokens` against PyTorch on the same logits."""

from __future__ import annotations

import pytest
import torch
from proofs import zipf_logits

from bench import eager
from specdec_kernels import kept_tokens, sample

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


@pytest.mark.parametrize("filters", ["plain", "topk50-topp.9"])
@pytest.mark.parametrize(("rows", "v"), [(1, 49152), (8, 49152), (8, 128256)])
def test_kept_tokens(compare, rows, v, filters):
    """64 tokens of each row, beside `torch.topk` of the same log-probabilities."""
    logits = zipf_logits(rows, v, torch.Generator().manual_seed(0))
    options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | FILTERS[filters]
    probs = eager.filtered_candidates if options["top_k"] else eager.filtered
    compare(
        lambda: kept_tokens(logits, max_kept=64, **options),
        {"topk": lambda: probs(logits, **options).log().topk(64)},
        floor=logits.numel() * logits.element_size(),
    )
