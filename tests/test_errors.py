"""One table of bad inputs; real kernel, fake kernel, Triton and reference say the same of each."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from providers import provider, shaping

import specdec_kernels
from specdec_kernels import _checks, testing

VECTOR = ("temperature", "top_k", "top_p", "min_p")


def i64(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def sample_args(logits=None, seeds=None, positions=None, stream="draft", method="cdf", **filters):
    return (
        torch.zeros(3, 7) if logits is None else logits,
        *shaping(**filters),
        i64(3) if seeds is None else seeds,
        i64(3) if positions is None else positions,
        stream,
        method,
    )


def chain_args(target=None, tokens=None, draft=None, lse=None, threshold=None, ts=None, t=1.0,
               kind="logits", rule="token", seeds=None, positions=None, cu_rows=None,
               uniforms=None, **filters):  # fmt: skip
    return (
        torch.zeros(3, 5, 7) if target is None else target,
        i64(3, 4) if tokens is None else tokens,
        *(draft, lse, threshold, ts, t, kind, rule),
        *shaping(**filters),
        i64(3) if seeds is None else seeds,
        i64(3) if positions is None else positions,
        *(cu_rows, uniforms),
    )


def f64(*shape):
    return torch.zeros(shape, dtype=torch.float64)


Q = torch.zeros(3, 4, 7)
FILTERS = [  # of both ops
    (dict(temperature=-1.0), "temperature must be finite and at least 0, got -1"),
    (dict(temperature=float("nan")), "temperature must be finite and at least 0, got nan"),
    (dict(temperature=float("inf")), "temperature must be finite and at least 0, got inf"),
    (dict(temperature=torch.ones(2)), r"temperature must be \[3\], got \[2\]"),
    (dict(temperature=torch.ones(3, 1)), r"temperature must be \[3\], got \[3, 1\]"),
    (dict(temperature=f64(3)), "temperature must be float32, got float64"),
    (dict(top_k=-2), r"top_k must be at least 0 \(0 keeps every token\), got -2"),
    (dict(top_k=i64(3)), "top_k must be int32, got int64"),
    (dict(top_k=i64(4).int()), r"top_k must be \[3\], got \[4\]"),
    (dict(top_p=0.0), r"top_p must be in \(0, 1\], got 0"),
    (dict(top_p=1.5), r"top_p must be in \(0, 1\], got 1.5"),
    (dict(top_p=float("nan")), r"top_p must be in \(0, 1\], got nan"),
    (dict(top_p=torch.ones(3).half()), "top_p must be float32, got float16"),
    (dict(min_p=-0.25), r"min_p must be in \[0, 1\], got -0.25"),
    (dict(min_p=1.0001), r"min_p must be in \[0, 1\], got 1.0001"),
    (dict(min_p=torch.zeros(1)), r"min_p must be \[3\], got \[1\]"),
    (dict(seeds=i64(2)), r"seeds must be \[3\], got \[2\]"),
    (dict(seeds=i64(3).int()), "seeds must be int64, got int32"),
    (dict(positions=i64(3, 1)), r"positions must be \[3\], got \[3, 1\]"),
    (dict(positions=torch.zeros(3)), "positions must be int64, got float32"),
]
SAMPLE = [
    *FILTERS,
    (dict(logits=torch.zeros(7)), r"logits must be \[R, V\], got \[7\]"),
    (dict(logits=torch.zeros(1, 3, 7)), r"logits must be \[R, V\], got \[1, 3, 7\]"),
    (dict(logits=f64(3, 7)), "logits must be float32, bfloat16 or float16, got float64"),
    (dict(logits=i64(3, 7)), "logits must be float32, bfloat16 or float16, got int64"),
    (
        dict(logits=torch.zeros(3, 0)),
        r"logits must have a vocabulary of 1 to 2147483647 entries, got \[3, 0\]",
    ),
    (
        dict(logits=torch.zeros(7, 3).T),
        "logits must have a contiguous last dimension, got stride 3",
    ),
    (dict(stream="accept"), "stream must be one of residual, draft, shared, got accept"),
    (dict(method="gumbel"), "method must be one of cdf, race, got gumbel"),
    (dict(stream="shared"), "method must be race when stream is shared, got cdf"),
]
CHAIN = [
    *FILTERS,
    (dict(kind="logprobs"), "kind must be one of logits, probs, got logprobs"),
    (dict(rule="tokens"), "rule must be one of token, greedy, match, got tokens"),
    (dict(tokens=i64(3)), r"draft_tokens must be \[B, gamma\], got \[3\]"),
    (dict(tokens=torch.zeros(3, 4)), "draft_tokens must be int32 or int64, got float32"),
    (dict(tokens=i64(3, 4).short()), "draft_tokens must be int32 or int64, got int16"),
    (
        dict(target=torch.zeros(3, 4, 7)),
        r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[3, 4, 7\]",
    ),
    (
        dict(target=torch.zeros(2, 5, 7)),
        r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[2, 5, 7\]",
    ),
    (
        dict(target=torch.zeros(15, 7)),
        r"target must be \[B, gamma\+1, V\] = \[3, 5, V\], got \[15, 7\]",
    ),
    (dict(cu_rows=i64(4).int()), r"target must be \[N, V\] when cu_rows is given, got \[3, 5, 7\]"),
    (
        dict(target=torch.zeros(9, 7), cu_rows=i64(3).int()),
        r"cu_rows must be \[4\], got \[3\]",
    ),
    (dict(target=torch.zeros(9, 7), cu_rows=i64(4)), "cu_rows must be int32, got int64"),
    (dict(target=f64(3, 5, 7)), "target must be float32, bfloat16 or float16, got float64"),
    (
        dict(target=torch.zeros(3, 5, 0)),
        r"target must have a vocabulary of 1 to 2147483647 entries, got \[3, 5, 0\]",
    ),
    (
        dict(target=torch.zeros(3, 7, 5).mT),
        "target must have a contiguous last dimension, got stride 5",
    ),
    (
        dict(draft=torch.zeros(3, 4, 6)),
        r"draft must be \[B, gamma, V\] = \[3, 4, 7\], got \[3, 4, 6\]",
    ),
    (
        dict(draft=torch.zeros(3, 5, 7)),
        r"draft must be \[B, gamma, V\] = \[3, 4, 7\], got \[3, 5, 7\]",
    ),
    (
        dict(draft=torch.zeros(12, 7)),
        r"draft must be \[B, gamma, V\] = \[3, 4, 7\], got \[12, 7\]",
    ),
    (
        dict(target=torch.zeros(9, 7), cu_rows=i64(4).int(), draft=torch.zeros(7, 7)),
        r"draft must be \[N-B, V\] = \[6, 7\], got \[7, 7\]",
    ),
    (dict(draft=i64(3, 4, 7)), "draft must be float32, bfloat16 or float16, got int64"),
    (
        dict(draft=torch.zeros(3, 7, 4).mT),
        "draft must have a contiguous last dimension, got stride 4",
    ),
    (
        dict(lse=f64(3, 4)),
        "draft_logsumexp and draft_threshold must come together and with draft",
    ),
    (
        dict(draft=Q, threshold=torch.zeros(3, 4)),
        "draft_logsumexp and draft_threshold must come together and with draft",
    ),
    (
        dict(lse=f64(3, 4), threshold=torch.zeros(3, 4)),
        "draft_logsumexp and draft_threshold must come together and with draft",
    ),
    (
        dict(draft=Q, lse=f64(3, 5), threshold=torch.zeros(3, 4)),
        r"draft_logsumexp must be \[B, gamma\] = \[3, 4\], got \[3, 5\]",
    ),
    (
        dict(draft=Q, lse=f64(3, 4), threshold=torch.zeros(4)),
        r"draft_threshold must be \[B, gamma\] = \[3, 4\], got \[4\]",
    ),
    (
        dict(draft=Q, lse=torch.zeros(3, 4), threshold=torch.zeros(3, 4)),
        "draft_logsumexp must be float64, got float32",
    ),
    (
        dict(draft=Q, lse=f64(3, 4), threshold=f64(3, 4)),
        "draft_threshold must be float32, got float64",
    ),
    (dict(t=-0.5), "draft temperature must be finite and at least 0, got -0.5"),
    (dict(ts=torch.ones(4)), r"draft temperature must be \[3\], got \[4\]"),
    (dict(ts=f64(3)), "draft temperature must be float32, got float64"),
    (
        dict(uniforms=f64(3, 4)),
        r"uniforms must be \[B, gamma\+1\] = \[3, 5\], got \[3, 4\]",
    ),
    (dict(uniforms=torch.zeros(3, 5)), "uniforms must be float64, got float32"),
    (dict(uniforms=f64(3, 5), rule="match"), "uniforms must be None when rule is match"),
]
BUILD = {"sample": sample_args, "verify_chain": chain_args}
TABLE = [(op, bad, m) for op, rows in (("sample", SAMPLE), ("verify_chain", CHAIN))
         for bad, m in rows]  # fmt: skip
# Where it is raised: `meta` runs the fake kernel.
WHERE = [*(n for n in ("reference", "cpp", "triton") if n in testing.providers("sample")), "meta"]


def says(op, args):
    """First line of the error."""
    with pytest.raises((RuntimeError, ValueError)) as error:
        op(*args)
    return str(error.value).strip().splitlines()[0]


def on_meta(args):
    return tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)


def name_of(row):
    return re.sub(r"[^a-zA-Z0-9.-]+", "_", row[2].replace("\\", ""))[:70]


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("op", "bad", "message"), TABLE, ids=[f"{r[0]}-{name_of(r)}" for r in TABLE]
)
def test_names_the_argument_the_rule_and_the_value(op, bad, message, where):
    args = BUILD[op](**bad)
    if where == "meta":
        text = says(provider(op, "cpp"), on_meta(args))
    else:
        text = says(provider(op, where), args)
    assert re.fullmatch(message, text), f"{text!r} is not {message!r}"


def check_sites():
    """(first line, last line) of every `require` in the checks of the two ops."""
    functions = {"sample", "verify_chain", "sampling", "rows", "vector", "one_of"}
    tree = ast.parse(Path(_checks.__file__).read_text())
    return {
        (node.lineno, node.end_lineno)
        for f in tree.body
        if isinstance(f, ast.FunctionDef) and f.name in functions
        for node in ast.walk(f)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"
    }


def test_the_table_trips_every_check(monkeypatch):
    """A check that no row of the table fails has no test."""
    tripped = set()

    def require(condition, message):
        if not condition:
            line = sys._getframe(1).f_lineno
            tripped.update(site for site in sites if site[0] <= line <= site[1])
            raise RuntimeError(message)

    sites = check_sites()
    assert len(sites) > 20
    monkeypatch.setattr(_checks, "require", require)
    for op, bad, _ in TABLE:
        with pytest.raises(RuntimeError):
            getattr(_checks, op)(*BUILD[op](**bad))
    assert not sites - tripped


DEVICES = [
    ("sample", 0, "seeds", dict(seeds=i64(3)), "seeds must be on the device of logits"),
    ("sample", 0, "top_p", dict(top_p=torch.ones(3)), "top_p must be on the device of logits"),
    ("verify_chain", 0, "tokens", {}, "draft_tokens must be on the device of target"),
    ("verify_chain", 0, "draft", dict(draft=Q), "draft must be on the device of target"),
    ("verify_chain", 0, "uniforms", dict(uniforms=f64(3, 5)),
     "uniforms must be on the device of target"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "first", "name", "given", "message"), DEVICES)
def test_devices_are_checked(op, first, name, given, message):
    """One argument stays on the CPU, all the others are on another device."""
    args = list(on_meta(BUILD[op](**given)))
    at = {"seeds": -4, "top_p": 5, "tokens": 1, "draft": 2, "uniforms": -1}[name]
    args[at] = BUILD[op](**given)[at]
    text = says(provider(op, "cpp"), args)
    assert text.startswith(message), text
    assert text.endswith("meta, got cpu"), text
    checks = says(getattr(_checks, op), args)
    assert checks == text


def test_good_inputs_raise_nothing():
    for op, build in BUILD.items():
        for where in WHERE:
            args = build() if where != "meta" else on_meta(build())
            assert provider(op, "cpp" if where == "meta" else where)(*args)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("top_k", 0.5, ValueError, "top_k must be an integer or a tensor, got 0.5"),
        ("top_k", torch.tensor([2.9]), ValueError, "top_k must be int32 or int64"),
        ("top_k", -1, RuntimeError, "top_k must be at least 0"),
        (
            "temperature",
            [0.5],
            ValueError,
            r"temperature must be a number or a tensor, got \[0.5\]",
        ),
        ("temperature", torch.tensor(0.5), ValueError, "got a 0-dim tensor"),
        ("temperature", 1e39, RuntimeError, "temperature must be finite and at least 0, got inf"),
        ("temperature", -1, RuntimeError, "temperature must be finite and at least 0, got -1"),
        ("top_p", 1e-46, RuntimeError, r"top_p must be in \(0, 1\], got 0"),
        ("top_p", 0, RuntimeError, r"top_p must be in \(0, 1\], got 0"),
        ("min_p", "a", ValueError, "min_p must be a number or a tensor, got 'a'"),
    ],
)
def test_public_sampling_parameters_are_named(name, value, error, message):
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(error, match=message):
        specdec_kernels.sample(torch.zeros(1, 3), seeds=one, positions=one, **{name: value})


def test_a_count_beyond_int32_keeps_every_token():
    one = torch.zeros(1, dtype=torch.int64)
    logits = torch.arange(5.0)[None]
    for k in (2**63, torch.tensor([2**40 + 1])):
        out = specdec_kernels.sample(logits, top_k=k, seeds=one, positions=one)
        assert out.threshold.tolist() == [-torch.inf]


def test_devices_of_one_kind_are_told_apart():
    """The checks of the fakes; two CUDA devices need not exist for their names."""
    meta = torch.zeros(1, 2, device="meta")
    with pytest.raises(RuntimeError, match="the device of logits, cuda:0, got cpu"):
        _checks.same_device("seeds", torch.zeros(1), torch.device("cuda:0"), "logits")
    _checks.same_device("seeds", meta, meta.device, "logits")
    assert _checks.device_name(torch.device("cuda:1")) == "cuda:1"
