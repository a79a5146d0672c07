"""The contract of every op (docs/design/contract.md): registration, invariances, memory."""

import importlib.util
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
import torch._dynamo.testing
from support.providers import (
    KERNEL_PROVIDERS,
    assert_close,
    assert_outputs_equal,
    provider,
    sample,
    verify,
)
from torch.testing._internal.optests.generate_tests import OpCheckError

from specdec_kernels import (
    RULES,
    DraftMap,
    SampledDraft,
    SparseDraft,
    _library,
    kv_append_,
    kv_truncate_,
    reference,
    testing,
)
from specdec_kernels import sample as public_sample
from specdec_kernels import verify_chain as public_verify_chain
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.tree import TreeArguments

HELPERS = {"built_with_cuda", "cpu_capability", "set_cuda_schedule"}
NAMES = sorted(
    {
        name.split("::")[1].split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("specdec_kernels::")
    }
    - HELPERS
)
LIGHT = [c for c in testing.CASES if not c.heavy]
ARGUMENTS = {"verify_chain": ChainArguments, "verify_tree": TreeArguments}
PURE = [c for c in LIGHT if c.op in ("sample", *ARGUMENTS)]


def run(case, name="cpp"):
    """Outputs of an implementation, with its arguments where it works in place."""
    args = case.args()
    out = tensors([provider(case.op, name)(*args)])
    return out + tensors(args) if case.op in _library.CACHE_OPS else out


def tensors(values):
    """The tensors among values, and in lists and tuples among them."""
    flat = [t for v in values for t in (v if isinstance(v, (list, tuple)) else [v])]
    return [t for t in flat if torch.is_tensor(t)]


def same(got, want):
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_close(f"output {i}", g, w)


def test_every_op_is_listed_and_has_cases_a_kernel_a_fake_and_a_reference():
    assert set(NAMES) == set(_library.OPS)
    for name in NAMES:
        assert len(testing.cases(name)) >= 5, f"{name} has too few cases"
        assert callable(getattr(reference, name)), f"{name} has no reference"
        for key in ("CPU", "Meta"):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec_kernels::{name}", key)
            assert has, f"{name} has no {key} kernel"


def test_case_names_are_unique_and_a_case_gives_the_same_arguments_again():
    assert len({(c.op, c.id) for c in testing.CASES}) == len(testing.CASES)
    for case in PURE:
        again = replace(case, build=lambda g, case=case: case.build(g))
        for a, b in zip(case.args(), again.args(), strict=True):
            assert torch.equal(a, b) if torch.is_tensor(a) else a == b


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_triton_is_among_the_providers_where_it_is_installed():
    assert all("triton" in testing.providers(op) for op in NAMES)


def test_providers_are_named_for_every_op_and_device():
    assert set(_library.providers()) == set(NAMES)
    assert all(p["cpu"] == "cpp" for p in _library.providers().values())


@pytest.mark.slow
@pytest.mark.parametrize("case", LIGHT, ids=lambda c: f"{c.op}-{c}")
def test_opcheck(case):
    op, args = getattr(torch.ops.specdec_kernels, case.op).default, case.args()
    # To opcheck, NaN differs from NaN.
    if case.op in ARGUMENTS and op(*args)[-1].isnan().any():
        args = ARGUMENTS[case.op](*args)._replace(with_accept_probs=False)
    torch.library.opcheck(op, tuple(args))


def test_opcheck_rejects_an_op_whose_fake_is_wrong():
    """The negative control: a fake that omits the bonus token."""
    with torch.library._scoped_library("specdec_control", "DEF") as lib:
        lib.define("longer(Tensor x) -> Tensor")
        lib.impl("longer", lambda x: x.new_zeros(len(x) + 1), "CPU")
        torch.library.register_fake("specdec_control::longer", torch.empty_like, lib=lib)
        with pytest.raises(OpCheckError):
            torch.library.opcheck(torch.ops.specdec_control.longer.default, (torch.zeros(3),))


# The ops compile without a graph break, with dynamic shapes: sizes differ from call to call.


def draft_and_verify(target, logits, seeds, positions, temperature):
    """A round of the loop: draft with `sample`, and verify with the statistics it returns."""
    b, gamma, v = logits.shape
    flat = logits.reshape(b * gamma, v)
    at = (positions[:, None] + torch.arange(gamma)).flatten()
    drawn = public_sample(flat, temperature=0.8, top_k=5, top_p=0.9,
                          seeds=seeds.repeat_interleave(gamma), positions=at)  # fmt: skip
    logsumexp, threshold = drawn.logsumexp.view(b, gamma), drawn.threshold.view(b, gamma)
    sampled = SampledDraft(logits, logsumexp, threshold, 0.8)
    verdict = public_verify_chain(
        target, drawn.tokens.view(b, gamma), sampled, temperature=temperature, top_p=0.95,
        min_p=0.01, seeds=seeds, positions=positions,
    )  # fmt: skip
    return (*verdict, drawn.tokens)


def round_inputs(b, gamma, v):
    g = torch.Generator().manual_seed(b)
    target = 2 * torch.randn(b, gamma + 1, v, generator=g)
    logits = target[:, :gamma] + torch.randn(b, gamma, v, generator=g)
    return target, logits, torch.arange(b), torch.arange(b) * 9, torch.rand(b, generator=g)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_round_compiles_as_one_graph_for_all_sizes(backend):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(draft_and_verify, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for sizes in ((3, 4, 61), (5, 2, 130), (4, 3, 97)):
        args = round_inputs(*sizes)
        same(compiled(*args), draft_and_verify(*args))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * 3


def ragged_rules(target, tokens, seeds, positions, target_indptr):
    kw = dict(seeds=seeds, positions=positions, target_indptr=target_indptr)
    sparse = SparseDraft(tokens[..., None], torch.ones(tokens.shape)[..., None])
    columns = DraftMap(torch.arange(target.shape[1], dtype=torch.int32))
    own = target[: len(target) - len(tokens)]
    limits = dict(eos_token_ids=tokens[0, :1], max_new_tokens=positions + 2, with_accept_probs=True)
    return (
        *public_verify_chain(target, tokens, sparse, rule="block", **kw, **limits),
        *public_verify_chain(target, tokens, own, draft_map=columns, **kw),
        *public_verify_chain(target, tokens, rule="typical", **kw),
        *public_verify_chain(target, tokens, rule="greedy", **kw),
        *public_verify_chain(target, tokens, rule="match", **kw),
        *public_verify_chain(target.softmax(-1), tokens, kind="probs", **kw),
    )


@pytest.mark.slow
def test_ragged_rules_compile_as_one_graph():
    torch._dynamo.reset()
    compiled = torch.compile(ragged_rules, fullgraph=True, backend="aot_eager", dynamic=True)
    target = torch.randn(7, 40, generator=torch.Generator().manual_seed(1))
    args = (target, torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.arange(2), torch.arange(2),
            torch.tensor([0, 4, 7], dtype=torch.int32))  # fmt: skip
    same(compiled(*args), ragged_rules(*args))


def cache_round(keys, values, new, positions, lengths, cut):
    kv_append_([keys, values], [new, new], positions)
    kv_truncate_([keys, values], lengths, cut, zero_fill=True)
    return keys.sum() + values.sum()


@pytest.mark.slow
def test_cache_ops_compile_as_one_graph_and_write_in_place():
    torch._dynamo.reset()
    compiled = torch.compile(cache_round, fullgraph=True, backend="aot_eager", dynamic=True)
    states = []
    for f in (cache_round, compiled):
        state = [torch.zeros(2, 3, 9, 4), torch.zeros(2, 3, 9, 4), torch.ones(2, 3, 4, 4),
                 torch.tensor([2, 5]), torch.tensor([6, 9]), torch.tensor([4, 7])]  # fmt: skip
        total = f(*state)
        states.append([*state, total])
    same(*states)
    assert float(states[0][-1]) == 2 * 2 * 2 * 12


# A result depends on (seed, position), the rows and the parameters of its own sequence alone.

INVARIANT = [
    testing.chain_case(6, 3, 257),
    testing.chain_case(6, 3, 257, draft="sampled", filters="tensor"),
    testing.chain_case(6, 3, 131, torch.bfloat16, rule="match", filters="tensor"),
    testing.chain_case(6, 3, 257, kind="probs", draft="none"),
    testing.chain_case(6, 3, 257, rule="block", filters="tensor"),
    testing.chain_case(6, 3, 257, rule="block", kind="probs"),
    testing.chain_case(6, 3, 257, torch.bfloat16, rule="block", draft="sparse"),
    testing.chain_case(6, 3, 257, rule="block", draft="mapped-sampled"),
    testing.chain_case(6, 3, 257, draft="wide"),
    testing.chain_case(6, 3, 257, rule="typical"),
    testing.chain_case(6, 3, 257, rule="lenient", draft="sparse"),
    testing.chain_case(6, 3, 257, rule="synthetic", filters="tensor"),
]
PAIRS = [("cpp", c) for c in INVARIANT] + [
    (n, c)
    for n in KERNEL_PROVIDERS
    if n != "cpp"
    for c in (
        INVARIANT[0],
        testing.chain_case(6, 3, 67, rule="match"),
        testing.chain_case(6, 3, 67, rule="block"),
    )
]
PAIRS = [pytest.param(n, c, id=f"{n}-{c}") for n, c in PAIRS]
SHARED = ("draft_columns", "synthetic_rates", "eos_token_ids")  # one for all sequences
# Arguments of shape [B, gamma, ..].
PER_DRAFT = ("draft_token_ids", "draft", "draft_ids", "draft_logsumexp", "draft_threshold")


def select(args, rows):
    """The arguments of `verify_chain` for some sequences of a padded batch."""
    named = ChainArguments(*args)._asdict().items()
    return [a[rows] if torch.is_tensor(a) and k not in SHARED else a for k, a in named]


def shifted(args, start, stop, at=0):
    """The arguments for drafts start .. stop - 1 alone, with positions moved by `at`."""
    a = ChainArguments(*args)
    cut = {k: x[:, start:stop] for k in PER_DRAFT if (x := getattr(a, k)) is not None}
    rates = None if a.synthetic_rates is None else a.synthetic_rates[start:stop]
    return a._replace(target=a.target[:, start : stop + 1], positions=a.positions + at,
                      synthetic_rates=rates, **cut)  # fmt: skip


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_place_in_the_batch_and_batch_size_change_no_bit(name, case):
    op, args = provider("verify_chain", name), case.args()
    whole = op(*args)
    order = torch.tensor([4, 2, 5, 0, 3, 1])
    assert_outputs_equal("verify_chain", op(*select(args, order)), [x[order] for x in whole])
    for b in range(2 if name == "triton" else 6):
        assert_outputs_equal("verify_chain", op(*select(args, [b])), [x[b : b + 1] for x in whole])


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_padding_with_missing_drafts_changes_no_bit(name, case):
    """gamma = 2 equals the start of gamma = 3 whose last draft is missing."""
    op = provider("verify_chain", name)
    args = case.args()
    args[1][:, 2] = -1
    longer = op(*args)
    got = op(*shifted(args, 0, 2))
    short = [x[:, : g.shape[1]] if x.dim() == 2 else x for x, g in zip(longer, got, strict=True)]
    assert_outputs_equal("verify_chain", got, short)
    assert (longer[0][:, 3] == -1).all()


@pytest.mark.parametrize(("name", "case"), [p for p in PAIRS if "block" not in p.id])
def test_a_chain_that_starts_later_continues_the_same_decisions(name, case):
    """Where draft 0 is accepted, the rest equals a call that starts at draft 1 and its position."""
    op = provider("verify_chain", name)
    args = case.args()
    whole = op(*args)
    got = op(*shifted(args, 1, 3, at=1))
    accepted = whole[1] > 0
    assert accepted.any()
    assert_close("tokens", got[0][accepted], whole[0][accepted, 1:])
    assert_close("num_accepted", got[1][accepted] + 1, whole[1][accepted])


@pytest.mark.parametrize("method", ["cdf", "gumbel"])
@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_a_row_of_sample_does_not_depend_on_its_neighbours(name, method):
    logits = 2 * torch.randn(5, 257, generator=torch.Generator().manual_seed(9))
    kw = dict(method=method, top_p=0.9, temperature=0.8)
    op = provider("sample", name)
    whole = sample(op, logits, seeds=torch.arange(5), positions=torch.arange(5), **kw)
    for r in range(5):
        alone = sample(op, logits[r : r + 1], seeds=r, positions=r, **kw)
        assert_outputs_equal("sample", alone, [x[r : r + 1] for x in whole])


THREADED = [c for c in testing.CASES if c.heavy or c.op in _library.CACHE_OPS] + [
    testing.sample_case(1, 50_001, filters="scalar", noise="shared", method="gumbel"),
    testing.sample_case(3, 50_001, filters="tensor"),
    testing.chain_case(1, 2, 50_001, rule="match", filters="scalar"),
    testing.chain_case(1, 2, 50_001, kind="probs"),
    testing.chain_case(1, 2, 50_001, rule="block", draft="sampled", filters="scalar"),
    testing.chain_case(1, 2, 50_001, rule="block", kind="probs", draft="mapped"),
    testing.chain_case(1, 2, 50_001, rule="typical", filters="topp"),
    testing.chain_case(5, 2, 10_001, draft="sampled", layout="ragged"),
]


@pytest.mark.parametrize("case", THREADED, ids=lambda c: f"{c.op}-{c}")
def test_the_number_of_threads_changes_no_bit(case):
    torch.set_num_threads(1)
    alone = run(case)
    for threads in (2, 3):
        torch.set_num_threads(threads)
        same(run(case), alone)


@pytest.mark.parametrize("case", LIGHT, ids=lambda c: f"{c.op}-{c}")
def test_inputs_are_not_changed_and_a_second_call_gives_the_same(case):
    args, before = case.args(), case.args()
    op = provider(case.op, "cpp")
    first = op(*args)
    if case.op in _library.CACHE_OPS:
        schema = getattr(torch.ops.specdec_kernels, case.op).default._schema
        for argument, a, b in zip(schema.arguments, args, before, strict=True):
            if argument.alias_info is None:
                same(tensors([a]), tensors([b]))
        return
    for a, b in zip(args, before, strict=True):
        if torch.is_tensor(a):
            assert_close("input", a, b)
    assert_outputs_equal(case.op, op(*args), first)


@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
@pytest.mark.parametrize("op", ["sample", "verify_chain", "verify_tree"])
def test_every_element_of_the_outputs_is_written(op, name):
    """New memory holds NaN and the largest integer, and no output has them."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    for case in testing.cases(op, rows=3 if name == "triton" else None):
        got = run(case, name)
        if op in ARGUMENTS:  # NaN where the rule decided without them
            want = getattr(reference, op)(*case.args())[-1]
            assert_close("accept_probs", got.pop(), want, atol=2e-5)
        for x in got:
            bad = x.isnan() if x.is_floating_point() else x == torch.iinfo(x.dtype).max
            assert not bad.any(), f"{case}: not written at {bad.nonzero()[0].tolist()}"


INVALID = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
def test_every_element_of_the_outputs_is_written_for_invalid_rows(name):
    torch.use_deterministic_algorithms(True)
    target = torch.zeros(4, 3, 50)
    for b, value in enumerate(INVALID):
        target[b] = value
    drafts = torch.full((4, 2), 999)
    for rule in RULES:
        kw = dict(rule=rule, rates=torch.ones(2) if rule == "synthetic" else None)
        got = verify(provider("verify_chain", name), target, drafts, **kw)
        want = verify(reference.verify_chain, target, drafts, **kw)
        assert_close("tokens", got[0], want[0])
        assert_close("status", got[2], want[2])
        assert not got[3].isnan().any()
        assert (got[3][:3] == 0).all()
    got = sample(provider("sample", name), target[:, 0])
    for x in got[:4]:
        assert x[:3].tolist() == ([-1] * 3 if x.dtype == torch.int64 else [0.0] * 3)


@pytest.mark.slow
def test_no_temporary_of_the_size_of_the_rows():
    """Peak memory of a fresh process while 48,617 kB of bfloat16 rows are verified and sampled."""
    program = """
    import resource, torch, specdec_kernels as sk
    b, gamma, v = 32, 4, 151_936
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    target = torch.zeros(b, gamma + 1, v, dtype=torch.bfloat16)
    target[..., ::7] = 2.0
    draft = target[:, :gamma]
    tokens = torch.zeros(b, gamma, dtype=torch.int64)
    at = torch.arange(b)
    def calls(n):
        for filters in ({}, dict(top_k=50, top_p=0.9, min_p=0.01, temperature=0.7)):
            for rule in ("token", "block", "greedy", "match", "typical", "lenient"):
                kw = dict(rule=rule, seeds=at[:n], positions=at[:n], **filters)
                sk.verify_chain(target[:n], tokens[:n], draft[:n], **kw)
            sk.sample(target[:n, 0], seeds=at[:n], positions=at[:n], **filters)
    calls(2)
    before = peak()
    calls(b)
    print(peak() - before)
    """
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
    )
    assert int(out.stdout) < 6_000  # kB; one bfloat16 copy of the rows is 48,617
