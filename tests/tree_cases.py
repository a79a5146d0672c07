"""Oracles of the small tree ops that walk parents in Python, sharing nothing with the package."""

from __future__ import annotations

import torch


def parent(parents, b, n):
    p = int(parents[b, n])
    return p if 0 <= p < n else -1


def path(parents, b, n):
    """Nodes from n up to the root's child, n first."""
    out = []
    while n >= 0:
        out.append(n)
        n = parent(parents, b, n)
    return out


def attention_oracle(parents, lengths, slots, window):
    """(mask, positions), slot by slot."""
    batch, nodes = parents.shape
    mask = torch.zeros(batch, nodes + 1, slots, dtype=torch.bool)
    positions = torch.zeros(batch, nodes + 1, dtype=torch.int64)
    for b in range(batch):
        length = max(int(lengths[b]), 0)
        for row in range(nodes + 1):
            above = path(parents, b, row - 1)
            position = positions[b, row] = length + len(above)
            keys = {s: s for s in range(min(length, slots))} | {length: length}
            keys |= {length + 1 + n: length + len(path(parents, b, n)) for n in above}
            for slot, at in keys.items():
                if slot < slots and (window == 0 or at > position - window):
                    mask[b, row, slot] = True
    return mask, positions
