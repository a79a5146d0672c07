"""The arrays that the ops of specdec_host take, and the arguments that they refuse."""

import itertools
import re

import numpy as np
import pytest
import specdec_host as host
from specdec_host import SampledDraft, Tree

B, GAMMA, V = 3, 4, 67
SEEDS, POSITIONS = np.arange(B), np.full(B, 10)
DRAWS = dict(seeds=SEEDS, positions=POSITIONS)


def rows(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 2, shape).astype(np.float32)


TARGET, NEAR = rows(B, GAMMA + 1, V), rows(B, GAMMA, V, seed=1)
IDS = TARGET[:, :-1].argmax(-1)
PARENTS = np.broadcast_to([-1, -1, 0, 1], (B, GAMMA))
DRAFT = SampledDraft(
    NEAR, np.log(np.exp(NEAR).sum(-1)), np.full((B, GAMMA), -np.inf, np.float32), 1.0
)


def equal(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True))


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
    for target, verify in itertools.product((TARGET, TARGET.astype(np.float16)), "ct"):

        def run(read, target=target, verify=verify):
            q = DRAFT._replace(logits=read(DRAFT.logits), logsumexp=read(DRAFT.logsumexp))
            how = dict(temperature=read(np.full(B, 0.8)), top_p=read(np.full(B, 0.9, np.float32)),
                       seeds=read(SEEDS), positions=read(POSITIONS))  # fmt: skip
            if verify == "c":
                return host.verify_chain(read(target), read(IDS), q, rule="block", **how)
            tree = Tree(read(IDS), read(PARENTS.copy()))
            return host.verify_tree(read(target), tree, q, rule="multi_draft", **how)

        assert equal(run(layout), run(np.copy))


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


# Wrong arguments. Those that the torch ops refuse are in test_torch_equality.py.


class Failing:
    """An object whose other library raises: `memory`, or `device` if that is an error."""

    def __init__(self, memory=None, device=(1, 0)):
        self.memory, self.device = memory, device

    def __dlpack__(self, **_):
        raise self.memory

    def __dlpack_device__(self):
        if isinstance(self.device, Exception):
            raise self.device
        return self.device


WRONG = [
    (dict(target=[[0.0]]), TypeError, "target must be an array, got [[0.0]]"),
    (dict(temperature=b"1"), TypeError, "temperature must be a number or an array, got b'1'"),
    (dict(target=Failing(AssertionError("it must not be asked"), (2, 0))), RuntimeError,
     "target must be in memory of the CPU, got DLPack device type 2"),
    (dict(target=Failing(BufferError("it requires a gradient"))), RuntimeError,
     "target cannot be read through DLPack: it requires a gradient"),
    (dict(seeds=Failing(device=AssertionError("it has no device"))), RuntimeError,
     "seeds cannot be read through DLPack: it has no device"),
    (dict(target=TARGET.astype(">f4")), RuntimeError,
     "target must be float32, bfloat16 or float16, got >f4"),
    (dict(target=np.ma.array(TARGET)), TypeError,
     "target must be an array without a mask, got MaskedArray"),
    (dict(target=between_bytes(TARGET.shape, "c8")), RuntimeError,
     "target must be float32, bfloat16 or float16, got complex64"),
    (dict(seeds=SEEDS.astype(np.uint64)), RuntimeError, "seeds must be int32 or int64, got uint64"),
    (dict(temperature=np.array(["a"] * B)), TypeError,
     "temperature must be an array of numbers, got <U1"),
    (dict(temperature=np.array(0.5)), ValueError,
     "temperature must be a number or an array [B], got a 0-dim array"),
    (dict(top_k=np.ones(B)), ValueError, "top_k must be int32 or int64, got float64"),
    (dict(draft=[0.5]), TypeError,
     "draft must be None, an array, a SampledDraft or a SparseDraft, got list"),
    (dict(draft_map=SEEDS), TypeError, "draft_map must be a DraftMap or None, got ndarray"),
    (dict(eos_token_ids=2), TypeError, "eos_token_ids must be an array, got 2"),
    (dict(rule="tokens"), RuntimeError, f"rule must be one of {', '.join(host.RULES)}, got tokens"),
    (dict(with_logprobs=1), TypeError, "with_logprobs must be True or False, got 1"),
    (dict(tree=(IDS, PARENTS)), TypeError, "tree must be a Tree, got tuple"),
    (dict(tree=Tree(IDS, None)), TypeError, "tree parents must be an array, got None"),
    (dict(max_depth=1.5), TypeError, "max_depth must be an integer, got 1.5"),
    (dict(max_depth=10**30), RuntimeError, "max_depth must be in [0, N] = [0, 4], got 9"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), WRONG, ids=[m for *_, m in WRONG])
def test_wrong_arguments_are_named(given, error, message):
    verify, good = host.verify_chain, dict(target=TARGET, draft_token_ids=IDS, **DRAWS)
    if given.keys() & {"tree", "max_depth"}:
        good = dict(target=TARGET, tree=Tree(IDS, PARENTS), rule="greedy", **DRAWS)
        verify = host.verify_tree
    verify(**good)
    with pytest.raises(error, match=re.escape(message)):
        verify(**good | given)


def test_numbers_of_numpy_are_numbers_and_counts_beyond_int32_keep_every_token():
    how = dict(seeds=SEEDS[:1], positions=POSITIONS[:1])
    for k in (2**63, np.array([2**40 + 1])):
        assert host.sample(TARGET[0, :1], top_k=k, **how).threshold.tolist() == [-np.inf]
    assert host.sample(TARGET[0, :1], top_k=np.array([-(2**40)]), **how).status.tolist() == [16]
    a = host.sample(TARGET[0, :1], temperature=np.float32(0.5), top_k=np.int64(3), **how)
    assert equal(a, host.sample(TARGET[0, :1], temperature=0.5, top_k=3, **how))
