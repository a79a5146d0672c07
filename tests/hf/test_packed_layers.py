"""Decoder layers and attention of packed models: which run by ops, and that these are the layer."""

import copy

import numpy as np
import pytest
import torch
from specdec_hf.runner.packed import decoder_layer
from specdec_hf.runner.packed.model import PackedModel, packed_model_of
from specdec_hf.runner.spec_runner import SpecRunner
from support.hf_models import VOCAB, build, decode, with_noise
from transformers.models.llama import modeling_llama

MODELS = {
    "llama": ("llama", {}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    # One layer of full and one of sliding attention have a mask each.
    "qwen2-masks": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 12}),
}
by_model = pytest.mark.parametrize("which", MODELS)


def made(which, dtype=torch.float32):
    """A model whose biases and norms are no zeros and ones."""
    name, fields = MODELS[which]
    model = build(name, **fields)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model.to(dtype)


def layers_of(packed_model):
    return [m for m in packed_model.model.modules() if type(m).__name__.endswith("DecoderLayer")]


def unfused(model):
    packed_model = PackedModel(model)
    for layer in layers_of(packed_model):
        layer.__class__ = type(layer).__mro__[1]
        del layer.parts
    return packed_model


def ids(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCAB, shape, generator=generator)


@by_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@torch.no_grad()
def test_fused_layers_give_the_hidden_states_of_the_model(which, dtype):
    model = made(which, dtype)
    packed_model = packed_model_of(model)
    assert packed_model.fused == len(layers_of(packed_model)) == 2
    given = {"input_ids": ids(2, 20), "output_hidden_states": True}
    got, want = packed_model.model(**given), model(**given)
    tolerance = 1e-5 if dtype == torch.float32 else 0.04
    for mine, its in zip(got.hidden_states, want.hidden_states, strict=True):
        assert len(got.hidden_states) == 3
        assert (mine - its).abs().max() <= tolerance * its.abs().max()
    # The ops round where Transformers does, so that most numbers of 16 bits are the same.
    plain = unfused(model).model(**given)
    same = (got.hidden_states[1] == plain.hidden_states[1]).float().mean()
    assert dtype == torch.float32 or same > 0.9


@by_model
@torch.no_grad()
def test_one_op_for_all_layers_has_the_bits_of_two_for_each(which):
    """Over the loop's cache: prompts of two lengths, then a few tokens; and the states of all."""
    outputs = []
    for apart in (False, True):
        model = PackedModel(made(which)).model
        decoder = model.get_decoder()
        if apart:
            decoder.__class__ = type(decoder).__base__
        runner = SpecRunner(model, 2, 16)
        runner.tap.open()
        logits = [
            runner.forward(ids(2, size), np.array(starts), size)
            for size, starts in ((9, [0, -3]), (4, [9, 6]))
        ]
        assert ("stack" in vars(decoder)) == (not apart and which != "qwen2-masks")
        outputs.append(
            [logits[0][:, 3:], logits[1], *(x[:, 3:] for x in runner.tap.pop().values())]
        )
    assert len(outputs[0]) == 2 + 3
    for mine, its in zip(*outputs, strict=True):
        assert torch.equal(mine, its)


@by_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_text_is_that_without_drafts(which, dtype):
    model = made(which, dtype)
    small = with_noise(model, 0.01)
    for lengths in ((9,), (11, 4, 7)):
        plain = decode(model, lengths)
        assert plain.stats.packed.fused == 2
        for settings in ({}, {"tree": (2, 1, 1)}):
            fast = decode(model, lengths, drafter=small, **settings)
            assert torch.equal(fast.sequences, plain.sequences)
            assert fast.stats.forwards == "packed"
            assert fast.stats.accepted > 0


@pytest.mark.parametrize("how", ["in place", "replaced", "through data"])
@pytest.mark.parametrize("part", ["norm", "weight", "bias"])
def test_parameters_that_change_after_the_first_call_are_seen(part, how):
    model = made("llama-biases")
    decode(model, (9,))
    layer = model.model.layers[1]
    owner, name = {
        "norm": (layer.post_attention_layernorm, "weight"),
        "weight": (layer.self_attn.k_proj, "weight"),
        "bias": (layer.mlp.up_proj, "bias"),
    }[part]
    parameter = getattr(owner, name)
    with torch.no_grad():
        changed = parameter.flip(0) * 3
        if how == "replaced":
            setattr(owner, name, torch.nn.Parameter(changed))
        else:
            (parameter if how == "in place" else parameter.data).copy_(changed)
    got = decode(model, (9,))
    assert got.stats.forwards == "packed"
    assert (got.stats.packed.seconds > 0) == (part == "weight")
    assert decode(model, (9,)).stats.packed.seconds == 0
    assert torch.equal(got.sequences, decode(copy.deepcopy(model), (9,)).sequences)
    assert torch.equal(got.sequences, decode(model, (9,), compile=False).sequences)


@torch.no_grad()
def test_what_the_ops_do_not_compute_runs_as_the_class_says(monkeypatch):
    model = made("llama", torch.bfloat16)
    mine, plain = PackedModel(model).model, unfused(model).model
    tokens = ids(1, 9)
    calls = []
    fused = decoder_layer.LayerParts.forward
    monkeypatch.setattr(decoder_layer.LayerParts, "forward",
                        lambda *args: calls.append(1) or fused(*args))  # fmt: skip
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mine(tokens).logits, plain(tokens).logits)
    assert torch.equal(mine(tokens, output_attentions=False).logits, mine(tokens).logits)
    assert len(calls) == 4
    calls.clear()
    mine(tokens, output_attentions=True)
    assert not calls


def become(module, **members):
    module.__class__ = type("Own", (type(module),), members)


UNLIKE = {
    "llama-subclassed": lambda layer: become(layer.mlp, forward=lambda self, x: x),
    "llama-with_another_activation": lambda layer: setattr(layer.mlp, "act_fn", torch.nn.GELU()),
    "llama-biases-without_a_bias": lambda layer: setattr(layer.self_attn.k_proj, "bias", None),
    "llama-with_an_adapter": lambda layer: become(layer.mlp.up_proj),
    "llama-with_a_norm_of_another_dtype": lambda layer: layer.post_attention_layernorm.bfloat16(),
    "qwen3-with_another_epsilon": lambda layer: setattr(
        layer.self_attn.q_norm, "variance_epsilon", 0.5
    ),
}


@pytest.mark.parametrize("case", UNLIKE)
def test_layers_that_are_not_those_of_the_ops_stay(case):
    model = made(case.rpartition("-")[0])
    UNLIKE[case](model.model.layers[1])
    assert packed_model_of(model).fused == 1
    got = decode(model, (9,))
    assert (got.stats.forwards, got.stats.packed.fused) == ("packed", 1)
    assert torch.equal(got.sequences, decode(model, (9,), compile=False).sequences)


@pytest.mark.parametrize(
    "name",
    ["LlamaRMSNorm", "LlamaAttention", "LlamaDecoderLayer", "LlamaMLP", "apply_rotary_pos_emb"],
)
def test_what_a_library_patched_stays(name, monkeypatch):
    owner = getattr(modeling_llama, name)
    owner, name = (owner, "forward") if isinstance(owner, type) else (modeling_llama, name)
    own = getattr(owner, name)

    def patched(*args, **kwargs):
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, patched)
    assert packed_model_of(made("llama")).fused == 0
