"""Cases of the small tree ops for `testing`."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from specdec_kernels._cases import Args, Case, sliced

i32, i64 = torch.int32, torch.int64


def random_parents(b: int, n: int, g: Generator, shape: str = "random") -> Tensor:
    """[b, n] int64 parents: "random", "chain", "wide" (all below the root) or "faulty" (with
    parents out of range)."""
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


def _spread(x: Tensor, layout: str) -> Tensor:
    """The same values; "sliced" in a wider tensor, "transposed" with the last stride not 1."""
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    return sliced(x) if layout == "sliced" else x


def attention_case(
    b: int,
    n: int,
    slots: int,
    dtype: torch.dtype = i64,
    *,
    shape: str = "random",
    window: int = 0,
    layout: str = "dense",
) -> Case:
    """A case of `tree_attention`; some trees reach beyond the last slot."""

    def build(g: Generator) -> Args:
        parents = random_parents(b, n, g, shape).to(dtype)
        lengths = torch.randint(0, max(slots - n // 2, 1), (b,), generator=g)
        return _spread(parents, layout), lengths, slots, window

    words = [f"B{b}", f"N{n}", f"S{slots}", str(dtype)[6:], shape, f"w{window}", layout]
    return Case("tree_attention", "-".join(words), build)


def rerank_case(
    b: int,
    m: int,
    size: int,
    dtype: torch.dtype = i64,
    *,
    shape: str = "random",
    levels: int = 0,
    layout: str = "dense",
) -> Case:
    """A case of `rerank_tree`, with absent nodes; `levels` distinct scores make ties."""

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
        return *(_spread(t, layout) for t in tensors), size

    words = [f"B{b}", f"M{m}", f"N{size}", str(dtype)[6:], shape, f"t{levels}", layout]
    return Case("rerank_tree", "-".join(words), build)


def trie_case(
    b: int,
    k: int,
    length: int,
    size: int,
    dtype: torch.dtype = i64,
    *,
    merge: bool = True,
    layout: str = "dense",
) -> Case:
    """A case of `build_trie`: few tokens, so that prefixes coincide; -1 ends some sequences."""

    def build(g: Generator) -> Args:
        sequences = torch.randint(0, 3, (b, k, length), generator=g)
        sequences[torch.rand(b, k, length, generator=g) < 0.1] = -1
        return _spread(sequences.to(dtype), layout), size, merge

    words = [f"B{b}", f"K{k}", f"L{length}", f"N{size}", str(dtype)[6:]]
    return Case("build_trie", "-".join([*words, "merged" if merge else "apart", layout]), build)


CASES: tuple[Case, ...] = (
    attention_case(3, 7, 20),
    attention_case(2, 7, 20, i32, window=4),
    attention_case(3, 9, 31, shape="faulty", window=1),
    attention_case(2, 6, 11, i32, shape="chain", window=3, layout="transposed"),
    attention_case(2, 6, 40, shape="wide", layout="sliced"),
    attention_case(0, 4, 9),
    attention_case(2, 0, 5),
    attention_case(1, 1, 0),
    attention_case(2, 300, 517, i32),
    rerank_case(3, 13, 5),
    rerank_case(3, 13, 6, i32, levels=3, layout="transposed"),
    rerank_case(2, 9, 4, shape="faulty", levels=2, layout="sliced"),
    rerank_case(2, 9, 4, i32, shape="chain"),
    rerank_case(2, 9, 12, shape="wide"),
    rerank_case(2, 9, 0),
    rerank_case(2, 0, 3),
    rerank_case(0, 5, 3),
    rerank_case(2, 331, 60, levels=20),
    trie_case(3, 4, 5, 20),
    trie_case(3, 4, 5, 7, i32, layout="transposed"),
    trie_case(2, 3, 4, 9, merge=False, layout="sliced"),
    trie_case(2, 3, 4, 30, i32, merge=False),
    trie_case(2, 1, 6, 6),
    trie_case(0, 3, 4, 5),
    trie_case(2, 0, 4, 3),
    trie_case(2, 3, 0, 3),
    trie_case(2, 3, 4, 0),
    trie_case(2, 40, 9, 300),
)
