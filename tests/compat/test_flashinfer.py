"""FlashInfer's functions: the ops, the distributions, their noise, faults and errors."""

import itertools

import proofs
import pytest
import torch
from proofs import SIGNIFICANCE, chi_square

from specdec_kernels import sample, verify_chain
from specdec_kernels.compat import flashinfer, noise

NAN = float("nan")
ROW = torch.tensor([0.05, 0.4, 0.1, 0.3, 0.15])
DRAWS = 20_000
BOTH = {"top_k": 2, "top_p": 0.5}
JOINT = {**BOTH, "filter_apply_order": "joint"}
# Name -> its arguments beside the rows, and the filters that it applies one after the other.
SAMPLERS = {
    "sampling_from_probs": ({}, {}),
    "top_p_sampling_from_probs": ({"top_p": 0.6}, {"top_p": 0.6}),
    "top_k_sampling_from_probs": ({"top_k": 3}, {"top_k": 3}),
    "min_p_sampling_from_probs": ({"min_p": 0.3}, {"min_p": 0.3}),
    "top_k_top_p_sampling_from_probs": (BOTH, BOTH),
    "top_k_top_p_sampling_from_probs, joint": (JOINT, None),
    "sampling_from_logits": ({}, {}),
    "top_k_top_p_sampling_from_logits": (BOTH, BOTH),
    "top_k_top_p_sampling_from_logits, joint": (JOINT, None),
}
OF_PROBS = [name for name in SAMPLERS if "logits" not in name]


def draw(name, probs, **kwargs):
    """The sample of each row of probabilities."""
    rows = probs.log() if "logits" in name else probs
    return getattr(flashinfer, name.split(",")[0])(rows, **SAMPLERS[name][0], **kwargs)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_those_of_the_ops_or_of_the_joint_filters(name):
    """Negative control: top-p of the row joined with top-k is no top-p of the renormalised row."""
    filters = SAMPLERS[name][1]
    if filters is None:
        ids = draw(name, ROW.expand(DRAWS, -1), seed=3, offset=0).long()
        probs, chained = (
            proofs.filtered_distribution(ROW.log(), **given) for given in ({"top_k": 2}, BOTH)
        )
        assert chi_square(ids, probs) > SIGNIFICANCE
        assert not (chained[ids] > 0).all()
        return
    probs = torch.randn(50, 31, generator=torch.Generator().manual_seed(0)).mul(2).softmax(-1)
    seeds, positions = noise.seeds_and_positions(50, probs.device, None, 8, 1)
    how = dict(**filters, seeds=seeds, positions=positions)
    if name in OF_PROBS:  # the bonus token of a chain without drafts
        none = torch.empty(50, 0, dtype=torch.int64)
        want = verify_chain(probs[:, None], none, kind="probs", **how).tokens[:, 0]
    else:
        want = sample(probs.log(), **how).tokens
    assert draw(name, probs, seed=8, offset=1).tolist() == want.tolist()


def test_softmax_also_at_the_ends_of_temperature():
    """Masked tokens stay masked at 0, and tiny temperatures do not overflow."""
    logits = torch.randn(3, 111, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits[0, 4] = -torch.inf
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    want = (logits.float() / temperatures[:, None]).softmax(-1)
    torch.testing.assert_close(flashinfer.softmax(logits, temperatures), want)
    torch.testing.assert_close(flashinfer.softmax(logits, 0.5)[0], want[0])
    torch.testing.assert_close(flashinfer.softmax(logits)[1], want[1])
    row = torch.tensor([[-torch.inf, 20.0, -30.0]])
    for temperature, probs in ((0.0, [0, 0.5, 0.5]), (1e-37, [0, 1, 0]), (1e-42, [0, 1, 0])):
        for given in (temperature, torch.tensor([temperature])):
            assert flashinfer.softmax(row, given).tolist() == [probs]


def test_rows_without_a_distribution_give_id_0_and_are_invalid():
    probs = torch.full((4, 60), 1 / 60)
    probs[0], probs[2] = NAN, 0.0
    for name in OF_PROBS:
        ids, valid = draw(name, probs, return_valid=True)
        assert valid.tolist() == [False, True, False, True], name
        assert ids[[0, 2]].tolist() == [0, 0]
        assert draw(name, probs)[0] == 0
    assert flashinfer.sampling_from_logits(torch.full((1, 5), NAN)).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_name_the_row_of_each_output(dtype):
    indices = torch.tensor([4, 1, 1, 0, 3, 3], dtype=dtype)
    for name in SAMPLERS:
        ids = draw(name, torch.eye(5), indices=indices)
        assert (ids.dtype, ids.tolist()) == (dtype, indices.tolist()), name
    flat = torch.full((2, 5), 0.2)
    flat[:, 2] = 0.21
    rows = torch.tensor([0] * 9 + [1] * 9, dtype=dtype)
    out = flashinfer.top_k_sampling_from_probs(flat, torch.tensor([1, 5]), rows, seed=0, offset=0)
    assert out[:9].eq(2).all()
    assert not out[9:].eq(2).all()


def test_parameters_at_the_ends_of_their_ranges_and_rows_of_any_dtype_and_stride():
    rows = ROW[None]
    assert flashinfer.top_p_sampling_from_probs(rows, 0.0).tolist() == [1]
    assert flashinfer.top_p_sampling_from_probs(rows, torch.zeros(1)).tolist() == [1]
    everything = flashinfer.sampling_from_probs(rows, seed=1, offset=9).tolist()
    for name, value in (("top_p", 7.0), ("top_k", 1 << 30), ("min_p", 0.0)):
        function = getattr(flashinfer, f"{name}_sampling_from_probs")
        assert function(rows, value, seed=1, offset=9).tolist() == everything
    for name in (n for n in SAMPLERS if n.startswith("top_k")):  # the kernel has k without a sign
        function = getattr(flashinfer, name.split(",")[0])
        logits = rows.log() if "logits" in name else rows
        given = dict.fromkeys(("seed", "offset"), 4) | SAMPLERS[name][0] | {"top_p": 1.0}
        if name == "top_k_sampling_from_probs":
            del given["top_p"]
        found = [
            function(logits.expand(99, -1), **given | {"top_k": top_k}).tolist()
            for k in (5, -1, 1, 0) for top_k in (k, torch.full((99,), k))
        ]  # fmt: skip
        assert found[:4] == found[:1] * 4, name
        assert found[4:] == [[1] * 99] * 4, name
        assert set(found[0]) != {1}
    wide = torch.zeros(3, 10).double()
    wide[:, ::2] = torch.eye(5)[[2, 0, 4]].double()
    assert flashinfer.sampling_from_probs(wide[:, ::2]).tolist() == [2, 0, 4]


# Chains.

DRAFT = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])
TARGET = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3], [0.1, 0.1, 0.8]])
chain = flashinfer.chain_speculative_sampling


def test_a_chain_equals_verify_chain():
    generator = torch.Generator().manual_seed(4)
    draft, target = (torch.rand(200, n, 7, generator=generator) for n in (4, 5))
    draft, target = draft / draft.sum(-1, keepdim=True), target / target.sum(-1, keepdim=True)
    ids = torch.randint(7, (200, 4), generator=generator)
    ids[3, 2], ids[4, 1], ids[5, 0] = -1, 7, 2**31 - 1
    ids[6, 0], ids[7, 0], ids[8, 0] = 2**32, -(2**32), 2**40 + 1  # int32 would wrap to 0, 0 and 1
    out, accepted, emitted = chain(draft, ids, target, seed=5, offset=2)
    assert (emitted[3:9] <= torch.tensor([2, 1, 0, 0, 0, 0])).all()
    assert (accepted[3:9] <= 3).all()
    assert out.dtype == torch.int32
    seeds, positions = noise.seeds_and_positions(200, target.device, None, 5, 2)
    want = verify_chain(target, ids, draft, kind="probs", seeds=seeds, positions=positions + 1)
    assert out.tolist() == want.tokens.tolist()
    assert emitted.tolist() == want.num_accepted.tolist()


@pytest.mark.parametrize("first", [0, 1])
def test_drafts_may_be_drawn_with_the_noise_of_their_verification(first):
    """Negative control: from its first position on, a chain would draw with the drafts' noise."""
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT[:1], TARGET[:2])]
    ids = flashinfer.sampling_from_probs(rows[0][:, 0], seed=1, offset=3)[:, None]
    tokens, *_ = chain(rows[0], ids, rows[1], seed=1, offset=3)
    if first == 0:
        seeds, positions = noise.seeds_and_positions(DRAWS, ids.device, None, 1, 3)
        tokens = verify_chain(
            rows[1], ids, rows[0], kind="probs", seeds=seeds, positions=positions
        ).tokens
    p_value = chi_square(tokens[:, 0].long(), TARGET[0].double())
    assert (p_value > SIGNIFICANCE) == (first == 1)


# The first draft is accepted with probability 0.4, the second for sure; of rows that are halved
# with 0.2 and 0.5. After a rejection every draft behind the rejected one has a test of its own.
@pytest.mark.parametrize(
    ("scale", "want", "fits"),
    [
        pytest.param(1, [0.0, 0.6, 0.4], True, id="kernel"),
        pytest.param(1, [0.0, 0.36, 0.64], False, id="two tests of the rejected draft"),
        pytest.param(0.5, [0.4, 0.5, 0.1], True, id="rows that sum to a half"),
        pytest.param(0.5, [0.006, 0.5964, 0.3976], False, id="rows divided by their sums"),
    ],
)
def test_the_accepted_number_has_the_distribution_of_the_kernel(scale, want, fits):
    """Probabilities are taken as they are. What does not fit is a negative control."""
    ids = torch.tensor([[0, 2]]).expand(DRAWS, -1)
    rows = [t.expand(DRAWS, -1, -1) for t in (DRAFT, scale * TARGET)]
    _, accepted, _ = chain(rows[0], ids, rows[1], seed=1, offset=0)
    p_value = chi_square(accepted.long(), torch.tensor(want, dtype=torch.float64))
    assert (p_value > SIGNIFICANCE) == fits


def test_a_draft_counts_only_with_valid_probabilities():
    """The first draft is rejected, so that the second only has a test of its own."""
    for p, q in itertools.product((0.5, NAN, torch.inf, -0.5), repeat=2):
        draft = torch.tensor([[[1.0, 0.0], [q, 0.5]]])
        target = torch.tensor([[[0.0, 1.0], [p, 0.5], [1.0, 0.0]]])
        out = chain(draft, torch.zeros(1, 2).int(), target)
        assert [t.tolist() for t in out] == [[[1, -1, -1]], [int(p == q == 0.5)], [0]], (p, q)


def test_nothing_behind_an_absent_draft_counts():
    rows = torch.tensor([[[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]])
    for ids, want in (([1, -1, 1], 0), ([0, -1, 1], 1), ([0, 2, 1], 1)):
        _, accepted, _ = chain(rows, torch.tensor([ids]), torch.cat([rows, rows[:, :1]], 1))
        assert accepted.tolist() == [want], ids


# Noise: each seed, row and offset has its own.

ROWS = 64
EQUAL = torch.full((1, 1, 2**14), 2**-14)  # a row whose tokens are all equally likely


def tokens(seed=None, offset=None, **given):
    """[ROWS], the sample of each row."""
    rows = EQUAL[0].expand(ROWS, -1)
    return flashinfer.sampling_from_probs(rows, seed=seed, offset=offset, **given)


def last_tokens(positions):
    """[4], the last tokens of chains that accept all drafts, at offset 0 and so many positions."""
    target = EQUAL.expand(4, positions - 1, -1)
    drafts = torch.zeros(4, positions - 2, dtype=torch.int32)
    return chain(target[:, 1:], drafts, target, seed=1, offset=0)[0][:, -1]


def test_a_call_is_determined_by_seed_and_offset_or_by_the_generator():
    one, zero = torch.tensor([1]), torch.tensor([0])
    for same in ((1, 0), (one, zero), (one.expand(ROWS), zero.expand(ROWS))):
        assert tokens(*same).equal(tokens(1, 0))
    for same in ((2**64 - 1, 0), torch.tensor([[2**64 - 1], [0]], dtype=torch.uint64)):
        assert tokens(*same).equal(tokens(-1, 0))
    other = [tokens(*given) for given in ((1, 0), (2, 0), (1, 1), (1, 2**40))]
    assert all((a == b).sum() < 2 for a, b in itertools.combinations(other, 2))
    generator = torch.Generator()
    for given, reset in (
        ({"generator": generator}, generator.manual_seed),
        ({}, torch.manual_seed),
    ):
        reset(3)
        first, second = tokens(**given), tokens(**given)
        reset(3)
        assert tokens(**given).equal(first)
        assert not second.equal(first)


@pytest.mark.parametrize("step", [1, 2, 2**62, 2**63])
@pytest.mark.parametrize("seed", [0, -1])
def test_no_row_has_the_noise_of_any_row_of_another_seed(seed, step):
    """Negative control: 2**64 seeds further, all have that of this one."""
    ours, others, control = (set(tokens(seed + n, 0).tolist()) for n in (0, step, 2**64))
    assert len(ours & others) < 6  # of 64 * 64 pairs, one in 2**14 is equal by chance
    assert ours == control
    assert len(ours) > ROWS - 6  # nor has it that of another row


def test_no_position_of_a_row_is_that_of_another_row_or_offset():
    """Negative control: one position more than 2**16 is the first one of the next offset."""
    assert len({*last_tokens(9).tolist()} & {*tokens(1, 0).tolist()}) < 2
    drawn = last_tokens(2**15 + 1)
    for power in range(17):
        assert (drawn == tokens(1, 2**power)[:4]).sum() < 2
    assert last_tokens(2**16 + 1).tolist() == tokens(1, 1)[:4].tolist()


@pytest.mark.parametrize("given", [{"seed": 1}, {"offset": 1}])
def test_a_seed_or_an_offset_alone_is_ignored_with_a_warning(given):
    rows, generator = EQUAL[0].expand(ROWS, -1), torch.Generator()
    missing = "offset" if "seed" in given else "seed"
    with pytest.warns(UserWarning, match=f"because {missing} is None") as warned:
        drawn = flashinfer.sampling_from_probs(rows, generator=generator.manual_seed(3), **given)
    assert [w.filename for w in warned] == [__file__]
    expected = flashinfer.sampling_from_probs(rows, generator=generator.manual_seed(3))
    assert torch.equal(drawn, expected)


# Arguments.

P, ONE = torch.full((2, 5), 0.2), torch.zeros(1, dtype=torch.int64)
CHAIN = dict(
    draft_probs=torch.full((1, 2, 5), 0.2), draft_token_ids=torch.zeros(1, 2, dtype=torch.int32),
    target_probs=torch.full((1, 3, 5), 0.2),
)  # fmt: skip
OF_P = dict(probs=P)
ERRORS = [
    ("sampling_from_probs", dict(probs=P * NAN, check_nan=True), ValueError, "no NaN"),
    ("sampling_from_probs", OF_P | dict(indices=ONE - 1), RuntimeError, r"in \[0, 1\], got -1"),
    ("sampling_from_probs", OF_P | dict(seed=1, offset=ONE), ValueError, "both be tensors"),
    ("sampling_from_probs", OF_P | dict(seed=ONE, offset=ONE.to("meta")), ValueError,
     "offset must be on the device of the rows, cpu, got meta"),
    ("top_p_sampling_from_probs", OF_P | dict(top_p=P), ValueError,
     r"top_p must be a scalar or \[2\], got a tensor \[2, 5\]"),
    ("min_p_sampling_from_probs", OF_P | dict(min_p=2.0), RuntimeError, "min_p must be in"),
    ("chain_speculative_sampling", CHAIN | dict(draft_token_ids=ONE[None]), RuntimeError,
     r"draft_token_ids must be \[1, 2\], got \[1, 1\]"),
    ("chain_speculative_sampling", CHAIN | dict(target_probs=P[None]), RuntimeError,
     r"target_probs must be \[1, 3, 5\], got \[1, 2, 5\]"),
    *((name, {rows: P[:, :0]} | others, RuntimeError,
       rf"{rows} must have a vocabulary, V >= 1, got \[2, 0\]") for name, rows, others in (
        ("softmax", "logits", {}), ("sampling_from_logits", "logits", {}),
        ("sampling_from_probs", "probs", {}), ("top_k_top_p_sampling_from_probs", "probs", JOINT),
        ("top_k_top_p_sampling_from_logits", "logits", JOINT),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("name", "arguments", "error", "message"), ERRORS)
def test_wrong_arguments_of_flashinfer_are_named(name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(flashinfer, name)(**arguments)
