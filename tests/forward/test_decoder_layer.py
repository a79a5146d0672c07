"""`norm_qkv_rope` and `output_norm_mlp`: values, error, and what the bits of a token depend on."""

from __future__ import annotations

import ctypes
from contextlib import contextmanager

import proofs
import pytest
import torch
from proofs import OUTPUTS, assert_close, intervals
from proofs.forward import norm_qkv_rope_case, output_norm_mlp_case
from support.providers import run_case

import specdec_kernels as sk
from specdec_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = ("norm_qkv_rope", "output_norm_mlp")
# The arguments with numbers of each token: x, cos and sin; attended and residual.
TOKENS = {"norm_qkv_rope": (0, 5, 6), "output_norm_mlp": (0, 1)}
WIDTHS = [1, 2, 3, 5, 6, 7, 12, 13, 31, 63, 64, 65, 130]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
by_op = pytest.mark.parametrize("op", OPS)
EVERY_CASE = [case for op in OPS for case in proofs.cases(op)]


def drawn(op, b, n, dtype, *, small=False, **more):
    """Arguments of an op for a layer with 3 heads of 34 numbers, or with 2 of 6."""
    hidden, heads, size, inner = (33, 2, 6, 17) if small else (101, 3, 34, 403)
    if op == "norm_qkv_rope":
        sizes = (b, n, hidden, heads, 1, size)
        return norm_qkv_rope_case(sizes, dtype, biases=True, head_norms=True, **more).args()
    sizes = (b, n, heads * size, hidden, inner)
    return output_norm_mlp_case(sizes, dtype, output_bias=True, biases=True, **more).args()


def call(op, args, change=lambda x: x):
    """The outputs of an op, with `change` made to every argument that has numbers of tokens."""
    changed = [change(x) if i in TOKENS[op] else x for i, x in enumerate(args)]
    out = getattr(torch.ops.specdec_kernels, op).default(*changed)
    return [out] if torch.is_tensor(out) else list(out)


def assert_bits(got, want):
    """Equal bit for bit, but for the payload of NaN; zeros keep their sign."""
    for g, w in zip(got, want, strict=True):
        assert_close("an output", g, w)
        assert torch.equal(g.signbit() | g.isnan(), w.signbit() | w.isnan())


@contextmanager
def filled_memory():
    """Memory from malloc holds 0xfe in every byte: -1.7e38, or NaN in float16."""
    m_perturb, mallopt = -6, getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)
    mallopt(m_perturb, 1)
    yield
    mallopt(m_perturb, 0)


@pytest.mark.parametrize("case", EVERY_CASE, ids=lambda case: f"{case.op}-{case}")
def test_agrees_with_the_specification(case):
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    args = case.args()
    with filled_memory():
        out = run_case(case)
    want = getattr(reference, case.op)(*args)
    want = [want] if torch.is_tensor(want) else want
    held = getattr(intervals, case.op)(*args)
    for name, y, w, interval in zip(OUTPUTS[case.op], out, want, held, strict=True):
        assert y.is_contiguous()
        assert (y.shape, y.dtype) == (w.shape, args[0].dtype)
        assert interval.holds(y).all(), name
        assert interval.holds(w).all(), f"{name} of the reference"
        if y.dtype == torch.float32:
            assert_close(name, y, w, atol=4e-6 * float(w.abs().amax() if w.numel() else 0))
        elif y.numel():  # rounding is where the reference rounds, so few numbers differ at all
            assert (y == w).double().mean() >= 0.98, name


@by_dtype
@by_op
def test_a_token_has_the_same_bits_whatever_stands_beside_it(op, dtype):
    args = drawn(op, 1, 130, dtype)
    tokens = [call(op, args, lambda x, i=i: x[:, i : i + 1]) for i in range(130)]
    alone = [torch.cat(parts, 1) for parts in zip(*tokens, strict=True)]
    order = torch.randperm(130)
    for n in WIDTHS:
        some = order[:n]
        assert_bits(call(op, args, lambda x, at=some: x[:, at]), [y[:, some] for y in alone])
    for shape in ((13, 10), (2, 65), (130, 1)):
        out = call(op, args, lambda x, shape=shape: x.view(*shape, -1))
        assert_bits([y.view(1, 130, *y.shape[2:]) for y in out], alone)


@by_dtype
@by_op
@pytest.mark.parametrize("small", [False, True])
def test_the_number_of_threads_changes_nothing(op, small, dtype):
    torch.use_deterministic_algorithms(True)  # an output that no thread writes is NaN
    args = drawn(op, 2, 65, dtype, small=small)
    torch.set_num_threads(1)
    want = {n: call(op, args, lambda x, n=n: x[:, :n]) for n in (1, 6, 65)}
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for n, y in want.items():
            with filled_memory():
                assert_bits(call(op, args, lambda x, n=n: x[:, :n]), y)


@by_dtype
@by_op
def test_strides_change_nothing_and_the_memory_around_is_not_read(op, dtype):
    args = drawn(op, 2, 5, dtype, small=True)
    want = call(op, args)

    def inside(x):
        wide = torch.full([n + 3 for n in x.shape], torch.nan).to(dtype)
        view = wide[tuple(slice(1, n + 1) for n in x.shape)]
        view.copy_(x)
        return view

    def exchanged(x):
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    def last_first(x):
        return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)

    for of in (inside, exchanged, last_first, lambda x: x.repeat_interleave(2, 2)[..., ::2]):
        assert_bits(call(op, args, of), want)

    def around(x):
        """Vectors out of wider ones, and lists of them; panels have to be contiguous."""
        if isinstance(x, list):
            return [around(y) for y in x]
        return inside(x) if torch.is_tensor(x) and x.dim() == 1 else x

    assert_bits(call(op, [around(x) for x in args]), want)
    spaced = [x.repeat_interleave(2)[::2] if torch.is_tensor(x) and x.dim() == 1 else x
              for x in args]  # fmt: skip
    assert_bits(call(op, spaced), want)


@by_dtype
def test_residual_and_attended_may_be_one_tensor(dtype):
    args = list(output_norm_mlp_case((2, 3, 33, 33, 17), dtype).args())
    args[1] = args[0].clone()
    want = call("output_norm_mlp", args)
    args[1] = args[0]
    assert_bits(call("output_norm_mlp", args), want)


@by_dtype
@by_op
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity_reach_all_of_their_token_and_no_other(op, value, dtype):
    for at in (0, 15, 32):
        args = drawn(op, 2, 3, dtype, small=True)
        clean = call(op, args)
        residual = args[TOKENS[op][op != "norm_qkv_rope"]]  # or x
        residual[1, 1, at] = value
        for y, was in zip(call(op, args), clean, strict=True):
            assert y[1, 1].isnan().all()
            assert_bits([y[0], y[1, ::2]], [was[0], was[1, ::2]])


@by_dtype
def test_nan_of_an_angle_reaches_two_numbers_of_each_head(dtype):
    args = drawn("norm_qkv_rope", 1, 3, dtype)
    clean = call("norm_qkv_rope", args)
    args[5][0, 1, 20] = torch.nan
    query, key, value = call("norm_qkv_rope", args)
    for y, was in ((query, clean[0]), (key, clean[1])):
        faulty = torch.zeros_like(y, dtype=torch.bool)
        faulty[0, 1, :, 20] = True
        assert torch.equal(y.isnan(), faulty)
        assert_bits([y[~faulty]], [was[~faulty]])
    assert_bits([value], [clean[2]])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: str(d)[6:])
def test_numbers_that_overflow_are_those_of_a_norm_in_float32(dtype):
    """A square overflows, so that the factor is 0, as it is in Transformers."""
    args = norm_qkv_rope_case((1, 2, 7, 1, 1, 2), dtype).args()
    args[0][0, 1] = 1e30
    assert not any(y[0, 1].any() for y in call("norm_qkv_rope", args))
    assert all(y[0, 0].all() for y in call("norm_qkv_rope", args))


def test_numbers_whose_squares_underflow_are_those_of_a_norm_in_float32():
    """Without an epsilon the factor is infinite, as it is in Transformers."""
    args = [*norm_qkv_rope_case((1, 2, 7, 1, 1, 2), torch.float32).args()[:-1], 0.0]
    args[0][0, 1] = 1e-30
    out = call("norm_qkv_rope", args)
    for y, interval in zip(out, intervals.norm_qkv_rope(*args), strict=True):
        assert y[0, 0].isfinite().all()
        assert not y[0, 1].isfinite().any()
        assert interval.holds(y).all()


def activated(x):
    """silu(x) of a vector [n], by a network whose gate is a bias."""
    n, dtype = len(x), x.dtype
    zeros, nothing = torch.zeros(1, 1, n, dtype=dtype), sk.pack_linear(torch.zeros(n, n).to(dtype))
    one = torch.ones(n, dtype=dtype)
    down = sk.pack_linear(torch.eye(n).to(dtype))
    return sk.output_norm_mlp(
        zeros, zeros, one, nothing, [nothing, nothing, down], epsilon=1.0,
        biases=[x, one, torch.zeros_like(one)],
    )[0, 0]  # fmt: skip


def test_the_sigmoid_of_small_and_large_numbers_is_exact():
    ends = torch.logspace(-30, 4, 300)
    x = torch.cat([torch.linspace(-110, 110, 500), ends, -ends, torch.tensor([0.0, -0.0, -87.3])])
    want = x.double() * torch.sigmoid(x.double())
    # Below e^-87.3 the exponential is 0.
    assert ((activated(x).double() - want).abs() <= 3e-7 * want.abs() + 2e-36).all()


@by_dtype
def test_nan_and_infinity_are_activated_as_by_torch(dtype):
    for number in (torch.inf, -torch.inf, torch.nan, 0.0, -1e4, 1e4, 88.8, -88.8, -3e4):
        x = torch.tensor([number]).to(dtype)
        want = torch.nn.functional.silu(x)
        assert_close("y", activated(x), want, rtol=float(torch.finfo(dtype).eps), atol=1e-36)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d)[6:])
def test_every_number_of_16_bits_is_activated_as_by_torch(dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    got = torch.cat([activated(x) for x in every.split(256)])
    want = torch.nn.functional.silu(every)
    assert_close("y", got, want, rtol=float(torch.finfo(dtype).eps), atol=1e-36)
    # The processor's own products of bfloat16 take a subnormal for zero.
    normal = want.abs() >= torch.finfo(dtype).tiny
    assert (got == want)[normal].double().mean() >= 0.998


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=lambda d: str(d)[6:])
def test_a_number_is_rounded_before_it_is_weighted(dtype):
    """1 / sqrt(3) times some weights is another number of 16 bits where it is rounded once."""
    one, root = torch.ones(1, 1, 1, dtype=dtype), torch.tensor(3, dtype=torch.float64).rsqrt()
    packed, angles = sk.pack_linear(one[0].expand(2, 1).contiguous()), one.expand(1, 1, 2)
    different = 0
    for norm in torch.linspace(1, 2, 65).to(dtype).split(1):
        value = sk.norm_qkv_rope(one, norm, [packed] * 3, angles, angles, epsilon=2.0)[2]
        assert (value == root.to(dtype) * norm).all()
        different += int((value != (root * norm.double()).to(dtype)).any())
    assert different > 5


def test_a_padded_weight_is_no_weight_of_another_size():
    """Panels of bfloat16 hold pairs of inputs, so those of 33 inputs have the shape of 34."""
    x, one = torch.ones(1, 1, 34).bfloat16(), torch.ones(34).bfloat16()
    packed = sk.pack_linear(torch.ones(4, 33).bfloat16())
    angles = torch.ones(1, 1, 2).bfloat16()
    with pytest.raises(RuntimeError, match=r"qkv\[0\] must be .* C = 34, got \[4, 33\]"):
        sk.norm_qkv_rope(x, one, [packed] * 3, angles, angles, epsilon=0.0)


FAMILIES = {
    "Llama": dict(attention_bias=True, mlp_bias=True),
    "Mistral": dict(sliding_window=None),
    "Qwen2": {},
    "Qwen3": dict(attention_bias=True),
}
MODELS = [
    dict(hidden_size=36, num_attention_heads=4, num_key_value_heads=2, head_dim=10,
         intermediate_size=70, rms_norm_eps=0.25),
    dict(hidden_size=192, num_attention_heads=3, num_key_value_heads=1, head_dim=64,
         intermediate_size=509, rms_norm_eps=1e-6),
]  # fmt: skip


def attend(module, query, keys, values, mask, scaling, **_):
    return sk.cached_attention(query, keys, values, mask, scale=scaling), None


def layer_of(family, sizes, dtype):
    """A decoder layer of Transformers with random numbers in all of its weights."""
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers.models, family.lower())
    config = getattr(module, f"{family}Config")(**FAMILIES[family] | sizes)
    # In 16 bits PyTorch's attention rounds weights, which would hide the rest of the layer.
    config._attn_implementation = "sdpa" if dtype == torch.float32 else attend.__module__
    transformers.AttentionInterface.register(attend.__module__, attend)
    kind = getattr(getattr(module, f"modeling_{family.lower()}"), f"{family}DecoderLayer")
    layer, g = kind(config, 0).requires_grad_(requires_grad=False), torch.Generator()
    g.manual_seed(0)
    for weight in layer.parameters():
        weight.copy_(torch.randn(weight.shape, generator=g))
        if weight.dim() == 2:
            weight.div_(weight.shape[1] ** 0.5)
    return layer.to(dtype).eval()


def by_ops(layer, x, cos, sin, mask):
    """The same by the ops, with attention over the keys and values of these tokens."""
    attention, mlp = layer.self_attn, layer.mlp
    linear = [
        attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj,
        mlp.up_proj, mlp.down_proj,
    ]  # fmt: skip
    weights, biases = [sk.pack_linear(y.weight) for y in linear], [y.bias for y in linear]
    norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    heads = sk.norm_qkv_rope(
        x, layer.input_layernorm.weight, weights[:3], cos, sin,
        epsilon=layer.input_layernorm.variance_epsilon,
        biases=[] if biases[0] is None else biases[:3],
        head_norms=[norm.weight for norm in norms if norm is not None],
    )  # fmt: skip
    attended = sk.cached_attention(*(y.transpose(1, 2) for y in heads), mask)
    return sk.output_norm_mlp(
        attended.flatten(2), x, layer.post_attention_layernorm.weight, weights[3], weights[4:],
        epsilon=layer.post_attention_layernorm.variance_epsilon, output_bias=biases[3],
        biases=[] if biases[4] is None else biases[4:],
    )  # fmt: skip


def model_inputs(layer, dtype, b=2, n=13):
    """Hidden states, the cos and sin of their positions, and the mask of a chain."""
    attention, g = layer.self_attn, torch.Generator().manual_seed(0)
    x = torch.randn(b, n, attention.q_proj.in_features, generator=g).to(dtype)
    positions = torch.arange(b * n).view(b, n, 1).double()
    frequencies = 10_000 ** -torch.linspace(0, 1, attention.head_dim // 2).double()
    angles = (positions * frequencies).repeat(1, 1, 2)
    mask = torch.ones(b, 1, n, n, dtype=torch.bool).tril()
    return x, angles.cos().to(dtype), angles.sin().to(dtype), mask


def by_transformers(layer, x, cos, sin, mask):
    return layer(x, attention_mask=mask, position_embeddings=(cos, sin))


by_model = pytest.mark.parametrize("sizes", MODELS, ids=lambda sizes: sizes["hidden_size"])
by_family = pytest.mark.parametrize("family", FAMILIES)


@by_dtype
@by_model
@by_family
def test_with_attention_they_are_a_layer_of_transformers(family, sizes, dtype):
    layer = layer_of(family, sizes, dtype)
    inputs = model_inputs(layer, dtype)
    y, want = by_ops(layer, *inputs), by_transformers(layer, *inputs)
    eps = torch.finfo(dtype).eps
    assert_close("y", y, want, atol=32 * eps * float(want.abs().amax()))
    # Every rounding to 16 bits is at the same place, so only sums near a tie differ, and what
    # follows from them. Over 16 seeds at least 0.957 and 0.877 were equal.
    equal = {torch.float32: 0.0, torch.bfloat16: 0.95, torch.float16: 0.85}[dtype]
    assert (y == want).double().mean() >= equal
