"""Packed models: the text is the same whatever is drafted, and what cannot be packed is named."""

import gc
import sys
import types
import warnings
import weakref

import pytest
import torch
from hf.recorded_ops import CHANGES, REFUSED
from specdec_hf import EagleTree, generate
from specdec_hf.runner.forwards import FIRST, SINGLE, ForwardPolicy
from specdec_hf.runner.packed import attention
from specdec_hf.runner.packed import linear as packed_linear
from specdec_hf.runner.packed import model as packing
from specdec_hf.runner.packed.linear import LinearWithPackedCopy
from specdec_hf.runner.spec_runner import SpecRunner
from support.hf_models import build, decode, prompts, unchanged, with_noise

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16"])
def model(request):
    # Ties are near where logits lie close to each other, so that rounding shows in the text.
    made = build("llama", vocab_size=997, hidden_size=256, intermediate_size=640)
    with torch.no_grad():
        made.lm_head.weight.mul_(0.05)
    return made.to(request.param)


SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3, "rule": "match"}


@pytest.mark.parametrize("more", [{}, SAMPLED], ids=["greedy", "match"])
@pytest.mark.parametrize("lengths", [(9,), (70, 5, 90)], ids=["alone", "ragged"])
def test_the_text_is_that_without_drafts_bit_for_bit(model, lengths, more):
    plain = decode(model, lengths, **more)
    drafter = with_noise(model, 0.05)
    for settings in (
        {"num_assistant_tokens": 5},
        {"num_assistant_tokens": 2, "drafter": "suffix_automaton"},
        {"tree": (2, 1, 1)},
        {"tree": EagleTree(size=6, depth=3)},
    ):
        if more and isinstance(settings.get("tree"), EagleTree):
            continue  # takes no rule match
        fast = decode(model, lengths, **{"drafter": drafter, **more, **settings})
        assert torch.equal(fast.sequences, plain.sequences)
        assert fast.stats.forwards == "packed"
    for b, length in enumerate(lengths if not more else ()):
        mask = plain.attention_mask[b].bool()
        inputs = prompts(lengths, vocab_size=997)["input_ids"][b : b + 1, -length:]
        alone = generate(model, inputs, max_new_tokens=12, do_sample=False, drafter=None)
        assert torch.equal(alone[0], plain.sequences[b][mask])


def logits_of(model, sizes, rows=1, start=70, policy=None):
    """Logits of tokens after a prompt, which is long, fed in forwards of these sizes."""
    policy = policy or ForwardPolicy(omits_mask=frozenset((FIRST,)))
    runner = SpecRunner(model, rows, start + sum(sizes) + 1, policy)
    ids = prompts((start + sum(sizes),), vocab_size=997)["input_ids"].expand(rows, -1)
    logits = [runner.forward(ids[:, :start], runner.lengths, 1)]
    for size in sizes:
        begin = int(runner.lengths[0])
        logits.append(runner.forward(ids[:, begin : begin + size], runner.lengths, size))
    return torch.cat(logits, dim=1)


def with_torchs_products(model):
    """Negative control: a packed model whose products are torch's own."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)

    made = packing.PackedModel(model)
    for layer in made.layers:
        layer.forward = types.MethodType(forward, layer)
    return made.model


@torch.inference_mode()
@pytest.mark.parametrize("layers", ["fused", "unfused"])
def test_logits_depend_on_no_other_tokens(model, layers, monkeypatch):
    if layers != "fused":
        monkeypatch.setattr("specdec_hf.runner.packed.decoder_layer.fuse", lambda module: False)
    mine = packing.PackedModel(model).model
    alone = logits_of(mine, [1] * 24)
    for sizes in ([24], [3, 20, 1], [5, 19]):
        assert torch.equal(logits_of(mine, sizes), alone)
    assert torch.equal(logits_of(mine, [24], rows=3)[1:2], alone)  # 72 rows


@pytest.mark.parametrize("width", [48, 100, 144])
def test_fused_layers_of_any_width_depend_on_no_other_tokens(width):
    made = build("llama", vocab_size=997, hidden_size=256, intermediate_size=width)
    mine = packing.PackedModel(made)
    assert mine.fused == 2
    with torch.inference_mode():
        assert torch.equal(logits_of(mine.model, [24]), logits_of(mine.model, [1] * 24))


@torch.inference_mode()
def test_drafts_of_any_number_change_no_bits(model):
    mine, start = packing.packed_model_of(model).model, 70
    alone = logits_of(mine, [35, 35])
    assert torch.equal(logits_of(mine, [70]), alone)
    runner = SpecRunner(mine, 1, start + 71)
    ids = prompts((start + 70,), vocab_size=997)["input_ids"]
    logits = [runner.forward(ids[:, :start], runner.lengths, 1)]
    chain = torch.arange(-1, 68)[None]
    logits.append(runner.forward_tree(ids[:, start:], runner.lengths.copy(), chain))
    assert torch.equal(torch.cat(logits, dim=1), alone)


@torch.inference_mode()
@pytest.mark.parametrize("part", ["products", "attention"])
def test_products_and_attention_of_torch_depend_on_other_tokens(part, monkeypatch):
    """Negative control. In float32, where they do on any machine."""
    model = build("llama", vocab_size=997, hidden_size=256, intermediate_size=640)
    wrong = with_torchs_products(model) if part == "products" else packing.PackedModel(model).model
    if part == "attention":
        monkeypatch.setattr(attention, "cached_attention", grouped)
    assert not torch.equal(logits_of(wrong, [24]), logits_of(wrong, [1] * 24))


def grouped(query, key, value, mask, scale):
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)


@REFUSED
def test_a_model_that_cannot_be_packed_says_why_once(change, reason):
    model = build("llama")
    change(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = decode(model, (9,))
    (found,) = (note for note in output.stats.notes if "own forwards" in note)
    assert reason in found
    assert output.stats.forwards == "own"
    with pytest.warns(UserWarning, match="runs its own forwards: .*" + reason) as caught:
        decode(model, (9,), compile=True)
    assert len(caught) == 1
    silent = decode(model, (9,), compile=False)
    assert silent.stats.packed is None
    assert torch.equal(silent.sequences, output.sequences)


class Other(torch.nn.Linear):
    """In the place of a library's."""


class Adapted(torch.nn.Module):
    """In the place of PEFT's, whose classes are called as those of PyTorch that they adapt."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer, self.scale = base_layer, 0.5

    def forward(self, x):
        return self.scale * self.base_layer(x)


def of_other_classes(model):
    for layer in model.model.layers:
        layer.mlp.up_proj.__class__ = Other


def adapted(model):
    kind = type("Linear", (Adapted,), {"__module__": "peft.lora"})
    model.lm_head = kind(model.lm_head)


WAY = "merge its adapters to pack them, with merge_and_unload() of PEFT"


@pytest.mark.parametrize(
    ("name", "change", "unpacked", "packed", "named"),
    [
        ("llama", of_other_classes, {"Other": 2}, 13, "2 Other"),
        ("llama", adapted, {"peft.lora.Linear": 1}, 14, f"1 peft.lora.Linear; {WAY}"),
        ("gpt2", lambda model: None, {"Conv1D": 8}, 1, "8 Conv1D"),
    ],
    ids=["subclass", "adapter", "Conv1D"],
)
def test_matrices_of_other_classes_stay_and_are_named(name, change, unpacked, packed, named):
    model = build(name)
    change(model)
    assert not packing.PackedModel(model).invariant
    stats = decode(model, (9,)).stats
    assert (stats.packed.unpacked, stats.packed.layers) == (unpacked, packed)
    end = f"matrices of other classes than torch.nn.Linear are not packed: {named}"
    assert any(note.endswith(end) for note in stats.notes)


@pytest.mark.filterwarnings("ignore")
def test_modules_that_quantise_by_the_whole_forward_are_the_cause_that_is_named():
    quantised = torch.ao.quantization.quantize_dynamic(
        build("llama"), {torch.nn.Linear}, dtype=torch.qint8
    )
    kind = "torch.ao.nn.quantized.dynamic.modules.linear.Linear"
    with pytest.raises(ValueError, match=f"Its 15 modules {kind} quantise what they read by the"):
        decode(quantised, (9,), drafter="prompt_lookup")
    assert decode(quantised, (9,)).stats.packed.layers == 0


def test_too_little_memory_is_said_and_packs_nothing(monkeypatch):
    model = build("llama")
    size = sum(layer.weight.nbytes for layer in packing.PackedModel(model).layers)
    gc.collect()
    for available, fits in ((2 * size, True), (2 * size - 1, False)):
        model = build("llama")
        monkeypatch.setattr(
            packing.psutil, "virtual_memory", lambda n=available: types.SimpleNamespace(available=n)
        )
        output = decode(model, (9,))
        assert (output.stats.packed.reason == "") == fits
    assert "packed weights would take" in output.stats.packed.reason
    assert "specdec_hf.pack_" in output.stats.notes[0]


def test_without_specdec_host_the_model_itself_runs(monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_host", None)
    stats = decode(build("llama"), (9,)).stats
    assert stats.forwards == "own"
    assert "its weights cannot be watched for changes: " in stats.notes[0]


def wrong(self, x):
    return torch.nn.functional.linear(x, self.weight, self.bias).flip(-1)


def test_wrong_packed_weights_are_found_and_the_model_itself_runs(monkeypatch, forgetful):
    model = build("llama")
    own = decode(model, (9,), compile=False)
    monkeypatch.setattr(LinearWithPackedCopy, "forward", wrong)
    output = decode(model, (9,))
    assert torch.equal(output.sequences, own.sequences)
    assert output.stats.packed.reason.startswith("packed weights differ: its logits differ")
    assert "packed weights differ" in output.stats.notes[0]
    assert output.stats.cache == "spec"


@CHANGES
def test_a_changed_model_gets_a_new_packed_model(change):
    model = build("llama")
    decode(model, (9,))
    before = packing.packed_model_of(model)
    assert packing.packed_model_of(model) is before
    torch.manual_seed(0)
    change(model)
    assert torch.equal(decode(model, (9,)).sequences, decode(model, (9,), compile=False).sequences)
    assert packing.packed_model_of(model) is not before


def test_the_model_is_as_before_and_its_packed_weights_go_with_it():
    model = build("llama", layers=1)
    packed = set(packed_linear._copies)
    with unchanged(model):
        decode(model, (9,), max_new_tokens=4)
    made = set(packed_linear._copies) - packed
    assert len(made) > 0
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not set(packed_linear._copies) & made


@pytest.mark.parametrize(
    "settings",
    [
        {"drafter": "layer_skip:1-1"},
        {"drafter": "early_exit:1"},
        {"drafter": "sparse_cache:budget=6,chunk=2,sinks=1,recent=2"},
        {"drafter": None, "num_beams": 2},
        {"drafter": None, "cache": "dynamic"},
        {"drafter": "prompt_lookup", "cache": "aligned"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_whatever_runs_the_model_runs_its_packed_model(settings, monkeypatch):
    model, ran = build("llama"), []
    own = decode(model, (9, 5), compile=False, **settings)
    decode(model, (9, 5), **settings)  # with the self-checks
    forward, linear = LinearWithPackedCopy.forward, torch.nn.Linear.forward
    monkeypatch.setattr(
        LinearWithPackedCopy, "forward", lambda self, x: ran.append("packed") or forward(self, x)
    )
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, x: ran.append("own") or linear(self, x)
    )
    packed = decode(model, (9, 5), **settings)
    assert packed.stats.forwards == "packed"
    assert set(ran) == {"packed"}
    assert torch.equal(packed.sequences, own.sequences)


@pytest.mark.parametrize("self_check", [True, False])
def test_a_packed_model_runs_under_autocast(self_check):
    model = build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        own = decode(model, (9,), compile=False, drafter=None)
        output = decode(model, (9,), drafter=None, self_check=self_check)
    assert output.stats.packed.reason == ""
    assert torch.equal(output.sequences, own.sequences)


def test_a_prompt_and_a_single_token_attend_by_their_masks():
    model = packing.packed_model_of(build("llama")).model
    runner = SpecRunner(model, 1, 100, ForwardPolicy(omits_mask=frozenset((FIRST, SINGLE))))
    ids = prompts((10,))["input_ids"]
    with torch.inference_mode():
        runner.forward(ids[:, :9], runner.lengths, 1)
        runner.forward(ids[:, 9:], runner.lengths, 1)
    assert runner.omitted == set()
