"""Cases of the ops of a forward: linear layers, attention, and the rest of a decoder layer."""

from __future__ import annotations

import math
from unittest import mock

import torch
from torch import Generator, Tensor

import specdec_kernels as sk
from proofs.case import SHORT, Args, Case, spread
from specdec_kernels import reference
from specdec_kernels.arguments.weight_blocks import BLOCK_FORMATS, FORMATS

f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16


def numbers(shape: tuple[int, ...], g: Generator, kind: str) -> Tensor:
    """kind: "normal", or "faulty", where every 97th number is NaN, infinite, huge or subnormal."""
    x = torch.randn(shape, generator=g)
    if kind == "faulty":
        odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 1e-42, -0.0])
        flat = x.view(-1)
        places = torch.arange(5, len(flat), 97)
        flat[places] = odd[torch.arange(len(places)) % len(odd)]
    return x


def pack_case(n: int, k: int, dtype: torch.dtype = f32) -> Case:
    """A case of `pack_linear`."""

    def build(g: Generator) -> Args:
        return (torch.randn(n, k, generator=g).to(dtype),)

    return Case("pack_linear", "-".join([f"N{n}", f"K{k}", SHORT[dtype]]), build)


def blocks_of(n: int, k: int, name: str, g: Generator, scale: float = 1.0) -> Tensor:
    """Blocks of a weight [n, k] of any integers; its scales are at most `scale`.

    scale: infinity for any bits of float16, also infinite and NaN.
    """
    kind = FORMATS[BLOCK_FORMATS.index(name)]
    x = torch.randint(0, 256, (n, k // kind.inputs, kind.file_bytes), generator=g).to(torch.uint8)
    if scale < math.inf:
        halves = 2 if kind.has_minimum else 1
        drawn = (torch.rand(n, k // kind.inputs, halves, generator=g) * scale).half()
        at = 208 if name == "Q6_K" else 0
        x[..., at : at + 2 * halves] = drawn.view(torch.uint8)
    return x.flatten(1)


def blocks_case(op: str, n: int, k: int, name: str) -> Case:
    """A case of `pack_blocks` or `unpack_blocks`."""

    def build(g: Generator) -> Args:
        blocks, number = blocks_of(n, k, name, g, math.inf), BLOCK_FORMATS.index(name) + 1
        return (blocks, number) if op == "pack_blocks" else (
            reference.pack_blocks(blocks, number), k, n
        )  # fmt: skip

    return Case(op, "-".join([f"N{n}", f"K{k}", name]), build)


def linear_case(
    lead, n, k, dtype=f32, *, bias=True, kind="normal", layout="dense", blocks=None
) -> Case:
    """A case of `packed_linear` on x [*lead, k]; `kind` is that of x."""

    def build(g: Generator) -> Args:
        x = spread(numbers((*lead, k), g, kind).to(dtype), layout)
        if blocks is None:
            panels = reference.pack_linear(torch.randn(n, k, generator=g).to(dtype))
        else:
            packed = blocks_of(n, k, blocks, g, 0.01), BLOCK_FORMATS.index(blocks) + 1
            panels = reference.pack_blocks(*packed)
        return x, panels, k, n, torch.randn(n, generator=g).to(dtype) if bias else None

    words = ["x".join(map(str, lead)) or "vector", f"N{n}", f"K{k}", SHORT[dtype], kind, layout]
    words += [blocks] if blocks else []
    return Case("packed_linear", "-".join([*words, *(["bias"] if bias else [])]), build)


def visible_slots(how: str, b: int, n: int, s: int, g: Generator) -> Tensor | None:
    """A mask [b, 1, n, s]: "all" (None), "chain", "ragged" chains, a "window", "random", "none"."""
    if how == "all":
        return None
    if how == "random":
        return torch.rand(b, 1, n, s, generator=g) < 0.6
    lengths = torch.full((b,), s - n)
    if how == "ragged":
        lengths = torch.randint(0, max(s - n, 0) + 1, (b,), generator=g)
    ends = (lengths[:, None] + torch.arange(n))[:, None, :, None]
    slots = torch.arange(s)
    seen = slots <= ends
    return seen & (slots > ends - 5) if how == "window" else seen & (how != "none")


def attention_case(
    sizes,
    dtype=f32,
    *,
    value_size=None,
    mask="chain",
    scale=None,
    soft_cap=None,
    layout="static",
    kind="normal",
) -> Case:
    """A case of `cached_attention` of sizes (B, H, H_kv, n, S, D).

    layout: "static" (keys and values are the first slots of a longer cache, whose others are NaN,
        and the query is transposed, as a model has them), "dense", or "sliced".
    kind: of keys and values.
    """
    b, h, h_kv, n, s, d = sizes
    d_v = d if value_size is None else value_size

    def build(g: Generator) -> Args:
        query = torch.randn(b, n, h, d, generator=g).to(dtype).transpose(1, 2)
        cache = [numbers((b, h_kv, s, e), g, kind).to(dtype) for e in (d, d_v)]
        if layout == "static":
            longer = [x.new_full((b, h_kv, s + 3, x.shape[3]), torch.nan) for x in cache]
            for wide, x in zip(longer, cache, strict=True):
                wide[:, :, :s] = x
            cache = [wide[:, :, :s] for wide in longer]
        else:
            query, *cache = (spread(x.contiguous(), layout) for x in (query, *cache))
        return query, *cache, visible_slots(mask, b, n, s, g), scale, soft_cap

    words = [f"{x}{y}" for x, y in zip(("B", "H", "K", "n", "S", "D"), sizes, strict=True)]
    words += [*([f"V{d_v}"] if d_v != d else []), SHORT[dtype], mask, layout]
    words += [*(["scale"] if scale else []), *(["cap"] if soft_cap else [])]
    return Case("cached_attention", "-".join([*words, *(["faulty"] * (kind == "faulty"))]), build)


def weights(
    sizes: list[tuple[int, int]], g: Generator, dtype: torch.dtype
) -> tuple[list[Tensor], list[int], list[int]]:
    """Panels, inputs and outputs of random weights [N, K] that keep the size of numbers."""
    drawn = [torch.randn(size, generator=g) / size[1] ** 0.5 for size in sizes]
    panels = [reference.pack_linear(weight.to(dtype)) for weight in drawn]
    return panels, [k for _, k in sizes], [n for n, _ in sizes]


def vectors(sizes: list[int], g: Generator, dtype: torch.dtype) -> list[Tensor]:
    return [(1 + 0.3 * torch.randn(n, generator=g)).to(dtype) for n in sizes]


def norm_qkv_rope_case(
    sizes,
    dtype=f32,
    *,
    parts=1,
    biases=False,
    head_norms=False,
    shared=False,
    epsilon=1e-05,
    layout="dense",
) -> Case:
    """A case of `norm_qkv_rope` of sizes (B, n, C, H, H_kv, D).

    The halves of cos and sin differ. `shared` is of cos and sin, by all sequences.
    """
    b, n, c, h, h_kv, d = sizes

    def build(g: Generator) -> Args:
        x = torch.randn(b, n, c, generator=g).to(dtype)
        (norm,) = vectors([c], g, dtype)
        norm = norm.view(parts, -1) if parts > 1 else norm
        outputs = [heads * d for heads in (h, h_kv, h_kv)]
        packed = weights([(n_out, c) for n_out in outputs], g, dtype)
        angles = 2 * math.pi * torch.rand(1 if shared else b, n, d, generator=g)
        cos, sin = (spread(y.to(dtype), layout) for y in (angles.cos(), angles.sin()))
        bias = vectors(outputs, g, dtype) if biases else []
        norms = vectors([d, d], g, dtype) if head_norms else []
        return spread(x, layout), norm, *packed, cos, sin, bias, norms, epsilon

    words = [f"{x}{y}" for x, y in zip(("B", "n", "C", "H", "K", "D"), sizes, strict=True)]
    words += [SHORT[dtype], *(["biases"] * biases), *(["norms"] * head_norms)]
    words += [
        *(["shared"] * shared),
        *([layout] * (layout != "dense")),
        *([f"G{parts}"] * (parts > 1)),
    ]
    return Case("norm_qkv_rope", "-".join(words), build)


def output_norm_mlp_case(
    sizes, dtype=f32, *, output_bias=False, biases=False, epsilon=1e-05, layout="dense"
) -> Case:
    """A case of `output_norm_mlp` of sizes (B, n, A, C, I)."""
    b, n, a, c, i = sizes

    def build(g: Generator) -> Args:
        attended, residual = (torch.randn(b, n, k, generator=g).to(dtype) for k in (a, c))
        panels, *features = weights([(c, a), (i, c), (i, c), (c, i)], g, dtype)
        norm, *bias = vectors([c, c, i, i, c], g, dtype)
        return (
            *(spread(attended, layout), spread(residual, layout), norm),
            *(panels[0], panels[1:], *features, bias[0] if output_bias else None),
            *(bias[1:] if biases else [], epsilon),
        )

    words = [f"{x}{y}" for x, y in zip(("B", "n", "A", "C", "I"), sizes, strict=True)]
    words += [SHORT[dtype], *(["bias"] * output_bias), *(["biases"] * biases)]
    return Case("output_norm_mlp", "-".join([*words, *([layout] * (layout != "dense"))]), build)


def decoder_layers_case(
    sizes,
    dtype=f32,
    *,
    layers=1,
    parts=1,
    biases=False,
    head_norms=False,
    mask="ragged",
    hidden_slots=3,
    layout="dense",
    every=False,
) -> Case:
    """A case of `decoder_layers_` of sizes (B, n, C, H, H_kv, D, I, S).

    The caches have `hidden_slots` more slots than the mask. Some of the tokens of a batch are left
    padding, and some lie beyond the cache. The first layer reads C numbers in `parts`.
    """
    b, n, c, h, h_kv, d, inner, s = sizes

    def build(g: Generator) -> Args:
        x, cos, sin = (torch.randn(b, n, k, generator=g).to(dtype) for k in (c * parts, d, d))
        norms, qkv_biases, output_biases, mlp_biases, of_heads, caches = ([] for _ in range(6))
        wide: list[tuple[int, int]] = []
        for i in range(layers):
            # Layers may have different numbers of heads.
            groups, width = h_kv + i % 2, c * (parts if i == 0 else 1)
            outputs = [h // h_kv * groups * d, groups * d, groups * d]
            wide += [(k, width) for k in outputs]
            wide += [(c, outputs[0]), (inner, c), (inner, c), (c, inner)]
            norm, other, bias, *mlp = vectors([width, c, c, inner, inner, c], g, dtype)
            norms += [norm.view(parts, c) if parts > 1 and i == 0 else norm, other]
            output_biases += [bias] if biases else []
            mlp_biases += mlp if biases else []
            qkv_biases += vectors(outputs, g, dtype) if biases else []
            of_heads += vectors([d, d], g, dtype) if head_norms else []
            shape = b, groups, s + hidden_slots, d
            caches += [spread(torch.randn(shape, generator=g).to(dtype), layout) for _ in "kv"]
        return (
            *(spread(x, layout), norms, *weights(wide, g, dtype)),
            *(qkv_biases, output_biases, mlp_biases, of_heads),
            *(spread(cos, layout), spread(sin, layout), caches),
            torch.randint(-n + 1, s + 1, (b,), generator=g),
            visible_slots(mask, b, n, s, g), 0.3, 1e-5, every,
        )  # fmt: skip

    words = [f"{x}{y}" for x, y in zip("BnCHKDIS", sizes, strict=True)]
    words += [SHORT[dtype], *(["biases"] * biases), *(["norms"] * head_norms), mask, layout]
    words += [f"L{layers}"] * (layers > 1) + [f"G{parts}"] * (parts > 1) + ["every"] * every
    return Case("decoder_layers_", "-".join(words), build)


def grow_tree_case(
    sizes,
    dtype=f32,
    *,
    width=3,
    size=7,
    depth=4,
    least=0.0,
    mapped=True,
    faulty=False,
    **of_head,
) -> Case:
    """A case of `grow_tree_` with a head of sizes (B, n, C, H, H_kv, D, I, S).

    Sequences have texts, pairs and limits of their own, some of them none. Without `mapped` the
    head drafts the whole vocabulary. faulty: one hidden state is NaN.
    """
    b, n, c, *_, d, _, s = sizes
    head = decoder_layers_case(sizes, dtype, parts=2, hidden_slots=0, **of_head)
    vocab, fed = 41, max(depth - 1, 0) * width
    outputs = 23 if mapped else vocab

    def build(g: Generator) -> Args:
        x, *layers, _, _, caches, _, _, scale, epsilon, _ = head.build(g)
        hidden, embeddings = x[..., :c].contiguous(), torch.randn(vocab, c, generator=g).to(dtype)
        if faulty:
            hidden[0, 0, 0] = torch.nan
        panels, _, _ = weights([(outputs, c)], g, dtype)
        ids = torch.randperm(vocab, generator=g)[:outputs] if mapped else None
        counts = torch.randint(1, n + 1, (b,), generator=g)
        return (
            hidden, torch.randint(0, vocab, (b, n), generator=g), counts,
            torch.randint(0, s - max(n + fed, 1) + 1, (b,), generator=g),
            torch.cat([torch.tensor([depth]), torch.randint(0, depth + 1, (b,), generator=g)])[:b],
            embeddings, *layers, *vectors([c], g, dtype), panels[0], outputs, ids,
            *(torch.randn(s, d, generator=g).to(dtype) for _ in "cs"), caches, scale, epsilon,
            width, size, least,
        )  # fmt: skip

    words = [str(head), f"w{width}", f"d{depth}", f"N{size}"] + [f"p{least}"] * (least > 0)
    words += ["whole"] * (not mapped) + ["faulty"] * faulty
    return Case("grow_tree_", "-".join(words), build)


CASES: tuple[Case, ...] = (
    pack_case(1, 1), pack_case(3, 17), pack_case(577, 33), pack_case(40, 259, bf16),
    pack_case(1, 1, bf16), pack_case(64, 64, f16), pack_case(17, 3, f16), linear_case((1,), 1, 1),
    linear_case((), 17, 3), linear_case((2, 3), 577, 33),
    linear_case((3, 1), 17, 577, bias=False, layout="sliced"),
    linear_case((4, 2), 33, 300, layout="transposed"), linear_case((5,), 40, 1025, kind="faulty"),
    linear_case((13,), 96, 576, bf16), linear_case((2, 2), 577, 33, bf16, layout="sliced"),
    linear_case((1,), 3, 1, bf16, bias=False), linear_case((7,), 19, 515, bf16, kind="faulty"),
    linear_case((2, 65), 31, 65, bf16), linear_case((13,), 96, 576, f16),
    linear_case((1,), 1, 17, f16, bias=False), linear_case((6,), 19, 515, f16, kind="faulty"),
    linear_case((64,), 130, 260, bias=False), linear_case((0,), 9, 5),
    *(blocks_case(op, n, 512, kind) for kind in BLOCK_FORMATS for n in (1, 70)
      for op in ("pack_blocks", "unpack_blocks")),
    *(linear_case((5,), 70, 512, dtype, blocks=kind) for kind in BLOCK_FORMATS
      for dtype in (f32, bf16)),
    linear_case((2, 33), 97, 1536, blocks="Q4_1", kind="faulty"),
    linear_case((13,), 40, 576, f16, blocks="Q8_0", bias=False),
    linear_case((2, 0), 9, 5, bf16), attention_case((1, 9, 3, 1, 100, 64)),
    attention_case((1, 9, 3, 8, 300, 64)),
    attention_case((2, 6, 2, 3, 77, 80), value_size=48, mask="random", layout="sliced"),
    attention_case((3, 4, 1, 5, 40, 3), mask="ragged", scale=0.3, soft_cap=5.0),
    attention_case((1, 2, 2, 2, 1, 128), mask="all", layout="dense"),
    attention_case((1, 2, 1, 2, 0, 8), mask="all", layout="dense"),
    attention_case((1, 2, 1, 2, 0, 8)), attention_case((1, 2, 1, 0, 7, 8), mask="all"),
    attention_case((0, 2, 1, 3, 7, 8)), attention_case((1, 4, 2, 2, 70, 16), mask="none"),
    attention_case((2, 4, 2, 4, 600, 192), value_size=128, mask="window"),
    attention_case((1, 8, 8, 2, 33, 5), value_size=17, soft_cap=0.5),
    attention_case((1, 4, 2, 3, 200, 96), kind="faulty"),
    attention_case((1, 9, 3, 4, 130, 64), bf16),
    attention_case((2, 4, 1, 3, 67, 33), bf16, mask="random", soft_cap=50.0, layout="sliced"),
    attention_case((1, 2, 1, 2, 90, 256), f16),
    attention_case((2, 2, 2, 3, 50, 7), f16, value_size=1, mask="ragged", layout="dense"),
    norm_qkv_rope_case((1, 1, 33, 4, 2, 6), biases=True, head_norms=True),
    norm_qkv_rope_case((2, 3, 33, 4, 2, 6), biases=True, epsilon=0.25, layout="sliced"),
    norm_qkv_rope_case((1, 1, 1, 1, 1, 2)),
    norm_qkv_rope_case((3, 2, 7, 3, 1, 10), head_norms=True, layout="transposed"),
    norm_qkv_rope_case((2, 5, 576, 9, 3, 64), shared=True),
    norm_qkv_rope_case((2, 65, 40, 2, 1, 34), shared=True, biases=True),
    norm_qkv_rope_case((1, 13, 96, 3, 1, 64), bf16, biases=True),
    norm_qkv_rope_case((3, 2, 33, 4, 2, 6), bf16, head_norms=True, shared=True),
    norm_qkv_rope_case((2, 2, 7, 1, 1, 10), bf16, layout="sliced"),
    norm_qkv_rope_case((1, 4, 96, 2, 2, 80), f16, head_norms=True, biases=True),
    norm_qkv_rope_case((2, 3, 1, 2, 1, 2), f16, epsilon=0.0),
    norm_qkv_rope_case((0, 3, 7, 2, 1, 4)), norm_qkv_rope_case((2, 3, 66, 4, 2, 6), parts=2),
    norm_qkv_rope_case((1, 2, 105, 2, 1, 10), bf16, parts=3, biases=True),
    norm_qkv_rope_case((2, 0, 7, 2, 1, 4), bf16, shared=True),
    output_norm_mlp_case((1, 1, 10, 33, 17), output_bias=True, biases=True),
    output_norm_mlp_case((2, 3, 24, 33, 17), epsilon=0.25, layout="sliced"),
    output_norm_mlp_case((1, 1, 1, 1, 1)),
    output_norm_mlp_case((3, 2, 5, 7, 1), biases=True, layout="transposed"),
    output_norm_mlp_case((1, 8, 576, 576, 1536)),
    output_norm_mlp_case((2, 65, 40, 33, 70), output_bias=True),
    output_norm_mlp_case((1, 13, 96, 96, 130), bf16, output_bias=True, biases=True),
    output_norm_mlp_case((2, 2, 6, 7, 17), bf16, layout="sliced"),
    output_norm_mlp_case((1, 4, 64, 96, 131), f16, biases=True),
    output_norm_mlp_case((2, 3, 3, 1, 17), f16, epsilon=0.0), output_norm_mlp_case((0, 3, 7, 2, 4)),
    output_norm_mlp_case((2, 0, 7, 2, 4), bf16), decoder_layers_case((1, 1, 7, 2, 1, 4, 5, 6)),
    decoder_layers_case((2, 3, 33, 4, 2, 6, 17, 9), biases=True, head_norms=True, layout="sliced"),
    decoder_layers_case((3, 5, 24, 3, 1, 16, 40, 33), mask="random", hidden_slots=0),
    decoder_layers_case((2, 2, 33, 2, 2, 10, 17, 70), bf16, biases=True, mask="window"),
    decoder_layers_case((1, 4, 64, 4, 2, 16, 70, 20), f16, head_norms=True),
    decoder_layers_case((0, 2, 7, 2, 1, 4, 5, 6)),
    decoder_layers_case((2, 0, 7, 2, 1, 4, 5, 6), bf16),
    decoder_layers_case((2, 3, 24, 4, 2, 6, 17, 9), layers=3, biases=True, head_norms=True),
    decoder_layers_case((1, 4, 33, 2, 2, 10, 17, 20), bf16, layers=2, parts=2, every=True),
    decoder_layers_case((2, 2, 24, 2, 1, 4, 5, 6), parts=3, head_norms=True, layout="sliced"),
    decoder_layers_case((0, 2, 7, 2, 1, 4, 5, 6), layers=2, every=True),
    grow_tree_case((1, 1, 16, 2, 1, 8, 24, 24)),
    grow_tree_case((3, 3, 24, 4, 2, 6, 17, 24), biases=True, head_norms=True, layout="sliced"),
    grow_tree_case((2, 2, 33, 2, 2, 10, 17, 40), bf16, width=5, size=30, depth=5, layers=2),
    grow_tree_case((2, 4, 16, 2, 1, 8, 24, 30), f16, width=1, depth=6, size=6, mapped=False),
    grow_tree_case((4, 2, 16, 2, 1, 8, 24, 30), width=4, size=3, least=0.3, depth=5),
    grow_tree_case((2, 2, 16, 2, 1, 8, 24, 24), faulty=True),
    grow_tree_case((0, 2, 7, 2, 1, 4, 5, 16)),
    grow_tree_case((2, 3, 16, 2, 1, 8, 24, 24), depth=0, size=2),
    grow_tree_case((2, 1, 16, 2, 1, 8, 24, 24), width=30, size=40, depth=1),
)  # fmt: skip


def layers_by_ops(*args, **kwargs):
    """The reference of `decoder_layers_`, by the ops that each layer consists of."""
    names = ("norm_qkv_rope", "kv_append_", "cached_attention", "output_norm_mlp")
    with mock.patch.multiple("specdec_kernels.reference.forward.decoder_layer", **native(*names)):
        return reference.decoder_layers_(*args, **kwargs)


def layers_of(
    norms, panels, ins, outs, qkv_biases, output_biases, mlp_biases, head_norms, *numbers
):
    """The record of layers for arguments of an op; numbers: their scale and epsilon."""
    packed = [sk.PackedLinear(*w) for w in zip(panels, ins, outs, strict=True)]
    scale, epsilon = numbers
    return sk.PackedDecoderLayers([
        sk.PackedDecoderLayer(
            norms[2 * i : 2 * i + 2], packed[7 * i : 7 * i + 3], packed[7 * i + 3],
            packed[7 * i + 4 : 7 * i + 7], epsilon, scale, qkv_biases[3 * i : 3 * i + 3],
            output_biases[i], mlp_biases[3 * i : 3 * i + 3], head_norms[2 * i : 2 * i + 2],
        )
        for i in range(len(norms) // 2)
    ])  # fmt: skip


def native(*names):
    """Ops as they are registered."""
    return {name: getattr(torch.ops.specdec_kernels, name) for name in names}


def norm_by_op(x, weight, epsilon):
    """RMSNorm by the op that begins a layer, whose values are the products with an identity."""
    c, ops = x.shape[1], torch.ops.specdec_kernels
    outputs, angles = c + c % 2, x.new_zeros(1, len(x), 2)
    one = ops.pack_linear(torch.eye(outputs, c).to(x.dtype))
    values = ops.norm_qkv_rope(
        x[None], weight, [one] * 3, [c] * 3, [outputs] * 3, angles, angles, [], [], epsilon
    )[2]
    return values.flatten(2)[0, :, :c]


def tree_by_ops(*args):
    """The reference of `grow_tree_`, by the ops that it consists of."""
    names = "decoder_layers_", "packed_linear", "tree_attention", "expand_tree", "rerank_tree"
    ops = native(*names) | {"rms_norm": norm_by_op}
    with mock.patch.multiple("specdec_kernels.reference.forward.grow_tree", **ops):
        return reference.grow_tree_(*args)
