"""Times `ngram_propose` against eager PyTorch and against prompt lookup on the host."""

from __future__ import annotations

import pytest
import torch
from specdec_hf.drafters.copying import lookup

from specdec_kernels import ngram_propose

GAMMA, LONGEST, SHORTEST = 5, 4, 2


def eager_propose(history, lengths):
    """All ends of matches at once: one comparison of the whole history for each size."""
    b, columns = history.shape
    at = torch.arange(columns, device=history.device)
    last = lengths[:, None] - 1
    same, size = (at < last).expand(b, columns), torch.zeros_like(history)
    for k in range(LONGEST):
        ending = history.gather(1, (last - k).clamp(min=0))
        same = same & (history.roll(k, 1) == ending) & (at >= k)
        size += same
    best, end = (size * columns + at).max(1)
    start = end[:, None] + 1
    copied = torch.arange(GAMMA, device=history.device) % (lengths[:, None] - start).clamp(min=1)
    found = (best // columns >= SHORTEST)[:, None]
    return torch.where(found, history.gather(1, (start + copied).clamp(max=columns - 1)), -1)


@pytest.mark.parametrize("columns", [1024, 8192])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_ngram_propose(compare, batch, columns):
    """Texts of 1000 distinct tokens, so that an end with one equal token is about one in 1000."""
    generator = torch.Generator().manual_seed(0)
    history = torch.randint(0, 1000, (batch, columns), generator=generator)
    history[:, -3:] = history[:, 100:103]
    lengths = torch.full((batch,), columns)
    rows = list(history.numpy())

    def ours():
        return ngram_propose(
            history, lengths, gamma=GAMMA, max_ngram=LONGEST, min_ngram=SHORTEST
        ).tokens

    def on_the_host():
        return [lookup(row, GAMMA, LONGEST, SHORTEST) for row in rows]

    assert torch.equal(ours(), eager_propose(history, lengths))
    assert ours().tolist() == [found.tolist() for found in on_the_host()]
    compare(
        ours,
        {"eager": lambda: eager_propose(history, lengths), "host": on_the_host},
        floor=(columns + GAMMA) * batch * history.element_size(),
    )
