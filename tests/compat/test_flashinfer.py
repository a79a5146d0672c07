"""FlashInfer's functions: its documented cases, the ops, the distributions, faults and errors."""

from functools import partial

import proofs
import pytest
import torch
from support.providers import SIGNIFICANCE, chi_square

from specdec_kernels import sample, verify_chain
from specdec_kernels.compat import flashinfer, noise

NAN = float("nan")
ROW = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 5000
SAMPLERS = {  # name -> (function of [R, 5] probabilities, the filters that it applies)
    "probs": (flashinfer.sampling_from_probs, {}),
    "top_p": (partial(flashinfer.top_p_sampling_from_probs, top_p=0.6), dict(top_p=0.6)),
    "top_k": (partial(flashinfer.top_k_sampling_from_probs, top_k=3), dict(top_k=3)),
    "min_p": (partial(flashinfer.min_p_sampling_from_probs, min_p=0.3), dict(min_p=0.3)),
    "top_k_top_p": (
        partial(flashinfer.top_k_top_p_sampling_from_probs, top_k=2, top_p=0.5),
        dict(top_k=2, top_p=0.5),
    ),
    "joint": (
        partial(flashinfer.top_k_top_p_sampling_from_probs, top_k=2, top_p=0.5,
                filter_apply_order="joint"),
        {},
    ),
    "logits": (lambda p, **k: flashinfer.sampling_from_logits(p.log(), **k), {}),
    "logits-joint": (
        lambda p, **k: flashinfer.top_k_top_p_sampling_from_logits(
            p.log(), 2, 0.5, filter_apply_order="joint", **k
        ),
        {},
    ),
    "logits-top_k_top_p": (
        lambda p, **k: flashinfer.top_k_top_p_sampling_from_logits(p.log(), 2, 0.5, **k),
        dict(top_k=2, top_p=0.5),
    ),
}  # fmt: skip
VALIDATED = [name for name in SAMPLERS if not name.startswith("logits")]


@pytest.mark.parametrize("name", [name for name in SAMPLERS if "joint" not in name])
def test_samples_are_those_of_the_ops(name):
    draw, filters = SAMPLERS[name]
    probs = torch.randn(50, 31, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    seeds, positions = noise.seeds_and_positions(50, probs.device, None, 8, 1)
    how = dict(**filters, seeds=seeds, positions=positions)
    if name in VALIDATED:  # the bonus token of a chain without drafts
        none = torch.empty(50, 0, dtype=torch.int64)
        want = verify_chain(probs[:, None], none, kind="probs", **how).tokens[:, 0]
    else:
        want = sample(probs.log(), **how).tokens
    assert draw(probs, seed=8, offset=1).tolist() == want.tolist()


@pytest.mark.parametrize("name", ["joint", "logits-joint"])
def test_samples_of_joint_filters_have_the_filtered_distribution(name):
    """Negative control: top-p of the row joined with top-k is no top-p of the renormalised row."""
    ids = SAMPLERS[name][0](ROW.expand(DRAWS, -1), seed=3, offset=0).long()

    def p_value(**filters):
        probs = proofs.filtered_distribution(ROW.log(), **filters)
        return chi_square(ids, probs) if (probs[ids] > 0).all() else 0.0

    assert p_value(top_k=2) > SIGNIFICANCE > p_value(top_k=2, top_p=0.5)


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("k", [1, 2, 4, 9])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.65, 1.0])
def test_joint_filters_keep_what_each_keeps_on_the_whole_row(k, p):
    probs = torch.softmax(2 * torch.randn(7, 9, generator=torch.Generator().manual_seed(k)), -1)
    larger = probs[:, None, :] > probs[:, :, None]
    keep = (larger.sum(-1) < k) & ((larger * probs[:, None, :]).sum(-1) < p)
    seen = torch.zeros_like(keep)
    for offset in range(100):
        ids = flashinfer.top_k_top_p_sampling_from_probs(
            probs, k, p, filter_apply_order="joint", seed=1, offset=offset
        )
        seen[torch.arange(7), ids.long()] = True
    assert not (seen & ~keep).any()
    assert (seen | ~keep | (probs < 0.08)).all()


def test_softmax():
    logits = torch.randn(3, 111, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits[0, 4] = -torch.inf
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    want = (logits.float() / temperatures[:, None]).softmax(-1)
    torch.testing.assert_close(flashinfer.softmax(logits, temperatures), want)
    torch.testing.assert_close(flashinfer.softmax(logits, 0.5)[0], want[0])
    torch.testing.assert_close(flashinfer.softmax(logits)[1], want[1])
    assert flashinfer.softmax(logits[1:], 0.0).eq(1 / 111).all()
    assert flashinfer.softmax(logits[1:], torch.zeros(2)).eq(1 / 111).all()


@pytest.mark.parametrize("of", [float, lambda t: torch.tensor([t])])
def test_softmax_at_the_ends_of_temperature(of):
    """Masked tokens stay masked at 0, and tiny temperatures do not overflow."""
    logits = torch.tensor([[-torch.inf, 20.0, -30.0]])
    assert flashinfer.softmax(logits, of(0.0)).tolist() == [[0, 0.5, 0.5]]
    for tiny in (1e-37, 1e-42):
        assert flashinfer.softmax(logits, of(tiny)).tolist() == [[0, 1, 0]]
    assert flashinfer.softmax(torch.full((1, 3), -torch.inf), of(1.0)).isnan().all()


# Chains.


def chain_inputs(n, v=111, b=9):
    generator = torch.Generator().manual_seed(n)
    draft = torch.rand(b, n, v, generator=generator)
    ids = torch.randint(v, (b, n), generator=generator)
    return draft / draft.sum(-1, keepdim=True), ids, generator


def test_one_hot_targets_accept_every_draft_and_counts_are_added_to_those_given():
    n = 3
    draft, ids, generator = chain_inputs(n)
    last = torch.randint(111, (9, 1), generator=generator)
    want = torch.cat([ids, last], 1)
    target = torch.nn.functional.one_hot(want, 111).float()
    accepted, emitted = torch.ones(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int64)
    out = flashinfer.chain_speculative_sampling(draft, ids, target, accepted, emitted)
    assert out[0].tolist() == want.tolist()
    assert out[1] is accepted
    assert out[2] is emitted
    assert accepted.eq(n + 1).all()
    assert emitted.eq(n).all()


def test_nan_rows_give_id_0_and_are_invalid():
    probs = torch.full((4, 60), 1 / 60)
    probs[0], probs[2] = NAN, 0.0
    for name in VALIDATED:
        ids, valid = SAMPLERS[name][0](probs, return_valid=True)
        assert valid.tolist() == [False, True, False, True], name
        assert ids[[0, 2]].tolist() == [0, 0]
        assert SAMPLERS[name][0](probs)[0] == 0
    assert flashinfer.sampling_from_logits(torch.full((1, 5), NAN)).tolist() == [0]


def test_no_draft_counts_after_a_minus_one():
    probs = torch.full((1, 3, 5), 0.2)
    ids = torch.tensor([[-1, 1]])
    _, accepted, emitted = flashinfer.chain_speculative_sampling(probs[:, :2], ids, probs)
    assert (accepted.tolist(), emitted.tolist()) == ([0], [0])
    _, accepted, _ = flashinfer.chain_speculative_sampling(probs[:, :2], ids.abs(), probs)
    assert accepted.tolist() == [2]


# The ops.


def test_a_chain_equals_verify_chain():
    draft, ids, generator = chain_inputs(4, v=7, b=200)
    target = torch.rand(200, 5, 7, generator=generator)
    target /= target.sum(-1, keepdim=True)
    ids[3, 2], ids[4, 1], ids[5, 0] = -1, 7, 2**31 - 1
    ids[6, 0], ids[7, 0], ids[8, 0] = 2**32, -(2**32), 2**40 + 1  # int32 would wrap to 0, 0 and 1
    out, accepted, emitted = flashinfer.chain_speculative_sampling(
        draft, ids, target, seed=5, offset=2
    )
    assert (emitted[3:9] <= torch.tensor([2, 1, 0, 0, 0, 0])).all()
    assert (accepted[3:9] <= 3).all()
    assert out.dtype == torch.int32
    assert ((out >= 0).sum(1) == emitted + 1).all()
    seeds, positions = noise.seeds_and_positions(200, target.device, None, 5, 2)
    want = verify_chain(target, ids, draft, kind="probs", seeds=seeds, positions=positions + 1)
    assert out.tolist() == want.tokens.tolist()
    assert emitted.tolist() == want.num_accepted.tolist()


# Arguments.


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_name_the_row_of_each_output(dtype):
    probs = torch.eye(5)
    indices = torch.tensor([4, 1, 1, 0, 3, 3], dtype=dtype)
    for name, (draw, _) in SAMPLERS.items():
        ids = draw(probs, indices=indices)
        assert ids.dtype == dtype, name
        assert ids.tolist() == indices.tolist(), name
    flat = torch.full((2, 5), 0.2)
    flat[:, 2] = 0.21
    out = flashinfer.top_k_sampling_from_probs(
        flat, torch.tensor([1, 5]), torch.tensor([0] * 9 + [1] * 9, dtype=dtype), seed=0, offset=0
    )
    assert out[:9].eq(2).all()
    assert not out[9:].eq(2).all()


def test_parameters_at_the_ends_of_their_ranges():
    rows = ROW[None]
    assert flashinfer.top_p_sampling_from_probs(rows, 0.0).tolist() == [1]
    assert flashinfer.top_p_sampling_from_probs(rows, torch.zeros(1)).tolist() == [1]
    everything = flashinfer.sampling_from_probs(rows, seed=1, offset=9).tolist()
    for draw, value in (
        (flashinfer.top_p_sampling_from_probs, 7.0),
        (flashinfer.top_k_sampling_from_probs, 1 << 30),
        (flashinfer.min_p_sampling_from_probs, 0.0),
    ):
        assert draw(rows, value, seed=1, offset=9).tolist() == everything
    _, valid = flashinfer.top_k_sampling_from_probs(rows, torch.zeros(1).long(), return_valid=True)
    assert valid.tolist() == [False]


def test_rows_of_any_floating_dtype_and_stride_are_read():
    wide = torch.zeros(3, 10).double()
    wide[:, ::2] = torch.eye(5)[[2, 0, 4]].double()
    assert flashinfer.sampling_from_probs(wide[:, ::2]).tolist() == [2, 0, 4]
    draft, ids, _ = chain_inputs(2)
    target = torch.nn.functional.one_hot(torch.cat([ids, ids[:, :1]], 1), 111)
    out, *_ = flashinfer.chain_speculative_sampling(draft.half(), ids, target.double())
    assert out[:, :2].tolist() == ids.tolist()


P, ONE = torch.full((2, 5), 0.2), torch.zeros(1, dtype=torch.int64)
CHAIN = dict(
    draft_probs=torch.full((1, 2, 5), 0.2), draft_token_ids=torch.zeros(1, 2, dtype=torch.int32),
    target_probs=torch.full((1, 3, 5), 0.2),
)  # fmt: skip
JOINT = dict(top_k=1, top_p=0.5, filter_apply_order="joint")
ERRORS = [
    ("sampling_from_probs", dict(probs=P[0]), RuntimeError, r"probs must be \[R, V\], got \[5\]"),
    ("sampling_from_probs", dict(probs=P.tolist()), TypeError, "probs must be a tensor"),
    ("sampling_from_probs", dict(probs=P * NAN, check_nan=True), ValueError, "no NaN"),
    ("sampling_from_logits", dict(logits=P * NAN, check_nan=True), ValueError, "no NaN"),
    ("sampling_from_probs", dict(probs=P, indices=P), RuntimeError, r"indices must be \[B\]"),
    ("sampling_from_probs", dict(probs=P, indices=P[0]), RuntimeError, "indices must be int32"),
    ("sampling_from_probs", dict(probs=P, indices=ONE - 1), RuntimeError,
     r"indices must be in \[0, 1\], got -1"),
    ("top_k_top_p_sampling_from_logits", dict(logits=P, top_k=1, top_p=1.0, indices=ONE + 2),
     RuntimeError, r"indices must be in \[0, 1\], got 2"),
    ("sampling_from_probs", dict(probs=P, seed=1, offset=ONE), ValueError, "both be tensors"),
    ("sampling_from_probs", dict(probs=P, seed=1.5, offset=0), TypeError, "seed must be an int"),
    ("sampling_from_probs", dict(probs=P, seed=ONE, offset=ONE.int()), ValueError,
     "offset must be int64 or uint64, got int32"),
    ("sampling_from_probs", dict(probs=P, seed=ONE, offset=ONE.to("meta")), ValueError,
     "offset must be on the device of the rows, cpu, got meta"),
    ("sampling_from_probs", dict(probs=P, seed=ONE[None], offset=ONE), ValueError,
     r"seed must be \[1\] or \[2\], got \[1, 1\]"),
    ("top_p_sampling_from_probs", dict(probs=P, top_p=P), ValueError,
     r"top_p must be a scalar or \[2\], got a tensor \[2, 5\]"),
    ("min_p_sampling_from_probs", dict(probs=P, min_p=P[0, 0]), ValueError, r"tensor \[\]"),
    ("min_p_sampling_from_probs", dict(probs=P, min_p=2.0), RuntimeError, "min_p must be in"),
    ("top_k_sampling_from_probs", dict(probs=P, top_k=ONE), ValueError, r"scalar or \[2\]"),
    ("top_k_sampling_from_probs", dict(probs=P, top_k=0), ValueError, "at least 1, got 0"),
    ("top_k_sampling_from_probs", dict(probs=P, top_k=True), TypeError, "must be an integer"),
    ("top_k_top_p_sampling_from_probs", dict(probs=P, top_k=1, top_p=0.5,
     filter_apply_order="top_p_first"), ValueError, "must be top_k_first or joint"),
    ("softmax", dict(logits=P, temperature=P), ValueError, "temperature must be a scalar"),
    ("chain_speculative_sampling", CHAIN | dict(draft_probs=P), RuntimeError, "draft_probs must"),
    ("chain_speculative_sampling", CHAIN | dict(draft_token_ids=ONE[None]), RuntimeError,
     r"draft_token_ids must be \[1, 2\], got \[1, 1\]"),
    ("chain_speculative_sampling", CHAIN | dict(draft_token_ids=torch.zeros(1, 2)), RuntimeError,
     "draft_token_ids must be int32 or int64, got float32"),
    ("chain_speculative_sampling", CHAIN | dict(target_probs=P[None]), RuntimeError,
     r"target_probs must be \[1, 3, 5\], got \[1, 2, 5\]"),
    ("chain_speculative_sampling", CHAIN | dict(draft_probs=torch.zeros(1, 2, 0),
     target_probs=torch.zeros(1, 3, 0)), RuntimeError,
     r"target_probs must have a vocabulary of 1 or more, got \[1, 3, 0\]"),
    ("chain_speculative_sampling", CHAIN | dict(maybe_output_accepted_token_num=ONE[None]),
     RuntimeError, r"maybe_output_accepted_token_num must be \[1\], got \[1, 1\]"),
    ("chain_speculative_sampling", CHAIN | dict(maybe_output_emitted_draft_token_num=[0]),
     TypeError, r"maybe_output_emitted_draft_token_num must be a tensor, got \[0\]"),
    ("chain_speculative_sampling", CHAIN | dict(maybe_output_accepted_token_num=torch.zeros(1)),
     RuntimeError, "maybe_output_accepted_token_num must hold integers, got float32"),
    *((name, {rows: P[:, :0]} | others, RuntimeError,
       rf"{rows} must have a vocabulary, V >= 1, got \[2, 0\]") for name, rows, others in (
        ("softmax", "logits", {}), ("sampling_from_logits", "logits", {}),
        ("sampling_from_probs", "probs", {}),
        ("top_k_top_p_sampling_from_probs", "probs", JOINT),
        ("top_k_top_p_sampling_from_logits", "logits", JOINT),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "message"), ERRORS)
def test_wrong_arguments_are_named(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(flashinfer, name)(**arguments)
