"""The ops of specdec_host without torch: layouts, sources of arrays, faults, wrong arguments."""

import array
import itertools
import re

import numpy as np
import pytest
import specdec_host as host
from specdec_host import SampledDraft, SparseDraft, Status, Tree, draft_positions

B, GAMMA, V = 3, 4, 67
SEEDS, POSITIONS = np.arange(B), np.full(B, 10)
DRAWS = dict(seeds=SEEDS, positions=POSITIONS)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


TARGET, NEAR = rows(B, GAMMA + 1, V), rows(B, GAMMA, V, seed=1)
IDS = TARGET[:, :-1].argmax(-1)
PARENTS = np.broadcast_to([-1, -1, 0, 1], (B, GAMMA))


def equal(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


def drafted(rule):
    """Drafts of one round and the form that describes them."""
    where = draft_positions(POSITIONS, GAMMA, rule=rule).reshape(-1)
    noise = "shared" if rule == "match" else "draft"
    got = host.sample(
        NEAR.reshape(-1, V), temperature=0.8, top_k=20, seeds=SEEDS.repeat(GAMMA), positions=where,
        noise=noise,
    )  # fmt: skip
    statistics = (x.reshape(B, GAMMA) for x in (got.logsumexp, got.threshold))
    return got.tokens.reshape(B, GAMMA), SampledDraft(NEAR, *statistics, 0.8)


@pytest.mark.parametrize("rule", host.RULES)
def test_a_round_of_a_chain_emits_its_accepted_drafts_and_one_token(rule):
    ids, draft = drafted(rule)
    rates = np.full(GAMMA, 0.5, np.float32) if rule == "synthetic" else None
    out = host.verify_chain(
        TARGET, ids, draft, rule=rule, temperature=0.8, synthetic_rates=rates,
        with_accept_probs=True, **DRAWS,
    )  # fmt: skip
    for b in range(B):
        n = out.num_accepted[b]
        assert out.tokens[b, :n].tolist() == ids[b, :n].tolist()
        assert 0 <= out.tokens[b, n] < V
        assert (out.tokens[b, n + 1 :] == -1).all()
    assert not out.status.any()
    assert out.accept_probs.shape == ids.shape


@pytest.mark.parametrize("rule", host.TREE_RULES)
def test_a_round_of_a_tree_emits_a_path_and_one_token(rule):
    ids, draft = drafted(rule)
    out = host.verify_tree(TARGET, Tree(ids, PARENTS), draft, rule=rule, temperature=0.8, **DRAWS)
    for b in range(B):
        n = out.num_accepted[b]
        path = out.path[b, :n]
        assert out.tokens[b, :n].tolist() == ids[b, path].tolist()
        assert PARENTS[b, path].tolist() == [-1, *path[:-1]][:n]
        assert 0 <= out.tokens[b, n] < V
    assert not out.status.any()


def test_match_emits_what_sampling_without_drafts_emits():
    ids, _ = drafted("match")
    out = host.verify_chain(TARGET, ids, rule="match", temperature=0.8, **DRAWS)
    for b, n in enumerate(out.num_accepted):
        plain = host.sample(
            TARGET[b, : n + 1], temperature=0.8, seeds=SEEDS[b].repeat(n + 1),
            positions=POSITIONS[b] + np.arange(n + 1), noise="shared",
        )  # fmt: skip
        assert out.tokens[b, : n + 1].tolist() == plain.tokens.tolist()


# Arrays.


def spread(x):
    wide = np.full((*(2 * n for n in x.shape[:-1]), x.shape[-1] + 3), 7, x.dtype)
    view = wide[(*(slice(None, None, 2),) * (x.ndim - 1), slice(1, x.shape[-1] + 1))]
    view[...] = x
    return view


def backwards(x):
    return x[::-1].copy()[::-1]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def unaligned(x):
    packed = np.zeros(x.shape[0], np.dtype([("byte", np.uint8), ("x", x.dtype, x.shape[1:])]))
    packed["x"] = x
    assert not packed["x"].flags.aligned
    return packed["x"]


class DLPackOnly:
    def __init__(self, x):
        self.x = x

    def __dlpack__(self, **how):
        return self.x.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.x.__dlpack_device__()


def between_bytes(shape, dtype):
    """Zeros at strides that are no multiple of their size; NumPy counts complex ones as aligned."""
    return np.zeros(shape, np.dtype([("before", "S4"), ("x", dtype)]))["x"]


LAYOUTS = [spread, backwards, read_only, unaligned, memoryview, DLPackOnly]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
def test_the_layout_and_the_owner_of_an_array_change_nothing(layout):
    ids, draft = drafted("block")
    for kind, verify in itertools.product((TARGET, TARGET.astype(np.float16)), "ct"):

        def run(read, target=kind, verify=verify):
            q = draft._replace(logits=read(draft.logits), logsumexp=read(draft.logsumexp))
            how = dict(temperature=read(np.full(B, 0.8)), top_p=read(np.full(B, 0.9, np.float32)),
                       seeds=read(SEEDS), positions=read(POSITIONS))  # fmt: skip
            if verify == "c":
                return host.verify_chain(read(target), read(ids), q, rule="block", **how)
            tree = Tree(read(ids), read(PARENTS.copy()))
            return host.verify_tree(read(target), tree, q, rule="multi_draft", **how)

        assert equal(run(layout), run(np.copy))


def test_vectors_may_be_buffers_of_any_library():
    seeds, ids = array.array("q", SEEDS), array.array("q", IDS[0])
    got = host.verify_chain(
        TARGET, IDS, rule="token", seeds=seeds, positions=array.array("q", POSITIONS)
    )
    assert equal(got, host.verify_chain(TARGET, IDS, rule="token", **DRAWS))
    text = host.SuffixAutomaton()
    text.append(ids)
    text.append(DLPackOnly(IDS[0]))
    assert len(text) == 2 * GAMMA


def bits_of(x):
    """float32 that bfloat16 holds exactly, and these bits."""
    bits = (x.view(np.uint32) >> 16).astype(np.uint16)
    return (bits.astype(np.uint32) << 16).view(np.float32), bits


def test_bfloat16_is_two_bytes_of_this_name():
    exact, bits = bits_of(TARGET)
    want = host.verify_chain(exact, IDS, rule="token", temperature=0.7, **DRAWS)
    for named in (bits.view(host.bfloat16), bits.view([("bfloat16", np.uint16)])):
        got = host.verify_chain(named, IDS, rule="token", temperature=0.7, **DRAWS)
        assert equal(got, want)
    temperature = bits_of(np.full(B, 0.75, np.float32))[1].view(host.bfloat16)
    got = host.verify_chain(exact, IDS, temperature=temperature, **DRAWS)
    assert equal(got, host.verify_chain(exact, IDS, temperature=0.75, **DRAWS))
    with pytest.raises(RuntimeError, match="target must be float32, bfloat16 or float16, got uint"):
        host.verify_chain(bits, IDS, **DRAWS)


def test_bfloat16_of_ml_dtypes_is_known():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    exact, bits = bits_of(TARGET)
    got = host.verify_chain(bits.view(ml_dtypes.bfloat16), IDS, rule="token", **DRAWS)
    assert equal(got, host.verify_chain(exact, IDS, rule="token", **DRAWS))


# Faults of the data.


def test_faults_set_a_status_and_emit_no_token():
    target = TARGET.copy()
    target[0, 0] = np.nan
    temperature = np.array([1, 1, -1], np.float32)
    ids = IDS.copy()
    ids[1, 0] = V
    out = host.verify_chain(target, ids, rule="token", temperature=temperature, **DRAWS)
    assert [Status(s) for s in out.status.tolist()] == [
        Status.TARGET_INVALID, Status.DRAFT_OUT_OF_RANGE, Status.BAD_PARAMETER,
    ]  # fmt: skip
    assert (out.tokens[[0, 2]] == -1).all()
    assert 0 <= out.tokens[1, 0] < V
    draft = SparseDraft(IDS[..., None], np.full((B, GAMMA, 1), np.nan, np.float32))
    out = host.verify_chain(TARGET, IDS, draft, **DRAWS)
    assert (out.status & Status.DRAFT_INVALID).all()
    tree = Tree(IDS, np.full((B, GAMMA), 9))
    out = host.verify_tree(TARGET, tree, rule="target_only", **DRAWS)
    assert (out.status & Status.DRAFT_OUT_OF_RANGE).all()


def test_empty_batches_and_chains_are_legal():
    none = np.zeros(0, np.int64)
    out = host.verify_chain(rows(0, 3, V), np.zeros((0, 2), np.int64), seeds=none, positions=none)
    assert out.tokens.shape == (0, 3)
    out = host.verify_chain(TARGET[:, :1], np.zeros((B, 0), np.int32), **DRAWS)
    assert out.tokens.shape == (B, 1)
    assert out.tokens.dtype == np.int32
    assert host.sample(rows(0, V), seeds=none, positions=none).tokens.shape == (0,)


# Wrong arguments. Those that the torch ops refuse are in test_torch_errors.py.


class OnAnotherDevice:
    def __dlpack__(self, **_):
        raise AssertionError("it must not be asked for its memory")

    def __dlpack_device__(self):
        return (2, 0)


class Unreadable:
    def __dlpack__(self, **_):
        raise BufferError("it requires a gradient")

    def __dlpack_device__(self):
        return (1, 0)


class Broken(Unreadable):
    """An object whose other library fails with an error of its own."""

    def __init__(self, *, in_device=False):
        self.in_device = in_device

    def __dlpack__(self, **_):
        raise AttributeError("it has no memory")

    def __dlpack_device__(self):
        if self.in_device:
            raise AssertionError("it has no device")
        return (1, 0)


WRONG = [
    (dict(target=[[0.0]]), TypeError, "target must be an array, got [[0.0]]"),
    (dict(temperature=b"1"), TypeError, "temperature must be a number or an array, got b'1'"),
    (dict(seeds=bytearray(b"8")), TypeError, "seeds must be an array, got bytearray(b'8')"),
    (dict(target=OnAnotherDevice()), RuntimeError,
     "target must be in memory of the CPU, got DLPack device type 2"),
    (dict(target=Unreadable()), RuntimeError,
     "target cannot be read through DLPack: it requires a gradient"),
    (dict(draft=Broken()), RuntimeError, "draft cannot be read through DLPack: it has no memory"),
    (dict(seeds=Broken(in_device=True)), RuntimeError,
     "seeds cannot be read through DLPack: it has no device"),
    (dict(target=TARGET.astype(">f4")), RuntimeError,
     "target must be float32, bfloat16 or float16, got >f4"),
    (dict(target=np.ma.array(TARGET)), TypeError,
     "target must be an array without a mask, got MaskedArray"),
    (dict(target=TARGET.astype(np.complex64)), RuntimeError,
     "target must be float32, bfloat16 or float16, got complex64"),
    (dict(target=between_bytes(TARGET.shape, "c8")), RuntimeError,
     "target must be float32, bfloat16 or float16, got complex64"),
    (dict(seeds=between_bytes(3, "S3")), RuntimeError, "seeds must be int64, got |S3"),
    (dict(target=np.zeros(3, "U1")), RuntimeError,
     "target must be [B, gamma+1, V] = [3, 5, V], got [3]"),
    (dict(seeds=3), TypeError, "seeds must be an array, got 3"),
    (dict(seeds=SEEDS.astype(np.uint64)), RuntimeError, "seeds must be int64, got uint64"),
    (dict(temperature=np.array(["a"] * B)), TypeError,
     "temperature must be an array of numbers, got <U1"),
    (dict(temperature=[0.5]), TypeError, "temperature must be a number or an array, got [0.5]"),
    (dict(temperature=np.array(0.5)), ValueError,
     "temperature must be a number or an array [B], got a 0-dim array"),
    (dict(top_k=0.5), TypeError, "top_k must be an integer or an array, got 0.5"),
    (dict(top_k=np.ones(B)), ValueError, "top_k must be int32 or int64, got float64"),
    (dict(draft=[0.5]), TypeError,
     "draft must be None, an array, a SampledDraft or a SparseDraft, got list"),
    (dict(draft_map=SEEDS), TypeError, "draft_map must be a DraftMap or None, got ndarray"),
    (dict(eos_token_ids=2), TypeError, "eos_token_ids must be an array, got 2"),
    (dict(rule="tokens"), RuntimeError, f"rule must be one of {', '.join(host.RULES)}, got tokens"),
    (dict(kind=0), TypeError, "kind must be a string, got 0"),
    (dict(lenience="a"), TypeError, "lenience must be a number, got 'a'"),
    (dict(with_logprobs=1), TypeError, "with_logprobs must be True or False, got 1"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_arguments_are_named(given, error, message):
    good = dict(target=TARGET, draft_token_ids=IDS, **DRAWS)
    host.verify_chain(**good)
    with pytest.raises(error, match=re.escape(message) + "$"):
        host.verify_chain(**good | given)


def test_wrong_trees_are_named():
    good = dict(target=TARGET, tree=Tree(IDS, PARENTS), rule="greedy", **DRAWS)
    host.verify_tree(**good)
    for given, message in (
        (dict(tree=(IDS, PARENTS)), "tree must be a Tree, got tuple"),
        (dict(tree=Tree(IDS, None)), "tree parents must be an array, got None"),
        (dict(max_depth=1.5), "max_depth must be an integer, got 1.5"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            host.verify_tree(**good | given)
    with pytest.raises(
        RuntimeError, match=re.escape("max_depth must be in [0, N] = [0, 4], got 9")
    ):
        host.verify_tree(**good | dict(max_depth=10**30))


def test_numbers_of_numpy_are_numbers_and_counts_beyond_int32_keep_every_token():
    how = dict(seeds=SEEDS[:1], positions=POSITIONS[:1])
    for k in (2**63, np.array([2**40 + 1])):
        assert host.sample(TARGET[0, :1], top_k=k, **how).threshold.tolist() == [-np.inf]
    assert host.sample(TARGET[0, :1], top_k=np.array([-(2**40)]), **how).status.tolist() == [16]
    a = host.sample(TARGET[0, :1], temperature=np.float32(0.5), top_k=np.int64(3), **how)
    assert equal(a, host.sample(TARGET[0, :1], temperature=0.5, top_k=3, **how))
