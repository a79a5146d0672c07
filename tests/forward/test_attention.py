"""`cached_attention`: values, error, and what the bits of a query's output depend on."""

from __future__ import annotations

import proofs
import pytest
import torch
from proofs import assert_bits, assert_close
from support.providers import run_case

import specdec_kernels as sk
from specdec_kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 3, 8, 16, 33, 64, 80, 96, 128, 192, 256]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


def drawn(b, h, h_kv, n, s, d, dtype=torch.float32, value_size=None, seed=0):
    """query [b, h, n, d], keys and values."""
    g = torch.Generator().manual_seed(seed)
    shapes = (b, h, n, d), (b, h_kv, s, d), (b, h_kv, s, value_size or d)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes]


def alone(query, keys, values, mask, **more):
    """The output of each query alone, with what it sees in a cache of its own."""
    b, h, n, _ = query.shape
    group = h // keys.shape[1]
    out = query.new_zeros(b, n, h, values.shape[3])
    for at in ((x, y, z) for x in range(b) for y in range(h) for z in range(n)):
        seq, head, i = at
        seen = mask[seq, 0, i]
        key, value = (x[seq, head // group][seen][None, None] for x in (keys, values))
        out[seq, i, head] = sk.cached_attention(
            query[seq, head, i][None, None, None], key, value, **more
        )[0, 0, 0]
    return out


@pytest.mark.parametrize("case", proofs.cases("cached_attention"), ids=str)
def test_agrees_with_the_specification(case):
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    args = case.args()
    (out,) = run_case(case)
    want = reference.cached_attention(*(a.double() if i < 3 else a for i, a in enumerate(args)))
    assert out.is_contiguous()
    assert out.dtype == args[0].dtype
    ulp = 0.0 if out.dtype == torch.float32 else torch.finfo(out.dtype).eps / 2
    largest = (
        args[2].double().nan_to_num(0, 0, 0).clamp(-1e30, 1e30).abs().amax((0, 1, 2))
        if (args[2].numel())
        else torch.zeros(args[2].shape[3])
    )
    near = (out.double() - want).abs() <= 2e-6 * largest + ulp * want.abs() + 1e-7
    # Where a value overflows on the way, the order of the sum decides.
    extreme = want.abs() > 1e30
    same = (out.double() == want) | (out.isnan() & want.isnan())
    assert (near | extreme | same).all()


@pytest.mark.parametrize("d", SIZES)
@by_dtype
def test_a_query_has_the_same_bits_alone_with_what_it_sees(d, dtype):
    query, keys, values = drawn(2, 4, 2, 7, 150, d, dtype, value_size=SIZES[-1 - SIZES.index(d)])
    mask = torch.rand(2, 1, 7, 150) < torch.rand(7)[:, None]
    mask[0, 0, 2], mask[1, 0, 0] = False, True
    mask[0, 0, 3:6, 70:] = True  # the same slots, but other ordinals
    out = sk.cached_attention(query, keys, values, mask)
    assert_bits(out, alone(query, keys, values, mask))
    for n in (1, 2, 3, 5):
        part = sk.cached_attention(query[:, :, :n], keys, values, mask[:, :, :n])
        assert_bits(part, out[:, :n])
    order = torch.randperm(7)
    assert_bits(sk.cached_attention(query[:, :, order], keys, values, mask[:, :, order]),
                out[:, order])  # fmt: skip
    assert not out[0, 2].any()


@by_dtype
def test_hidden_slots_of_any_content_change_nothing(dtype):
    query, keys, values = drawn(1, 4, 2, 5, 200, 40, dtype)
    mask = torch.rand(1, 1, 5, 200) < 0.5
    mask[..., torch.rand(200) < 0.3] = False
    want = sk.cached_attention(query, keys, values, mask)
    hidden = ~mask[0, 0].any(0)
    assert hidden.any()
    for filler in (torch.nan, torch.inf, -torch.inf, 1e38, 1e-42):
        for x in (keys, values):
            x[:, :, hidden] = filler
        assert_bits(sk.cached_attention(query, keys, values, mask), want)
    # What one query does not see, another does.
    keys[:, :, 77], values[:, :, 77], mask[..., 77] = torch.nan, torch.nan, False
    mask[0, 0, 2, 77] = True
    got = sk.cached_attention(query, keys, values, mask)
    others = [0, 1, 3, 4]
    assert got[:, 2].isnan().all()
    assert not got[:, others].isnan().any()


@by_dtype
def test_slots_may_lie_anywhere_in_the_same_order(dtype):
    query, keys, values = drawn(1, 3, 1, 2, 90, 24, dtype)
    want = sk.cached_attention(query, keys, values)
    for gap in (1, 3, 70, 1000):
        places = torch.sort(torch.randperm(90 + gap)[:90]).values
        wide = [x.new_full((1, 1, 90 + gap, 24), torch.nan) for x in (keys, values)]
        for to, x in zip(wide, (keys, values), strict=True):
            to[:, :, places] = x
        mask = torch.zeros(1, 1, 2, 90 + gap, dtype=torch.bool)
        mask[..., places] = True
        assert_bits(sk.cached_attention(query, *wide, mask), want)


@by_dtype
@pytest.mark.parametrize("mask", ["all", "chain", "window"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 9, 3, 1, 700, 64), (1, 9, 3, 13, 300, 64), (2, 8, 8, 5, 333, 80), (5, 2, 1, 60, 40, 16)],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_the_number_of_threads_changes_nothing(sizes, mask, dtype):
    query, keys, values = drawn(*sizes, dtype)
    b, _, _, n, s, _ = sizes
    seen = proofs.forward.visible_slots(mask, b, n, s, torch.Generator())
    torch.use_deterministic_algorithms(True)  # an output that no thread writes is NaN
    torch.set_num_threads(1)
    want = sk.cached_attention(query, keys, values, seen)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert_bits(sk.cached_attention(query, keys, values, seen), want)


@by_dtype
def test_a_sequence_has_the_same_bits_in_every_batch(dtype):
    query, keys, values = drawn(8, 4, 2, 3, 120, 32, dtype)
    lengths = torch.arange(8)[:, None, None, None] * 15
    mask = (torch.arange(120) <= lengths + torch.arange(3)[:, None]).expand(8, 1, 3, 120)
    every = sk.cached_attention(query, keys, values, mask)
    for b in range(1, 9):
        order = torch.randperm(8)[:b]
        part = sk.cached_attention(query[order], keys[order], values[order], mask[order])
        assert_bits(part, every[order])


@by_dtype
def test_strides_change_nothing_and_the_memory_around_is_not_read(dtype):
    query, keys, values = drawn(2, 4, 2, 5, 66, 37, dtype)
    mask = torch.rand(2, 1, 5, 66) < 0.7
    want = sk.cached_attention(query, keys, values, mask)

    def inside(x):
        wide = torch.full([n + 3 for n in x.shape], torch.nan).to(dtype)
        view = wide[1:-2, 2:-1, 1:-2, 1:-2]
        view.copy_(x)
        return view

    def exchanged(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def reversed_dims(x):
        return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)

    for of in (inside, exchanged, reversed_dims):
        assert_bits(sk.cached_attention(of(query), of(keys), of(values), mask), want)
    for of_mask in (
        mask.repeat_interleave(2, 3)[..., ::2],
        mask.transpose(0, 3).contiguous().transpose(0, 3),
        mask.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    ):
        assert_bits(sk.cached_attention(query, keys, values, of_mask), want)
    one = sk.cached_attention(query, keys, values, mask[:1, :, :1].expand(2, 1, 5, 66))
    assert_bits(one, sk.cached_attention(query, keys, values,
                                         mask[:1, :, :1].repeat(2, 1, 5, 1)))  # fmt: skip


@pytest.mark.parametrize("s", [64, 500, 2000])
@pytest.mark.parametrize("kind", ["normal", "peaked", "flat"])
def test_the_error_is_no_larger_than_that_of_torch(s, kind):
    query, keys, values = drawn(1, 8, 8, 8, s, 64)
    query *= {"normal": 1, "peaked": 6, "flat": 0.02}[kind]
    values += kind == "flat"
    sdpa = torch.nn.functional.scaled_dot_product_attention
    exact = sdpa(query.double(), keys.double(), values.double()).transpose(1, 2)
    pair = sk.cached_attention(query, keys, values), sdpa(query, keys, values).transpose(1, 2)
    ours, torchs = ((y.double() - exact).abs() for y in pair)
    assert ours.square().mean().sqrt() <= torchs.square().mean().sqrt()
    assert ours.max() <= torchs.max() * 1.1


@by_dtype
def test_nan_and_infinity_are_those_of_the_softmax(dtype):
    query, keys, values = drawn(1, 1, 1, 4, 100, 16, dtype)
    query = query.abs()
    mask = torch.ones(1, 1, 4, 100, dtype=torch.bool).tril(96)
    clean = sk.cached_attention(query, keys, values, mask)
    assert_bits(clean[:, :3], sk.cached_attention(query[:, :, :3], keys, values, mask[:, :, :3]))
    for at, value in ((99, torch.nan), (99, torch.inf), (99, -torch.inf)):
        for which in (0, 1):  # keys, values
            cache = [keys.clone(), values.clone()]
            cache[which][0, 0, at, 3] = value
            out = sk.cached_attention(query, *cache, mask)
            want = reference.cached_attention(query, *cache, mask, None, None)
            assert_bits(out[:, :3], clean[:, :3])
            assert torch.equal(out.isnan(), want.isnan())
            assert torch.equal(out.isinf(), want.isinf())
            assert torch.equal(out[out.isinf()], want[want.isinf()])
    every = sk.cached_attention(query, torch.full_like(keys, -torch.inf), values)
    assert every.isnan().all()


@by_dtype
def test_scores_far_apart_leave_one_key(dtype):
    """Differences of scores beyond the exponents of float32, of either sign."""
    query = torch.ones(1, 1, 1, 1).to(dtype)
    keys = torch.tensor([-3e4, 2e4, -1.0, 1e4]).view(1, 1, 4, 1).to(dtype)
    values = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 1, 4, 1).to(dtype)
    for scale, want in ((1.0, 2.0), (-1.0, 1.0), (0.0, 2.5), (1e30, 2.0)):
        assert sk.cached_attention(query, keys, values, scale=scale).item() == want


@pytest.mark.parametrize("soft_cap", [1e-3, 0.7, 5.0, 50.0, 1e6])
def test_soft_capped_scores_are_exact(soft_cap):
    """Of one key against another: the weight of the first tells the difference of the scores."""
    scores = torch.cat([torch.linspace(-30, 30, 201), torch.linspace(-1e-3, 1e-3, 21)])
    query = torch.ones(len(scores), 1, 1, 1)
    keys = torch.stack([scores, torch.zeros_like(scores)], 1)[:, None, :, None]
    values = torch.tensor([1.0, 0.0]).view(1, 1, 2, 1).expand(len(scores), 1, 2, 1)
    out = sk.cached_attention(query, keys, values, scale=1.0, soft_cap=soft_cap).flatten()
    want = torch.sigmoid(soft_cap * torch.tanh(scores.double() / soft_cap))
    assert ((out.double() - want).abs() <= 3e-7 * want + 2e-7 * scores.abs() * want).all()


def test_more_queries_than_a_pass_takes():
    """As a prompt has; rows of several passes, over a cache whose scores fill a pass."""
    query, keys, values = drawn(1, 2, 1, 70, 9000, 8)
    mask = torch.ones(70, 9000, dtype=torch.bool).tril(8930)[None, None]
    out = sk.cached_attention(query, keys, values, mask)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.double(), keys.double(), values.double(), mask, enable_gqa=True
    ).transpose(1, 2)
    assert_close("out", out.double(), want, atol=1e-7)
