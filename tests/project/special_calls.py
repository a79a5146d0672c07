"""Wrong calls whose message depends on several arguments or on very large ones.

A row is what to change in the good arguments that wrong_calls.py makes of an op, and the message.
"""

import torch

from specdec_kernels import RULES, pack_linear


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def i32(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def f64(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def f32(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def packed(*sizes):
    """The panels of weights [N, K], their inputs and their outputs."""
    panels = [pack_linear(f32(*size)).panels for size in sizes]
    return panels, [k for _, k in sizes], [n for n, _ in sizes]


def shown(shape):
    return f"[{', '.join(map(str, shape))}]"


PANELS = pack_linear(f32(3, 5)).panels
WIDTH = PANELS.shape[-1]
Q4_1 = torch.zeros(3, 40, dtype=torch.uint8)  # blocks of three outputs
Q, SPARSE = f32(3, 4, 7), dict(draft=f32(3, 4, 2), ids=i64(3, 4, 2))
RAGGED = dict(target=f32(9, 7), target_indptr=i64(4))

MAPPED = dict(columns=i32(7))
TOGETHER = "draft logsumexp and draft threshold must come together and with draft"
VOCABULARY = "must have a vocabulary of 1 to 2147483647 entries, got"
NO_MAP = "draft_map must be None unless draft holds rows over a vocabulary of its own"
SYNTHETIC = "synthetic_rates must be given with rule synthetic and with no other"
WIDE = i64(1, 1).expand(2**29, 2**29)  # holds no memory
BESIDE = dict(draft_rows=i32(3, 4))


def less(what, shape):
    return f"must leave the {what} with less than 2**56 entries, got {shown(shape)}"


VERIFIERS = [
    (dict(target=f32(3, 5, 0)), f"target {VOCABULARY} [3, 5, 0]"),
    (dict(draft=f32(3, 4, 0)), f"draft {VOCABULARY} [3, 4, 0]"),
    (dict(sampled=(f64(3, 4), None, 1.0)), TOGETHER),
    (dict(draft=Q, sampled=(None, f32(3, 4), 1.0)), TOGETHER),
    (dict(sampled=(f64(3, 4), f32(3, 4), 1.0)), TOGETHER),
    (dict(SPARSE, sampled=(f64(3, 4), f32(3, 4), 1.0)), TOGETHER),
    (dict(ids=i64(3, 4, 2)),
     "draft ids must have the shape of the draft probabilities, None, got [3, 4, 2]"),
    (MAPPED, NO_MAP), (SPARSE | MAPPED, NO_MAP),
    (dict(epsilon=0.5), "typical_epsilon must be 0.09 unless rule is typical, got 0.5"),
    (dict(delta=0.0), "typical_delta must be 0.3 unless rule is typical, got 0"),
    (dict(target_indptr=i32(4)),
     "target must be [R, V] when target_indptr is given, got [3, 5, 7]"),
    (dict(BESIDE, draft=f32(2, 6, 7)), "draft must be [B, M, D] = [3, M, D], got [2, 6, 7]"),
    (dict(BESIDE, draft=f32(7)), "draft must be [B, M, D] = [3, M, D], got [7]"),
    (dict(BESIDE, draft=f32(6, 0), ids=i64(6, 0)),
     "draft probabilities must have K >= 1 entries, got [6, 0]"),
    (dict(BESIDE, draft=Q, sampled=(f64(3, 4), f32(3, 5), 1.0)),
     "draft threshold must be [B, M] = [3, 4], got [3, 5]"),
    (dict(BESIDE, draft=f32(6, 7), sampled=(f64(3, 4), f32(6), 1.0)),
     "draft logsumexp must be [M] = [6], got [3, 4]"),
]  # fmt: skip
SPECIAL = {
    "sample": [
        (dict(logits=f32(1, 1).expand(2**56, 1)), f"logits {less('outputs [R]', [2**56])}"),
        (dict(logits=f32(3, 0)), f"logits {VOCABULARY} [3, 0]"),
        (dict(noise="shared"), "method must be gumbel when noise is shared, got cdf"),
        (dict(temperature=1e39), "temperature must be finite and at least 0, got inf"),
    ],
    "kept_tokens": [
        (dict(target=f32(7)), "target must be [R, V] or [B, N, V], got [7]"),
        (dict(target=f32(3, 7), rows=i64(3, 2)),
         "target must be [B, N, V] when rows are given without target_indptr, got [3, 7]"),
        (dict(target_indptr=i64(4), rows=i64(3, 2)),
         "target must be [R, V] when target_indptr is given, got [3, 5, 7]"),
        (dict(target=f32(9, 7), target_indptr=i64(4)), "rows must be given with target_indptr"),
        (dict(target=f32(9, 7), target_indptr=i64(0), rows=i64(3, 2)),
         "target_indptr must be [B+1], got [0]"),
        (dict(target=f32(1, 1, 1).expand(2**29, 2**29, 1)),
         f"target {less('outputs [B, E, max_kept]', [2**29, 2**29, 4])}"),
    ],
    "verify_chain": [
        *VERIFIERS,
        (dict(rule="match", uniforms=f64(3, 5)), "uniforms must be None when rule is match"),
        (dict(rule=2**32), f"rule must be in [0, {len(RULES) - 1}], got 4294967296"),
        (dict(target=f32(2, 7), target_indptr=i32(4), draft=f32(0, 7)),
         "target must be [R, V] with R >= B = 3 when draft is [R-B, D], got [2, 7]"),
        (dict(target=f32(2, 7), target_indptr=i32(4), draft=f32(0, 2), ids=i64(0, 2)),
         "target must be [R, V] with R >= B = 3 when draft is [R-B, K], got [2, 7]"),
        (dict(RAGGED, draft=f32(7, 7)), "draft must be [R-B, D] = [6, D], got [7, 7]"),
        (dict(RAGGED, draft=f32(1, 2), ids=i64(1, 2)),
         "draft probabilities must be [R-B, K] = [6, K], got [1, 2]"),
        (dict(draft=f32(3, 4, 0), ids=i64(3, 4, 0)),
         "draft probabilities must have K >= 1 entries, got [3, 4, 0]"),
        (dict(lenience=0.5), "lenience must be 1 unless rule is lenient, got 0.5"),
        (dict(beta=2), "top_beta_rank must be 1 unless rule is top_beta, got 2"),
        (dict(tau=0.5, rule="lenient"),
         "top_beta_distance must be 0 unless rule is top_beta, got 0.5"),
        (dict(rule="synthetic"), SYNTHETIC), (dict(rates=f32(4)), SYNTHETIC),
    ],
    "verify_tree": [
        *VERIFIERS,
        (dict(rule="match", uniforms=f64(3, 9)), "uniforms must be None when rule is match"),
        (dict(draft=f32(12, 7)),
         "draft must be [B, N, D] unless draft_rows is given, got two dimensions"),
        (dict(rule="k_seq"), "draft must be given when rule is k_seq, got None"),
    ],
    "tree_attention": [
        (dict(slots=2**62), f"slots {less('mask [B, N+1, S]', [3, 5, 2**62])}"),
        (dict(parents=WIDE), f"parents {less('positions [B, N]', [2**29, 2**29])}"),
        (dict(parents=i64(0, 1).expand(0, 2**63 - 1), lengths=i64(0)),
         f"parents {less('positions [B, N]', [0, 2**63 - 1])}"),
    ],
    "rerank_tree": [
        (dict(tokens=WIDE, parents=WIDE, scores=f32(1, 1).expand(2**29, 2**29), size=2**30),
         f"size {less('tree [B, size]', [2**29, 2**30])}"),
    ],
    "build_trie": [
        (dict(sequences=WIDE[:, None], size=2**30),
         f"size {less('tree [B, size]', [2**29, 2**30])}"),
    ],
    "expand_tree": [
        (dict(logits=f32(3, 2, 0)), f"logits {VOCABULARY} [3, 2, 0]"),
        (dict(logits=f32(3, 0, 7), scores=f32(3, 0)),
         "logits must have a frontier of at least one node, got [3, 0, 7]"),
    ],
    "ngram_propose": [
        (dict(history=i64(3, 1).expand(3, 2**31)),
         "history must have at most 2147483647 columns, got [3, 2147483648]"),
    ],
}  # fmt: skip

IN_PLACE = "because it is written in place, got stride 0 in dimension"


def written(size, entry=None):
    """Rows of every op that moves tokens of caches."""
    entries = dict(entries=[f32(*entry)]) if entry else {}
    same, expanded = f32(*size), f32(size[0], 1, *size[2:]).expand(size)
    return [
        (dict(caches=[f32(*size), same, same], **{n: x * 3 for n, x in entries.items()}),
         "caches[2] must not overlap caches[1], because both are written in place"),
        (dict(caches=[expanded], **entries), f"caches[0] must not be expanded, {IN_PLACE} 1"),
    ]  # fmt: skip


CACHE_SIZE, POOL_SIZE = (3, 2, 5, 4), (7, 4, 2, 8)
EXPANDED = (dict(lengths=i64(1).expand(3)), f"lengths must not be expanded, {IN_PLACE} 0")
ONE_EACH = "entries must have one tensor for each of the 2 caches, got 1"
SPECIAL |= {
    "kv_append_": [
        *written(CACHE_SIZE, (3, 2, 1, 4)), (dict(caches=[f32(3, 2, 5, 4)] * 2), ONE_EACH),
        (dict(caches=[f32(3, 2, 5, 4), f32(3, 1, 5, 4)], entries=[f32(3, 2, 1, 4)] * 2),
         "entries[1] must be [B, H, n, D] = [3, 1, n, 4], got [3, 2, 1, 4]"),
        (dict(entries=[f32(3, 2, 1, 5)]),
         "entries[0] must be [B, H, n, D] = [3, 2, n, 4], got [3, 2, 1, 5]"),
        (dict(caches=[f32(3, 2, 5, 4, dtype=torch.float8_e4m3fn)],
              entries=[f32(3, 2, 1, 4, dtype=torch.bfloat16)]),
         "entries[0] must be float8_e4m3fn like its cache, got bfloat16"),
    ],
    "kv_compact_": written(CACHE_SIZE),
    "kv_realign_": written(CACHE_SIZE),
    "paged_append_": [
        *written(POOL_SIZE, (3, 1, 2, 8)), (dict(caches=[f32(*POOL_SIZE)] * 2), ONE_EACH),
    ],
    "paged_compact_": written(POOL_SIZE),
    "kv_truncate_": [EXPANDED],
    "apply_penalties_": [
        (dict(target=f32(1, 5, 7).expand(3, -1, -1)), f"target must not be expanded, {IN_PLACE} 0"),
        (dict(ids=i64(3, 2)), "bias_ids and biases must come together"),
        (dict(least=i64(3)), "min_new_tokens and eos_token_ids must come together"),
        (dict(indptr=i64(4)), r"target must be [R, V] when target_indptr is given, got [3, 5, 7]"),
        (dict(counts=i32(3, 14)[:, ::2]),
         "token_counts must have a contiguous last dimension, got stride 2"),
    ],
    "paged_truncate_": [
        EXPANDED,
        (dict(tables=i32(3, 1).expand(3, 2)), f"block_tables must not be expanded, {IN_PLACE} 1"),
    ],
    "ring_truncate_": [
        EXPANDED,
        (dict(caches=[f32(3, 2, 9, 4), f32(3, 2, 5, 4)], window=6),
         "window must be at most the slots of caches[1], 5, got 6"),
    ],
}  # fmt: skip

SET = "for the instruction set of this process, got"
QKV, MLP = [(8, 5), (4, 5), (4, 5)], [(5, 8), (7, 5), (7, 5), (5, 7)]


def panels_of(n, k):
    return pack_linear(f32(n, k)).panels


def instead(sizes, at, size):
    """Packed weights of these sizes, one of them of another."""
    return dict(weights=packed(*sizes[:at], size, *sizes[at + 1 :]))


SPECIAL |= {
    "pack_linear": [
        (dict(weight=f32(3, 0)), "weight must not be empty, got [3, 0]"),
        (dict(weight=f32(2, 3).T), "weight must be contiguous, got strides [1, 3]"),
    ],
    "pack_blocks": [
        (dict(blocks=Q4_1[:, :30]),
         "blocks must be [N, bytes of a row], a multiple of 20, got [3, 30]"),
        (dict(blocks=Q4_1.T.contiguous().T), "blocks must be contiguous, got strides [1, 3]"),
    ],
    "unpack_blocks": [
        (dict(panels=PANELS.byte()), f"panels must hold blocks, got [1, 5, {WIDTH}]"),
        (dict(in_features=32), f"panels must be [1, 1, {20 * WIDTH}] {SET} [1, 2, {20 * WIDTH}]"),
        (dict(in_features=48),
         "panels must be of a multiple of 32 inputs in this format, got K = 48"),
    ],
    "packed_linear": [
        (dict(x=torch.tensor(1.0)), "x must be [..., K] with K = 5, got []"),
        (dict(x=f32(2, 5).bfloat16()), "panels must be bfloat16, got float32"),
        (dict(panels=PANELS[:, :4]), f"panels must be [1, 5, {WIDTH}] {SET} [1, 4, {WIDTH}]"),
        (dict(panels=PANELS.mT.contiguous().mT), "panels must be contiguous"),
        (dict(x=f32(2, 0), in_features=0), "in_features must be at least 1, got 0"),
    ],
    "cached_attention": [
        (dict(query=f32(2, 4, 3, 0)),
         "query must have at least 1 entry in the last dimension, got [2, 4, 3, 0]"),
        *((dict(keys=f32(2, heads, 7, 5)),
           f"keys must have a number of heads that divides 4, that of query, got {heads}")
          for heads in (3, 0)),
        (dict(keys=f32(2, 2, 1, 5).expand(2, 2, 2**31, 5)),
         "keys must have less than 2147483648 slots, got 2147483648"),
        (dict(values=f32(2, 2, 7, 0)),
         "values must have at least 1 entry in the last dimension, got [2, 2, 7, 0]"),
        (dict(scale=1e39), "scale must be finite, got 1e+39"),
    ],
    "norm_qkv_rope": [
        *((dict(norm=norm), "norm must be [C], or [G, C] for G parts of x, with 5 numbers, got "
           f"{list(norm.shape)}") for norm in (f32(4), f32(1, 1, 5), f32(2, 5))),
        (dict(x=f32(2, 3, 0)), "x must be [B, n, C], got [2, 3, 0]"),
        *((dict(cos=f32(*shape)), "cos must be [B, n, D] = [2, 3, D], or [1, 3, D], with an even "
           f"D, got {shown(shape)}")
          for shape in ((3, 4), (3, 3, 4), (2, 1, 4), (2, 3, 0), (2, 3, 5))),
        (dict(weights=packed(*QKV[:2])), "qkv must be 3 packed weights, got 2"),
        (dict(biases=[f32(8), f32(4)]), "biases must be 3 tensors or none, got 2"),
        (dict(head_norms=[f32(4)]), "head_norms must be 2 tensors or none, got 1"),
        (instead(QKV, 0, (8, 6)),
         "qkv[0] must be a weight [H * D, C] with D = 4 and C = 5, got [8, 6]"),
        (dict(weights=packed((8, 5), (6, 5), (6, 5))),
         "qkv[1] must be a weight [H * D, C] with D = 4 and C = 5, got [6, 5]"),
        (instead(QKV, 2, (8, 5)), "qkv[2] must have as many outputs as qkv[1], 4, got 8"),
        (dict(qkv=[panels_of(8, 5), panels_of(4, 5), panels_of(4, 5)[:, :4]]),
         f"qkv[2] must be [1, 5, {WIDTH}] {SET} [1, 4, {WIDTH}]"),
        (dict(epsilon=1e39), "epsilon must be finite and at least 0, got 1e+39"),
    ],
    "output_norm_mlp": [
        (dict(residual=f32(2, 3, 0)), "residual must be [B, n, C], got [2, 3, 0]"),
        (dict(attended=f32(2, 3, 0)), "attended must be [B, n, A] = [2, 3, A], got [2, 3, 0]"),
        (dict(weights=packed((5, 8), (7, 5), (5, 7))), "mlp must be 3 packed weights, got 2"),
        (dict(biases=[f32(7)]), "biases must be 3 tensors or none, got 1"),
        *((instead(MLP, 0, size), f"output must be a weight [C, A] = [5, 8], got {shown(size)}")
          for size in ((5, 9), (6, 8))),
        (instead(MLP, 1, (7, 6)), "mlp[0] must be a weight [I, C] with C = 5, got [7, 6]"),
        *((instead(MLP, 2, size), f"mlp[1] must be a weight [I, C] = [7, 5], got {shown(size)}")
          for size in ((7, 6), (8, 5))),
        *((instead(MLP, 3, size), f"mlp[2] must be a weight [C, I] = [5, 7], got {shown(size)}")
          for size in ((5, 8), (6, 7))),
        (dict(output=panels_of(5, 9)), f"output must be [1, 8, {WIDTH}] {SET} [1, 9, {WIDTH}]"),
    ],
}  # fmt: skip
