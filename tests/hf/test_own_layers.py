"""Drafters that are a part of the target: first layers, early exits, and skipped layers."""

import gc
import weakref
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from specdec_hf import (
    EagleTree,
    EarlyExitDrafter,
    ExitHeadDrafter,
    LayersDrafter,
    LayerSkipDrafter,
    SkippedSublayers,
    TrieTree,
    generate,
)
from specdec_hf.heads.exit_head import ExitConfig, ExitHead
from specdec_hf.runner.split_model import SplitModel
from support import encoder_models, hf_models
from support.drafter_proof import assert_greedy_identical
from support.heads import exit_folder, rounds_of

from bench.tiny_models.build import build

LAYERS = 5
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


@contextmanager
def counted_tokens(model):
    """How many tokens each layer of the model sees."""
    seen = [0] * len(layers_of(model))

    def count(i):
        def hook(module, args, output):
            seen[i] += output.shape[1]

        return hook

    hooks = [layer.register_forward_hook(count(i)) for i, layer in enumerate(layers_of(model))]
    yield seen
    for hook in hooks:
        hook.remove()


@pytest.mark.covering(test=0)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_no_layer_sees_a_token_twice(name, sampled):
    model = model_of(name)
    for part, again in (("early_exit:2", []), ("layer_skip:2-3", [4])):
        arguments = {"do_sample": sampled, "seed": 1, "gamma": 3, "drafter": part}
        hf_models.decode(model, **arguments)  # checks the parts
        with counted_tokens(model) as seen:
            out = hf_models.decode(model, **arguments)
        gammas = out.stats.gammas
        assert gammas[0] == 0
        expected = [9 + sum(1 + gamma for gamma in gammas[1:])] * LAYERS
        for layer in again:  # after the layers that are left out
            expected[layer] += sum(gammas)
        assert sum(gammas) > 5
        assert seen == expected


@pytest.mark.parametrize("only_without_mask", [False, True])
def test_wrong_hidden_states_are_found_by_the_self_check(only_without_mask, monkeypatch, forgetful):
    """Negative control: the parts are compared with the whole before their first use."""
    model = hf_models.build("llama", 3, layers=4)
    expected = model.generate(**hf_models.prompts((9,)), max_new_tokens=12, do_sample=False)
    original = SplitModel.second

    def second(self, cache, hidden, *rest):
        wrong = cache.policy.omits_mask or not only_without_mask
        return original(self, cache, hidden.roll(1, dims=1) if wrong else hidden, *rest)

    monkeypatch.setattr(SplitModel, "second", second)
    with pytest.raises(ValueError, match="cannot be run in two parts: its logits then differ by"):
        hf_models.decode(model, drafter="early_exit:2")
    wrong = hf_models.decode(model, drafter="early_exit:2", self_check=False)
    # Without the self-check every forward has a mask.
    assert torch.equal(wrong.sequences, expected) == only_without_mask


def test_a_model_is_left_as_it_was():
    model = hf_models.build("gpt2", layers=4)
    before = {name: id(module) for name, module in model.named_modules()}
    config = model.config.to_dict()
    generate(model, **hf_models.prompts((9,)), drafter="layer_skip:1-2", max_new_tokens=8)
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert model.config.to_dict() == config


def test_parts_that_a_target_has_not_are_refused_by_name():
    tree, aligned = {"tree": (2, 1)}, {"cache": "aligned"}
    for drafter, message, more in (
        ("early_exit:5", "layers must be below the target's 5 with drafter early_exit, got 5", {}),
        ("layer_skip:1-5", "last must be below the target's 5 layers with drafter layer_sk", {}),
        ("early_exit:2", "drafter early_exit needs cache='spec', got 'aligned'", aligned),
        (EarlyExitDrafter(2), "or one that drafts several chains.* got early_exit$", tree),
        ("early_exit:x", "drafter must be early_exit:N with a number of layers, got 'x'", {}),
        ("layer_skip:3-1", "last must be at least first = 3, got 1", {}),
        ("layer_skip:0-1", "first must be at least 1, got 0", {}),
        ("layers:9", r"must have N in \[1, 5\], got 9", {}),
        ("layers:x", "with a number of layers, got 'x'", {}),
        ("layers", r"drafter must be layers:N\[,temperature=\.\.\], got 'layers'", {}),
    ):
        with pytest.raises(ValueError, match=message):
            hf_models.decode(model_of("llama"), drafter=drafter, **more)


def with_replaced_forward():
    model = hf_models.build("llama")
    model.model.forward = model.model.forward
    return model


@pytest.mark.parametrize(
    ("make", "drafter", "message"),
    [
        (lambda: encoder_models.tiny("t5"), "layers:1", "needs a model of text alone, got 't5'"),
        (
            lambda: build("OPTForCausalLM"), "early_exit:1",
            "OPTForCausalLM cannot be run in two parts: its base mod",
        ),
        (with_replaced_forward, "early_exit:1", "be run in two parts: its forward was replaced"),
        (
            lambda: build("Gemma3nForCausalLM"), "layers:1",
            "cannot draft for Gemma3nForCausalLM: its first 1 layers are no model of their",
        ),
    ],
    ids=["T5", "OPT", "replaced forward", "Gemma 3n"],
)  # fmt: skip
def test_models_of_another_structure_are_refused_by_name(make, drafter, message):
    with pytest.raises(ValueError, match=message):
        generate(make(), **hf_models.prompts((9,)), drafter=drafter, self_check=False)


def with_matrix(name, rows):
    """A model whose output matrix or embeddings have another number of rows than it has tokens."""
    model = hf_models.build("llama", layers=3)
    matrix = model.get_submodule(name)
    more = torch.zeros(max(rows - len(matrix.weight), 0), matrix.weight.shape[1])
    matrix.weight.data = torch.cat([matrix.weight.data[:rows], more])
    return model


def with_module(name, make):
    """A model in which another library has put a module around one of its own."""
    model = hf_models.build("llama", layers=3)
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, make(model.get_submodule(name)))
    return model


class Adapter(torch.nn.Module):
    """Adds a product to that of a linear layer."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.added = torch.nn.Linear(32, base_layer.weight.shape[0], bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.added(x)


def with_rope(**rope):
    return hf_models.build("llama", layers=3, rope_parameters={"rope_theta": 1e4, **rope})


def after_a_text_beyond_its_context():
    """Its buffers of rotary frequencies are one tensor then."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    model = hf_models.build("llama", layers=3, context=24, rope_parameters=rope)
    for new_tokens in (30, 2):
        model.generate(**hf_models.prompts((9,)), max_new_tokens=new_tokens, do_sample=False)
    return model


def compiled(model):
    return torch.compile(model, backend="eager")


def with_compiled_forward():
    model = hf_models.build("llama", layers=3)
    model.forward = compiled(model.forward)
    return model


LONGROPE = {
    "rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 128,
    "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
}  # fmt: skip
# What may be the matter with a target, and why drafters that are a part of it refuse it; "" where
# they draft. Only those that need its layers alone care for its base model.
TARGETS = {
    "as built": (lambda: hf_models.build("llama", layers=3), ""),
    "tied": (lambda: hf_models.build("llama", layers=3, tie_word_embeddings=True), ""),
    "compiled": (lambda: compiled(hf_models.build("llama", layers=3)), "it is a wrapper"),
    "compiled base": (
        lambda: with_module("model", compiled), "its base model is a wrapper, OptimizedModule",
    ),
    "compiled forward": (with_compiled_forward, "its forward was replaced"),
    "dynamic": (lambda: with_rope(rope_type="dynamic", factor=2.0), ""),
    "dynamic, beyond": (after_a_text_beyond_its_context, ""),
    "longrope": (lambda: with_rope(**LONGROPE), ""),
    "fewer rows": (lambda: with_matrix("lm_head", hf_models.VOCAB - 3), ""),
    "more rows": (lambda: with_matrix("model.embed_tokens", hf_models.VOCAB + 5), ""),
    "adapter": (lambda: with_module("model.layers.0.self_attn.q_proj", Adapter), ""),
    "weight norm": (
        lambda: with_module(
            "model.layers.0.mlp.up_proj", torch.nn.utils.parametrizations.weight_norm
        ),
        "",
    ),
}  # fmt: skip
OWN_PARTS = {
    "layers": "layers:1",
    "early_exit": "early_exit:1",
    "layer_skip": "layer_skip:1-1",
    "sparse_cache": "sparse_cache:budget=2,chunk=1,sinks=0,recent=1,interval=2",
    "exit_head": None,
}


@pytest.mark.parametrize("drafter", OWN_PARTS)
@pytest.mark.parametrize("kind", TARGETS)
def test_a_part_of_a_target_drafts_or_is_refused_by_name(kind, drafter, tmp_path):
    make, reason = TARGETS[kind]
    named = OWN_PARTS[drafter] or f"{drafter}:{exit_folder(TARGETS['as built'][0](), tmp_path)}"
    if (kind, drafter) == ("fewer rows", "exit_head"):
        reason = r"the head needs a target with an output matrix \[67, 32\], got \[64, 32\]"
    with torch.compiler.set_stance("force_eager"):  # the types matter here, and no graph
        model = make()
        if reason:
            with pytest.raises(ValueError, match=reason):
                hf_models.decode(model, drafter=named)
        else:
            assert hf_models.decode_as_generate(model, drafter=named).stats.drafted > 0


def test_a_target_in_training_mode_is_left_in_it():
    model = hf_models.build("llama", layers=3).train()
    hf_models.decode(model, drafter="layers:1")
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        ("llama", {"cache": "dynamic"}),
        ("llama", {"tree": (2, 1)}),
        ("llama", {"tree": EagleTree(2, 3, 5)}),
        ("llama", {"drafter": ["layers:1", "prompt_lookup"], "tree": TrieTree(2, 3, 5)}),
        *((name, {}) for name in ("qwen2", "qwen3", "gemma2")),
        *((name, {}) for name in ("OPTForCausalLM", "GPTNeoForCausalLM", "FalconH1ForCausalLM")),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_the_first_layers_draft_chains_and_trees(make, options):
    """Also where a config lists its layers, and wherever the list of layers is."""
    model = hf_models.tiny(make) if make in hf_models.CLASSES else build(make)
    options = {"drafter": "layers:1", **options}
    assert hf_models.decode_as_generate(model, (7,), **options).stats.drafted > 0


GREEDY = {"max_new_tokens": 12, "do_sample": False}


def test_the_first_layers_draft_beams():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((7,))
    out = hf_models.decode(model, (7,), num_beams=2, drafter="layers:1")
    assert torch.equal(out.sequences, model.generate(**inputs, **GREEDY, num_beams=2))
    assert (out.stats.drafter, out.stats.drafted > 0) == ("layers", True)


def draft_model(model, text="layers:1"):
    drafter = LayersDrafter.from_text(text.partition(":")[2])
    drafter.draft_for(model)
    return drafter.model


def test_calls_share_the_draft_model_until_weights_are_moved():
    """So that its self-check, its graphs and its measured costs are those of earlier calls."""
    model, inputs = hf_models.build("llama"), hf_models.prompts((7,))
    generate(model, **inputs, **GREEDY, drafter="layers:1")
    small = draft_model(model)
    assert draft_model(model) is small
    assert draft_model(model, "layers:2") is not small
    assert {p.data_ptr() for p in small.parameters()} < {p.data_ptr() for p in model.parameters()}
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert draft_model(model) is small
    model.to(torch.bfloat16)
    moved = draft_model(model)
    assert moved is not small
    assert moved.dtype == torch.bfloat16
    generate(model, **inputs, **GREEDY, drafter="layers:1")
    watched = weakref.ref(model)
    del model, small, moved
    gc.collect()
    assert watched() is None


def test_a_weight_with_other_memory_makes_another_draft_model():
    model = hf_models.build("llama")
    small = draft_model(model)
    model.lm_head.weight.data = model.lm_head.weight.data.flip(0)
    assert draft_model(model) is not small
    assert torch.equal(draft_model(model).lm_head.weight, model.lm_head.weight)


def test_an_exit_that_has_learnt_nothing_drafts_as_early_exit_does():
    """And one that has learnt something drafts otherwise."""
    target = hf_models.build("llama", layers=4)
    with pytest.raises(ValueError, match=r"layer must be .* in \[1, 3\], got 4"):
        ExitConfig.for_target(target, 4)
    head = ExitHead(ExitConfig.for_target(target, 2))
    head.begin_as(target)
    seen = []
    for drafter, sign in ((EarlyExitDrafter(2), 1), (ExitHeadDrafter(head), 1), (None, -1)):
        with torch.no_grad():
            head.projection.weight.mul_(sign)
        made = drafter or ExitHeadDrafter(head)
        rounds = rounds_of(target, made, (9,), max_new_tokens=10, gamma=3)[1]
        seen.append([(texts, draft.tokens.tolist()) for texts, draft in rounds])
    assert seen[0] == seen[1] != seen[2]
