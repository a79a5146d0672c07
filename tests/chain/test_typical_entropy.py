"""The entropy in rule typical is that of P, which the temperature has shaped."""

import math

import pytest
import torch
from support.providers import ALL_PROVIDERS, provider, verify, verify_tree

from specdec_kernels.arguments.checks import float32

CASES = [(t, k) for t in (0.4, 1.0, 3.0) for k in (0, 12)]
PAIRS = [(n, *c) for n in ALL_PROVIDERS for c in (CASES[-2:-1] if n == "triton" else CASES)]


@pytest.mark.parametrize(("name", "temperature", "top_k"), PAIRS)
def test_the_bound_of_typical_takes_the_entropy_at_the_temperature(name, temperature, top_k):
    """Just under P(x) the bound accepts, and just above it rejects."""
    logits = torch.randn(40, generator=torch.Generator().manual_seed(2))
    kept = torch.where(logits >= logits.sort().values[-top_k], logits.double(), -torch.inf)
    p = (kept / float32(temperature)).softmax(0)
    entropy = -float((p * p.clamp(min=1e-300).log()).sum())
    x = int(logits.sort().indices[-3])
    target, one = logits.expand(1, 2, 40), torch.tensor([[x]])
    for factor, accepted in ((0.99, 1), (1.01, 0)):
        options = dict(rule="typical", epsilon=1.0, temperature=temperature, top_k=top_k,
                       delta=factor * float(p[x]) * math.exp(entropy))  # fmt: skip
        got = verify(provider("verify_chain", name), target, one, **options)
        assert got[1].tolist() == [accepted]
        got = verify_tree(provider("verify_tree", name), target, one, one * 0 - 1, **options)
        assert got[2].tolist() == [accepted]
