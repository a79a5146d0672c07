"""No op is differentiable, and autograd notices what the cache ops write in place."""

import proofs
import pytest
import torch
from project.wrong_calls import GOOD, f32, i64
from proofs import tensors

import specdec_kernels as sk
from specdec_kernels import _library

SMALLEST = {op: min(proofs.cases(op), key=lambda c: c.rows * c.vocabulary) for op in _library.OPS}


@pytest.mark.parametrize("op", _library.OPS)
def test_outputs_do_not_require_gradients(op):
    """Were it not so, a forgotten `no_grad` would keep the graph of every round in memory."""
    args = [
        a.requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a
        for a in SMALLEST[op].args()
    ]
    out = tensors([getattr(torch.ops.specdec_kernels, op).default(*args)])
    assert not any(t.requires_grad or t.grad_fn is not None for t in out)
    assert all(t.is_leaf for t in tensors(args))


# What each op writes, and what it writes only with zero_fill.
WRITES = {
    "kv_append_": ["caches"], "kv_compact_": ["caches"], "kv_realign_": ["caches"],
    "paged_append_": ["caches"], "paged_compact_": ["caches"], "apply_penalties_": ["target"],
    "paged_truncate_": ["block_tables", "lengths"],
    "kv_truncate_": ["lengths"], "ring_truncate_": ["lengths"], "state_select_": ["states"],
    "decoder_layers_": ["caches"], "grow_tree_": ["caches"],
}  # fmt: skip
WITH_ZEROS = ("kv_truncate_", "ring_truncate_")


def written(op, given):
    names = WRITES[op] + (["caches"] if op in WITH_ZEROS and given.get("zero_fill") else [])
    return tensors([given[name] for name in names])


def fresh(op, **changed):
    def copied(x):
        if isinstance(x, list):
            return [copied(y) for y in x]
        return x.clone() if torch.is_tensor(x) else x

    return {n: copied(x) for n, x in GOOD[op].items()} | changed


CALLS = [(op, {}) for op in WRITES] + [(op, {"zero_fill": True}) for op in WITH_ZEROS]


@pytest.mark.parametrize(("op", "how"), CALLS, ids=lambda x: x if isinstance(x, str) else len(x))
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_version_counter_of_what_is_written_rises_and_no_other(op, how, mode):
    given = fresh(op, **how)
    every = tensors(given.values())
    before = [t._version for t in every]
    with mode():
        getattr(sk, op)(**given)
    risen = {id(t) for t, v in zip(every, before, strict=True) if t._version > v}
    assert risen == {id(t) for t in written(op, given)}


OTHERS = (*WITH_ZEROS, "paged_truncate_", "apply_penalties_")
OF_LEAVES = [c for c in CALLS if c[0] not in OTHERS or c[1]]


@pytest.mark.parametrize(("op", "how"), OF_LEAVES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_leaf_that_requires_a_gradient_is_refused_by_name(op, how):
    given = fresh(op, **how)
    name = "states" if op == "state_select_" else "caches"
    *_, leaf = given[name]
    given[name] = [leaf.clone(), leaf.requires_grad_()]
    if "entries" in given:
        given["entries"] *= 2  # one for each cache
    message = (
        f"{name}[1] must not be a leaf that requires a gradient, because it is written in place, "
        "got requires_grad=True"
    )
    for refused in (leaf, leaf[:]):
        given[name][1] = refused
        with pytest.raises(RuntimeError) as error:
            getattr(sk, op)(**given)
        assert str(error.value) == message
    with torch.no_grad():
        getattr(sk, op)(**given)


def test_inference_tensors_are_written_inside_and_outside_of_inference_mode():
    with torch.inference_mode():
        kept, entry = f32(1, 1, 3, 1), f32(1, 1, 1, 1) + 1
        sk.kv_append_([kept], [entry], i64(1))
    other = f32(1, 1, 3, 1)
    sk.kv_append_([kept, other], [entry * 2, entry], i64(1))
    assert (kept.flatten().tolist(), other.flatten().tolist()) == ([2, 0, 0], [1, 0, 0])
    assert other._version == 1
