"""Results in tensors of the caller: `out` and `workspace` of the three large ops.

tests/simt has the sizes of workspaces, which only CUDA kernels need.
"""

import functools
import re

import proofs
import pytest
import torch
from project.wrong_calls import GOOD
from proofs import assert_outputs_equal, tensors
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels as sk
from specdec_kernels import _library, reference, triton

POISON = 0xA5
CASES = [case for op in _library.OUT_OPS for case in proofs.cases(op)]


def native(op):
    return getattr(torch.ops.specdec_kernels, op).default


def in_one_buffer(results):
    """(bytes, tensors like the results in them): all poisoned, 8 poisoned bytes around each."""
    sizes = [-(-t.numel() * t.element_size() // 8) * 8 for t in results]
    buffer = torch.full((sum(sizes) + 8 * len(sizes) + 8,), POISON, dtype=torch.uint8)
    out, at = [], 8
    for t, size in zip(results, sizes, strict=True):
        part = buffer[at : at + t.numel() * t.element_size()]
        out.append(part.view(t.dtype).view(t.shape))
        at += size + 8
    return buffer, out


def call(op, **changed):
    return getattr(sk, op)(**GOOD[op] | changed)


def like(op, **changed):
    """Tensors for the results of a good call, with other values."""
    asked = {} if op == "sample" else {"with_accept_probs": True}
    results = call(op, **asked)
    return results._make(torch.full_like(t, 77) for t in results)._replace(**changed)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_results_in_tensors_of_the_caller_are_those_of_the_op(case):
    args = case.args()
    want = native(case.op)(*args)
    buffer, out = in_one_buffer(want)
    assert native(f"{case.op}_out")(*args, *out, None) is None
    assert_outputs_equal(case.op, out, want)
    for t in out:
        t.view(-1).view(torch.uint8).fill_(POISON)
    assert (buffer == POISON).all(), "written beside the results"


@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_out_is_returned_and_its_versions_rise(op):
    out, workspace = like(op), torch.zeros(3, dtype=torch.uint8)
    if op != "sample":  # not asked for
        out = out._replace(logprobs=None, accept_probs=out.accept_probs[:0])
    asked = {} if op == "sample" else {"with_logprobs": False}
    before = [t._version for t in tensors(out)]
    assert call(op, out=out, workspace=workspace, **asked) is out
    assert all(t._version > v for t, v in zip(tensors(out), before, strict=True))
    want = call(op, **asked)
    for got, w in zip(out, want, strict=True):
        assert w.numel() == 0 or got.equal(w)


def test_the_result_of_a_call_serves_the_next_one_of_its_shape():
    target, tokens = torch.randn(2, 5, 4, 33), torch.randint(0, 33, (5, 3))
    out = None
    for rows in (*target, *target):
        given = {"seeds": torch.arange(5), "positions": torch.arange(5)}
        out = sk.verify_chain(rows, tokens, **given, out=out)
        assert_outputs_equal("verify_chain", out, sk.verify_chain(rows, tokens, **given))


@functools.cache
def wrong(op):
    """(what to change, the message): every rule of `out` and `workspace` that an op refuses."""
    first = "logits" if op == "sample" else "target"
    tokens = like(op).tokens
    wide = torch.zeros(64, dtype=torch.int64)
    row = tokens.dim() - 1
    rule = f"{re.escape('[B, ')}.*{re.escape(str(list(tokens.shape)))}" if row else r"\[1\]"
    bad = [
        ({"tokens": tokens[:0]}, f"out.tokens must be {rule}, got .*"),
        ({"tokens": tokens[None]}, f"out.tokens must be {rule}, got .*"),
        ({"tokens": tokens.int()}, "out.tokens must be int64, got int32"),
        ({"tokens": tokens.to("meta")}, f"out.tokens must be on the device of {first}, .*"),
        ({"tokens": None}, "out.tokens must be a tensor, got None"),
        ({"status": torch.zeros(1)}, "out.status must be int32, got float32"),
        ({"status": wide.int()[:2]}, r"out.status must be \[1\], got \[2\]"),
    ]
    where = GOOD[op][first]
    if op != "sample":
        spread = wide[: 2 * tokens.shape[1]].view(1, -1)[:, ::2]
        asked = r"out.accept_probs must be None or empty unless with_accept_probs is True, got .*"
        bad += [
            ({"tokens": spread}, "out.tokens must be contiguous, got stride .*"),
            ({"with_accept_probs": False}, asked),
            ({"accept_probs": None}, "out.accept_probs must be a tensor, got None"),
            ({"path": tokens}, r"out.path must be \[B, max_depth\] = \[1, 1\], got \[1, 2\]"),
        ][: 4 if op == "verify_tree" else 3]
    space = torch.zeros(64, dtype=torch.uint8)
    bad += [
        ({"workspace": space.int()}, "workspace must be uint8, got int32"),
        ({"workspace": space[::2]}, "workspace must be contiguous, got stride 2"),
        ({"workspace": space[None]}, r"workspace must have one dimension, got \[1, 64\]"),
        ({"workspace": space.to("meta")}, f"workspace must be on the device of {first}, .*"),
    ]
    shared = torch.zeros(8, dtype=torch.int32)
    counts = {"status": shared[:1], "tokens": shared.view(torch.int64)[: tokens.numel()]}
    counts["tokens"] = counts["tokens"].view(tokens.shape)
    inside = where.view(torch.int32).view(-1)[2:3]
    bad += [
        (counts, "out.status must not overlap out.tokens, because both are written"),
        ({"status": inside}, f"out.status must not overlap {first}, because one is written while "
         "the other is read"),
        ({"status": shared[:1], "workspace": shared.view(torch.uint8)[3:9]},
         "workspace must not overlap out.status, because both are written"),
    ]  # fmt: skip
    return bad


@pytest.mark.parametrize("where", ["cpp", "fake"])
@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_names_the_field_the_rule_and_the_value(op, where):
    for changed, message in wrong(op):
        if where == "fake" and ("overlap" in message or "device" in message):
            continue  # nothing overlaps without memory
        fields = {n: t for n, t in changed.items() if n in like(op)._fields}
        given = {n: t for n, t in changed.items() if n not in fields}
        asked = {} if op == "sample" else {"with_accept_probs": True}
        given = GOOD[op] | asked | given | {"out": like(op, **fields)}
        if where == "fake":
            with FakeTensorMode() as mode:
                given = torch.utils._pytree.tree_map_only(
                    torch.Tensor, functools.partial(mode.from_tensor), given
                )
                with pytest.raises(RuntimeError) as caught:
                    getattr(sk, op)(**given)
        else:
            with pytest.raises(RuntimeError) as caught:
                getattr(sk, op)(**given)
        assert re.fullmatch(message, str(caught.value)), (str(caught.value), message)


@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_what_is_no_result_is_named(op):
    with pytest.raises(RuntimeError, match=r"^workspace must be None unless out is given$"):
        call(op, workspace=torch.zeros(1, dtype=torch.uint8))
    kind = type(like(op)).__name__
    with pytest.raises(TypeError, match=f"^out must be a {kind}, got tuple of length"):
        call(op, out=tuple(like(op)))
    with pytest.raises(TypeError, match=r"^out.status must be a tensor, got 3$"):
        call(op, out=like(op, status=3))
    leaf = torch.zeros(1, 2).requires_grad_()
    with pytest.raises(RuntimeError, match=r"^out.logprobs must not be a leaf that requires"):
        call(op, out=like(op, logprobs=leaf))


def events(function):
    """The names of what the profiler sees, allocations of memory as "[memory]"."""
    function()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        function()
    return [event.name for event in profiler.events()]


@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_a_call_with_out_allocates_no_tensor(op):
    """With scalars and with vectors [B] that are float32 or int32 already."""
    asked = {} if op == "sample" else {"with_accept_probs": True}
    one = torch.ones(1)
    for given in (asked, asked | {"temperature": one, "top_k": one.int(), "top_p": one}):
        into = like(op)
        seen = events(functools.partial(call, op, **given, out=into))
        # A conversion to the dtype that a tensor has gives the tensor itself.
        assert [e for e in seen if e != "aten::to"] == [f"specdec_kernels::{op}_out"]
        control = events(functools.partial(call, op, **given))
        assert {"aten::new_empty", "[memory]"} <= {*control}
    control = events(lambda: call(op, out=into, **asked, seeds=torch.ones(1, dtype=torch.int32)))
    assert "[memory]" in control  # docs/ops.md names what is converted


def test_an_empty_batch_writes_nothing():
    none = torch.zeros(0, dtype=torch.int64)
    out = sk.verify_chain(torch.zeros(0, 3, 7), none.view(0, 2), seeds=none, positions=none)
    again = sk.verify_chain(
        torch.zeros(0, 3, 7), none.view(0, 2), seeds=none, positions=none, out=out
    )
    assert again is out
    assert out.tokens.shape == (0, 3)


@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_a_provider_that_allocates_copies_into_out(op):
    """Triton's kernels do; here the reference does in their place."""
    copying = triton.copying(op, getattr(reference, op))
    for case in proofs.cases(op, rows=9)[:4]:
        args = case.args()
        want = getattr(reference, op)(*args)
        _, out = in_one_buffer(want)
        copying(*args, *out, None)
        assert_outputs_equal(op, out, want)
        fields = native(f"{op}_out")._schema.arguments[len(args) :]
        bad = [t.bool() if f.name == "status" else t for f, t in zip(fields, out, strict=False)]
        with pytest.raises(RuntimeError, match=r"^out.status must be int32, got bool$"):
            copying(*args, *bad, None)


@pytest.mark.slow
@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_a_compiled_call_writes_into_views_of_one_buffer(op):
    asked = {} if op == "sample" else {"with_accept_probs": True}
    want = call(op, **asked)

    def twice(inputs, out):
        first = getattr(sk, op)(**inputs, **asked, out=out)
        return [t.clone() for t in first], getattr(sk, op)(**inputs, **asked, out=out)

    torch._dynamo.reset()
    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    buffer, out = in_one_buffer(want)
    out = type(want)(*out)
    copies, last = compiled(GOOD[op], out)
    assert_outputs_equal(op, copies, want)
    assert_outputs_equal(op, out, want)
    assert [t.data_ptr() for t in last] == [t.data_ptr() for t in out]
    for t in out:
        t.view(-1).view(torch.uint8).fill_(POISON)
    assert (buffer == POISON).all()


@pytest.mark.build  # it traces and compiles
@pytest.mark.parametrize("op", _library.OUT_OPS)
def test_opcheck_of_the_variant_with_out(op):
    for case in proofs.cases(op)[::9]:
        args = case.args()
        if "faulty" in case.id or any(t.isnan().any() for t in tensors(native(op)(*args))):
            continue
        out = in_one_buffer(native(op)(*args))[1]
        torch.library.opcheck(native(f"{op}_out"), (*args, *(t.clone() for t in out), None))


def test_a_cpu_needs_no_workspace_and_sizes_are_checked():
    assert sk.sample_workspace_bytes(8, 32_000, device="cpu") == 0
    assert sk.verify_chain_workspace_bytes(8, 5, 32_000, device="cpu") == 0
    assert sk.verify_tree_workspace_bytes(8, 5, 32_000, rule="greedy", device="cpu") == 0
    for wrong_call, message in [
        (lambda: sk.sample_workspace_bytes(-1, 5), "rows must be at least 0, got -1"),
        (lambda: sk.sample_workspace_bytes(1, 2**31), r"vocab must be in \[1, 2147483647\], got"),
        (lambda: sk.verify_chain_workspace_bytes(1, -2, 5), "gamma must be at least 0, got -2"),
        (lambda: sk.verify_chain_workspace_bytes(1, 2, 0), r"vocab must be in .*, got 0"),
        (lambda: sk.verify_chain_workspace_bytes(2**40, 2**20, 9), "batch must be so small that"),
        (lambda: sk.verify_tree_workspace_bytes(1, 2, 5, rule="token"), "rule must be one of"),
    ]:
        with pytest.raises(RuntimeError, match=f"^{message}"):
            wrong_call()
    with pytest.raises(TypeError, match=r"^nodes must be an integer, got 2.5$"):
        sk.verify_tree_workspace_bytes(1, 2.5, 5, rule="greedy")
