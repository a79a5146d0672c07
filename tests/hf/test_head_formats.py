"""Heads in the layouts of their publishers: read, drafting, written, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from specdec_hf import Eagle3Drafter, generate
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_as_speculators, save_head
from support import hf_models, published_heads
from support.hf_models import one_thread  # noqa: F401  # autouse here

LAYERS = 8  # so that the default layers are 2, 4 and 5
KINDS = ("authors", "specforge", "speculators")
READ = {"authors": (2, 4, 5), "specforge": (1, 3, 4), "speculators": (1, 3, 4)}


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=LAYERS)


def published(kind, target, folder, **fields):
    return getattr(published_heads, kind)(target, folder, **fields)


def first_logits(target, folder, kind, monkeypatch):
    """Logits after a prompt, as the drafter of a folder computes them and as they must be."""
    prompt = hf_models.prompts((9,))["input_ids"]
    seen = []
    logits = "specdec_hf.heads.eagle3.drafter.HeadDraft._logits"
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
        ("authors", {"norm_before_residual": True}),
        ("speculators", {"norm_before_residual": False}),
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


def test_the_layers_are_written_in_both_spellings():
    config = HeadConfig.for_target(hf_models.tiny("llama"), 5, (1, 2)).to_dict()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert HeadConfig.from_dict(config).layers == (1, 2)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert HeadConfig.from_dict(config).layers == (1, 2)
