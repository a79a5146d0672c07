"""`grow_tree_`: bit for bit the ops that it consists of, and all or nothing is written."""

from __future__ import annotations

import copy

import proofs
import pytest
import torch
from proofs import assert_close
from proofs.forward import grow_tree_case, layers_of, tree_by_ops

import specdec_kernels as sk
from specdec_kernels import reference

HIDDEN, TOKENS, COUNTS, STARTS, LIMITS, EMBEDDINGS, NORMS, NORM, OUTPUT, MAP, COS, CACHES = (
    0, 1, 2, 3, 4, 5, 6, 14, 15, 17, 18, 20,
)  # fmt: skip
by_case = pytest.mark.parametrize("case", proofs.cases("grow_tree_"), ids=str)
op = torch.ops.specdec_kernels.grow_tree_.default


def drawn():
    case = grow_tree_case(
        (3, 3, 24, 4, 2, 6, 17, 24), biases=True, head_norms=True, layout="sliced"
    )
    return list(case.args())


def assert_same(args, out, other, want):
    """What lies in a cache behind a sequence's pairs depends on how deep its batch drafts."""
    for name, x, y in zip(sk.GrownTree._fields, out, want, strict=True):
        assert_close(name, x, y)
    for cache, y in zip(args[CACHES], other[CACHES], strict=True):
        for b, end in enumerate((args[STARTS] + args[COUNTS]).tolist()):
            assert_close("a cache", cache[b, :, :end], y[b, :, :end])


@by_case
def test_it_is_its_ops_bit_for_bit(case):
    torch.use_deterministic_algorithms(True)  # what is not written is NaN
    args, other = case.args(), case.args()
    assert_same(args, op(*args), other, tree_by_ops(*other))


@by_case
def test_it_agrees_with_the_specification(case):
    args, other = case.args(), case.args()
    out, want = sk.GrownTree(*op(*args)), sk.GrownTree(*reference.grow_tree_(*other))
    same = (out.tokens == want.tokens) & (out.parents == want.parents)
    if args[HIDDEN].dtype == torch.float32:
        assert same.all()
        assert (out.levels == want.levels).all()
        assert_close("scores", out.scores, want.scores, atol=1e-4)
    elif same.numel():  # rounding may order two nodes otherwise
        assert same.double().mean() > 0.5


def test_a_sequence_has_the_same_tree_alone():
    args = drawn()
    whole = op(*copy.deepcopy(args))
    for b in range(3):
        alone = [x[b : b + 1] if i <= LIMITS else x for i, x in enumerate(copy.deepcopy(args))]
        alone[CACHES] = [cache[b : b + 1].clone() for cache in alone[CACHES]]
        for name, x, y in zip(sk.GrownTree._fields, op(*alone), whole, strict=True):
            assert_close(name, x[0], y[b])


@pytest.mark.parametrize("at", [OUTPUT, COS])  # which each level reads
def test_what_a_tree_reads_may_lie_in_its_cache(at):
    args = drawn()
    args[CACHES] = [torch.cat([x] * 20, dim=2).contiguous() for x in args[CACHES]]
    args[STARTS][0] = 0
    memory = args[CACHES][0].flatten()[: args[at].numel()].view(args[at].shape)
    memory.copy_(args[at])
    want = op(*copy.deepcopy(args))
    args[at] = memory
    for name, x, y in zip(sk.GrownTree._fields, op(*args), want, strict=True):
        assert_close(name, x, y)


def test_the_public_function_passes_a_head_on():
    args, other = drawn(), drawn()
    packed = sk.PackedLinear(args[OUTPUT], 24, args[16])
    layers = layers_of(*args[NORMS : NORMS + 8], *args[21:23])
    head = sk.PackedHead(layers, args[EMBEDDINGS], args[NORM], packed, args[MAP])
    args[CACHES] = caches = tuple(cache.clone() for cache in args[CACHES])
    with torch.inference_mode():
        out = sk.grow_tree_(
            args[HIDDEN], args[TOKENS], head, args[COS], args[COS + 1], caches,
            args[STARTS], counts=args[COUNTS], limits=args[LIMITS], width=args[23], size=args[24],
            min_probability=args[25],
        )  # fmt: skip
    assert_same(args, out, other, op(*other))
    assert all(cache._version == 1 for cache in caches)


# Argument, what it becomes, the message. The rest is the validation of the layers.
FAULTS = [
    (HIDDEN, lambda x: x[:, :0], "hidden must hold at least one pair"),
    (HIDDEN, lambda x: x[0], r"hidden must be \[B, n, C\], got \[3, 24\]"),
    (TOKENS, lambda x: x[:, :2], r"tokens must be \[B, n\] = \[3, 3\], got \[3, 2\]"),
    (TOKENS, lambda x: x + 41, r"tokens must be in \[0, 41\), got"),
    (TOKENS, lambda x: x - 41, r"tokens must be in \[0, 41\), got -"),
    (COUNTS, lambda x: x * 0, r"counts must be in \[1, n\] = \[1, 3\], got 0"),
    (COUNTS, lambda x: x + 3, r"counts must be in \[1, n\] = \[1, 3\], got"),
    (COUNTS, lambda x: x.float(), "counts must be int32 or int64, got float32"),
    (STARTS, lambda x: x - 24, r"starts must be in \[0, P\) = \[0, 24\), got -"),
    (STARTS, lambda x: x * 0 + 2**62, r"starts must be in \[0, P\) = \[0, 24\), got 46"),
    (STARTS, lambda x: x * 0 + 22, r"cos must have a row for each of \d+ places, got \[24, 6\]"),
    (STARTS, lambda x: x[:1], r"starts must be \[3\], got \[1\]"),
    (LIMITS, lambda x: x + 2**62, "limits must be at most P = 24, got 46"),
    (LIMITS, lambda x: x * 0 + 9, r"caches must have \d+ slots, got \[3, 2, 24, 6\]"),
    (EMBEDDINGS, lambda x: x[:, :9], r"embeddings must be \[V, C\] with 24 columns, got"),
    (EMBEDDINGS, lambda x: x[:9], r"tokens must be in \[0, 9\), got"),
    (EMBEDDINGS, lambda x: x.half(), "embeddings must be float32, got float16"),
    (NORM, lambda x: x[:9], r"norm must be \[24\], got \[9\]"),
    (OUTPUT, lambda x: x[:0], "output must "),
    (16, lambda x: 90, "output must "),
    (MAP, lambda x: x[:9], r"draft_tokens must be \[23\], got \[9\]"),
    (MAP, lambda x: x + 41, r"draft_tokens must be in \[0, 41\), got"),
    (COS, lambda x: x[:, :5], r"cos must be \[P, D\] with an even D, got \[24, 5\]"),
    (COS, lambda x: x[:9], r"sin must have the shape of cos, \[9, 6\], got \[24, 6\]"),
    (COS + 1, lambda x: x[:, :4], r"sin must be \[P, D\] with 6 columns, got \[24, 4\]"),
    *(
        (NORMS, lambda x, k=k: [x[0].reshape(k), *x[1:]], r"norms\[0\] must be \[2, C\] = \[2, 24")
        for k in ((48,), (1, 48), (4, 12), (2, 24, 1))
    ),
    (NORMS, lambda x: [], r"norms\[0\] must be \[2, C\] .* got none"),
    (CACHES, lambda x: x[:1], "caches must be 2 tensors, .* of each layer, got 1"),
    (CACHES, lambda x: [y[:, :, :4] for y in x], r"caches must have \d+ slots, got \[3, 2, 4, 6\]"),
    (23, lambda x: 0, r"width must be in \[1, 64\], got 0"),
    (23, lambda x: 65, r"width must be in \[1, 64\], got 65"),
    (24, lambda x: 0, "size must be at least 1, got 0"),
    (24, lambda x: 2**62, r"size must leave the tree \[B, size\] .*"),
    (25, lambda x: 1.5, r"min_probability must be in \[0, 1\], got 1.5"),
    (25, lambda x: float("nan"), r"min_probability must be in \[0, 1\], got nan"),
]  # fmt: skip


@pytest.mark.parametrize(("at", "change", "message"), FAULTS)
def test_no_cache_is_written_where_a_tree_has_a_wrong_argument(at, change, message):
    args = drawn()
    args[at] = change(args[at])
    before = copy.deepcopy(args[CACHES])
    with pytest.raises(RuntimeError, match=message):
        op(*args)
    for cache, was in zip(args[CACHES], before, strict=True):
        assert_close("a cache", cache, was)


def test_a_head_without_a_map_drafts_no_more_tokens_than_there_are():
    args = drawn()
    args[MAP], args[EMBEDDINGS] = None, args[EMBEDDINGS][:22]
    args[TOKENS] %= 22
    with pytest.raises(RuntimeError, match=r"output must have at most .* rows, 22, .* got 23"):
        op(*args)
