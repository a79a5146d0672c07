"""`decoder_layers_`: bit for bit the ops that it consists of, and all or nothing is written."""

from __future__ import annotations

import copy
import dataclasses

import proofs
import pytest
import torch
from proofs import assert_close
from proofs.forward import decoder_layers_case, layers_by_ops, layers_of

import specdec_kernels as sk

by_case = pytest.mark.parametrize("case", proofs.cases("decoder_layers_"), ids=str)
X, NORMS, WEIGHTS, COS, CACHES, POSITIONS, MASK = 0, 1, 2, 9, 11, 12, 13
op = torch.ops.specdec_kernels.decoder_layers_.default


def drawn(**more):
    sizes = (2, 3, 33, 4, 2, 6, 17, 9)
    return list(decoder_layers_case(sizes, biases=True, head_norms=True, **more).args())


def assert_same(args, y, want_y, want_caches):
    assert_close("y", y, want_y)
    for cache, want in zip(args[CACHES], want_caches, strict=True):
        assert_close("a cache", cache, want)


@by_case
def test_it_is_the_four_ops_bit_for_bit(case):
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    args, other = case.args(), case.args()
    want = layers_by_ops(*other)
    y = op(*args)
    assert y.is_contiguous()
    assert_same(args, y, want, other[CACHES])


@pytest.mark.parametrize("at", [X, MASK, COS, NORMS, 5, 6, 7, 8])
def test_what_lies_in_a_cache_is_read_before_it_is_written(at):
    args = drawn(hidden_slots=60, layers=2)
    args[POSITIONS] = torch.tensor([0, 0])
    listed = isinstance(args[at], list)
    given = args[at][-1] if listed else args[at]
    # The same numbers, in the memory of the slots that the call writes.
    memory = args[CACHES][0].view(torch.uint8).flatten()
    size = given.numel() * given.element_size()
    inside = memory[:size].view(given.dtype).view(given.shape)
    inside.copy_(given)
    want = layers_by_ops(*copy.deepcopy(args))
    args[at] = [*args[at][:-1], inside] if listed else inside
    assert_close("y", op(*args), want)


@pytest.mark.parametrize("every", [False, True])
def test_the_public_function_passes_everything_on(every):
    args, other = drawn(layers=2, every=every), drawn(layers=2, every=every)
    y = sk.decoder_layers_(
        args[X], layers_of(*args[1:9], *args[14:16]), *args[COS : COS + 2], tuple(args[CACHES]),
        *args[POSITIONS:14], every_layer=every,
    )  # fmt: skip
    assert_same(args, y, op(*other), other[CACHES])


def test_layers_that_do_not_agree_are_named():
    first, second = layers_of(*drawn(layers=2)[1:9], 0.3, 1e-5).layers
    for name, value, message in (
        ("epsilon", 0.5, "1e-05, got 0.5"), ("head_norms", (), "2 tensors, got 0 tensors"),
        ("output_bias", None, "1 tensor, got 0 tensors"),
    ):  # fmt: skip
        other = dataclasses.replace(second, **{name: value})
        with pytest.raises(ValueError, match=rf"layers\[1\].{name} must be like .*{message}"):
            sk.PackedDecoderLayers([first, other])
    with pytest.raises(ValueError, match="layers must hold at least one layer, got none"):
        sk.PackedDecoderLayers([])
    with pytest.raises(TypeError, match=r"layers\[1\] must be a PackedDecoderLayer, got None"):
        sk.PackedDecoderLayers([first, None])
    with pytest.raises(TypeError, match="layers must be a sequence of PackedDecoderLayer, got"):
        sk.PackedDecoderLayers(first)


# Argument, what it becomes, the message. The rest is the validation of the ops within.
FAULTS = [
    (NORMS, lambda x: x[:3], "norms must be 2 tensors a layer, got 3"),
    (NORMS, lambda x: [], "norms must be 2 tensors a layer, got 0"),
    (NORMS, lambda x: [x[0][:9], *x[1:]],
     r"layer 0, before attention: norm must be \[C\], or .* with 33 numbers, got \[9\]"),
    (NORMS, lambda x: [x[0].view(1, 3, 11), *x[1:]], r"with 33 numbers, got \[1, 3, 11\]"),
    (NORMS, lambda x: [x[0].view(3, 11), *x[1:]],
     r"layer 0, after attention: norm must be \[11\], got \[33\]"),
    (NORMS, lambda x: [*x[:2], x[2][:9], x[3]], r"layer 1, before attention: norm must be"),
    (NORMS, lambda x: [*x[:2], x[2].view(3, 11), x[3]],
     r"layer 1, before attention: norm must be \[C\], because only the first .* got \[3, 11\]"),
    (NORMS, lambda x: [*x[:3], x[3][:9]],
     r"layer 1, after attention: norm must be \[33\], got \[9\]"),
    (WEIGHTS, lambda x: x[:13], "must be 14 packed weights, 7 a layer, got 13"),
    (WEIGHTS, lambda x: [x[3], *x[1:]], r"layer 0, before attention: qkv\[0\] must be \["),
    (WEIGHTS, lambda x: [*x[:10], x[11], *x[11:]],
     r"layer 1, after attention: output must be \["),
    (5, lambda x: x[:5], "qkv_biases must be 6 tensors or none, got 5"),
    (6, lambda x: x[:1], "output_biases must be 2 tensors or none, got 1"),
    (7, lambda x: x[:5], "mlp_biases must be 6 tensors or none, got 5"),
    (8, lambda x: x[:3], "head_norms must be 4 tensors or none, got 3"),
    (CACHES, lambda x: x[:3], "caches must be 4 tensors, .* of each layer, got 3"),
    (CACHES, lambda x: [x[0], x[1][:, :, :8], *x[2:]],
     r"caches\[1\] must be \[B, H_kv, S, D\] = \[2, 2, 12, 6\], got \[2, 2, 8, 6\]"),
    (CACHES, lambda x: [x[0][:, :1], *x[1:]],
     r"caches\[0\] must be \[B, H_kv, S, D\] = \[2, 2, 12, 6\], got \[2, 1, 12, 6\]"),
    (CACHES, lambda x: [x[0][:1], *x[1:]], r"caches\[0\] must be \[B, H, S, D\] with B = 2, got"),
    (CACHES, lambda x: [x[0].mT.contiguous().mT, *x[1:]],
     r"caches\[0\] must have a contiguous last dimension"),
    (CACHES, lambda x: [x[0].half(), *x[1:]], r"caches\[0\] must be float32, got float16"),
    (POSITIONS, lambda x: x.short(), "positions must be int32 or int64, got int16"),
    (POSITIONS, lambda x: x[:1], r"positions must be \[2\], got \[1\]"),
    *(
        (MASK, change, r"mask must be \[B, 1, n, S\] = \[2, 1, 3, S\] with S at most 12, the "
         rf"slots of caches, got \[{', '.join(map(str, shape))}\]")
        for change, shape in (
            (lambda x: x[:, 0], (2, 3, 9)), (lambda x: x[:, :, :2], (2, 1, 2, 9)),
            (lambda x: torch.ones(2, 1, 3, 13).bool(), (2, 1, 3, 13)),
            (lambda x: x[:1], (1, 1, 3, 9)), (lambda x: x.expand(2, 4, 3, 9), (2, 4, 3, 9)),
        )
    ),
    (MASK, lambda x: x.float(), "mask must be bool, got float32"),
    (14, lambda x: float("nan"), "scale must be finite, got nan"),
    (15, lambda x: -1.0, "layer 0, .*: epsilon must be finite and at least 0, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("at", "change", "message"), FAULTS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_nothing_is_written_where_an_argument_does_not_fit(at, change, message, device):
    args = drawn(layers=2)
    args[at] = change(args[at])
    before = copy.deepcopy(args[CACHES])
    if device == "meta":  # the fake kernel
        args = [[y.to(device) if torch.is_tensor(y) else y for y in x] if isinstance(x, list) else
                x.to(device) if torch.is_tensor(x) else x for x in args]  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        op(*args)
    if device == "cpu":
        for cache, was in zip(args[CACHES], before, strict=True):
            assert_close("a cache", cache, was)


def test_keys_and_values_in_one_memory_are_refused():
    args = drawn()
    args[CACHES] = [args[CACHES][0]] * 2
    with pytest.raises(RuntimeError, match=r"caches\[1\] must"):
        op(*args)
