"""Drafters that are a part of the target: first layers, early exits, and skipped layers."""

import copy
from functools import cache

import pytest
import torch
from specdec_hf import EagleTree, TrieTree, generate
from specdec_papers.own_layers import LayerSkipDrafter
from specdec_papers.skipped_sublayers import SkippedSublayers
from specdec_papers.split_model import SplitModel
from support import hf_models
from support.drafter_proof import assert_greedy_identical
from support.hf_models import exit_folder

from bench.tiny_models.build import build

pytestmark = pytest.mark.papers

LAYERS = 5
TREE, ALIGNED = {"tree": (2, 1)}, {"cache": "aligned"}
PARTS = {
    **{name: name for name in ("early_exit:2", "early_exit:4", "layer_skip:1-1", "layer_skip:3-4")},
    "sublayers": LayerSkipDrafter(skipped=SkippedSublayers(attention=(2, 3), mlp=(1, 3))),
}


@cache
def model_of(name):
    """A model whose later layers change little, so that its first ones guess well."""
    model = hf_models.build(name, layers=LAYERS)
    for layer in layers_of(model)[1:]:
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                parameter.data.mul_(0.6)
    return model


def layers_of(model):
    base = model.base_model
    return base.h if hasattr(base, "h") else base.layers


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_greedy_equals_plain_generation(name, part):
    stats = assert_greedy_identical(lambda: PARTS[part], model_of(name), 12, gamma=3)
    assert stats.accepted > 0
    assert not [note for note in stats.notes if "not packed" not in note]


@pytest.mark.parametrize("sampled", [False, True])
def test_no_layer_sees_a_token_twice(sampled):
    model, seen = copy.deepcopy(model_of("llama")), [0] * LAYERS

    def count(layer):
        def hook(module, args, output):
            seen[layer] += output.shape[1]

        return hook

    for number, layer in enumerate(layers_of(model)):
        layer.register_forward_hook(count(number))
    for part, again in (("early_exit:2", []), ("layer_skip:2-3", [4])):
        arguments = {"do_sample": sampled, "seed": 1, "gamma": 3, "drafter": part}
        hf_models.decode(model, **arguments)  # checks the parts
        seen[:] = [0] * LAYERS
        gammas = hf_models.decode(model, **arguments).stats.gammas
        assert gammas[0] == 0
        expected = [9 + sum(1 + gamma for gamma in gammas[1:])] * LAYERS
        for layer in again:  # after the layers that are left out
            expected[layer] += sum(gammas)
        assert sum(gammas) > 5
        assert seen == expected


def test_wrong_hidden_states_are_found_by_the_self_check(monkeypatch, forgetful):
    """Negative control: the parts are compared with the whole before their first use."""
    model, original = hf_models.build("llama", 3, layers=4), SplitModel.second
    expected = model.generate(**hf_models.prompts((9,)), max_new_tokens=12, do_sample=False)

    def second(self, cache, hidden, *rest):
        return original(self, cache, hidden.roll(1, dims=1), *rest)

    monkeypatch.setattr(SplitModel, "second", second)
    with pytest.raises(ValueError, match="cannot be run in two parts: its logits then differ by"):
        hf_models.decode(model, drafter="early_exit:2")
    wrong = hf_models.decode(model, drafter="early_exit:2", self_check=False)
    assert not torch.equal(wrong.sequences, expected)


def test_parts_that_a_target_has_not_are_refused_by_name():
    t5, opt, gemma3n = hf_models.tiny("t5"), "OPTForCausalLM", "Gemma3nForCausalLM"
    for drafter, message, model, more in (
        (
            "early_exit:5",
            "must be below the target's 5 with drafter early_exit, got 5",
            "llama",
            {},
        ),
        ("layer_skip:1-5", "last must be below the target's 5 layers with drafter", "llama", {}),
        ("early_exit:2", "early_exit needs cache='spec', got 'aligned'", "llama", ALIGNED),
        ("early_exit:2", "or one that drafts several chains.* got 'early_ex", "llama", TREE),
        ("early_exit:x", "must be early_exit:N with a number of layers, got 'x'", "llama", {}),
        ("layer_skip:3-1", "last must be at least first = 3, got 1", "llama", {}),
        ("layer_skip:0-1", "first must be at least 1, got 0", "llama", {}),
        ("layers:9", r"must have N in \[1, 5\], got 9", "llama", {}),
        ("layers:1", "needs a model of text alone, got 't5'", t5, {}),
        ("early_exit:1", "cannot be run in two parts: its base mod", build(opt), {}),
        ("layers:1", "its first 1 layers are no model of their", build(gemma3n), {}),
    ):
        target = model_of(model) if model == "llama" else model
        with pytest.raises(ValueError, match=message):
            generate(target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=4, **more)


def with_fewer_rows():
    model = hf_models.build("llama", layers=3)
    model.lm_head.weight.data = model.lm_head.weight.data[:-3]
    return model


class Adapter(torch.nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.added = torch.nn.Linear(32, base_layer.weight.shape[0], bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.added(x)


def with_module(name, make):
    """A model in which another library has put a module around one of its own."""
    model = hf_models.build("llama", layers=3)
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, make(model.get_submodule(name)))
    return model


def after_a_text_beyond_its_context():
    """Its buffers of rotary frequencies are one tensor then."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = hf_models.build("llama", layers=3, context=24, rope_parameters=rope)
    for new_tokens in (30, 2):
        model.generate(**hf_models.prompts((9,)), max_new_tokens=new_tokens, do_sample=False)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def with_replaced_forward():
    model = hf_models.build("llama", layers=3)
    model.forward = compiled(model.forward)
    return model


# What may be the matter with a target, and why drafters that are a part of it refuse it; "" where
# they draft. Only those that need its layers alone care for its base model.
TARGETS = {
    "tied": (lambda: hf_models.build("llama", layers=3, tie_word_embeddings=True), ""),
    "compiled": (lambda: compiled(hf_models.build("llama", layers=3)), "it is a wrapper"),
    "compiled base": (
        lambda: with_module("model", compiled), "its base model is a wrapper, OptimizedModule",
    ),
    "compiled forward": (with_replaced_forward, "its forward was replaced"),
    "dynamic, beyond": (after_a_text_beyond_its_context, ""),
    "fewer rows": (with_fewer_rows, ""),
    "adapter": (lambda: with_module("model.layers.0.self_attn.q_proj", Adapter), ""),
}  # fmt: skip
OWN_PARTS = (
    "layers:1", "early_exit:1", "layer_skip:1-1", "exit_head",
    "sparse_cache:budget=2,chunk=1,sinks=0,recent=1,interval=2",
)  # fmt: skip


@pytest.mark.parametrize("drafter", OWN_PARTS)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_part_of_a_target_drafts_or_is_refused_by_name(kind, drafter, tmp_path):
    make, reason = TARGETS[kind]
    if drafter == "exit_head":
        if kind == "fewer rows":
            reason = r"the head needs a target with an output matrix \[67, 32\], got \[64, 32\]"
        drafter = f"exit_head:{exit_folder(hf_models.build('llama', layers=3), tmp_path)}"
    with torch.compiler.set_stance("force_eager"):  # the types matter here, and no graph
        model = make()
        if reason:
            with pytest.raises(ValueError, match=reason):
                hf_models.decode(model, drafter=drafter)
        else:
            assert hf_models.decode_as_generate(model, drafter=drafter).stats.drafted > 0


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("llama", {"cache": "dynamic"}), ("llama", {"tree": (2, 1)}),
        ("llama", {"tree": EagleTree(2, 3, 5)}),
        ("llama", {"drafter": ["layers:1", "prompt_lookup"], "tree": TrieTree(2, 3, 5)}),
        *((name, {}) for name in ("qwen3", "gemma2")),
        *((name, {}) for name in ("OPTForCausalLM", "GPTNeoForCausalLM", "FalconH1ForCausalLM")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)  # fmt: skip
def test_the_first_layers_draft_chains_and_trees(make, options):
    """Also where a config lists its layers, and wherever the list of layers is."""
    model = hf_models.tiny(make) if make in hf_models.CLASSES else build(make)
    options = {"drafter": "layers:1", **options}
    assert hf_models.decode_as_generate(model, (7,), **options).stats.drafted > 0
