"""Bad inputs raise, and every provider and the fake kernels raise the same message for each.

The reference is left out: it is a specification of valid arguments.
"""

import contextlib
import functools
import inspect
import re

import numpy as np
import proofs
import pytest
import torch
from support import kv_error_table
from support.error_table import BUILD, DEVICES, TABLE, f64, i64, message_of
from support.providers import provider
from torch._subclasses.fake_tensor import FakeTensorMode

import specdec_kernels
from specdec_kernels.arguments import checks, rules

# Where each row runs: "meta" and "fake" are the fake kernel.
WHERE = {
    op: [*(name for name in proofs.providers(op) if name != "reference"), "meta", "fake"]
    for op in BUILD
}


def without_values(args, device="meta"):
    """The arguments as tensors without values; a tensor that occurs twice does so again."""

    @functools.cache
    def empty(a):
        return torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=device)

    def moved(a):
        if isinstance(a, list):
            return [moved(x) for x in a]
        return empty(a) if isinstance(a, torch.Tensor) else a

    return tuple(moved(a) for a in args)


@pytest.mark.parametrize(("op", "where"), [(op, where) for op in WHERE for where in WHERE[op]])
def test_names_the_argument_the_rule_and_the_value(op, where):
    wrong = []
    for bad, message in [row[1:] for row in TABLE if row[0] == op]:
        args = BUILD[op](**bad)
        if where in ("meta", "fake"):
            if "must not overlap" in message:
                continue  # nothing overlaps without memory
            with FakeTensorMode() if where == "fake" else contextlib.nullcontext():
                given = without_values(args, "cpu" if where == "fake" else "meta")
            text = message_of(provider(op, "cpp"), given)
        else:
            text = message_of(provider(op, where), args)
        if not re.fullmatch(message, text):
            wrong.append((text, message))
    assert wrong == []


@pytest.mark.parametrize(("op", "name", "given", "message"), DEVICES)
def test_devices_are_checked(op, name, given, message):
    """One argument stays on the CPU, all the others are on another device."""
    args = list(without_values(BUILD[op](**given)))
    schema = getattr(torch.ops.specdec_kernels, op).default._schema
    at = {"top_p": "top_ps"}.get(name, name)
    at = [argument.name for argument in schema.arguments].index(at)
    args[at] = BUILD[op](**given)[at]
    text = message_of(provider(op, "cpp"), args)
    assert text.startswith(message), text
    assert text.endswith("meta, got cpu"), text


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_wrong_shape_is_named_under_compilation(dynamic):
    """While the graph is traced or, where sizes are symbolic, when it runs."""
    graph = torch.compile(specdec_kernels.sample, backend="eager", dynamic=dynamic)
    graph(torch.zeros(3, 7), seeds=i64(3), positions=i64(3))
    with pytest.raises(RuntimeError, match=r"seeds must be \[4\], got \[5\]"):
        graph(torch.zeros(4, 7), seeds=i64(5), positions=i64(4))


def test_good_inputs_raise_nothing():
    for op, build in BUILD.items():
        provider(op, "cpp")(*build())
        provider(op, "cpp")(*without_values(build()))


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("top_k", 0.5, TypeError, "top_k must be an integer or a tensor, got 0.5"),
        ("top_k", torch.tensor([2.9]), ValueError, "top_k must be int32 or int64"),
        ("top_k", -1, RuntimeError, "top_k must be at least 0"),
        (
            "temperature",
            [0.5],
            TypeError,
            r"temperature must be a number or a tensor, got \[0.5\]",
        ),
        ("temperature", torch.tensor(0.5), ValueError, "got a 0-dim tensor"),
        ("temperature", 1e39, RuntimeError, "temperature must be finite and at least 0, got inf"),
        ("temperature", -1, RuntimeError, "temperature must be finite and at least 0, got -1"),
        ("top_p", 1e-46, RuntimeError, r"top_p must be in \(0, 1\], got 0"),
        ("top_p", 0, RuntimeError, r"top_p must be in \(0, 1\], got 0"),
        ("min_p", "a", TypeError, "min_p must be a number or a tensor, got 'a'"),
        ("top_k", True, TypeError, "top_k must be an integer or a tensor, got True"),
        ("temperature", True, TypeError, "temperature must be a number or a tensor, got True"),
        ("top_p", None, TypeError, "top_p must be a number or a tensor, got None"),
    ],
)
def test_public_sampling_parameters_are_named(name, value, error, message):
    one = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(error, match=message):
        specdec_kernels.sample(torch.zeros(1, 3), seeds=one, positions=one, **{name: value})


@pytest.mark.parametrize(
    ("make", "given", "vocab", "error", "message"),
    [
        ("from_ids", torch.zeros(1, 2).long(), 5, ValueError,
         "ids must be [D] int32 or int64, got [1, 2] torch.int64"),
        ("from_ids", torch.zeros(2), 5, ValueError,
         "ids must be [D] int32 or int64, got [2] torch.float32"),
        ("from_ids", torch.tensor([0, 5]), 5, ValueError, "ids must be in [0, 5), got 0 to 5"),
        ("from_ids", torch.tensor([-1, 3]), 5, ValueError, "ids must be in [0, 5), got -1 to 3"),
        ("from_ids", torch.tensor([2, 3, 2]), 5, ValueError, "ids must be distinct, got one twice"),
        ("from_ids", i64(0), 0, ValueError, "vocab must be at least 1, got 0"),
        ("from_ids", i64(1), 7.5, TypeError, "vocab must be an integer, got 7.5"),
        ("from_ids", [0, 1], 5, TypeError, "ids must be a tensor, got [0, 1]"),
        ("from_offsets", torch.zeros(2), 5, ValueError,
         "d2t must be [D] int32 or int64, got [2] torch.float32"),
        ("from_offsets", torch.tensor([0, 4]), 5, ValueError,
         "i + d2t[i] must be in [0, 5), got 0 to 5"),
        ("from_offsets", torch.tensor([1, 0]), 5, ValueError,
         "i + d2t[i] must be distinct, got one twice"),
        ("from_offsets", i64(1), 7.5, TypeError, "vocab must be an integer, got 7.5"),
        ("from_offsets", [0], 5, TypeError, "d2t must be a tensor, got [0]"),
    ],
)  # fmt: skip
def test_draft_maps_are_checked_once_when_they_are_made(make, given, vocab, error, message):
    with pytest.raises(error, match=re.escape(message)):
        getattr(specdec_kernels.DraftMap, make)(given, vocab)


def test_a_draft_map_from_offsets_is_the_one_from_ids():
    d2t = torch.tensor([3, 0, 2], dtype=torch.int32)
    want = specdec_kernels.DraftMap.from_ids(torch.tensor([3, 1, 4]), 6).columns
    assert torch.equal(specdec_kernels.DraftMap.from_offsets(d2t, 6).columns, want)


SAMPLED = specdec_kernels.SampledDraft(torch.zeros(1, 1, 3), f64(1, 1), torch.zeros(1, 1), 1.0)
SPARSE = specdec_kernels.SparseDraft(i64(1, 1, 2), torch.zeros(1, 1, 2))
TREE = specdec_kernels.Tree(i64(1, 1), torch.full((1, 1), -1))
ONE, ROWS = i64(1), torch.zeros(1, 2, 7)
SQUARE = specdec_kernels.pack_linear(torch.zeros(2, 2))
GOOD = {
    "sample": dict(logits=torch.zeros(1, 7), seeds=ONE, positions=ONE),
    "verify_chain": dict(target=ROWS, draft_token_ids=i64(1, 1), seeds=ONE, positions=ONE),
    "verify_tree": dict(target=ROWS, tree=TREE, seeds=ONE, positions=ONE, rule="greedy"),
    "tree_attention": dict(parents=i64(1, 1), lengths=ONE, slots=3),
    "rerank_tree": dict(tokens=i64(1, 1), parents=i64(1, 1), scores=torch.zeros(1, 1), size=1),
    "build_trie": dict(sequences=i64(1, 1, 1)),
    "expand_tree": dict(logits=torch.zeros(1, 1, 7), scores=torch.zeros(1, 1), width=1),
    "ngram_propose": dict(history=i64(1, 1), lengths=ONE, gamma=1),
    "pack_linear": dict(weight=torch.zeros(3, 2)),
    "packed_linear": dict(
        x=torch.zeros(1, 2), packed=specdec_kernels.pack_linear(torch.zeros(3, 2))
    ),
    "cached_attention": dict.fromkeys(("query", "keys", "values"), torch.zeros(1, 1, 2, 3)),
    "norm_qkv_rope": dict(
        x=ROWS[..., :2],
        norm=torch.ones(2),
        qkv=[SQUARE] * 3,
        cos=ROWS[..., :2],
        sin=ROWS[..., :2],
        epsilon=0.5,
        biases=[torch.ones(2)] * 3,
        head_norms=[torch.ones(2)] * 2,
    ),
    "output_norm_mlp": dict(
        attended=ROWS[..., :2],
        residual=ROWS[..., :2],
        norm=torch.ones(2),
        output=SQUARE,
        mlp=[SQUARE] * 3,
        epsilon=0.5,
        biases=[torch.ones(2)] * 3,
    ),
    "decoder_layer_": dict(
        x=ROWS[..., :2],
        layer=specdec_kernels.PackedDecoderLayer(
            [torch.ones(2)] * 2, [SQUARE] * 3, SQUARE, [SQUARE] * 3, 0.5, 1.0
        ),
        cos=ROWS[..., :2],
        sin=ROWS[..., :2],
        caches=[torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)],
        positions=ONE,
        mask=torch.ones(1, 1, 2, 3, dtype=torch.bool),
    ),
    **kv_error_table.GOOD,
}
OPTIONAL = [  # arguments of both verifiers
    (dict(draft=[0.5]), "draft must be None, a tensor, a SampledDraft or a SparseDraft, got list"),
    (dict(draft_map=i64(3)), "draft_map must be a DraftMap or None, got Tensor"),
    (dict(target_indptr=[0, 2]), "target_indptr must be a tensor, got [0, 2]"),
    (dict(uniforms=0.5), "uniforms must be a tensor, got 0.5"),
    (dict(eos_token_ids=2), "eos_token_ids must be a tensor, got 2"),
    (dict(max_new_tokens=4), "max_new_tokens must be a tensor, got 4"),
]
WRONG_TYPES = {
    "verify_chain": [
        *OPTIONAL,
        (dict(draft=tuple(SPARSE)),
         "draft must be None, a tensor, a SampledDraft or a SparseDraft, got tuple"),
        (dict(draft=SAMPLED._replace(logits=None)), "draft logits must be a tensor, got None"),
        (dict(draft=SAMPLED._replace(logsumexp=None)),
         "draft logsumexp must be a tensor, got None"),
        (dict(draft=SAMPLED._replace(threshold=0.5)), "draft threshold must be a tensor, got 0.5"),
        (dict(draft=SAMPLED._replace(temperature=None)),
         "draft temperature must be a number or a tensor, got None"),
        (dict(draft=SPARSE._replace(ids=None)), "draft ids must be a tensor, got None"),
        (dict(draft=SPARSE._replace(probs=None)), "draft probabilities must be a tensor, got None"),
        (dict(draft_map=specdec_kernels.DraftMap(None)),
         "draft_map columns must be a tensor, got None"),
        (dict(rule="synthetic", synthetic_rates=[0.5]),
         "synthetic_rates must be a tensor, got [0.5]"),
    ],
    "verify_tree": [
        *OPTIONAL,
        (dict(tree=(i64(1, 1), i64(1, 1))), "tree must be a Tree, got tuple"),
        (dict(tree=TREE._replace(parents=[[0]])), "tree parents must be a tensor, got [[0]]"),
        (dict(tree=TREE._replace(tokens=None)), "tree tokens must be a tensor, got None"),
        (dict(draft_rows=[0]), "draft_rows must be a tensor, got [0]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("op", "given", "message"),
    [(op, given, message) for op, rows in WRONG_TYPES.items() for given, message in rows],
)
def test_verifiers_name_arguments_of_a_wrong_type(op, given, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(specdec_kernels, op)(**GOOD[op] | given)


def test_a_draft_temperature_is_never_assumed():
    with pytest.raises(TypeError, match="temperature"):
        specdec_kernels.SampledDraft(*SAMPLED[:3])


def test_a_count_beyond_int32_keeps_every_token():
    one = torch.zeros(1, dtype=torch.int64)
    logits = torch.arange(5.0)[None]
    for k in (2**63, torch.tensor([2**40 + 1])):
        out = specdec_kernels.sample(logits, top_k=k, seeds=one, positions=one)
        assert out.threshold.tolist() == [-torch.inf]


def test_a_count_below_int32_is_out_of_range_and_not_wrapped():
    one = torch.zeros(1, dtype=torch.int64)
    out = specdec_kernels.sample(
        torch.arange(5.0)[None], top_k=torch.tensor([-(2**40)]), seeds=one, positions=one
    )
    assert (out.tokens.tolist(), out.status.tolist()) == ([-1], [16])


def test_devices_of_one_kind_are_told_apart():
    """In the checks of `compat`; two CUDA devices need not exist for their names."""
    meta = torch.zeros(1, 2, device="meta")
    with pytest.raises(RuntimeError, match="the device of logits, cuda:0, got cpu"):
        checks.check_same_device("seeds", torch.zeros(1), torch.device("cuda:0"), "logits")
    checks.check_same_device("seeds", meta, meta.device, "logits")
    assert checks.device_name(torch.device("cuda:1")) == "cuda:1"


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, n)
        for op, given in GOOD.items()
        for n, x in given.items()
        if isinstance(x, torch.Tensor) or (isinstance(x, list) and isinstance(x[0], torch.Tensor))
    ],
)
def test_every_argument_that_is_no_tensor_is_named(op, name):
    function, good = getattr(specdec_kernels, op), GOOD[op]
    function(**good)
    words = f"{name} must be a tensor, got None"
    if isinstance(good[name], list):
        words = f"{name} must be a list of tensors, got NoneType"
        with pytest.raises(TypeError, match=re.escape(f"{name}[0] must be a tensor, got 3")):
            function(**good | {name: [3]})
        with pytest.raises(TypeError, match=f"{name} must be a list of tensors, got Tensor"):
            function(**good | {name: ROWS})
    with pytest.raises(TypeError, match=words):
        function(**good | {name: None})


@pytest.mark.parametrize(
    ("layout", "got"), [("sparse_coo", "torch.sparse_coo"), ("quint8", "torch.quint8")]
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_are_not_dense_are_named(layout, got):
    def changed(x):
        return (
            x.to_sparse()
            if layout == "sparse_coo"
            else torch.quantize_per_tensor(x, 1.0, 0, torch.quint8)
        )

    cache = torch.zeros(1, 1, 3, 2)
    for call, name in (
        (lambda: specdec_kernels.sample(changed(ROWS[0]), seeds=ONE, positions=ONE), "logits"),
        (lambda: specdec_kernels.verify_chain(
            ROWS, i64(1, 1), changed(ROWS[:, :1]), seeds=ONE, positions=ONE), "draft"),
        (lambda: specdec_kernels.kv_truncate_([cache, changed(cache)], ONE, ONE), "caches"),
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as caught:
            call()
        assert str(caught.value) == f"{name} must be a dense tensor, got {got}"


# What a scalar argument must be, and values of other types.
WRONG = {
    "a number": (None, "a", True, [0.5]),
    "an integer": (None, "b", 2.5, True, [1]),
    "True or False": (None, "yes", 1, 1.5),
    "a string": (None, 3, True),
}
SCALARS = {
    "sample": {"noise": "a string", "method": "a string"},
    "verify_chain": {
        "kind": "a string", "rule": "a string", "lenience": "a number",
        "typical_epsilon": "a number", "typical_delta": "a number", "top_beta_rank": "an integer",
        "top_beta_distance": "a number", "with_logprobs": "True or False",
        "with_accept_probs": "True or False",
    },
    "verify_tree": {
        "kind": "a string", "rule": "a string", "typical_epsilon": "a number",
        "typical_delta": "a number", "max_depth": "an integer", "with_logprobs": "True or False",
        "with_accept_probs": "True or False",
    },
    "tree_attention": {"slots": "an integer", "window": "an integer"},
    "rerank_tree": {"size": "an integer"},
    "build_trie": {"size": "an integer", "merge": "True or False"},
    "expand_tree": {"width": "an integer"},
    "ngram_propose": dict.fromkeys(("gamma", "max_ngram", "min_ngram"), "an integer"),
    "cached_attention": dict.fromkeys(("scale", "soft_cap"), "a number"),
    "norm_qkv_rope": {"epsilon": "a number"},
    "output_norm_mlp": {"epsilon": "a number"},
    "kv_truncate_": {"zero_fill": "True or False"},
    "kv_realign_": {"zero_fill": "True or False"},
    "ring_truncate_": {"window": "an integer", "zero_fill": "True or False"},
    "paged_truncate_": {"block_size": "an integer"},
}  # fmt: skip
NONE_IS_A_DEFAULT = {
    ("sample", "method"), ("verify_tree", "max_depth"), ("build_trie", "size"),
    ("cached_attention", "scale"), ("cached_attention", "soft_cap"),
}  # fmt: skip


@pytest.mark.parametrize(("op", "name"), [(op, n) for op, names in SCALARS.items() for n in names])
def test_every_scalar_of_a_wrong_type_is_named(op, name):
    function, good = getattr(specdec_kernels, op), GOOD[op]
    function(**good)
    words = SCALARS[op][name]
    for value in WRONG[words]:
        if value is None and (op, name) in NONE_IS_A_DEFAULT:
            continue
        with pytest.raises(TypeError) as error:
            function(**good | {name: value})
        assert str(error.value) == f"{name} must be {words}, got {value!r}"


# Arguments that are lists of packed weights.
WEIGHTS = [("norm_qkv_rope", "qkv"), ("output_norm_mlp", "mlp")]


@pytest.mark.parametrize(("op", "name"), WEIGHTS)
def test_every_weight_that_is_not_packed_is_named(op, name):
    function, good = getattr(specdec_kernels, op), GOOD[op]
    function(**good)
    for weights, message in [
        (SQUARE, f"{name} must be a list of PackedLinear, got PackedLinear"),
        (None, f"{name} must be a list of PackedLinear, got NoneType"),
        ([SQUARE, SQUARE, torch.zeros(2, 2)],
         f"{name}[2] must be a PackedLinear, got Tensor [2, 2]"),
        ([SQUARE, SQUARE, SQUARE._replace(panels=3)], f"{name}[2] panels must be a tensor, got 3"),
    ]:  # fmt: skip
        with pytest.raises(TypeError) as error:
            function(**good | {name: weights})
        assert str(error.value) == message


def test_the_output_projection_of_a_wrong_type_is_named():
    call, good = specdec_kernels.output_norm_mlp, GOOD["output_norm_mlp"]
    for given, message in [
        (dict(output=None), "output must be a PackedLinear, got None"),
        (dict(output=SQUARE._replace(panels=None)), "output panels must be a tensor, got None"),
        (dict(output_bias=0.5), "output_bias must be a tensor, got 0.5"),
    ]:
        with pytest.raises(TypeError) as error:
            call(**good | given)
        assert str(error.value) == message


PARAMETERS = {"temperature", "top_k", "top_p", "min_p"}  # scalars or tensors, tested above
NO_SCALARS = {
    "draft", "draft_map", "draft_rows", "target_indptr", "uniforms", "synthetic_rates",
    "eos_token_ids", "max_new_tokens", "bias", "mask", "output_bias", "counts",
}  # fmt: skip


@pytest.mark.parametrize("op", specdec_kernels.providers())
def test_the_tables_name_every_argument_of_a_public_function(op):
    arguments = inspect.signature(getattr(specdec_kernels, op)).parameters.keys()
    assert arguments <= GOOD[op].keys() | SCALARS.get(op, {}).keys() | PARAMETERS | NO_SCALARS


@pytest.mark.parametrize(
    ("op", "name", "value", "names"),
    [
        ("sample", "noise", "accept", rules.NOISES),
        ("sample", "method", "gumble", rules.METHODS),
        ("verify_chain", "kind", "logprobs", rules.KINDS),
        ("verify_chain", "rule", "tokens", rules.RULES),
        ("verify_tree", "kind", "", rules.KINDS),
        ("verify_tree", "rule", "token", rules.TREE_RULES),
    ],
)
def test_the_message_for_an_unknown_name_lists_the_known_ones(op, name, value, names):
    with pytest.raises(RuntimeError) as error:
        getattr(specdec_kernels, op)(**GOOD[op] | {name: value})
    assert str(error.value) == f"{name} must be one of {', '.join(names)}, got {value}"


def test_numbers_of_numpy_are_numbers():
    good = GOOD["verify_chain"]
    specdec_kernels.verify_chain(**good, rule="lenient", lenience=np.float64(0.5))
    specdec_kernels.verify_chain(**good, rule="lenient", lenience=np.float32(0.5))
    specdec_kernels.tree_attention(**GOOD["tree_attention"] | {"slots": np.int64(3)})
