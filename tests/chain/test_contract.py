"""The contract of every op (docs/design/contract.md): registration and invariances."""

import proofs
import pytest
import torch
from proofs import assert_all_equal, assert_close, tensors
from support.lanes import covering
from support.providers import KERNEL_PROVIDERS, run_case

from specdec_kernels import SampledDraft, _library, reference
from specdec_kernels import sample as public_sample
from specdec_kernels import verify_chain as public_verify_chain
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.tree import TreeArguments


def kind(value):
    """All that decides about an argument's fake and its registration; sizes and values do not."""
    if torch.is_tensor(value):
        return value.dtype, value.dim(), value.is_contiguous(), 0 in value.shape
    if isinstance(value, list):
        return tuple(dict.fromkeys(map(kind, value)))
    return value if value is None or isinstance(value, bool) else type(value)


ARGUMENTS = {"verify_chain": ChainArguments, "verify_tree": TreeArguments}


def test_every_op_has_cases_a_kernel_a_fake_and_a_provider():
    for name in _library.OPS:
        assert _library.providers()[name]["cpu"] == "cpp"
        assert len(proofs.cases(name)) >= 5, f"{name} has too few cases"
        for key in ("CPU", "Meta"):
            has = torch._C._dispatch_has_kernel_for_dispatch_key(f"specdec_kernels::{name}", key)
            assert has, f"{name} has no {key} kernel"


@pytest.mark.build  # it traces and compiles
@pytest.mark.parametrize("name", _library.OPS)
def test_opcheck(name):
    """Every pair of kinds of two arguments that occurs in a case."""
    op = getattr(torch.ops.specdec_kernels, name).default
    # To opcheck, NaN differs from NaN.
    cases = [c for c in proofs.cases(name) if "faulty" not in c.id]
    kinds = [tuple(str(kind(a)) for a in c.args()) for c in cases]
    for case in (cases[i] for i in sorted(covering(kinds, 2))):
        print(case)  # for the report of a failure
        args = case.args()
        if name in ARGUMENTS and op(*args)[-1].isnan().any():
            args = ARGUMENTS[name](*args)._replace(with_accept_probs=False)
        torch.library.opcheck(op, tuple(args))


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
def test_a_round_compiles_as_one_graph_for_all_sizes():
    from torch._dynamo.testing import CompileCounterWithBackend  # noqa: PLC0415  # slow

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(draft_and_verify, fullgraph=True, backend=counter, dynamic=True)
    frames = []
    for sizes in ((3, 4, 61), (5, 2, 130), (4, 3, 97)):
        args = round_inputs(*sizes)
        assert_all_equal(compiled(*args), draft_and_verify(*args))
        frames.append(counter.frame_count)
    assert frames == frames[:1] * len(frames)


@pytest.mark.parametrize("name", _library.OPS)
def test_inputs_are_not_changed_and_a_second_call_gives_the_same(name):
    schema = getattr(torch.ops.specdec_kernels, name).default._schema
    for case in proofs.cases(name):
        args, before = case.args(), case.args()
        first = run_case(case, args=args)
        for argument, a, b in zip(schema.arguments, args, before, strict=True):
            if argument.alias_info is None:
                assert_all_equal(tensors([a]), tensors([b]))
        if name not in _library.CACHE_OPS:
            assert_all_equal(run_case(case, args=args), first)


@pytest.mark.parametrize("name", KERNEL_PROVIDERS)
@pytest.mark.parametrize("op", ["sample", "verify_chain", "verify_tree"])
def test_every_element_of_the_outputs_is_written(op, name):
    """New memory holds NaN and the largest integer, and no output has them."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    for case in proofs.cases(op, rows=3 if name == "triton" else None):
        got = run_case(case, name)
        if op in ARGUMENTS:  # NaN where the rule decided without them
            want = getattr(reference, op)(*case.args())[-1]
            assert_close("accept_probs", got.pop(), want, atol=2e-5)
        for x in got:
            bad = x.isnan() if x.is_floating_point() else x == torch.iinfo(x.dtype).max
            assert not bad.any(), f"{case}: not written at {bad.nonzero()[0].tolist()}"
