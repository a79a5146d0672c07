"""Cases of `tree_attention`, `rerank_tree`, `build_trie` and `expand_tree`."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from proofs.case import SHORT, Args, Case, spread, zipf_logits

i32, i64 = torch.int32, torch.int64


def random_parents(b: int, n: int, g: Generator, shape: str = "random") -> Tensor:
    """[b, n] int64 parents.

    shape: "random", "chain", "wide" (all are children of the root) or "faulty" (some parents are
        out of range).
    """
    node = torch.arange(n)
    if shape == "chain":
        return (node - 1).expand(b, n).clone()
    if shape == "wide":
        return torch.full((b, n), -1)
    parents = (torch.rand(b, n, generator=g) * (node + 1)).long() - 1
    if shape == "faulty":
        bad = torch.rand(b, n, generator=g) < 0.3
        parents[bad] = torch.randint(-(2**31), 2**31, (b, n), generator=g)[bad]
    return parents


def attention_case(b, n, slots, dtype=i64, *, shape="random", window=0, layout="dense") -> Case:
    """A case of `tree_attention` in which some trees reach beyond the last slot."""

    def build(g: Generator) -> Args:
        parents = random_parents(b, n, g, shape).to(dtype)
        lengths = torch.randint(0, max(slots - n // 2, 1), (b,), generator=g)
        return spread(parents, layout), lengths, slots, window

    words = [f"B{b}", f"N{n}", f"S{slots}", str(dtype)[6:], shape, f"w{window}", layout]
    return Case("tree_attention", "-".join(words), build)


def rerank_case(b, m, size, dtype=i64, *, shape="random", levels=0, layout="dense") -> Case:
    """A case of `rerank_tree` with absent nodes; few `levels` of the scores make ties."""

    def build(g: Generator) -> Args:
        tokens = torch.randint(0, 1000, (b, m), generator=g)
        scores = -torch.rand(b, m, generator=g)
        if levels:
            scores = (scores * levels).floor()
        kind = torch.rand(b, m, generator=g)
        tokens[kind < 0.05] = -1
        scores[kind > 0.97] = -torch.inf
        scores[(kind > 0.95) & (kind < 0.96)] = torch.nan
        tensors = tokens.to(dtype), random_parents(b, m, g, shape).to(dtype), scores
        return *(spread(t, layout) for t in tensors), size

    words = [f"B{b}", f"M{m}", f"N{size}", str(dtype)[6:], shape, f"t{levels}", layout]
    return Case("rerank_tree", "-".join(words), build)


def trie_case(b, k, length, size, dtype=i64, *, merge=True, layout="dense") -> Case:
    """A case of `build_trie`: few distinct tokens, so that prefixes coincide; some end by -1."""

    def build(g: Generator) -> Args:
        sequences = torch.randint(0, 3, (b, k, length), generator=g)
        sequences[torch.rand(b, k, length, generator=g) < 0.1] = -1
        return spread(sequences.to(dtype), layout), size, merge

    words = [f"B{b}", f"K{k}", f"L{length}", f"N{size}", str(dtype)[6:]]
    return Case("build_trie", "-".join([*words, "merged" if merge else "apart", layout]), build)


def expand_case(
    b, f, v, width, dtype=torch.float32, *, temperature="one", rows="zipf", layout="dense"
) -> Case:
    """A case of `expand_tree`.

    rows: "zipf", "ties" (few distinct logits) or "faulty" (some rows are not finite or hold -inf,
        some nodes are absent).
    temperature: "one", "warm", "zero" or "tensor".
    """

    def build(g: Generator) -> Args:
        logits = zipf_logits(b * f, v, g).view(b, f, v)
        scores = -3 * torch.rand(b, f, generator=g)
        if rows == "ties":
            logits, scores = logits.round(), torch.zeros(b, f)
        if rows == "faulty":
            flat = logits.view(b * f, v)
            for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
                flat[1 + i :: 7, v // 2] = value
            flat[4::7], flat[5::7, 1:] = -torch.inf, -torch.inf
            scores[:, f // 2] = -torch.inf
        logits = spread(logits.to(dtype), layout)
        scalar = {"warm": 1.7, "zero": 0.0}.get(temperature, 1.0)
        vector = torch.rand(b, generator=g) * (torch.rand(b, generator=g) < 0.8)
        return logits, scores, width, vector if temperature == "tensor" else None, scalar

    words = [f"B{b}", f"F{f}", f"V{v}", f"K{width}", SHORT[dtype], rows, temperature, layout]
    return Case("expand_tree", "-".join(words), build, b * f, v)


CASES: tuple[Case, ...] = (
    attention_case(3, 7, 20), attention_case(2, 7, 20, i32, window=4),
    attention_case(3, 9, 31, shape="faulty", window=1),
    attention_case(2, 6, 11, i32, shape="chain", window=3, layout="transposed"),
    attention_case(2, 6, 40, shape="wide", layout="sliced"), attention_case(0, 4, 9),
    attention_case(2, 0, 5), attention_case(1, 1, 0), attention_case(2, 300, 517, i32),
    expand_case(2, 3, 131, 4), expand_case(2, 3, 131, 4, torch.bfloat16, layout="sliced"),
    expand_case(3, 2, 517, 10, torch.float16, temperature="tensor"),
    expand_case(2, 3, 67, 6, rows="ties", temperature="warm"),
    expand_case(3, 5, 70, 8, rows="faulty"),
    expand_case(2, 4, 70, 8, torch.bfloat16, rows="faulty", temperature="tensor"),
    expand_case(2, 2, 5, 8, temperature="zero"), expand_case(2, 3, 1, 1), expand_case(1, 2, 1, 64),
    expand_case(0, 3, 17, 4), expand_case(1, 2, 4097, 3, torch.bfloat16),
    expand_case(1, 1, 9001, 64), expand_case(1, 2, 9001, 5, rows="ties"),
    expand_case(1, 3, 131073, 10, torch.bfloat16),
    expand_case(2, 8, 151936, 10, temperature="warm"), rerank_case(3, 13, 5),
    rerank_case(3, 13, 6, i32, levels=3, layout="transposed"),
    rerank_case(2, 9, 4, shape="faulty", levels=2, layout="sliced"),
    rerank_case(2, 9, 4, i32, shape="chain"), rerank_case(2, 9, 12, shape="wide"),
    rerank_case(2, 9, 0), rerank_case(2, 0, 3), rerank_case(0, 5, 3),
    rerank_case(2, 331, 60, levels=20), trie_case(3, 4, 5, 20),
    trie_case(3, 4, 5, 7, i32, layout="transposed"),
    trie_case(2, 3, 4, 9, merge=False, layout="sliced"), trie_case(2, 3, 4, 30, i32, merge=False),
    trie_case(2, 1, 6, 6), trie_case(0, 3, 4, 5), trie_case(2, 0, 4, 3), trie_case(2, 3, 0, 3),
    trie_case(2, 3, 4, 0), trie_case(2, 40, 9, 300),
)  # fmt: skip
