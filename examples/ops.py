"""Verify five drafted tokens for two sequences: `python examples/ops.py`."""

import torch

from specdec_kernels import SampledDraft, draft_positions, sample, verify_chain

batch, gamma, vocab = 2, 5, 32000
seeds, positions = torch.tensor([1, 2]), torch.tensor([10, 20])
torch.manual_seed(0)
target = 4 * torch.randn(batch, gamma + 1, vocab)
draft = target[:, :gamma] + 0.3 * torch.randn(batch, gamma, vocab)

drafted = sample(
    draft.reshape(-1, vocab),
    temperature=0.8,
    top_k=50,
    seeds=seeds.repeat_interleave(gamma),
    positions=draft_positions(positions, gamma, rule="block").reshape(-1),
)
distribution = SampledDraft(
    draft, drafted.logsumexp.view(batch, gamma), drafted.threshold.view(batch, gamma), 0.8
)
verdict = verify_chain(
    target,
    drafted.tokens.view(batch, gamma),
    distribution,
    rule="block",
    temperature=0.8,
    top_k=50,
    seeds=seeds,
    positions=positions,
)
print(verdict.tokens, verdict.num_accepted)
