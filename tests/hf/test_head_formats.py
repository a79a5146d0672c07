"""Heads in the layouts of their publishers: read, drafting, written, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import Eagle3ChainDrafter, Eagle3Drafter, generate
from specdec_hf.heads.config import HeadConfig
from specdec_hf.heads.files import load_head, save_as_speculators, save_head
from support import hf_models, published_heads
from support.heads import head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here

LAYERS = 8  # so that the default layers are 2, 4 and 5
KINDS = ("authors", "specforge", "speculators")
READ = {"authors": (2, 4, 5), "specforge": (1, 3, 4), "speculators": (1, 3, 4)}


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=LAYERS)


def published(kind, target, folder, **fields):
    return getattr(published_heads, kind)(target, folder, **fields)


def drafts(target, head):
    """Of a greedy call: the tokens of each round's tree, and the text."""
    drafter = Eagle3Drafter(head)
    seen, propose = [], drafter.propose

    def recorded(history, limits):
        draft = propose(history, limits)
        seen.append(None if draft is None else draft.tokens.tolist())
        return draft

    drafter.propose = recorded
    out = generate(
        target, **hf_models.prompts((9, 4)), drafter=drafter, max_new_tokens=12, guard=False
    )
    return seen, out.tolist()


@pytest.mark.parametrize("drafter", [Eagle3Drafter, Eagle3ChainDrafter])
@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_drafts_and_text_stays_as_it_is(kind, drafter, target, tmp_path):
    folder = published(kind, target, tmp_path)
    inputs = hf_models.prompts((9, 4, 12))
    settings = {"max_new_tokens": 16, "do_sample": False}
    out = generate(
        target, **inputs, **settings, drafter=drafter(folder), guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.tolist() == target.generate(**inputs, **settings).tolist()
    assert out.stats.drafted > 0


def first_logits(target, folder, kind, monkeypatch):
    """Logits after a prompt, as the drafter of a folder computes them and as they must be."""
    prompt = hf_models.prompts((9,))["input_ids"]
    seen = []
    logits = "specdec_hf.drafters.heads.head_draft.HeadDraft._logits"
    monkeypatch.setattr(logits, lambda self, x: seen.append(self.head.logits(x)) or seen[-1])
    out = generate(target, prompt, drafter=Eagle3Drafter(folder), max_new_tokens=3, guard=False)
    text = out[:, : prompt.shape[1] + 1]
    states = target(text, output_hidden_states=True).hidden_states
    features = torch.cat([states[n] for n in READ[kind]], dim=-1)[:, :-1]
    tensors = load_file(folder / "model.safetensors")
    rows = tensors.get("embed_tokens.weight", target.get_input_embeddings().weight)
    other = kind == "speculators"
    want = published_heads.expected_logits(
        tensors, rows[text[:, 1:]], features, norm_before_residual=other,
        layer="layers.0" if other else "midlayer", **published_heads.layer_fields(target),
    )  # fmt: skip
    return seen[0][0, -1], want[0, -1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_computes_what_its_publisher_computes(kind, target, tmp_path, monkeypatch):
    """From the layers that each layout means, with its embeddings and its residual."""
    got, want = first_logits(target, published(kind, target, tmp_path), kind, monkeypatch)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("authors", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}),
        ("authors", {"rope_theta": 10000.0}),
        ("authors", {"norm_before_residual": True}),
        ("speculators", {"norm_before_residual": False}),
        ("speculators", {"eagle_aux_hidden_state_layer_ids": None}),
    ],
)
def test_a_wrong_reading_of_a_field_is_found(kind, fields, target, tmp_path, monkeypatch):
    """Negative control of the test above."""
    got, want = first_logits(target, published(kind, target, tmp_path, **fields), kind, monkeypatch)
    assert (got - want).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_head_is_written_back_as_it_was(kind, target, tmp_path):
    (tmp_path / "given").mkdir()
    folder = published(kind, target, tmp_path / "given")
    given, head = load_file(folder / "model.safetensors"), load_head(folder)
    if kind == "speculators":
        save_as_speculators(head, tmp_path / "made", target, torch.float32)
    else:
        save_head(head, tmp_path / "made", torch.float32)
    made = load_file(tmp_path / "made" / "model.safetensors")
    assert made.keys() == given.keys()
    assert all(torch.equal(x, given[name]) for name, x in made.items())
    read = load_head(tmp_path / "made")
    assert read.config.to_dict() == head.config.to_dict()
    if kind == "speculators":
        fields = json.loads((tmp_path / "made" / "config.json").read_text())
        assert fields.keys() == json.loads((folder / "config.json").read_text()).keys() | {
            "tie_word_embeddings"
        }


def test_a_head_trained_here_drafts_the_same_from_the_layout_of_speculators(target, tmp_path):
    head = head_for(target, range(3, 60), noise=0.02)
    save_as_speculators(head, tmp_path, target, torch.float32)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["embed_tokens.weight"].shape == (67, 32)
    assert tensors["lm_head.weight"].shape == (57, 32)
    assert not any(name.startswith("midlayer") for name in tensors)
    want = drafts(target, head)
    assert len(want[0]) > 3
    assert drafts(target, tmp_path) == want


def test_the_layers_are_written_in_both_spellings():
    config = HeadConfig.for_target(hf_models.tiny("llama"), 5, (1, 2)).to_dict()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert HeadConfig.from_dict(config).layers == (1, 2)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert HeadConfig.from_dict(config).layers == (1, 2)


def renamed(config, tensors):
    tensors["layers.0.mlp.gate.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")


def without(name):
    return lambda config, tensors: config.pop(name)


def with_(name, value):
    return lambda config, tensors: config.update({name: value})


def inside(name, value):
    return lambda config, tensors: config["transformer_layer_config"].update({name: value})


def narrow(config, tensors):
    config["target_hidden_size"] = 48
    tensors["fc.weight"] = torch.zeros(32, 144)
    del tensors["embed_tokens.weight"]


def other_marks(config, tensors):
    tensors["t2d"] = tensors["t2d"].roll(1)


def biased(config, tensors):
    tensors["layers.0.self_attn.q_proj.bias"] = torch.zeros(48)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (renamed, r"lacks midlayer.mlp.gate_proj.weight and holds midlayer.mlp.gate.weight"),
        (biased, "holds midlayer.self_attn.q_proj.bias, which no EAGLE-3 head has"),
        (narrow, "lacks embed_tokens.weight"),
        (other_marks, "t2d of .* must mark the tokens of d2t and no others"),
        (with_("speculators_model_type", "mtp"), "speculators_model_type .* eagle3, got 'mtp'"),
        (without("transformer_layer_config"), "must hold transformer_layer_config"),
        (without("norm_before_residual"), "must hold norm_before_residual"),
        (with_("fc_norm", True), "fc_norm of a head must be False, got True"),
        (with_("norm_output", True), "norm_output of a head must be False, got True"),
        (inside("model_type", "qwen3"), "model_type of a head must be llama, got 'qwen3'"),
        (inside("hidden_act", "gelu"), "hidden_act of a head must be silu, got 'gelu'"),
        (with_("eagle_aux_hidden_state_layer_ids", 3), "layer_ids must list integers, got 3"),
        (with_("eagle_aux_hidden_state_layer_ids", [-1]), "at least 0, got -1"),
        (with_("eagle_aux_hidden_state_layer_ids", [1, 2]), r"must be \[32, 64\], got \[32, 96\]"),
    ],
)
def test_a_damaged_head_of_speculators_is_refused_by_name(damage, message, target, tmp_path):
    published_heads.speculators(target, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    damage(config, tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_head(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(name, target, tmp_path):
    published_heads.authors(target, tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"is a pickle, .* convert it") as refusal:
        load_head(tmp_path)
    command = str(refusal.value).split("where you trust it: ")[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        import safetensors.torch  # noqa: PLC0415  # the command that is printed needs the name

        exec(command, {"torch": torch, "safetensors": safetensors})
    assert load_head(tmp_path).tokens.tolist() == list(published_heads.TOKENS)


def test_a_head_without_layers_needs_a_target_of_enough(tmp_path):
    few = hf_models.build("llama", layers=6)
    folder = published_heads.authors(few, tmp_path)
    with pytest.raises(ValueError, match="reads 3 layers of a model of 7 or more, got 6"):
        generate(few, **hf_models.prompts((4,)), drafter=Eagle3Drafter(folder))
