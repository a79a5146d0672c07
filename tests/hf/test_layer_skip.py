"""Drafts without single attention and MLP sublayers, their file, and the search for them."""

import json
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from specdec_hf import LayerSkipDrafter, SkippedSublayers
from specdec_hf.drafting.registry import names_file
from specdec_hf.lab.layer_skip.calibration import Calibration, Drafting, search_layers
from specdec_hf.lab.layer_skip.command import cut_pieces
from specdec_hf.lab.layer_skip.optimiser import maximise
from specdec_hf.profile import sizes_of
from specdec_hf.runner.packed.twin import packed_twin
from specdec_hf.runner.spec_runner import SpecRunner
from specdec_hf.runner.split_model import SplitModel
from support import hf_models
from support.cli_models import folder, invoke, one_line_error, says  # noqa: F401

LAYERS = 5
SKIPPED = SkippedSublayers(attention=(2, 3), mlp=(1, 3))
MODULES = {"gpt2": ("attn", "mlp"), "llama": ("self_attn", "mlp"), "gemma2": ("self_attn", "mlp")}


def tokens_of(model, rows=2, size=9):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, model.config.vocab_size, (rows, size), generator=generator)


@torch.no_grad()
def drafted_logits(name, model, tokens, skipped):
    """[B, n, V]: the unmodified model at each token, where the outputs of the skipped sublayers
    count as 0 at that token alone.
    """
    base, rows = model.base_model, []
    layers = base.h if hasattr(base, "h") else base.layers

    def no_last(module, args, output):
        out = output[0] if isinstance(output, tuple) else output
        out = out.clone()
        out[:, -1] = 0
        return (out, *output[1:]) if isinstance(output, tuple) else out

    with ExitStack() as hooks:
        for layer, kind in skipped.pairs():
            module = getattr(layers[layer], MODULES[name][kind == "mlp"])
            hooks.callback(module.register_forward_hook(no_last).remove)
        for end in range(1, tokens.shape[1] + 1):
            rows.append(model(tokens[:, :end]).logits[:, -1])
    return torch.stack(rows, dim=1)


def split_of(model, skipped):
    return SplitModel(model, skipped.first, skipped.first, skipped=skipped.pairs())


@torch.inference_mode()
def first_of_rounds(model, tokens, skipped):
    """The same by the parts that draft: one token after the other over the target's cache."""
    split, rows = split_of(model, skipped), []
    for end in range(tokens.shape[1]):
        runner = SpecRunner(model, len(tokens), 32)
        starts = np.zeros(len(tokens), dtype=np.int64)
        if end:
            runner.forward(tokens[:, :end], starts, 1)
        rows.append(split.first(runner, tokens[:, end : end + 1], starts + end)[0][:, 0])
    return torch.stack(rows, dim=1)


@torch.inference_mode()
def all_at_once(model, tokens, skipped):
    runner = SpecRunner(model, len(tokens), 32)
    runner.forward(tokens, np.zeros(len(tokens), dtype=np.int64), 1)
    keys = runner.cache.spec_layers[-1].keys[:, :, : tokens.shape[1]].clone()
    found = split_of(model, skipped).first_drafts(runner, tokens)
    assert runner.lengths.tolist() == [tokens.shape[1]] * len(tokens)
    assert runner.cache.spec_layers[-1].keys[:, :, : tokens.shape[1]].equal(keys)
    return found


@pytest.mark.parametrize("name", MODULES)
def test_drafts_are_those_of_the_model_without_the_sublayers(name):
    model = hf_models.build(name, layers=LAYERS)
    tokens = tokens_of(model)
    expected = drafted_logits(name, model, tokens, SKIPPED)
    for found in (first_of_rounds, all_at_once):
        torch.testing.assert_close(found(model, tokens, SKIPPED), expected, rtol=1e-4, atol=1e-4)
    other = drafted_logits(name, model, tokens, SkippedSublayers(attention=(2,), mlp=(1, 3)))
    assert (expected - other).abs().max() > 0.1, "the control: each sublayer counts"


def test_sublayers_are_left_out_of_fused_layers_on_packed_weights():
    model = hf_models.build("llama", layers=LAYERS)
    twin, tokens = packed_twin(model), tokens_of(model)
    assert twin.fused == LAYERS
    expected = drafted_logits("llama", model, tokens, SKIPPED)
    for found in (first_of_rounds, all_at_once):
        torch.testing.assert_close(
            found(twin.model, tokens, SKIPPED), expected, rtol=1e-4, atol=1e-4
        )
    assert len({type(x) for x in twin.model.model.layers}) == 1, "the twin stays as it was"


def test_a_run_of_whole_layers_drafts_as_before():
    model = hf_models.build("llama", layers=LAYERS)
    both = SkippedSublayers(attention=(2, 3), mlp=(2, 3))
    outs = [
        hf_models.decode(model, (9, 4), drafter=drafter, do_sample=True, seed=2, rule="token")
        for drafter in ("layer_skip:2-3", LayerSkipDrafter(skipped=both))
    ]
    assert hf_models.outcome(outs[0]) == hf_models.outcome(outs[1])
    assert outs[0].stats.accepted > 0


def test_what_a_layer_lacks_is_refused_by_name():
    model = hf_models.build("llama", layers=LAYERS)
    layer = model.model.layers[2]
    layer.attention_of_ours = layer._modules.pop("self_attn")
    with pytest.raises(ValueError, match="attention of LlamaDecoderLayer cannot be skipped: it"):
        split_of(model, SKIPPED)
    for skipped, message in (
        ({(1, "mlp")}, r"layers with skipped sublayers must be in \[2, 4\] .* got \[1\]"),
        ({(5, "mlp")}, r"layers with skipped sublayers must be in \[2, 4\] .* got \[5\]"),
    ):
        with pytest.raises(ValueError, match=message):
            SplitModel(model, 2, 2, skipped=skipped)


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
        ({**GOOD, "attention": "2"}, "attention must be a sequence, got '2'"),
        ({**GOOD, "attention": []}, "attention and mlp must list at least one layer, got none"),
        ({**GOOD, "model": {"layers": 3}}, "model of .* must hold model_type, num_hidden_layers"),
        ({**GOOD, "search": 1}, "search of .* must be an object, got 1"),
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


def test_a_value_is_a_file_unless_it_has_another_form():
    values = ("layer_skip:4-9", "layer_skip:4", "ngram:3", "ngram:a", "rest:3")
    found = [names_file(*one.split(":")) for one in values]
    assert found == [False, True, False, True, True]


# The search.


def hidden_pairs(point):
    """A score with one best point, which single steps do not lead to: choices count in pairs."""
    wanted = np.arange(12) % 3 == 0
    alike = point == wanted
    return float((alike[::2] & alike[1::2]).sum())


@pytest.mark.parametrize("seed", range(2))
def test_the_optimiser_finds_what_random_points_do_not(seed):
    """80 of 4,096 points. The control draws as many at random."""
    tried = maximise(hidden_pairs, 12, 80, seed)
    assert max(value for _, value in tried) == 6
    assert len({point.tobytes() for point, _ in tried}) == len(tried) == 80
    again = maximise(hidden_pairs, 12, 20, seed)
    assert [a.tobytes() for a, _ in again] == [a.tobytes() for a, _ in tried[:20]]
    points = np.random.default_rng(seed).random((80, 12)) < 0.5
    assert max(map(hidden_pairs, points)) < 6
    assert len(maximise(lambda x: float(x.sum()), 3, 50)) == 8, "it ends where all are known"


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_the_search_finds_the_sublayers_that_add_nothing(temperature):
    model = hf_models.build("llama", layers=LAYERS)
    with torch.no_grad():
        for layer in SKIPPED.attention:
            model.model.layers[layer].self_attn.o_proj.weight.zero_()
        for layer in SKIPPED.mlp:
            model.model.layers[layer].mlp.down_proj.weight.zero_()
    texts = tokens_of(model, rows=8, size=16).tolist()
    told = []
    found = search_layers(
        model, texts, evaluations=80, max_draft=4, temperature=temperature,
        advance=lambda done, best: told.append((done, best.speed)),
    )  # fmt: skip
    assert found.skipped.pairs() >= SKIPPED.pairs()
    alone = Calibration(model, texts, temperature)
    assert np.mean(alone.rates(SKIPPED)) == pytest.approx(1.0)
    cost = alone.split(SKIPPED).first_share
    assert found.drafting.speed > Drafting.of(1.0, cost, 4).speed - 1e-5 > 1
    assert [done for done, _ in told] == list(range(1, 81))
    assert sorted(speed for _, speed in told) == [speed for _, speed in told]
    record = found.skipped.search
    assert record["drafting"]["speed"] == found.drafting.speed
    assert record["evaluations"] == found.tried == 80
    assert found.skipped.model == sizes_of(model.config)
    # The control: of another model they are worth less.
    other = Calibration(hf_models.build("llama", layers=LAYERS), texts, temperature)
    assert np.mean(other.rates(SKIPPED)) < 0.7


def test_the_rate_is_that_of_drafts_at_the_beginning_of_rounds():
    """Of a cascade of single drafts after each prefix of a text, the share that is accepted."""
    model = hf_models.build("llama", layers=LAYERS)
    tokens = tokens_of(model, rows=3, size=12)
    with torch.no_grad():
        wanted = model(tokens).logits
    drafted = drafted_logits("llama", model, tokens, SKIPPED)
    greedy = Calibration(model, tokens.tolist(), 0.0).rates(SKIPPED)
    agreed = (drafted.argmax(dim=-1) == wanted.argmax(dim=-1)).double().mean(dim=1)
    assert greedy == pytest.approx(agreed.tolist())
    p, q = (x.div(0.7).softmax(dim=-1) for x in (wanted, drafted))
    shared = torch.minimum(p, q).sum(dim=-1).double().mean(dim=1)
    sampled = Calibration(model, tokens.tolist(), 0.7).rates(SKIPPED)
    assert sampled == pytest.approx(shared.tolist(), abs=1e-4)


def test_held_out_texts_are_not_searched():
    """Where they hold another kind of text, only their own figure tells."""
    model = hf_models.build("llama", layers=LAYERS)
    texts = tokens_of(model, rows=8, size=16).tolist()
    changed = [[*text[8:], *text[:8]] if n % 4 == 1 else text for n, text in enumerate(texts)]
    first, second = (
        search_layers(model, given, evaluations=12, max_draft=4) for given in (texts, changed)
    )
    assert first.drafting == second.drafting
    assert first.skipped.pairs() == second.skipped.pairs()
    assert first.held_out != second.held_out


def test_what_cannot_be_searched_is_refused_by_name():
    single = hf_models.build("llama", layers=1)
    for model, texts, message in (
        (hf_models.tiny("llama"), [[1, 2, 3]], "texts must be at least 2, of which one is held"),
        (single, [[1, 2, 3]] * 2, "LlamaForCausalLM must have at least 2 layers to skip"),
    ):
        with pytest.raises(ValueError, match=message):
            search_layers(model, texts)


def test_pieces_are_spread_over_the_texts():
    texts = [list(range(10)), list(range(20, 25)), [1]]
    assert cut_pieces(texts, 100, 5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [20, 21, 22, 23, 24]]
    assert cut_pieces(texts, 10, 5) == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert cut_pieces(texts, 100, 11) == []


def test_the_command_writes_a_file_that_drafts(folder, tmp_path):  # noqa: F811
    text, output = tmp_path / "text", tmp_path / "skipped.json"
    text.write_text("one two three four five " * 40)
    given = ("build", "layer_skip", text, "--model", folder, "--output", output)
    small = ("--evaluations", 6, "--tokens", 64, "--length", 16)
    result = invoke(*given, *small)
    assert result.exit_code == 0, result.output
    # Of two layers the second has two sublayers: there are four sets, one of them without any.
    assert says(result, "sublayers are left out, after 4 trials")
    assert says(result, "on held-out texts: acceptance rate")
    answer = ("generate", "--model", folder, "--prompt", "ab ab", "--max-new-tokens", 4)
    result = invoke(*answer, "--drafter", f"layer_skip:{output}")
    assert result.exit_code == 0, result.output
    for changed, message in (
        (("--evaluations", 0), "--evaluations must be at least 1, got 0"),
        (("--tokens", 20, "--length", 16), "--tokens must be at least twice --length = 16, got 20"),
        (("--length", 300), "--length must be at most 256, the model's context, got 300"),
        (("--temperature", "nan"), "--temperature must be finite and >= 0, got nan"),
        (("--length", 512, "--tokens", 2048), "FILES must hold at least two pieces of --length ="),
    ):
        assert message in one_line_error(*given, *changed)
    wrong = ("--drafter", f"layer_skip:{tmp_path / 'nowhere'}")
    assert "--drafter: cannot read" in one_line_error(*answer, *wrong)
    line = one_line_error(*answer, "--drafter", f"layer_skip:{text}")
    assert "is no file of skipped layers" in line
