"""One random call of each public function, most of them valid."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from fuzz.values import (
    FLOATS,
    IDS,
    any_int64,
    ids,
    integers,
    laid_out,
    logits,
    odd,
    rows,
    size,
    vocabulary,
)

import specdec_kernels as sk
from specdec_kernels import _library
from specdec_kernels.arguments.weight_blocks import FORMATS


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: dict[str, Any]


def parameter(r, n, likely, unlikely, dtype=torch.float32):
    """A scalar, or a vector in which values out of range are legal."""
    if r.happens(0.6):
        return r.choice(likely)
    values = [r.choice(unlikely if r.happens(0.1) else likely) for _ in range(n)]
    return laid_out(r, torch.tensor(values, dtype=dtype))


def sampling(r, n, v):
    """Some of the four sampling parameters."""
    nan, inf = float("nan"), float("inf")
    given = {
        "temperature": lambda: parameter(
            r, n, (1.0, 1.0, 0.7, 0.0, 3.0, 1e-30, 1e30), (-1.0, nan, inf, 1e-45, 3e38)
        ),
        "top_k": lambda: parameter(
            r, n, (0, 1, 2, 5, max(v // 2, 1), v, v + 1), (-1, -(2**31), 2**31 - 1),
            r.choice(IDS)
        ),
        "top_p": lambda: parameter(
            r, n, (1.0, 0.9, 0.5, 0.1, 1e-6, 1 - 1e-7), (0.0, -1.0, 1.5, nan, inf)
        ),
        "min_p": lambda: parameter(r, n, (0.0, 0.05, 0.5, 1.0, 1e-30), (-0.1, 2.0, nan)),
    }  # fmt: skip
    return {name: make() for name, make in given.items() if r.happens(0.35)}


def noise(r, n):
    made = {name: any_int64(r, n) for name in ("seeds", "positions")}
    return {n: laid_out(r, x.to(torch.int32) if r.happens(0.2) else x) for n, x in made.items()}


def words(r, shape):
    """A bitmask for rows of a shape: of nothing, of few or of most tokens in each."""
    lead, n = shape[:-1], -(-shape[-1] // 32)
    made = [integers(r, -(2**31), 2**31, (*lead, n), torch.int32) for _ in range(3)]
    some, few = made[0] | made[1], made[0] & made[1] & made[2]
    kind = integers(r, 0, 3, (*lead, 1))
    x = torch.where(kind == 0, few, torch.where(kind == 1, some, made[0]))
    return laid_out(r, torch.where(integers(r, 0, 8, (*lead, 1)) == 0, 0, x))


def bitmask(r, shape):
    return {"token_bitmask": words(r, shape)} if r.happens(0.3) else {}


def sample(r):
    n, v = size(r, 6), vocabulary(r)
    x = laid_out(r, logits(r, (n, v), r.choice(FLOATS)))
    more = {"noise": r.choice(("draft", "residual", "shared"))}
    if more["noise"] != "shared":
        more["method"] = r.choice((None, "cdf", "gumbel"))
    more |= bitmask(r, (n, v))
    return Call(sk.sample, {"logits": x, **sampling(r, n, v), **noise(r, n), **more})


def kept_tokens(r):
    b, n, v = size(r, 4), size(r, 4), vocabulary(r)
    kind = r.choice(("logits", "logits", "probs"))
    shape, more = (b, n, v), {"kind": kind, "max_kept": r.choice((1, 3, 20, 700, 1024))}
    if r.happens(0.3):
        shape = (b, v)
    elif r.happens(0.7):
        more["rows"] = laid_out(r, ids(r, -2, n + 1, (b, size(r, 4)), r.choice(IDS)))
        if r.happens(0.4):
            shape = (b * n, v)
            offsets = sorted(r.randrange(-1, b * n + 2) for _ in range(b + 1))
            more["target_indptr"] = torch.tensor(offsets, dtype=r.choice(IDS))
    target = laid_out(r, rows(r, kind, shape, r.choice(FLOATS)))
    more |= bitmask(r, shape)
    return Call(sk.kept_tokens, {"target": target, **sampling(r, b, v), **more})


def draft(r, kind, lead, b, v):
    """(draft, draft_map, the number of ids that it may propose); `lead` are the leading sizes."""
    form = r.choice(("none", "rows", "rows", "sampled", "sparse"))
    if form == "none":
        return None, None, v
    dtype = r.choice(FLOATS)
    if form == "sparse":
        k = r.choice((1, 2, 3, 8, 129, 200))
        shape = (*lead, k)
        listed = ids(r, -1, v, shape, r.choice(IDS))
        probs = rows(r, "probs", shape, dtype)
        return sk.SparseDraft(laid_out(r, listed), laid_out(r, probs)), None, v
    d = r.choice((v, v, max(v - 3, 1), v + 3, vocabulary(r)))
    kind = kind if form == "rows" else "logits"
    x = laid_out(r, rows(r, kind, (*lead, d), dtype))
    mapped = None
    if r.happens(0.3):
        mapped = sk.DraftMap(laid_out(r, ids(r, -1, d, (v,), torch.int32)))
    if form == "sampled":
        temperature = parameter(r, b, (1.0, 0.5, 0.0), (-1.0, float("nan")))
        statistics = (x.double().logsumexp(-1), x.float().amin(-1))
        mask = words(r, x.shape) if r.happens(0.3) else None
        x = sk.SampledDraft(x, *(laid_out(r, odd(r, s)) for s in statistics), temperature, mask)
    return x, mapped, max(v, d) if mapped is None else v


def uniforms(r, shape):
    """None, or numbers in [0, 1), with a few that are not."""
    if r.happens(0.6):
        return None
    x = torch.rand(shape, generator=r.tensors, dtype=torch.float64)
    if x.numel() and r.happens(0.4):
        value = r.choice((0.0, -0.0, 1 - 2.0**-53, 1.0, -0.25, -5e-324, float("nan"), 7.0))
        x.view(-1)[r.randrange(x.numel())] = value
    return x


def limits(r, b, v):
    more = {}
    if r.happens(0.2):
        more["eos_token_ids"] = ids(r, 0, v, (r.randrange(4),), r.choice(IDS))
    if r.happens(0.2):
        more["max_new_tokens"] = any_int64(r, b) % r.choice((3, 6, 2**40)) - 1
    if r.happens(0.3):
        more["with_logprobs"] = False
    more["with_accept_probs"] = r.happens(0.5)
    return more


def offsets(r, b, most):
    """target_indptr [B+1] and the number of rows; sometimes the offsets are not ascending."""
    counts = [r.randint(1, most) for _ in range(b)]
    at = torch.tensor([0, *counts]).cumsum(0).to(r.choice(IDS))
    n = int(at[-1])
    return (ids(r, -1, n + 2, (b + 1,), at.dtype) if r.happens(0.1) else at), n


def chosen_rows(r, b, n):
    """`draft_rows` [B, N], and the leading sizes of the draft that it chooses from."""
    m = r.choice((1, 2, n + 1))
    lead = (b, m) if r.happens(0.5) else (m,)
    return laid_out(r, ids(r, 0, m, (b, n), r.choice(IDS))), lead


def verify_chain(r):
    b, gamma, v = size(r, 4), size(r, 5), vocabulary(r)
    kind, rule = r.choice(("logits", "probs")), r.choice(sk.RULES)
    lead, target_shape, more = (b, gamma), (b, gamma + 1, v), {}
    if r.happens(0.25):
        more["target_indptr"], n = offsets(r, b, gamma + 1)
        target_shape = (n, v)
        if r.happens(0.5):
            lead = (n - b,)
    if r.happens(0.25):
        more["draft_rows"], lead = chosen_rows(r, b, gamma)
    q, mapped, limit = draft(r, kind, lead, b, v)
    if isinstance(q, sk.SampledDraft) and len(lead) == 1 and "draft_rows" not in more:
        # The statistics are [B, gamma].
        q = q._replace(logsumexp=torch.zeros(b, gamma), threshold=torch.full((b, gamma), -9.0))
    tokens = laid_out(r, ids(r, 0 if r.happens(0.7) else -1, limit, (b, gamma), r.choice(IDS)))
    u = None if rule == "match" else uniforms(r, (b, gamma + 1))
    if rule == "lenient":
        more["lenience"] = r.choice((1.0, 0.5, 1e-30))
    if rule == "synthetic":
        more["synthetic_rates"] = odd(r, torch.rand(gamma, generator=r.tensors))
    if rule == "typical":
        more |= {"typical_epsilon": r.choice((0.0, 0.09, 1.0)), "typical_delta": r.choice((0, 9.0))}
    if rule == "top_beta":
        more["top_beta_rank"] = r.choice((1, 3, 2**62))
        more["top_beta_distance"] = r.choice((0.0, 1.0, math.inf))
    target = laid_out(r, rows(r, kind, target_shape, r.choice(FLOATS)))
    more |= {} if rule == "synthetic" else bitmask(r, target_shape)
    return Call(sk.verify_chain, {
        "target": target, "draft_token_ids": tokens, "draft": q, "kind": kind, "rule": rule,
        "uniforms": u, "draft_map": mapped,
        **sampling(r, b, v), **noise(r, b), **limits(r, b, v), **more,
    })  # fmt: skip


def apply_penalties_(r):
    b, n, v = size(r, 4), size(r, 5), vocabulary(r)
    tokens = laid_out(r, ids(r, -1, v, (b, n), r.choice(IDS)))
    drafts = sk.Tree(tokens, parents(r, b, n)) if r.happens(0.5) else tokens
    target, more = not_expanded(laid_out(r, logits(r, (b, n + 1, v), r.choice(FLOATS)))), {}
    if r.happens(0.6):
        more["token_counts"] = laid_out(r, integers(r, -1, 3, (b, v), torch.int32))
    if r.happens(0.5):
        more["prompt_mask"] = words(r, (b, v))
    for name in ("repetition", "presence", "frequency"):
        if r.happens(0.5):
            more[f"{name}_penalty"] = parameter(r, b, (1.0, 0.5, 1.7), (0.0, -2.0, math.nan))
    if r.happens(0.4):
        k = r.choice((1, 3, 40))
        more["bias_ids"] = ids(r, -1, v + 1, (b, k), r.choice(IDS))
        more["biases"] = torch.randn(b, k, generator=r.tensors)
    if r.happens(0.4):
        more["min_new_tokens"] = any_int64(r, b) % 5
        more["eos_token_ids"] = ids(r, 0, v, (r.randrange(3),), r.choice(IDS))
    return Call(sk.apply_penalties_, {"target": target, "draft_token_ids": drafts, **more})


def parents(r, b, n):
    """[B, N]; sometimes a parent does not precede its child."""
    x = torch.tensor([[r.randrange(-1, i) for i in range(n)] for _ in range(b)])
    x = x.reshape(b, n).to(r.choice(IDS))
    if x.numel() and r.happens(0.15):
        x.view(-1)[r.randrange(x.numel())] = r.choice((-2, n, n - 1, 2**31 - 1, -(2**31)))
    return laid_out(r, x)


def verify_tree(r):
    b, n, v = size(r, 4), size(r, 7), vocabulary(r)
    kind, rule = r.choice(("logits", "probs")), r.choice(sk.TREE_RULES)
    more, lead, target_shape = {}, (b, n), (b, n + 1, v)
    if r.happens(0.2):
        more["target_indptr"], count = offsets(r, b, n + 1)
        target_shape = (count, v)
    if r.happens(0.5):
        more["draft_rows"], lead = chosen_rows(r, b, n)
    q, mapped, limit = draft(r, kind, lead, b, v)
    if q is None:
        more.pop("draft_rows", None)
        rule = "greedy" if rule == "k_seq" else rule
    few = r.choice((2, limit, limit))  # equal siblings
    tree = sk.Tree(laid_out(r, ids(r, -1, min(few, limit), (b, n), r.choice(IDS))),
                   parents(r, b, n))  # fmt: skip
    if r.happens(0.3):
        more["max_depth"] = r.randint(0, n)
    target = laid_out(r, rows(r, kind, target_shape, r.choice(FLOATS)))
    more |= bitmask(r, target_shape)
    return Call(sk.verify_tree, {
        "target": target, "tree": tree, "draft": q, "kind": kind, "rule": rule,
        "uniforms": None if rule == "match" else uniforms(r, (b, 2 * n + 1)), "draft_map": mapped,
        **sampling(r, b, v), **noise(r, b), **limits(r, b, v), **more,
    })  # fmt: skip


CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float64)


def caches(r, b, s):
    """Up to three caches [B, H, S, D]; H, S, D and the dtype differ."""
    out = []
    for _ in range(r.choice((0, 1, 2, 3))):
        shape = (b, size(r, 3), s + r.randrange(2), r.choice((0, 1, 3, 8, 12, 33)))
        x = laid_out(r, integers(r, -100, 100, shape, r.choice(CACHE_DTYPES)))
        out.append(not_expanded(x))
    return out


def not_expanded(x):
    """Tensors that are written do not overlap themselves."""
    return x.clone() if x.shape[0] > 1 and x.stride(0) == 0 else x


def places(r, b, low, high):
    """[B] in [low, high), some far outside."""
    x = integers(r, low, high, (b,))
    if r.happens(0.3) and high < 2**31:
        x = x.to(torch.int32)
    if b and r.happens(0.15):
        far = (-(2**31), -1, 2**31 - 1)
        if x.dtype == torch.int64:
            far = (-(2**63), -1, 2**31, 2**62, 2**63 - 1)
        x[r.randrange(b)] = r.choice(far)
    return laid_out(r, x)


def path(r, b, s):
    """[B, P]: ascending nodes, then -1; some rows are arbitrary."""
    p = size(r, 5)
    x = torch.full((b, p), -1)
    for row in x:
        count = r.randint(0, min(p, s))
        row[:count] = torch.tensor(sorted(r.sample(range(s), count)), dtype=torch.int64)
    x = x.to(r.choice(IDS))
    return laid_out(r, ids(r, -2, s + 2, (b, p), x.dtype, 0.2) if r.happens(0.15) else x)


def kv_append_(r):
    b, s, n = size(r, 4), size(r, 9), size(r, 5)
    given = caches(r, b, s)
    new = [laid_out(r, integers(r, -9, 9, (b, c.shape[1], n, c.shape[3]), c.dtype)) for c in given]
    if new and r.happens(0.02):
        new[0] = given[0][:, :, :n]  # overlaps
    where = places(r, b, -n, s + 1)
    return Call(sk.kv_append_, {"caches": given, "entries": new, "positions": where})


def kv_truncate_(r):
    b, s = size(r, 4), size(r, 9)
    return Call(sk.kv_truncate_, {
        "caches": caches(r, b, s), "lengths": places(r, b, 0, s + 1).clone(),
        "new_lengths": places(r, b, -1, s + 1), "zero_fill": r.happens(0.7),
    })  # fmt: skip


def kv_compact_(r):
    b, s = size(r, 4), size(r, 9)
    return Call(sk.kv_compact_,
                {"caches": caches(r, b, s), "base": places(r, b, -1, s + 1),
                 "path": path(r, b, s)})  # fmt: skip


def paged_caches(r, b, m, block):
    """Up to three caches of `block` slots a block, and block tables [b, m], some with a fault."""
    blocks = b * m + r.randrange(2)
    given = [c.transpose(1, 2).contiguous() if r.happens(0.5) else c.transpose(1, 2)
             for c in caches(r, blocks, block) if c.shape[2] == block]  # fmt: skip
    tables = torch.tensor(r.sample(range(b * m), b * m), dtype=r.choice(IDS)).view(b, m)
    if tables.numel() and r.happens(0.2):
        faults = [-1, blocks, 2**31 - 1, -(2**31)]
        faults += [2**32, 2**63 - 1, -(2**63)] if tables.dtype == torch.int64 else []
        tables.view(-1)[r.randrange(tables.numel())] = r.choice(faults)
    return given, laid_out(r, tables)


def paged_append_(r):
    b, m, n, block = size(r, 4), size(r, 4), size(r, 5), r.choice((1, 2, 4, 5))
    given, tables = paged_caches(r, b, m, block)
    new = [laid_out(r, integers(r, -9, 9, (b, n, *c.shape[2:]), c.dtype)) for c in given]
    return Call(sk.paged_append_, {
        "caches": given, "entries": new, "block_tables": tables,
        "positions": places(r, b, -n, m * block + 1),
        "counts": places(r, b, -1, n + 2) if r.happens(0.5) else None,
    })  # fmt: skip


def paged_compact_(r):
    b, m, block = size(r, 4), size(r, 4), r.choice((1, 2, 4, 5))
    given, tables = paged_caches(r, b, m, block)
    return Call(sk.paged_compact_, {
        "caches": given, "block_tables": tables, "base": places(r, b, 0, m * block),
        "path": path(r, b, m * block),
    })  # fmt: skip


def paged_truncate_(r):
    b, m, block = size(r, 4), size(r, 6), r.choice((1, 2, 4, 16, 2**31, 2**62))
    high = min(m * block + 3, 2**62)
    tables = laid_out(r, integers(r, -1, 99, (b, m), torch.int32))
    return Call(sk.paged_truncate_, {
        "block_tables": tables.clone(), "lengths": places(r, b, -1, high).clone(),
        "new_lengths": places(r, b, -1, high), "block_size": block,
    })  # fmt: skip


def kv_realign_(r):
    b, s = size(r, 4), size(r, 9)
    return Call(sk.kv_realign_, {
        "caches": caches(r, b, s), "starts": places(r, b, -2, s + 1),
        "lengths": places(r, b, 0, s + 1), "shifts": places(r, b, -s, s + 1),
        "zero_fill": r.happens(0.5),
    })  # fmt: skip


def ring_truncate_(r):
    b, s = size(r, 4), max(size(r, 9), 1)
    return Call(sk.ring_truncate_, {
        "caches": caches(r, b, s), "lengths": places(r, b, 0, 4 * s).clone(),
        "new_lengths": places(r, b, -1, 4 * s), "window": r.randint(1, s),
        "zero_fill": r.happens(0.7),
    })  # fmt: skip


def tree_attention(r):
    b, n = size(r, 4), size(r, 9)
    return Call(sk.tree_attention, {
        "parents": parents(r, b, n), "lengths": places(r, b, 0, 9),
        "slots": r.choice((0, 1, 7, n + 9, 40)), "window": r.choice((0, 0, 1, 4, 2**62, 2**63 - 1)),
    })  # fmt: skip


def rerank_tree(r):
    b, m = size(r, 4), size(r, 9)
    return Call(sk.rerank_tree, {
        "tokens": laid_out(r, ids(r, -1, 50, (b, m), r.choice(IDS))), "parents": parents(r, b, m),
        "scores": laid_out(r, logits(r, (b, m), torch.float32)), "size": r.choice((0, 1, m, m + 2)),
    })  # fmt: skip


def build_trie(r):
    shape = size(r, 3), size(r, 4), size(r, 5)
    merge = r.happens(0.6)
    drawn = ids(r, -1, 3, shape, r.choice(IDS))
    size_ = None if r.happens(0.3) else r.choice((0, 1, 5, 99))
    return Call(sk.build_trie, {"sequences": laid_out(r, drawn), "size": size_, "merge": merge})


def expand_tree(r):
    b, f, v, width = size(r, 3), r.randint(1, 4), vocabulary(r), r.choice((1, 2, 3, 8, 64))
    return Call(sk.expand_tree, {
        "logits": laid_out(r, logits(r, (b, f, v), r.choice(FLOATS))),
        "scores": laid_out(r, logits(r, (b, f), torch.float32)), "width": width,
        "temperature": parameter(r, b, (1.0, 0.5, 0.0, 1e-30), (-1.0, float("nan"), 3e38)),
    })  # fmt: skip


def ngram_propose(r):
    b, columns, low = size(r, 5), size(r, 40), r.choice((1, 1, 2, 3))
    history = ids(r, -1, r.choice((1, 2, 3, 9)), (b, columns), r.choice(IDS), 0.05)
    return Call(sk.ngram_propose, {
        "history": laid_out(r, history), "lengths": places(r, b, 0, columns + 1),
        "gamma": r.choice((0, 1, 2, 5, 60)), "min_ngram": low,
        "max_ngram": low + r.choice((0, 1, 3, 60, 2**62)),
    })  # fmt: skip


def weight(r):
    n, k = r.choice((1, 2, 7, 8, 15, 17, 32, 33, 70)), r.choice((1, 2, 3, 31, 33, 64, 257, 600))
    return odd(r, torch.randn(n, k, generator=r.tensors).to(r.choice(FLOATS)))


def pack_linear(r):
    return Call(sk.pack_linear, {"weight": weight(r)})


def blocks(r):
    """Blocks of any bits, and their format."""
    kind = r.choice(FORMATS)
    shape = r.choice((1, 7, 8, 31, 33, 70)), r.choice((1, 2, 3)) * kind.file_bytes
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=r.tensors), kind.name


def pack_blocks(r):
    return Call(sk.pack_blocks, dict(zip(("blocks", "format"), blocks(r), strict=True)))


def unpack_blocks(r):
    return Call(sk.unpack_blocks, {"packed": sk.pack_blocks(*blocks(r))})


def packed_linear(r):
    w, packed = weight(r), None
    if r.happens(0.5):
        packed = sk.pack_blocks(*blocks(r))
        w = sk.unpack_blocks(packed).to(r.choice(FLOATS))
    lead = r.choice(((), (1,), (0,), (2, 3), (8,), (13,), (64,), (2, 65)))
    x = torch.randn(*lead, w.shape[1], generator=r.tensors).to(w.dtype)
    bias = torch.randn(w.shape[0], generator=r.tensors).to(w.dtype) if r.happens(0.5) else None
    bias = bias if bias is None else laid_out(r, bias)
    return Call(sk.packed_linear, {
        "x": laid_out(r, odd(r, x)), "packed": packed or sk.pack_linear(w), "bias": bias,
    })  # fmt: skip


def cached_attention(r):
    b, n, s = size(r, 3), size(r, 9), size(r, r.choice((5, 70, 300)))
    h_kv, group, dtype = r.choice((1, 2, 3)), r.choice((1, 2, 3, 7)), r.choice(FLOATS)
    d, d_v = (r.choice((1, 2, 3, 4, 7, 8, 16, 31, 33, 64, 80, 96, 128)) for _ in range(2))
    shapes = (b, h_kv * group, n, d), (b, h_kv, s, d), (b, h_kv, s, d_v)
    tensors = [laid_out(r, odd(r, torch.randn(shape, generator=r.tensors).to(dtype)))
               for shape in shapes]  # fmt: skip
    mask = torch.rand(b, 1, n, s, generator=r.tensors) < r.choice((0.0, 0.3, 0.9, 1.0))
    return Call(sk.cached_attention, {
        **dict(zip(("query", "keys", "values"), tensors, strict=True)),
        "mask": r.choice((None, laid_out(r, mask))), "scale": r.choice((None, 0.5, 0.0, -3.0)),
        "soft_cap": r.choice((None, 0.1, 30.0)),
    })  # fmt: skip


def weights(r, sizes, dtype):
    """Packed weights [N, K]."""
    drawn = (torch.randn(size, generator=r.tensors) / size[1] ** 0.5 for size in sizes)
    return [sk.pack_linear(odd(r, weight.to(dtype))) for weight in drawn]


def vectors(r, sizes, dtype):
    return [laid_out(r, odd(r, torch.randn(n, generator=r.tensors).to(dtype))) for n in sizes]


def hidden_states(r, shape, dtype):
    return laid_out(r, odd(r, torch.randn(shape, generator=r.tensors).to(dtype)))


def norm_qkv_rope(r):
    b, n, c, dtype = size(r, 3), size(r, 9), r.choice((1, 2, 7, 33, 64, 257)), r.choice(FLOATS)
    h_kv, d = r.choice((1, 2, 3)), r.choice((2, 4, 6, 10, 34, 64))
    outputs = [h_kv * r.choice((1, 2, 3)) * d, h_kv * d, h_kv * d]
    angles = r.choice((1, b)), n, d
    return Call(sk.norm_qkv_rope, {
        "x": hidden_states(r, (b, n, c), dtype), "norm": vectors(r, [c], dtype)[0],
        "qkv": weights(r, [(k, c) for k in outputs], dtype),
        "cos": hidden_states(r, angles, dtype), "sin": hidden_states(r, angles, dtype),
        "biases": vectors(r, outputs, dtype) if r.happens(0.5) else [],
        "head_norms": vectors(r, [d, d], dtype) if r.happens(0.5) else [],
        "epsilon": r.choice((0.0, 1e-6, 1e-5, 0.5, 1e30)),
    })  # fmt: skip


def output_norm_mlp(r):
    b, n, c, dtype = size(r, 3), size(r, 9), r.choice((1, 2, 7, 33, 64, 257)), r.choice(FLOATS)
    a, inner = r.choice((1, 6, 34, 64)), r.choice((1, 2, 17, 33, 70, 300))
    output, *mlp = weights(r, [(c, a), (inner, c), (inner, c), (c, inner)], dtype)
    return Call(sk.output_norm_mlp, {
        "attended": hidden_states(r, (b, n, a), dtype),
        "residual": hidden_states(r, (b, n, c), dtype), "norm": vectors(r, [c], dtype)[0],
        "output": output, "mlp": mlp,
        "output_bias": vectors(r, [c], dtype)[0] if r.happens(0.5) else None,
        "biases": vectors(r, [inner, inner, c], dtype) if r.happens(0.5) else [],
        "epsilon": r.choice((0.0, 1e-6, 1e-5, 0.5, 1e30)),
    })  # fmt: skip


def decoder_layers_(r):
    b, n, c, dtype = size(r, 3), size(r, 5), r.choice((1, 2, 7, 33, 64)), r.choice(FLOATS)
    s, parts = size(r, r.choice((5, 70))), r.choice((1, 2))
    layers, caches = layers_over_caches(r, b, c, s + r.choice((0, 0, 3)), parts, dtype)
    angles = r.choice((1, b)), n, caches[0].shape[3]
    mask = torch.rand(b, 1, n, s, generator=r.tensors) < r.choice((0.0, 0.5, 1.0))
    return Call(sk.decoder_layers_, {
        "x": hidden_states(r, (b, n, c * parts), dtype), "layers": layers,
        "cos": hidden_states(r, angles, dtype), "sin": hidden_states(r, angles, dtype),
        "caches": caches, "positions": places(r, b, -n, s + 1), "mask": laid_out(r, mask),
        "every_layer": r.happens(0.5),
    })  # fmt: skip


def layers_over_caches(r, b, c, s, parts, dtype):
    """Up to three layers, and their caches of s slots."""
    h_kv, d, inner = r.choice((1, 2, 3)), r.choice((2, 4, 10, 34)), r.choice((1, 17, 70))
    h = h_kv * r.choice((1, 2, 3))
    outputs = [h * d, h_kv * d, h_kv * d]
    has_biases, has_output_bias, has_norms = (r.happens(0.5) for _ in range(3))
    epsilon, scale, layers = r.choice((0.0, 1e-5, 0.5)), r.choice((0.0, 0.3, -2.0)), []
    for i in range(r.choice((1, 1, 2, 3))):
        width = c * parts if i == 0 else c
        packed = weights(r, [*((k, width) for k in outputs), (c, h * d), (inner, c), (inner, c),
                             (c, inner)], dtype)  # fmt: skip
        norm, other, bias = vectors(r, [width, c, c], dtype)
        layers.append(sk.PackedDecoderLayer(
            norms=[norm.reshape(parts, c) if i == 0 and parts > 1 else norm, other],
            qkv=packed[:3], output=packed[3], mlp=packed[4:], epsilon=epsilon, scale=scale,
            qkv_biases=vectors(r, outputs, dtype) if has_biases else [],
            output_bias=bias if has_output_bias else None,
            mlp_biases=vectors(r, [inner, inner, c], dtype) if has_biases else [],
            head_norms=vectors(r, [d, d], dtype) if has_norms else [],
        ))  # fmt: skip
    shape = b, h_kv, s, d
    caches = [not_expanded(hidden_states(r, shape, dtype)) for _ in range(2 * len(layers))]
    return sk.PackedDecoderLayers(layers), caches


def grow_tree_(r):
    b, n, c, dtype = size(r, 3), r.choice((1, 2, 5)), r.choice((1, 2, 7, 33)), r.choice(FLOATS)
    width, depth, vocab = r.choice((1, 2, 4, 9)), r.choice((0, 1, 2, 4)), r.choice((1, 3, 40))
    s = n + max(depth - 1, 0) * width + r.choice((0, 5, 60))
    layers, caches = layers_over_caches(r, b, c, s, 2, dtype)
    outputs, mapped = r.choice((1, 2, vocab)), r.happens(0.5)
    outputs = outputs if mapped else min(outputs, vocab)
    numbers = [torch.randint(*ends, (b,), generator=r.tensors) for ends in (
        (0, s - n - max(depth - 1, 0) * width + 1), (1, n + 1), (-1, depth + 1))]  # fmt: skip
    starts, counts, limits = (laid_out(r, x if r.happens(0.5) else x.int()) for x in numbers)
    ids, tokens = (torch.randint(0, vocab, k, generator=r.tensors) for k in ((outputs,), (b, n)))
    angles = s + r.choice((0, 9)), caches[0].shape[3]
    head = sk.PackedHead(
        layers, hidden_states(r, (vocab, c), dtype), *vectors(r, [c], dtype),
        *weights(r, [(outputs, c)], dtype), laid_out(r, ids) if mapped else None,
    )  # fmt: skip
    return Call(sk.grow_tree_, {
        "hidden": hidden_states(r, (b, n, c), dtype), "tokens": laid_out(r, tokens), "head": head,
        "cos": hidden_states(r, angles, dtype), "sin": hidden_states(r, angles, dtype),
        "caches": caches, "starts": starts, "counts": counts, "limits": limits, "width": width,
        "size": r.choice((1, 3, 30)), "min_probability": r.choice((0.0, 0.1, 1.0)),
    })  # fmt: skip


MAKERS = {op: globals()[op] for op in _library.OPS}
