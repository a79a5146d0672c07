"""Heads in the layouts of their publishers: read, drafting, written, and refused."""

import json

import pytest
import torch
from safetensors.torch import load_file
from specdec_hf import Eagle3Drafter, EagleChainDrafter, generate
from specdec_hf.heads.eagle import load_eagle, save_eagle
from specdec_hf.heads.eagle3.config import HeadConfig
from specdec_hf.heads.eagle3.files import load_head, save_as_speculators, save_head
from support import hf_models, published_heads
from support.heads import head_folder

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
    logits = "specdec_hf.heads.pairs.draft.HeadDraft._logits"
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


EAGLE_FIELDS = ({}, {"bias": False}, {"qkv_bias": True})


def eagle_states(target, folder, monkeypatch):
    """Hidden states of the first chain that a head drafts, and what they must be."""
    prompt, seen = hf_models.prompts((9,))["input_ids"], []
    states = "specdec_hf.heads.pairs.draft.HeadDraft._logits"
    monkeypatch.setattr(states, lambda self, x: seen.append(x) or self._in_vocabulary(
        self._step.logits(x)))  # fmt: skip
    drafter, drafts = EagleChainDrafter(folder), []
    propose = drafter.propose

    def proposed(history, limits):
        drafts.append((history.tokens[0, : history.lengths[0]].tolist(), propose(history, limits)))
        return drafts[-1][1]

    drafter.propose = proposed
    generate(target, prompt, drafter=drafter, max_new_tokens=6, guard=False, gamma=3)
    text, draft = drafts[0]
    tokens = torch.tensor([text + draft.tokens[0, :2].tolist()])
    final = target(tokens[:, : len(text)], output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(target.lm_head(final), target(tokens[:, : len(text)]).logits)
    rows = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    features = final[:, :-1]
    want = []
    for count in range(3):  # each draft reads the state that the head gave before it
        embeddings = rows[tokens[:, 1 : len(text) + count]]
        out = published_heads.expected_eagle_states(target, folder, embeddings, features)
        want.append(out[0, -1])
        features = torch.cat([features, out[:, -1:]], dim=1)
    return torch.stack([x[0, -1] for x in seen[:3]]), torch.stack(want)


@pytest.mark.parametrize("fields", EAGLE_FIELDS, ids=str)
def test_a_head_of_the_first_eagle_computes_what_its_authors_compute(
    fields, target, tmp_path, monkeypatch
):
    folder = published_heads.eagle(target, tmp_path, **fields)
    got, want = eagle_states(target, folder, monkeypatch)
    assert want.std() > 0.5
    torch.testing.assert_close(got, want, atol=1e-4 * float(want.abs().max()), rtol=0)


@pytest.mark.parametrize("fields", EAGLE_FIELDS, ids=str)
def test_a_head_of_the_first_eagle_is_written_back_as_it_was(fields, target, tmp_path):
    folder = published_heads.eagle(target, tmp_path / "given", **fields)
    head = load_eagle(folder)
    save_eagle(head, tmp_path / "made", torch.float32)
    given, made = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "made"))
    assert made.keys() == given.keys() - {published_heads.FREQUENCIES}
    assert all(torch.equal(x, given[name]) for name, x in made.items())
    assert load_eagle(tmp_path / "made").config.to_dict() == head.config.to_dict()


@pytest.mark.parametrize(
    ("load", "publish", "message"),
    [
        (load_eagle, "authors", "draft_vocab_size: it belongs to a head of EAGLE-3, .* eagle3 re"),
        (load_eagle, "speculators", "belongs to a head of the library speculators"),
        (load_head, "eagle", "must hold draft_vocab_size; heads of the first EAGLE, which drafter"),
    ],
)
def test_a_head_of_the_other_eagle_is_refused_by_name(load, publish, message, target, tmp_path):
    folder = published(publish, target, tmp_path)
    if publish == "speculators":
        config = json.loads((folder / "config.json").read_text())
        del config["draft_vocab_size"]
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_the_layers_are_written_in_both_spellings():
    config = HeadConfig.for_target(hf_models.tiny("llama"), 5, (1, 2)).to_dict()
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]
    assert HeadConfig.from_dict(config).layers == (1, 2)
    del config["eagle_aux_hidden_state_layer_ids"]
    assert HeadConfig.from_dict(config).layers == (1, 2)


def test_the_state_before_the_final_norm_is_refused_and_the_one_after_it_is_not(tmp_path):
    """Only training here writes heads that read the state after the norm, and it says so."""
    target, prompts = hf_models.tiny("llama"), hf_models.prompts((4,))
    folder = head_folder(target, tmp_path)
    plain = generate(target, **prompts, drafter=None, max_new_tokens=4)
    options = {**prompts, "drafter": f"eagle3_chain:{folder}", "max_new_tokens": 4}
    assert torch.equal(generate(target, **options), plain)
    config = json.loads((folder / "config.json").read_text())
    assert max(config["eagle_aux_hidden_state_layer_ids"]) == target.config.num_hidden_layers
    assert config.pop("final_state_after_norm")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"states after 2 layers, and must read .* model's 2"):
        generate(target, **options)
