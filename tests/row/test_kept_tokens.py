"""`kept_tokens` beside distributions by definition, and beside what sampler and verifiers emit."""

import itertools

import proofs
import pytest
import torch
from proofs import assert_close, assert_outputs_close, filtered_distribution, packed_bits
from support.providers import FAST_PROVIDERS as NAMES
from support.providers import provider, provider_cases, sampling_arguments

from specdec_kernels import (
    LOSSLESS_RULES,
    LOSSLESS_TREE_RULES,
    KeptTokens,
    Status,
    TreeVerdict,
    Verdict,
    kept_to_csr,
    kept_tokens,
    reference,
    verify_chain,
)
from specdec_kernels.arguments.chain import ChainArguments
from specdec_kernels.arguments.rules import KINDS
from specdec_kernels.arguments.sample import SampleArguments
from specdec_kernels.arguments.tree import TreeArguments

INF, NAN = torch.inf, torch.nan


def kept(name, target, n, rows=None, indptr=None, kind="logits", bitmask=None, **filters):
    arguments = (target, rows, indptr, KINDS.index(kind), n, *sampling_arguments(**filters))
    return KeptTokens(*provider("kept_tokens", name)(*arguments, bitmask))


def in_order(probs, logits):
    """The tokens with P > 0, the likeliest first and the lower id among equals."""
    return sorted(probs.nonzero()[:, 0].tolist(), key=lambda v: (-float(logits[v]), v))


def prove(got, probs, logits):
    """What is kept of rows [R, V] is the support of `probs`, with its logarithms."""
    n = got.ids.shape[-1]
    for r, (p, row) in enumerate(zip(probs, logits, strict=True)):
        want = in_order(p, row)
        assert int(got.counts[r]) == len(want), f"row {r}: {got.counts[r]} kept, not {len(want)}"
        assert bool(got.status[r] & Status.KEPT_CUT) == (len(want) > n), f"row {r}: status"
        want = want[:n]
        empty = n - len(want)
        assert got.ids[r].tolist() == want + [-1] * empty, f"row {r}: {got.ids[r]}, not {want}"
        logs = torch.cat([p[want].log(), torch.full((empty,), -INF)]).float()
        assert_close(f"logprobs of row {r}", got.logprobs[r], logs, atol=2e-6)


@pytest.mark.parametrize(("name", "case"), provider_cases("kept_tokens"))
def test_kept_tokens_agree_with_the_specification(name, case):
    want = reference.kept_tokens(*case.args())
    torch.use_deterministic_algorithms(True)  # new memory holds NaN and the largest integer
    assert_outputs_close("kept_tokens", provider("kept_tokens", name)(*case.args()), want)


FILTERS = [
    (1.0, 0, 1.0, 0.0), (0.5, 2, 1.0, 0.0), (1.0, 1, 0.6, 0.0), (1.0, 3, 0.6, 0.5),
    (2.0, 0, 0.3, 0.0), (1.0, 0, 1.0, 0.55), (0.0, 2, 0.6, 0.5), (1.0, 0, 0.7, 0.0),
]  # fmt: skip


def enumerated_rows(dtype=torch.float32):
    """Each row of four logits of a few, under each of FILTERS, and a mask beside NaN."""
    rows = torch.tensor([*itertools.product((-INF, -0.0, 0.0, 0.5, 1.0), repeat=4)], dtype=dtype)
    rows = rows[rows.amax(-1) > -INF].repeat_interleave(len(FILTERS), 0)
    columns = torch.tensor(FILTERS).repeat(len(rows) // len(FILTERS), 1).T
    names = ("temperature", "top_k", "top_p", "min_p")
    filters = {n: x.contiguous() for n, x in zip(names, columns, strict=True)}
    filters["top_k"] = filters["top_k"].to(torch.int32)
    allowed = torch.rand(rows.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    allowed |= (rows.where(allowed, -INF).amax(-1) == -INF)[:, None]
    masked = rows.where(allowed, -INF)
    want = torch.stack([
        filtered_distribution(row, *(float(x[i]) for x in filters.values()))
        for i, row in enumerate(masked)
    ])  # fmt: skip
    return rows.where(allowed, NAN), packed_bits(allowed), filters, masked, want


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("max_kept", [1, 3, 4, 9])
@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_few_logits_keeps_the_support_of_its_distribution(name, max_kept):
    rows, bitmask, filters, masked, want = enumerated_rows()
    if name != "cpp":
        rows, bitmask, masked, want = (x[::7] for x in (rows, bitmask, masked, want))
        filters = {n: x[::7] for n, x in filters.items()}
    got = kept(name, rows, max_kept, bitmask=bitmask, **filters)
    prove(got, want, masked)
    whole = got.counts <= max_kept
    assert_close("sums", got.logprobs[whole].exp().sum(-1), torch.ones(int(whole.sum())), atol=1e-5)


def rolled(x):
    return x.roll(1, 0)


CONTROLS = {
    "log-probabilities of all tokens": lambda k: k._replace(logprobs=k.logprobs - 0.01),
    "no ties at the threshold": lambda k: k._replace(counts=k.counts.clamp(max=2)),
    "ties by the higher id": lambda k: k._replace(
        ids=torch.where((k.logprobs[:, :1] == k.logprobs[:, 1:2]), k.ids.flip(-1), k.ids)
    ),
    "rows of other tokens": lambda k: KeptTokens(*map(rolled, k)),
    "a cut that is not said": lambda k: k._replace(status=k.status * 0),
    "normalised over what is returned": lambda k: k._replace(
        logprobs=k.logprobs - k.logprobs.logsumexp(-1, keepdim=True)
    ),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_rejected(control):
    rows, bitmask, filters, masked, want = enumerated_rows()
    got = kept("cpp", rows, 2, bitmask=bitmask, **filters)
    prove(got, want, masked)
    with pytest.raises(AssertionError):
        prove(CONTROLS[control](got), want, masked)


@pytest.mark.covering(emulated=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_kept", [1, 600, 1024])
@pytest.mark.parametrize("name", NAMES)
def test_more_ties_than_any_list_holds_are_cut_by_their_ids(name, max_kept, dtype):
    """Rows of one value, of two, with few above many ties in the last tiles, and with filters."""
    v, g = 5003, torch.Generator().manual_seed(2)
    rows = torch.zeros(5, v)
    rows[1, torch.randperm(v, generator=g)[:1500]] = 1.0
    rows[2, :3500] = -1.0
    rows[2, torch.randperm(v, generator=g)[:70]] = 2.0
    rows[3:] = torch.randint(0, 4, (2, v), generator=g)
    top_k = torch.tensor([0, 0, 0, 2000, 1], dtype=torch.int32)
    want = torch.stack([
        filtered_distribution(row.double(), 1.0, k) if k else row.double().softmax(0)
        for row, k in zip(rows, top_k.tolist(), strict=True)
    ])  # fmt: skip
    prove(kept(name, rows.to(dtype), max_kept, top_k=top_k), want, rows)


def logprobs_of_emitted(name, a, verdict, kept_of):
    """Compares what a verifier emitted with what is kept; returns how many tokens it emitted."""
    tokens, emitted = verdict.tokens, verdict.tokens >= 0
    found = kept_of.ids == torch.where(emitted, tokens, -7)[..., None]
    whole = emitted & (kept_of.counts <= kept_of.ids.shape[-1])
    assert found.any(-1)[whole].all(), f"{name}: emitted, but not kept"
    there = found.any(-1)
    got = kept_of.logprobs.where(found, 0.0).sum(-1)[there]
    # Some rules take probabilities as they are, which sum to 1 as their dtype allows.
    rounding = 1e-6 if a.target.dtype == torch.float32 else 4e-3
    atol = 0.0 if a.kind_name == "logits" else rounding
    assert_close("logprobs", got, verdict.logprobs[there], atol=atol)
    assert (kept_of.counts[~emitted] == 0).all()
    return int(there.sum())


def verified(name, op, records, result, rules):
    """The number of emitted tokens of all cases of the lossless rules of a verifier."""
    count = 0
    for case in proofs.cases(op):
        args = case.args()
        a = records(*args)
        if a.rule_name not in rules or not a.with_logprobs:
            continue
        verdict = result(*provider(op, name)(*args))
        of_target = (a.target, verdict.rows(), a.target_indptr, a.kind, 1024)
        names = ("temperatures", "top_ks", "top_ps", "min_ps")
        greedy = dict.fromkeys(names) | {"temperature": 0.0}
        a = a._replace(**greedy) if a.rule_name == "greedy" else a
        parameters = [getattr(a, n) for s in names for n in (s, s[:-1])]
        got = provider("kept_tokens", name)(*of_target, *parameters, a.token_bitmask)
        count += logprobs_of_emitted(f"{name} {case}", a, verdict, KeptTokens(*got))
    return count


@pytest.mark.parametrize("name", NAMES)
def test_what_a_chain_emits_is_kept_with_its_log_probability(name):
    args = (ChainArguments, Verdict, LOSSLESS_RULES)
    assert verified(name, "verify_chain", *args) > 150


@pytest.mark.parametrize("name", NAMES)
def test_what_a_tree_emits_is_kept_with_its_log_probability(name):
    args = (TreeArguments, TreeVerdict, LOSSLESS_TREE_RULES)
    assert verified(name, "verify_tree", *args) > 150


@pytest.mark.parametrize("name", NAMES)
def test_what_is_sampled_is_kept_with_its_log_probability(name):
    for case in proofs.cases("sample"):
        args = case.args()
        a = SampleArguments(*args)
        tokens, logprobs, *_ = provider("sample", name)(*args)
        got = KeptTokens(
            *provider("kept_tokens", name)(a.logits, None, None, 0, 1024, *args[1:9], args[9])
        )
        found = got.ids == tokens[:, None]
        there = found.any(-1) & (tokens >= 0)
        assert (there | (tokens < 0) | (got.counts > 1024)).all(), case
        assert_close("logprobs", got.logprobs.where(found, 0.0).sum(-1)[there], logprobs[there])


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_a_distribution_say_why_and_keep_nothing(name):
    target = torch.tensor(
        [[[0.0, NAN], [1.0, 0.0]], [[0.0, INF], [-INF, -INF]], [[0.0, 1.0], [2.0, 0.0]]]
    )
    rows = torch.tensor([[0, 1, -1, 2], [0, 1, -5, 2**40], [0, 1, -1, 1]])
    bitmask = torch.tensor([[[3], [0]], [[3], [3]], [[3], [3]]], dtype=torch.int32)
    temperature = torch.tensor([1.0, 1.0, NAN])
    got = kept(name, target, 2, rows, bitmask=bitmask, temperature=temperature)
    bad, none, invalid = Status.BAD_PARAMETER, Status.NOTHING_ALLOWED, Status.TARGET_INVALID
    want = [[invalid, none, 0, invalid], [invalid] * 4, [bad, bad, 0, bad]]
    assert got.status.tolist() == want
    assert (got.counts == 0).all()
    assert (got.ids == -1).all()
    assert (got.logprobs == -INF).all()
    indptr = torch.tensor([-3, 1, 2**40, 2])
    ragged = kept(name, target.flatten(0, 1)[4:], 2, rows[:, :2], indptr)
    assert ragged.counts.tolist() == [[2, 0], [2, 0], [0, 0]]
    assert ragged.ids[1, 0].tolist() == [0, 1]


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_that_are_0_in_a_double_are_not_kept(name):
    """Masks of large negative numbers in the place of -inf; at a huge temperature they count."""
    low = torch.finfo(torch.float32).min
    rows = torch.tensor([[0.0, low, -1.0], [0.0, -745.0, -747.0], [0.0, low, -INF]])
    got = kept(name, rows, 3, temperature=torch.tensor([1.0, 1.0, 3e38]))
    assert got.counts.tolist() == [2, 2, 2]
    assert got.ids.tolist() == [[0, 2, -1], [0, 1, -1], [0, 1, -1]]


@pytest.mark.parametrize("name", NAMES)
def test_probabilities_are_kept_as_logits_are(name):
    g = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(7, 40, generator=g)
    filters = {"temperature": torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0, 1.0, 0.0]), "top_p": 0.8}
    got = kept(name, logits.softmax(-1), 40, kind="probs", **filters)
    assert_outputs_close("kept_tokens", got, kept(name, logits, 40, **filters))
    halves = kept(name, torch.tensor([[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]), 3, kind="probs")
    assert halves.ids.tolist() == [[0, 2, -1], [-1, -1, -1]]
    assert halves.status.tolist() == [0, Status.TARGET_INVALID]


def test_compressed_rows_hold_the_kept_tokens_in_order():
    target = torch.tensor([[[0.0, 2.0, 1.0], [9.0, 0.0, 9.0]], [[0.0, 0.0, 0.0], [3.0, 2.0, 1.0]]])
    got = kept_tokens(target, max_kept=2, rows=torch.tensor([[1, -1], [0, 1]]), top_k=1)
    csr = kept_to_csr(got)
    assert csr.indptr.tolist() == [0, 2, 2, 4, 5]
    assert csr.ids.tolist() == [0, 2, 0, 1, 0]
    pairs = itertools.pairwise(csr.indptr.tolist())
    for (begin, end), row in zip(pairs, got.logprobs.flatten(0, 1), strict=True):
        assert csr.logprobs[begin:end].tolist() == row[row > -INF].tolist()
    empty = kept_to_csr(KeptTokens(*(x[:0] for x in got)))
    assert (empty.indptr.tolist(), empty.ids.tolist()) == ([0], [])
    with pytest.raises(TypeError, match="kept must be a KeptTokens, got tuple"):
        kept_to_csr(tuple(got))


def round_with_kept(target, tokens, seeds):
    verdict = verify_chain(target, tokens, seeds=seeds, positions=seeds, top_k=3)
    return (*verdict, *kept_tokens(target, rows=verdict.rows(), max_kept=5, top_k=3))


@pytest.mark.slow
def test_a_round_with_kept_tokens_compiles_as_one_graph():
    g = torch.Generator().manual_seed(4)
    args = torch.randn(3, 4, 61, generator=g), torch.randint(0, 61, (3, 3)), torch.arange(3)
    compiled = torch.compile(round_with_kept, fullgraph=True, backend="aot_eager", dynamic=True)
    for got, want in zip(compiled(*args), round_with_kept(*args), strict=True):
        assert_close("output", got, want)
