"""Drafts without single attention and MLP sublayers, their file, and the search for them."""

import copy
import json
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
import torch
from specdec_lab.layer_skip.calibration import Calibration, Drafting, search_layers
from specdec_lab.layer_skip.optimiser import expected_improvement
from specdec_papers.own_layers import LayerSkipDrafter
from specdec_papers.skipped_sublayers import SkippedSublayers, sizes_of
from specdec_papers.split_model import SplitModel
from support import hf_models
from support.cli_models import invoke, one_line_error, says
from support.hf_models import differences, rounds_of

pytestmark = pytest.mark.papers

LAYERS = 5
SKIPPED = SkippedSublayers(attention=(2, 3), mlp=(1, 3))
MODULES = {"gpt2": ("attn", "mlp"), "llama": ("self_attn", "mlp"), "gemma2": ("self_attn", "mlp")}


def tokens_of(model, rows=2, size=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model.config.vocab_size, (rows, size), generator=generator)


@torch.no_grad()
def expected_logits(name, model, skipped, text, drafts):
    """[V]: the unmodified model, where the outputs of the skipped sublayers count as 0 from the
    pending token on.
    """
    base = model.base_model
    layers = base.h if hasattr(base, "h") else base.layers

    def none_of_the_last(module, args, output):
        out = (output[0] if isinstance(output, tuple) else output).clone()
        out[:, len(text) - 1 :] = 0
        return (out, *output[1:]) if isinstance(output, tuple) else out

    with ExitStack() as hooks:
        for layer, kind in skipped.pairs():
            module = getattr(layers[layer], MODULES[name][kind == "mlp"])
            hooks.callback(module.register_forward_hook(none_of_the_last).remove)
        return model(torch.tensor([[*text, *drafts]])).logits[0, -1]


@pytest.mark.parametrize("name", MODULES)
def test_drafts_are_those_of_the_model_without_the_sublayers(name):
    model = hf_models.build(name, layers=LAYERS)
    settings = {"do_sample": True, "rule": "token", "seed": [5, 6], "gamma": 3}
    _, rounds = rounds_of(model, LayerSkipDrafter(skipped=SKIPPED), **settings)
    plain, rounds = copy.deepcopy(model), rounds[:: 1 + len(rounds) // 5]
    found = differences(rounds, partial(expected_logits, name, plain, SKIPPED))
    assert tuple(map(max, zip(*found, strict=True))) < (1e-4, 3)
    assert max(depth for _, depth in found) == 2
    # The control: each sublayer counts.
    fewer = partial(expected_logits, name, plain, SkippedSublayers(attention=(2,), mlp=(1, 3)))
    assert max(far for far, _ in differences(rounds, fewer)) > 1e-2


def test_a_file_holds_what_was_saved(tmp_path):
    model = hf_models.build("llama", layers=LAYERS)
    named = SkippedSublayers([3, 2], (1, 3), sizes_of(model.config), {"seed": 4})
    named.save(tmp_path / "skipped.json")
    read = SkippedSublayers.load(tmp_path / "skipped.json")
    assert read == named
    assert (read.attention, read.mlp, read.first, read.last) == ((2, 3), (1, 3), 1, 3)
    text = f"layer_skip:{tmp_path / 'skipped.json'}"
    hf_models.decode_as_generate(model, drafter=text, max_new_tokens=4)
    with pytest.raises(ValueError, match="found for num_hidden_layers = 5, and the target has 4"):
        hf_models.decode(hf_models.build("llama", layers=4), drafter=text)


GOOD = {"format": "specdec layer_skip", "version": 1, "attention": [2], "mlp": []}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no file of skipped layers: Expecting"),
        ("[]", "format must be 'specdec layer_skip'"),
        ({**GOOD, "version": 2}, "version of .* must be 1, got 2"),
        ({**GOOD, "attention": [0]}, r"attention\[0\] must be at least 1, got 0"),
        ({**GOOD, "attention": [2, 2]}, r"attention must list each layer once, got \[2, 2\]"),
        ({**GOOD, "attention": []}, "attention and mlp must list at least one layer, got none"),
        ({**GOOD, "model": {"layers": 3}}, "model of .* must hold model_type, num_hidden_layers"),
    ],
)
def test_a_wrong_file_is_refused_by_name(content, message, tmp_path):
    path = tmp_path / "skipped"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        SkippedSublayers.load(path)


def test_wrong_sublayers_are_refused_by_name():
    for arguments, kind, message in (
        ({}, ValueError, "either first and last or skipped must be given, got neither"),
        ({"first": 1, "last": 2, "skipped": SKIPPED}, ValueError, "must be given, got both"),
        ({"first": 1}, TypeError, "last must be an integer, got None"),
        ({"skipped": "x"}, TypeError, "skipped must be a SkippedSublayers, got 'x'"),
    ):
        with pytest.raises(kind, match=message):
            LayerSkipDrafter(**arguments)
    with pytest.raises(ValueError, match="skipped layers must be below the target's 2 with dr"):
        hf_models.decode(hf_models.tiny("llama"), drafter=LayerSkipDrafter(skipped=SKIPPED))
    model = hf_models.build("llama", layers=LAYERS)
    layer = model.model.layers[2]
    layer.attention_of_ours = layer._modules.pop("self_attn")
    with pytest.raises(ValueError, match="attention of LlamaDecoderLayer cannot be skipped: it"):
        SplitModel(model, 1, 1, skipped=SKIPPED.pairs())


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_the_search_finds_the_sublayers_that_add_nothing(temperature):
    model = hf_models.build("llama", layers=LAYERS)
    with torch.no_grad():
        for layer in SKIPPED.attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in SKIPPED.mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    texts = tokens_of(model, rows=8, size=16).tolist()
    found = search_layers(model, texts, evaluations=80, max_draft=4, temperature=temperature)
    assert found.skipped.pairs() >= SKIPPED.pairs()
    assert found.skipped.model == sizes_of(model.config)
    alone = Calibration(model, texts, temperature)
    assert np.mean(alone.rates(SKIPPED)) == pytest.approx(1.0)
    cost = alone.split(SKIPPED).first_share
    assert found.drafting.speed > Drafting.of(1.0, cost, 4).speed - 1e-5 > 1
    # The control: of another model they are worth less.
    other = Calibration(hf_models.build("llama", layers=LAYERS), texts, temperature)
    assert np.mean(other.rates(SKIPPED)) < 0.7


def test_the_expected_improvement_of_what_nothing_is_known_of_is_that_of_a_normal_variable():
    points = np.array([[False] * 40, [True] * 40])
    half = np.array([[True, False] * 20])
    (found,) = expected_improvement(points, np.array([1.0, -1.0]), half)
    assert found == pytest.approx(0.0833155, abs=1e-4)  # the mean of max(0, x - 1)


def test_the_command_writes_a_file_that_drafts(folder, tmp_path):
    text, output = tmp_path / "text", tmp_path / "skipped.json"
    text.write_text("one two three four five " * 40)
    given = ("build", "layer_skip", text, "--model", folder, "--output", output)
    result = invoke(*given, "--evaluations", 6, "--tokens", 64, "--length", 16)
    assert result.exit_code == 0, result.output
    # Of two layers the second has two sublayers: there are four sets, one of them without any.
    assert says(result, "sublayers are left out, after 4 trials")
    answer = ("generate", "--model", folder, "--prompt", "ab ab", "--max-new-tokens", 4)
    result = invoke(*answer, "--drafter", f"layer_skip:{output}")
    assert result.exit_code == 0, result.output
    for changed, message in (
        (("--evaluations", 0), "--evaluations must be at least 1, got 0"),
        (("--tokens", 20, "--length", 16), "--tokens must be at least twice --length = 16, got 20"),
        (("--length", 300), "--length must be at most 256, the model's context, got 300"),
        (("--length", 512, "--tokens", 2048), "FILES must hold at least two pieces of --length ="),
    ):
        assert message in one_line_error(*given, *changed)
    for wrong, message in ((tmp_path / "nowhere", "--drafter: cannot read"), (text, "is no file")):
        assert message in one_line_error(*answer, "--drafter", f"layer_skip:{wrong}")


def test_the_rate_is_that_of_drafts_at_the_beginning_of_rounds():
    """Of a cascade of single drafts after each prefix of a text, the share that is accepted."""
    model = hf_models.build("llama", layers=LAYERS)
    tokens = tokens_of(model, rows=3, size=12)
    with torch.no_grad():
        wanted = model(tokens).logits
    drafted = torch.stack([
        torch.stack([
            expected_logits("llama", model, SKIPPED, text[:size], []) for size in range(1, 13)
        ])
        for text in tokens.tolist()
    ])  # fmt: skip
    greedy = Calibration(model, tokens.tolist(), 0.0).rates(SKIPPED)
    agreed = (drafted.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean(dim=1)
    assert greedy == pytest.approx(agreed.tolist())
    p, q = (x.div(0.7).softmax(dim=-1) for x in (wanted, drafted))
    shared = torch.minimum(p, q).sum(dim=-1).double().mean(dim=1)
    sampled = Calibration(model, tokens.tolist(), 0.7).rates(SKIPPED)
    assert sampled == pytest.approx(shared.tolist(), abs=1e-4)
