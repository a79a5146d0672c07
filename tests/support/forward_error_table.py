"""Bad inputs of the ops of a forward, and their messages; error_table.py says what a row is."""

import torch
from support.kv_error_table import changing, f64, i64

from specdec_kernels import pack_linear

PANELS = pack_linear(torch.zeros(3, 5)).panels
BF16 = torch.zeros(2, 5, dtype=torch.bfloat16)
LINEAR = [
    (dict(x=torch.zeros(2, 6)), r"x must be \[\.\.\., K\] with K = 5, got \[2, 6\]"),
    (dict(x=torch.tensor(1.0)), r"x must be \[\.\.\., K\] with K = 5, got \[\]"),
    (dict(x=f64(2, 5)), "x must be float32, bfloat16 or float16, got float64"),
    (dict(x=BF16), "panels must be bfloat16, got float32"),
    (dict(panels=f64(1, 5, 16)), "panels must be float32, got float64"),
    (dict(panels=PANELS[:, :4]),
     r"panels must be \[1, 5, \d+\] for the instruction set of this process, got \[1, 4, \d+\]"),
    (dict(panels=PANELS[..., None, :]),
     r"panels must be \[1, 5, \d+\] for the instruction set of this process, "
     r"got \[1, 5, 1, \d+\]"),
    (dict(panels=PANELS.transpose(1, 2).contiguous().transpose(1, 2)),
     "panels must be contiguous"),
    (dict(x=torch.zeros(2, 0), in_features=0), "in_features must be at least 1, got 0"),
    (dict(out_features=-1), "out_features must be at least 1, got -1"),
    (dict(out_features=2**62), r"out_features must leave the weight \[N, K\] with less than "
     r"2\*\*56 entries, got \[4611686018427387904, 5\]"),
    (dict(bias=torch.zeros(4)), r"bias must be \[3\], got \[4\]"),
    (dict(bias=torch.zeros(1, 3)), r"bias must be \[3\], got \[1, 3\]"),
    (dict(bias=torch.zeros(3).half()), "bias must be float32, got float16"),
]  # fmt: skip
PACK = [
    (dict(weight=torch.zeros(3)), r"weight must be \[N, K\], got \[3\]"),
    (dict(weight=torch.zeros(3, 2, 1)), r"weight must be \[N, K\], got \[3, 2, 1\]"),
    (dict(weight=i64(3, 2)), "weight must be float32, bfloat16 or float16, got int64"),
    (dict(weight=torch.zeros(3, 0)), r"weight must not be empty, got \[3, 0\]"),
    (dict(weight=torch.zeros(2, 3).T), r"weight must be contiguous, got strides \[1, 3\]"),
    (dict(weight=torch.zeros(1, 3).expand(2, 3)),
     r"weight must be contiguous, got strides \[0, 1\]"),
]  # fmt: skip


ATTENTION = [
    (dict(query=torch.zeros(2, 4, 5)), r"query must be \[B, H, n, D\], got \[2, 4, 5\]"),
    (dict(query=f64(2, 4, 3, 5)), "query must be float32, bfloat16 or float16, got float64"),
    (dict(query=torch.zeros(2, 4, 5, 3).transpose(2, 3)),
     "query must have a contiguous last dimension, got stride 3"),
    (dict(query=torch.zeros(2, 4, 3, 0)),
     r"query must have at least 1 entry in the last dimension, got \[2, 4, 3, 0\]"),
    (dict(query=torch.zeros(1, 1, 1, 5).expand(2, 2**27, 2**27, 5), keys=torch.zeros(2, 1, 7, 5),
          values=torch.zeros(2, 1, 7, 6)),
     r"query must leave the output \[B, n, H, D_v\] with less than 2\*\*56 entries, "
     r"got \[2, 134217728, 134217728, 6\]"),
    (dict(keys=torch.zeros(2, 7, 5)),
     r"keys must be \[B, H_kv, S, D\] = \[2, H_kv, S, 5\], got \[2, 7, 5\]"),
    (dict(keys=torch.zeros(1, 2, 7, 5)),
     r"keys must be \[B, H_kv, S, D\] = \[2, H_kv, S, 5\], got \[1, 2, 7, 5\]"),
    (dict(keys=torch.zeros(2, 2, 7, 6)),
     r"keys must be \[B, H_kv, S, D\] = \[2, H_kv, S, 5\], got \[2, 2, 7, 6\]"),
    (dict(keys=torch.zeros(2, 3, 7, 5)),
     "keys must have a number of heads that divides 4, that of query, got 3"),
    (dict(keys=torch.zeros(2, 0, 7, 5)),
     "keys must have a number of heads that divides 4, that of query, got 0"),
    (dict(keys=torch.zeros(2, 2, 1, 5).expand(2, 2, 2**31, 5)),
     "keys must have less than 2147483648 slots, got 2147483648"),
    (dict(keys=torch.zeros(2, 2, 7, 5).half()), "keys must be float32, got float16"),
    (dict(keys=torch.zeros(2, 2, 5, 7).transpose(2, 3)),
     "keys must have a contiguous last dimension, got stride 7"),
    (dict(values=torch.zeros(2, 2, 6)),
     r"values must be \[B, H_kv, S, D_v\] = \[2, 2, 7, D_v\], got \[2, 2, 6\]"),
    (dict(values=torch.zeros(2, 1, 7, 5)),
     r"values must be \[B, H_kv, S, D_v\] = \[2, 2, 7, D_v\], got \[2, 1, 7, 5\]"),
    (dict(values=torch.zeros(2, 2, 8, 5)),
     r"values must be \[B, H_kv, S, D_v\] = \[2, 2, 7, D_v\], got \[2, 2, 8, 5\]"),
    (dict(values=torch.zeros(2, 2, 7, 0)),
     r"values must have at least 1 entry in the last dimension, got \[2, 2, 7, 0\]"),
    (dict(values=torch.zeros(2, 2, 7, 5).bfloat16()), "values must be float32, got bfloat16"),
    (dict(values=torch.zeros(2, 2, 5, 7).transpose(2, 3)),
     "values must have a contiguous last dimension, got stride 7"),
    (dict(mask=torch.ones(2, 4, 3, 7).bool()),
     r"mask must be \[B, 1, n, S\] = \[2, 1, 3, 7\], got \[2, 4, 3, 7\]"),
    (dict(mask=torch.ones(2, 3, 7).bool()),
     r"mask must be \[B, 1, n, S\] = \[2, 1, 3, 7\], got \[2, 3, 7\]"),
    (dict(mask=torch.ones(2, 1, 3, 6).bool()),
     r"mask must be \[B, 1, n, S\] = \[2, 1, 3, 7\], got \[2, 1, 3, 6\]"),
    (dict(mask=torch.zeros(2, 1, 3, 7)), "mask must be bool, got float32"),
    (dict(scale=float("nan")), "scale must be finite, got nan"),
    (dict(scale=1e39), r"scale must be finite, got 1e\+39"),
    (dict(soft_cap=0.0), "soft_cap must be finite and above 0, got 0"),
    (dict(soft_cap=-2.5), "soft_cap must be finite and above 0, got -2.5"),
    (dict(soft_cap=float("inf")), "soft_cap must be finite and above 0, got inf"),
]  # fmt: skip


def packed(*sizes, dtype=torch.float32):
    """The panels of weights [N, K], their inputs and their outputs."""
    panels = [pack_linear(torch.zeros(size, dtype=dtype)).panels for size in sizes]
    return panels, [k for _, k in sizes], [n for n, _ in sizes]


def norm_qkv_rope_args(weights=None, **bad):
    qkv, *features = weights or packed((8, 5), (4, 5), (4, 5))
    good = dict(
        x=torch.zeros(2, 3, 5), norm=torch.ones(5), qkv=qkv, ins=features[0], outs=features[1],
        cos=torch.ones(2, 3, 4), sin=torch.zeros(2, 3, 4), biases=[], head_norms=[], epsilon=1e-5,
    )  # fmt: skip
    return tuple((good | bad).values())


def output_norm_mlp_args(weights=None, **bad):
    panels, *features = weights or packed((5, 8), (7, 5), (7, 5), (5, 7))
    good = dict(
        attended=torch.zeros(2, 3, 8), residual=torch.zeros(2, 3, 5), norm=torch.ones(5),
        output=panels[0], mlp=panels[1:], ins=features[0], outs=features[1], output_bias=None,
        biases=[], epsilon=1e-5,
    )  # fmt: skip
    return tuple((good | bad).values())


def zeros(*sizes, dtype=torch.float32):
    return [torch.zeros(n, dtype=dtype) for n in sizes]


def panels_of(n, k):
    return pack_linear(torch.zeros(n, k)).panels


HUGE_ROWS = torch.zeros(1, 1, 5).expand(2**27, 2**27, 5)
HUGE_ANGLES = torch.zeros(1, 1, 4).expand(1, 2**27, 4)
NORM_QKV_ROPE = [
    (dict(x=torch.zeros(3, 5)), r"x must be \[B, n, C\], got \[3, 5\]"),
    (dict(x=torch.zeros(2, 3, 0)), r"x must be \[B, n, C\], got \[2, 3, 0\]"),
    (dict(x=f64(2, 3, 5)), "x must be float32, bfloat16 or float16, got float64"),
    (dict(norm=torch.ones(4)), r"norm must be \[5\], got \[4\]"),
    (dict(norm=torch.ones(5).half()), "norm must be float32, got float16"),
    *(
        (dict(cos=cos), r"cos must be \[B, n, D\] = \[2, 3, D\], or \[1, 3, D\], with an even D, "
         rf"got {shape}")
        for cos, shape in (
            (torch.ones(3, 4), r"\[3, 4\]"), (torch.ones(3, 3, 4), r"\[3, 3, 4\]"),
            (torch.ones(2, 1, 4), r"\[2, 1, 4\]"), (torch.ones(2, 3, 0), r"\[2, 3, 0\]"),
            (torch.ones(2, 3, 5), r"\[2, 3, 5\]"),
        )
    ),
    (dict(cos=torch.ones(2, 3, 4).bfloat16()), "cos must be float32, got bfloat16"),
    (dict(sin=torch.ones(3, 4)),
     r"sin must have the shape of cos, \[2, 3, 4\], got \[3, 4\]"),
    *(
        (dict(sin=torch.ones(shape)),
         rf"sin must have the shape of cos, \[2, 3, 4\], got \[{', '.join(map(str, shape))}\]")
        for shape in ((1, 3, 4), (2, 1, 4), (2, 3, 2))
    ),
    (dict(sin=f64(2, 3, 4)), "sin must be float32, got float64"),
    (dict(weights=packed((8, 5), (4, 5))), "qkv must be 3 packed weights, got 2"),
    (dict(weights=([], [], [])), "qkv must be 3 packed weights, got 0"),
    (dict(biases=zeros(8, 4)), "biases must be 3 tensors or none, got 2"),
    (dict(head_norms=zeros(4)), "head_norms must be 2 tensors or none, got 1"),
    (dict(weights=packed((8, 6), (4, 5), (4, 5))),
     r"qkv\[0\] must be a weight \[H \* D, C\] with D = 4 and C = 5, got \[8, 6\]"),
    (dict(weights=packed((8, 5), (6, 5), (6, 5))),
     r"qkv\[1\] must be a weight \[H \* D, C\] with D = 4 and C = 5, got \[6, 5\]"),
    (dict(weights=(packed((8, 5), (4, 5), (4, 5))[0], [5] * 3, [8, 0, 0])),
     r"qkv\[1\] must be a weight \[H \* D, C\] with D = 4 and C = 5, got \[0, 5\]"),
    (dict(weights=(packed((8, 5), (4, 5), (4, 5))[0], [5] * 3, [2**62, 4, 4])),
     r"qkv\[0\] must leave the weight \[N, K\] with less than 2\*\*56 entries, "
     r"got \[4611686018427387904, 5\]"),
    (dict(weights=packed((8, 5), (4, 5), (8, 5))),
     r"qkv\[2\] must have as many outputs as qkv\[1\], 4, got 8"),
    (dict(weights=packed((8, 5), (4, 5), (4, 5), dtype=torch.bfloat16)),
     r"qkv\[0\] must be float32, got bfloat16"),
    (dict(qkv=[panels_of(8, 5), panels_of(4, 5), panels_of(4, 5)[:, :4]]),
     r"qkv\[2\] must be \[1, 5, \d+\] for the instruction set of this process, "
     r"got \[1, 4, \d+\]"),
    (dict(qkv=[panels_of(8, 5), panels_of(4, 5).transpose(1, 2).contiguous().transpose(1, 2),
               panels_of(4, 5)]),
     r"qkv\[1\] must be contiguous"),
    (dict(biases=zeros(8, 4, 5)), r"biases\[2\] must be \[4\], got \[5\]"),
    (dict(biases=[*zeros(8), *zeros(4, 4, dtype=torch.float16)]),
     r"biases\[1\] must be float32, got float16"),
    (dict(head_norms=zeros(4, 8)), r"head_norms\[1\] must be \[4\], got \[8\]"),
    (dict(head_norms=zeros(4, 4, dtype=torch.bfloat16)),
     r"head_norms\[0\] must be float32, got bfloat16"),
    (dict(x=HUGE_ROWS, cos=HUGE_ANGLES, sin=HUGE_ANGLES),
     r"x must leave an output \[B, n, H \* D\] with less than 2\*\*56 entries, "
     r"got \[134217728, 134217728, 8\]"),
    (dict(epsilon=-1e-50), "epsilon must be finite and at least 0, got -1e-50"),
    (dict(epsilon=float("nan")), "epsilon must be finite and at least 0, got nan"),
    (dict(epsilon=1e39), r"epsilon must be finite and at least 0, got 1e\+39"),
]  # fmt: skip
MLP_PANELS = packed((5, 8), (7, 5), (7, 5), (5, 7))[0]
OUTPUT_NORM_MLP = [
    (dict(residual=torch.zeros(3, 5)), r"residual must be \[B, n, C\], got \[3, 5\]"),
    (dict(residual=torch.zeros(2, 3, 0)), r"residual must be \[B, n, C\], got \[2, 3, 0\]"),
    (dict(residual=f64(2, 3, 5)), "residual must be float32, bfloat16 or float16, got float64"),
    *(
        (dict(attended=torch.zeros(shape)), r"attended must be \[B, n, A\] = \[2, 3, A\], "
         rf"got \[{', '.join(map(str, shape))}\]")
        for shape in ((3, 8), (1, 3, 8), (2, 1, 8), (2, 3, 0))
    ),
    (dict(attended=torch.zeros(2, 3, 8).half()), "attended must be float32, got float16"),
    (dict(norm=torch.ones(8)), r"norm must be \[5\], got \[8\]"),
    (dict(norm=torch.ones(5).bfloat16()), "norm must be float32, got bfloat16"),
    (dict(weights=packed((5, 8), (7, 5), (5, 7))), "mlp must be 3 packed weights, got 2"),
    (dict(weights=packed((5, 8))), "mlp must be 3 packed weights, got 0"),
    (dict(biases=zeros(7)), "biases must be 3 tensors or none, got 1"),
    (dict(weights=packed((5, 9), (7, 5), (7, 5), (5, 7))),
     r"output must be a weight \[C, A\] = \[5, 8\], got \[5, 9\]"),
    (dict(weights=packed((6, 8), (7, 5), (7, 5), (5, 7))),
     r"output must be a weight \[C, A\] = \[5, 8\], got \[6, 8\]"),
    (dict(weights=packed((5, 8), (7, 6), (7, 5), (5, 7))),
     r"mlp\[0\] must be a weight \[I, C\] with C = 5, got \[7, 6\]"),
    (dict(weights=(MLP_PANELS, [8, 5, 5, 0], [5, 0, 0, 5])),
     r"mlp\[0\] must be a weight \[I, C\] with C = 5, got \[0, 5\]"),
    (dict(weights=packed((5, 8), (7, 5), (7, 6), (5, 7))),
     r"mlp\[1\] must be a weight \[I, C\] = \[7, 5\], got \[7, 6\]"),
    (dict(weights=packed((5, 8), (7, 5), (8, 5), (5, 7))),
     r"mlp\[1\] must be a weight \[I, C\] = \[7, 5\], got \[8, 5\]"),
    (dict(weights=packed((5, 8), (7, 5), (7, 5), (5, 8))),
     r"mlp\[2\] must be a weight \[C, I\] = \[5, 7\], got \[5, 8\]"),
    (dict(weights=packed((5, 8), (7, 5), (7, 5), (6, 7))),
     r"mlp\[2\] must be a weight \[C, I\] = \[5, 7\], got \[6, 7\]"),
    (dict(weights=(MLP_PANELS, [8, 5, 5, 2**62], [5, 2**62, 2**62, 5])),
     r"mlp\[0\] must leave the weight \[N, K\] with less than 2\*\*56 entries, "
     r"got \[4611686018427387904, 5\]"),
    (dict(output=panels_of(5, 8).half()), "output must be float32, got float16"),
    (dict(output=panels_of(5, 9)),
     r"output must be \[1, 8, \d+\] for the instruction set of this process, got \[1, 9, \d+\]"),
    (dict(mlp=[panels_of(7, 5), panels_of(7, 5), panels_of(5, 6)]),
     r"mlp\[2\] must be \[1, 7, \d+\] for the instruction set of this process, "
     r"got \[1, 6, \d+\]"),
    (dict(mlp=[panels_of(7, 5), panels_of(7, 5).bfloat16(), panels_of(5, 7)]),
     r"mlp\[1\] must be float32, got bfloat16"),
    (dict(biases=zeros(7, 7, 7)), r"biases\[2\] must be \[5\], got \[7\]"),
    (dict(biases=zeros(7, 7, 5, dtype=torch.float16)),
     r"biases\[0\] must be float32, got float16"),
    (dict(output_bias=torch.zeros(8)), r"output_bias must be \[5\], got \[8\]"),
    (dict(output_bias=torch.zeros(5).half()), "output_bias must be float32, got float16"),
    (dict(residual=HUGE_ROWS, attended=torch.zeros(1, 1, 8).expand(2**27, 2**27, 8)),
     r"residual must leave the result \[B, n, C\] with less than 2\*\*56 entries, "
     r"got \[134217728, 134217728, 5\]"),
    (dict(residual=torch.zeros(1, 1, 1).expand(2**27, 2**27, 1), norm=torch.ones(1),
          attended=torch.zeros(1, 1, 1).expand(2**27, 2**27, 1),
          weights=packed((1, 1), (7, 1), (7, 1), (1, 7))),
     r"residual must leave the gate \[B, n, I\] with less than 2\*\*56 entries, "
     r"got \[134217728, 134217728, 7\]"),
    (dict(epsilon=-0.5), "epsilon must be finite and at least 0, got -0.5"),
    (dict(epsilon=float("inf")), "epsilon must be finite and at least 0, got inf"),
]  # fmt: skip

BUILD = {
    "norm_qkv_rope": norm_qkv_rope_args,
    "output_norm_mlp": output_norm_mlp_args,
    "cached_attention": changing(
        query=torch.zeros(2, 4, 3, 5), keys=torch.zeros(2, 2, 7, 5), values=torch.zeros(2, 2, 7, 6),
        mask=None, scale=None, soft_cap=None,
    ),
    "pack_linear": changing(weight=torch.zeros(3, 5)),
    "packed_linear": changing(
        x=torch.zeros(2, 5), panels=PANELS, in_features=5, out_features=3, bias=None
    ),
}  # fmt: skip
ROWS = {
    "pack_linear": PACK, "packed_linear": LINEAR, "cached_attention": ATTENTION,
    "norm_qkv_rope": NORM_QKV_ROPE, "output_norm_mlp": OUTPUT_NORM_MLP,
}  # fmt: skip

# (op, the argument that stays on the CPU, what else to change, the start of the message)
DEVICES = [
    ("cached_attention", "keys", {}, "keys must be on the device of query"),
    ("cached_attention", "values", {}, "values must be on the device of query"),
    ("cached_attention", "mask", dict(mask=torch.ones(2, 1, 3, 7).bool()),
     "mask must be on the device of query"),
    ("norm_qkv_rope", "norm", {}, "norm must be on the device of x"),
    ("norm_qkv_rope", "cos", {}, "cos must be on the device of x"),
    ("norm_qkv_rope", "sin", {}, "sin must be on the device of x"),
    ("norm_qkv_rope", "qkv", {}, "qkv[0] must be on the device of x"),
    ("norm_qkv_rope", "biases", dict(biases=zeros(8, 4, 4)),
     "biases[0] must be on the device of x"),
    ("norm_qkv_rope", "head_norms", dict(head_norms=zeros(4, 4)),
     "head_norms[0] must be on the device of x"),
    ("output_norm_mlp", "attended", {}, "attended must be on the device of residual"),
    ("output_norm_mlp", "norm", {}, "norm must be on the device of residual"),
    ("output_norm_mlp", "output", {}, "output must be on the device of residual"),
    ("output_norm_mlp", "mlp", {}, "mlp[0] must be on the device of residual"),
    ("output_norm_mlp", "output_bias", dict(output_bias=torch.zeros(5)),
     "output_bias must be on the device of residual"),
    ("output_norm_mlp", "biases", dict(biases=zeros(7, 7, 5)),
     "biases[0] must be on the device of residual"),
    ("packed_linear", "panels", {}, "panels must be on the device of x"),
    ("packed_linear", "bias", dict(bias=torch.zeros(3)), "bias must be on the device of x"),
]  # fmt: skip
