"""Packed weights: what they compute, which changes are seen, and packing in place.

In place packed weights alone are kept, and whatever moves a model leaves it whole.
"""

import copy
import pickle
import weakref
from itertools import combinations

import numpy as np
import pytest
import specdec_host
import torch
from specdec_hf import pack_
from specdec_hf.runner.packed import in_place
from specdec_hf.runner.packed import linear as packed_linear
from specdec_hf.runner.packed.in_place import PackedInPlace
from specdec_hf.runner.packed.linear import LinearWithPackedCopy
from support.hf_models import build, decode, prompts

from specdec_kernels import pack_linear


def packable(linear):
    """The layer, where its weight can be packed; else the test is skipped."""
    if (reason := packed_linear.unpacked_reason(linear)) is not None:
        pytest.skip(reason)
    return linear


def test_weights_of_one_address_or_one_shape_are_packed_apart():
    whole = packable(torch.nn.Linear(48, 64, bias=False))
    part = torch.nn.Linear(48, 16, bias=False)
    part.weight = torch.nn.Parameter(whole.weight.detach()[:16])
    layers = (whole, part, torch.nn.Linear(48, 64, bias=False))
    packed = [LinearWithPackedCopy(linear) for linear in layers]
    x = torch.randn(2, 3, 48)
    with torch.inference_mode():
        for got, linear in zip(packed, layers, strict=True):
            torch.testing.assert_close(got(x), linear(x), rtol=1e-4, atol=1e-4)


@pytest.fixture
def linear():
    torch.manual_seed(0)
    return packable(torch.nn.Linear(7, 11))


def assert_packed_again(packed, linear):
    x = torch.randn(2, 3, linear.weight.shape[1])
    assert packed_linear.refresh([packed])
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x), rtol=1e-4, atol=1e-4)
    assert not packed_linear.refresh([packed])


def test_a_weight_of_which_a_number_or_an_order_changes_is_packed_again(linear):
    packed, weight = LinearWithPackedCopy(linear), linear.weight.data
    for i, j in combinations(range(7), 2):
        weight[[i, j]] = weight[[j, i]]
        assert_packed_again(packed, linear)
        weight[:, [i, j]] = weight[:, [j, i]]
        assert_packed_again(packed, linear)
        weight[i, j] *= 1.01
        assert_packed_again(packed, linear)


def test_a_weight_that_layers_share_is_read_once(linear, monkeypatch):
    layers, given = [LinearWithPackedCopy(linear) for _ in range(3)], []
    monkeypatch.setattr(specdec_host, "digests", lambda x, **_: given.extend(x) or [0] * len(x))
    assert packed_linear.refresh(layers)
    assert [x.nbytes for x in given] == [linear.weight.nbytes]


def test_a_packed_copy_goes_with_its_weight(linear):
    """A weight that is replaced keeps its memory until then, so that no other gets its address."""

    def replace():
        numbers = np.ones((11, 7), dtype=np.float32)
        linear.weight = torch.nn.Parameter(torch.from_numpy(numbers))
        return weakref.ref(numbers)

    before, memory = set(packed_linear._copies), replace()
    packed = LinearWithPackedCopy(linear)
    replace()
    assert memory() is not None
    assert_packed_again(packed, linear)
    assert memory() is None
    assert len(set(packed_linear._copies) - before) == 1
    del packed
    assert not set(packed_linear._copies) - before


TIED = pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])


def is_packed(module):
    return isinstance(module, PackedInPlace)


def test_packing_in_place_keeps_packed_weights_alone():
    model = build("llama", vocab_size=997, tie_word_embeddings=False)
    own = decode(model, (9,))
    long = decode(model, (80,), compile=False)
    weights = [m.weight.clone() for m in model.modules() if type(m) is torch.nn.Linear]
    made = pack_(model)
    assert (made.layers, made.unpacked) == (15, {})
    assert not any(type(m) is torch.nn.Linear for m in model.modules())
    for before, layer in zip(weights, filter(is_packed, model.modules()), strict=True):
        assert torch.equal(layer.weight, before)
    kept = sum(x.numel() for x in model.parameters())
    assert kept < model.model.embed_tokens.weight.numel() + 200  # the norms
    for settings in ({}, {"drafter": "suffix_automaton"}, {"tree": (2, 1), "drafter": model}):
        output = decode(model, (9,), **settings)
        assert output.stats.forwards == "packed"
        assert (output.stats.packed.layers, output.stats.packed.fused) == (15, 2)
        assert torch.equal(output.sequences, own.sequences)
    assert torch.equal(decode(model, (80,)).sequences, long.sequences)
    plain = model.generate(**prompts((9,), vocab_size=997), max_new_tokens=12, do_sample=False)
    assert torch.equal(plain, own.sequences)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_unpacked_as_it_was(dtype):
    linear = torch.nn.Linear(33, 41).to(dtype)
    packed = PackedInPlace(linear, pack_linear(linear.weight.detach()), tied=False)
    assert torch.equal(packed.weight, linear.weight)


@TIED
@pytest.mark.parametrize("part", ["model", "layers"])
def test_a_model_packed_in_place_can_be_converted(tied, part):
    model, other = (build("llama", tie_word_embeddings=tied) for _ in range(2))
    pack_(model)
    decode(model, (9,))  # on a packed model, which is made again
    for one in (model, other):
        (one if part == "model" else one.model.layers).to(torch.bfloat16)
    assert sum(map(is_packed, model.modules())) == 15
    for name, layer in other.named_modules():
        if type(layer) is torch.nn.Linear:
            assert torch.equal(model.get_submodule(name).weight, layer.weight)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    if part == "model":
        assert torch.equal(decode(model, (9,)).sequences, decode(other, (9,)).sequences)


@TIED
def test_where_its_weights_cannot_be_packed_its_layers_are_plain(tied):
    model, other = (build("llama", tie_word_embeddings=tied) for _ in range(2))
    pack_(model)
    model.double()
    assert not any(is_packed(m) for m in model.modules())
    want, got = other.double().state_dict(), model.state_dict()
    assert list(got) == list(want)
    assert all(torch.equal(got[name], weight) for name, weight in want.items())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = prompts((9,))["input_ids"]
    assert torch.equal(model(ids).logits, other(ids).logits)
    assert pack_(model.float()).layers == 15
    model.to("meta")
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"meta"}


@TIED
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deep", "pickle"],
)  # fmt: skip
def test_a_copy_of_a_model_packed_in_place_is_packed_by_who_reads_it(tied, copied, monkeypatch):
    model, packed = build("llama", tie_word_embeddings=tied), []
    pack_(model)
    want = decode(model, (9,)).sequences
    pack = in_place.pack_linear
    monkeypatch.setattr(in_place, "pack_linear", lambda x: packed.append(x) or pack(x))
    other = copied(model)
    monkeypatch.undo()
    assert len(packed) == 15
    mine = {id(m.panels) for m in model.modules() if is_packed(m)}
    assert not mine & {id(m.panels) for m in other.modules() if is_packed(m)}
    assert (other.lm_head.weight is other.model.embed_tokens.weight) == tied
    assert torch.equal(decode(other, (9,)).sequences, want)


def test_a_weight_and_a_module_that_layers_share_are_packed_and_counted_once():
    other, model = (build("llama", tie_word_embeddings=False) for _ in range(2))
    pack_(other)
    decode(other, (9,))  # the cache that serves it does not serve the model
    first, second = model.model.layers
    first.mlp.up_proj.weight = second.mlp.up_proj.weight
    second.self_attn = first.self_attn
    packed_runs = decode(model, (9,))
    made = pack_(model)
    again = decode(model, (9,))
    for stats in (packed_runs.stats.packed, made, again.stats.packed):
        assert (stats.layers, stats.bytes) == (11, made.bytes)
    up = [layer.mlp.up_proj for layer in model.model.layers]
    assert up[0].panels is up[1].panels
    assert torch.equal(again.sequences, packed_runs.sequences)


def test_what_packing_in_place_takes_away_is_named(tmp_path):
    model = build("llama")
    pack_(model)
    with pytest.raises(RuntimeError, match=r"q_proj' cannot be saved aft"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot be packed: it has no plain linear layers"):
        pack_(model)
    with pytest.raises(ValueError, match="cannot be packed: it is in training mode"):
        pack_(build("llama").train())
    with pytest.raises(TypeError, match="model must be"):
        pack_("x")
