"""Oracles of the layout ops, which follow parents in Python and share no code with the package."""

from __future__ import annotations

import math

import numpy as np
import torch

from proofs import assert_close


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


def rerank_oracle(tokens, parents, scores, size):
    """(tokens, parents, nodes), by sorting the nodes that may be taken."""
    out = [t.new_full((len(tokens), size), -1) for t in (tokens, parents, parents)]
    for b in range(len(tokens)):
        ranked = []
        for m in range(tokens.shape[1]):
            way = path(parents, b, m)
            score = min((float(scores[b, n]) for n in way), default=0.0)
            there = all(tokens[b, n] >= 0 and scores[b, n] > -torch.inf for n in way)
            if there:
                ranked.append((-score, m))
        chosen = sorted(m for _, m in sorted(ranked)[:size])
        place = {-1: -1} | {m: i for i, m in enumerate(chosen)}
        for m, i in place.items():
            if m >= 0:
                out[0][b, i] = tokens[b, m]
                out[1][b, i] = place[parent(parents, b, m)]
                out[2][b, i] = m
    return out


def check_trie(sequences, size, merge, got):
    """Fails unless the outputs are a trie of the sequences: one node for each prefix, in order."""
    tokens, parents, nodes, num_nodes = got
    for b in range(len(sequences)):
        count = int(num_nodes[b])
        first = list(dict.fromkeys(int(n) for n in nodes[b].flatten() if n >= 0))
        assert first == list(range(count)), "nodes are numbered in order of first appearance"
        assert (tokens[b, count:] == -1).all(), "tokens are -1 after the last node"
        assert (parents[b, count:] == -1).all(), "parents are -1 after the last node"
        texts = [tuple(int(tokens[b, i]) for i in reversed(path(parents, b, n))) for n in first]
        assert not merge or len(set(texts)) == count, "one node for what has one prefix"
        used = 0
        for k, sequence in enumerate(sequences[b].tolist()):
            length = sequence.index(-1) if -1 in sequence else len(sequence)
            row = [int(n) for n in nodes[b, k]]
            kept = row.index(-1) if -1 in row else len(row)
            assert set(row[kept:]) <= {-1}, "nothing follows a token without a node"
            for j in range(kept):
                assert texts[row[j]] == tuple(sequence[: j + 1]), "a node spells its prefix"
            if not merge:
                assert row[:kept] == list(range(used, used + kept)), "a chain of its own"
            used = max([used, *(n + 1 for n in row)])
            if kept < length:
                assert used == size, "a token has no node although there is room"
                known = {texts[n] for n in range(used)}
                assert not merge or tuple(sequence[: kept + 1]) not in known, "its node is there"
            assert kept <= length, "a node after the end"


def check_expansion(args, got):
    """Fails unless ids are exact, scores agree to float32 rounding and the frontier is the best."""
    logits, before, width, temperatures, temperature = args
    tokens, scores, frontier = got
    b, f, v = logits.shape
    assert (tokens.dtype, scores.dtype, frontier.dtype) == (torch.int64, torch.float32, torch.int64)
    assert tokens.shape == scores.shape == (b, f, width)
    for i in range(b):
        t = temperature if temperatures is None else float(temperatures[i])
        for j in range(f):
            row = logits[i, j].double()
            ranked = row.numpy()
            order = np.lexsort((np.arange(v), -ranked))[:width]
            t_here = 1.0 if t == 0 else float(np.float32(t))
            valid = math.isfinite(before[i, j]) and math.isfinite(row.max())
            if not (valid and math.isfinite(t) and t >= 0):
                order = order[:0]
            order = order[ranked[order] > -math.inf]
            scaled = (row - row.max()) / t_here
            if len(order):
                scaled += float(before[i, j]) - math.log(float(scaled.exp().sum()))
            want = scaled[torch.from_numpy(order.copy())]
            n = len(order)
            assert tokens[i, j].tolist() == [*order, *[-1] * (width - n)], (i, j)
            assert (scores[i, j, n:] == -math.inf).all(), (i, j)
            assert_close(f"scores[{i}, {j}]", scores[i, j, :n].double(), want, atol=4e-6, rtol=1e-6)
        flat = scores[i].flatten().tolist()
        best = sorted(range(len(flat)), key=lambda n, flat=flat: (-flat[n], n))[:width]
        assert frontier[i].tolist() == best, i
