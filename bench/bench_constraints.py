"""Times what grammar masks and penalties add to verification, beside whole passes in PyTorch."""

from __future__ import annotations

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from bench.configs import Config, build, floor_bytes, visited_bytes
from specdec_kernels import apply_penalties_, verify_chain

CONFIGS = [
    Config(batch=batch, filters=filters)
    for batch in (1, 8)
    for filters in ("off", "t.8-k50-p.9")
]  # fmt: skip
GENERATED = 256  # tokens of an output


@pytest.mark.parametrize("allowed", ["all", "half", "few"])
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.id)
def test_verify_chain_with_a_mask(compare, config, allowed):
    """Beside the same call without a mask, and -inf that is written into a copy of the rows."""
    inputs = build(config)
    b, rows, v = inputs.target.shape
    g = torch.Generator().manual_seed(1)
    share = {"all": 1.0, "half": 0.5, "few": 20 / v}[allowed]
    kept = torch.rand(b, rows, v, generator=g) < share
    kept.scatter_(-1, inputs.turns[0].tokens[..., None].expand(b, rows - 1, 1), value=True)
    kept[..., 0] = True
    bits = (kept.view(b, rows, v // 32, 32) << torch.arange(32)).sum(-1)
    mask = torch.where(bits >= 2**31, bits - 2**32, bits).int()
    options = {
        "temperature": inputs.temperature, "top_k": inputs.top_k, "top_p": inputs.top_p,
        "seeds": inputs.turns[0].seeds, "positions": inputs.positions,
    }  # fmt: skip
    tokens = inputs.turns[0].tokens

    def verify(target, **masked):
        return verify_chain(target, tokens, inputs.draft, **options, **masked)

    def written():
        return verify(inputs.target.masked_fill(~kept, -torch.inf))

    accepted = verify(inputs.target, token_bitmask=mask).num_accepted
    bits = int((accepted + 1).sum()) * v // 8  # of the target rows that are read
    compare(
        lambda: verify(inputs.target, token_bitmask=mask),
        {"no mask": lambda: verify(inputs.target), "masked_fill": written},
        floor=floor_bytes(config, accepted) + bits,
        bytes_read=visited_bytes(config, accepted) + bits,
    )


@pytest.mark.parametrize("v", [49152, 128256])
@pytest.mark.parametrize("batch", [1, 8])
def test_apply_penalties(compare, batch, v):
    """All penalties of B sequences with five drafts, beside processors called row by row."""
    g = torch.Generator().manual_seed(2)
    target = torch.randn(batch, 6, v, generator=g)
    drafts = torch.randint(v, (batch, 5), generator=g)
    texts = torch.randint(v, (batch, GENERATED), generator=g)
    counts = torch.zeros(batch, v, dtype=torch.int32)
    counts.scatter_add_(-1, texts, torch.ones_like(texts, dtype=torch.int32))
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)])

    def row_by_row():
        for b in range(batch):
            for n in range(6):
                path = torch.cat([texts[b], drafts[b, :n]])[None]
                processors(path, target[b, n][None])

    def dense():
        """What vLLM computes for a row of each sequence, for all rows; it counts no drafts."""
        held = counts[:, None]
        factors = torch.where(held > 0, 1.1, 1.0)
        rows = torch.where(target > 0, target / factors, target * factors)
        return rows - 0.1 * held - 0.1 * (held > 0)

    changed = batch * 6 * GENERATED * 2 * target.element_size()
    compare(
        lambda: apply_penalties_(target, drafts, token_counts=counts, **penalties),
        {"transformers, repetition alone": row_by_row, "torch, whole rows": dense},
        floor=counts.numel() * counts.element_size() + changed,
    )
