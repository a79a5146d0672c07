"""Heads: what they draft in a call, and their files."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import generate
from specdec_hf.drafters.heads import head_draft
from specdec_hf.drafters.heads.eagle3 import Eagle3Drafter
from specdec_hf.drafters.heads.eagle3_chain import Eagle3ChainDrafter
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.heads.files import load_head, save_head
from specdec_hf.trees.layouts import EagleTree, TrieTree
from support import hf_models
from support.heads import expected_logits, head_folder, head_for
from support.hf_models import one_thread  # noqa: F401  # autouse here

from specdec_kernels import tree_attention

DRAFTERS = [Eagle3Drafter, Eagle3ChainDrafter]


class Recorded(HeadDraft):
    """Keeps what was committed and drafted, with the logits that followed, of each sequence."""

    seen: list

    def catch_up(self, history):
        logits = super().catch_up(history)
        self.committed = [
            row[:n].tolist() if known else None
            for row, n, known in zip(
                history.tokens, history.lengths, self.room(history, 1) > 0, strict=True
            )
        ]
        self.paths = [[[]] for _ in self.committed]
        self._note([0] * len(self.committed), logits[:, None])
        return logits

    def feed(self, tokens, lengths, parents):
        logits = super().feed(tokens, lengths, parents)
        first = parents.shape[1] - tokens.shape[1]
        for b, paths in enumerate(self.paths):
            for m in range(tokens.shape[1]):
                above = paths[parents[b, first + m] + 1]
                token = int(tokens[b, m])
                paths.append(None if above is None or token < 0 else [*above, token])
        self._note([first + 1] * len(self.paths), logits)
        return logits

    def _note(self, firsts, logits):
        for b, first in enumerate(firsts):
            for m, row in enumerate(logits[b]):
                path = self.paths[b][first + m]
                if self.committed[b] is not None and path is not None:
                    self.seen.append((self.committed[b], path, row))


def drafted(monkeypatch, kind, target, head, lengths=(9, 4, 12), **kwargs):
    """What a head drafted in a call: committed tokens, drafts, and the logits after them."""
    seen = []
    monkeypatch.setattr(Recorded, "seen", seen, raising=False)
    module = f"specdec_hf.drafters.heads.{kind.name}"
    monkeypatch.setattr(f"{module}.HeadDraft", Recorded)
    inputs = hf_models.prompts(lengths, vocab_size=target.config.vocab_size)
    generate(target, **inputs, drafter=kind(head), max_new_tokens=8, guard=False, **kwargs)
    return seen


def largest_difference(target, head, seen):
    differences = []
    for committed, path, row in seen[:: 1 + len(seen) // 64]:
        want = expected_logits(target, head, committed, path)
        got = row[head.tokens] if len(row) != len(want) else row
        differences.append(float((got - want).abs().max()))
    assert len(seen) > 15
    assert {len(path) for _, path, _ in seen} >= {0, 1, 2}
    return max(differences)


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
@pytest.mark.parametrize("kind", DRAFTERS)
def test_drafting_equals_one_forward_over_the_whole_text(kind, lengths, monkeypatch):
    """Also below nodes of a tree, each of which sees its own ancestors only."""
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    seen = drafted(monkeypatch, kind, target, head, lengths)
    assert largest_difference(target, head, seen) < 1e-4


@pytest.mark.parametrize(
    "arguments", [{"cache": "aligned"}, {"cache": "dynamic"}, {"fixed_width": 8}], ids=str
)
def test_the_states_are_those_of_other_forwards_too(arguments, monkeypatch):
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    seen = drafted(monkeypatch, Eagle3ChainDrafter, target, head, **arguments)
    assert largest_difference(target, head, seen) < 1e-4


def test_a_mask_without_the_tree_is_found(monkeypatch):
    """Negative control of the test above."""

    def causal(parents, lengths, **kwargs):
        chain = torch.arange(-1, parents.shape[1] - 1).expand_as(parents)
        return tree_attention(parents, lengths, **kwargs)._replace(
            mask=tree_attention(chain, lengths, **kwargs).mask
        )

    monkeypatch.setattr(head_draft, "tree_attention", causal)
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    seen = drafted(monkeypatch, Eagle3Drafter, target, head)
    assert largest_difference(target, head, seen) > 1e-2


@pytest.mark.parametrize("kind", DRAFTERS)
def test_a_cache_that_was_given_leaves_the_text_as_it_is(kind):
    """The head then knows the states of later tokens only."""
    target = hf_models.build("llama", vocab_size=7)
    inputs = hf_models.prompts((9,), vocab_size=7)
    settings = {"max_new_tokens": 16, "do_sample": False}
    past = target(inputs["input_ids"][:, :6]).past_key_values
    out = generate(
        target, **inputs, **settings, past_key_values=past, drafter=kind(head_for(target)),
        guard=False, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.sequences.tolist() == target.generate(**inputs, **settings).tolist()
    assert out.stats.drafted > 0


def test_hidden_states_are_returned_as_without_a_head():
    """The head reads some of the layers that the caller gets."""
    target = hf_models.build("llama", vocab_size=7)
    inputs = hf_models.prompts((9, 4), vocab_size=7)
    settings = {
        "max_new_tokens": 6, "do_sample": False, "output_hidden_states": True,
        "return_dict_in_generate": True,
    }  # fmt: skip
    plain = generate(target, **inputs, **settings, drafter=None)
    out = generate(target, **inputs, **settings, drafter=Eagle3Drafter(head_for(target)))
    assert len(out.hidden_states) == len(plain.hidden_states) == 6
    for got, want in zip(out.hidden_states, plain.hidden_states, strict=True):
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_a_head_drafts_in_the_dtype_of_its_target_and_stays_as_it_is():
    target = hf_models.build("llama", vocab_size=7).to(torch.bfloat16)
    head = head_for(hf_models.build("llama", vocab_size=7))
    before = {name: x.clone() for name, x in head.state_dict().items()}
    for kind in DRAFTERS:
        out = generate(
            target, **hf_models.prompts((9, 4), vocab_size=7), drafter=kind(head),
            max_new_tokens=8, guard=False, return_dict_in_generate=True,
        )  # fmt: skip
        assert out.stats.drafted > 0
    assert all(torch.equal(x, before[name]) for name, x in head.state_dict().items())


def test_a_head_is_merged_with_copied_text_in_one_tree():
    """It reads the states of what was committed, whoever drafted it."""
    target = hf_models.build("llama", vocab_size=7)
    inputs = hf_models.prompts((9, 4, 12), vocab_size=7)
    settings = {"max_new_tokens": 24, "do_sample": False}
    out = generate(
        target, **inputs, **settings, guard=False, return_dict_in_generate=True,
        drafter=[Eagle3Drafter(head_for(target), EagleTree(2, 3, 5)), "prompt_lookup"],
        tree=TrieTree(2, 3, 8),
    )  # fmt: skip
    assert out.sequences.tolist() == target.generate(**inputs, **settings).tolist()
    assert out.stats.accepted > 0


def test_a_head_inside_a_cascade_is_refused():
    target = hf_models.build("llama", vocab_size=7)
    drafter = [hf_models.with_noise(target, 0.2), Eagle3ChainDrafter(head_for(target))]
    with pytest.raises(ValueError, match="must set rolls_back = True"):
        generate(target, **hf_models.prompts((4,), vocab_size=7), drafter=drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 9}, "a vocabulary of 7, got 9"),
        ({"layers": 1}, "reads the states after 2 layers, and the model has 1"),
    ],
)
def test_another_target_is_refused(change, message):
    head = head_for(hf_models.build("llama", vocab_size=7))
    other = hf_models.build("llama", **{"vocab_size": 7, **change})
    inputs = hf_models.prompts((4,), vocab_size=7)
    with pytest.raises(ValueError, match=message):
        generate(other, **inputs, drafter=Eagle3Drafter(head))


def test_what_is_no_head_is_refused():
    with pytest.raises(
        TypeError, match="head must be Eagle3Head or the folder of such a head, got int"
    ):
        Eagle3Drafter(3)


# Files.


def test_a_head_is_read_back_as_it_was_written(tmp_path):
    head = head_for(hf_models.tiny("llama"), range(3, 40))
    save_head(head, tmp_path, torch.float32)
    read = load_head(tmp_path)
    assert read.config.to_dict() == head.config.to_dict()
    assert read.tokens.tolist() == head.tokens.tolist()
    state = head.state_dict()
    assert read.state_dict().keys() == state.keys()
    assert all(torch.equal(x, state[name]) for name, x in read.state_dict().items())
    assert not read.own_lm_head


def test_an_output_matrix_of_its_own_is_kept(tmp_path):
    head = head_for(hf_models.tiny("llama"))
    head.lm_head, head.own_lm_head = head.lm_head + 1, True
    save_head(head, tmp_path, torch.float32)
    read = load_head(tmp_path)
    assert read.own_lm_head
    assert torch.equal(read.lm_head, head.lm_head)


def test_the_names_are_the_published_ones(tmp_path):
    path = head_folder(hf_models.tiny("llama"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    assert set(tensors) == {
        "fc.weight", "norm.weight", "d2t", "t2d", "midlayer.hidden_norm.weight",
        "midlayer.input_layernorm.weight", "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{x}_proj.weight" for x in "qkvo"),
        *(f"midlayer.mlp.{x}_proj.weight" for x in ("gate", "up", "down")),
    }  # fmt: skip
    assert tensors["t2d"].sum() == len(tensors["d2t"])
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]


def damaged(**changes):
    """Replaces tensors of a head's file; None takes one away."""

    def damage(path):
        tensors = load_file(path / "model.safetensors")
        for name, value in changes.items():
            tensors.pop(name.replace("__", "."), None)
            if value is not None:
                tensors[name.replace("__", ".")] = value
        save_file(tensors, path / "model.safetensors")

    return damage


def reconfigured(name, value):
    def damage(path):
        config = json.loads((path / "config.json").read_text())
        config.pop(name)
        if value is not None:
            config[name] = value
        (path / "config.json").write_text(json.dumps(config))

    return damage


def pickled(path):
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damaged(fc__weight=None), "lacks fc.weight"),
        (damaged(medusa=torch.zeros(1)), "holds medusa, which no EAGLE-3 head has"),
        (damaged(fc__weight=torch.zeros(3, 2)), r"fc.weight .* must be \[32, 96\], got \[3, 2\]"),
        (
            damaged(d2t=torch.zeros(66, dtype=torch.int64) + 5),
            r"d2t must lead to .* got 5 to 70, 66 of 66",
        ),
        (pickled, "is a pickle, which may run any code when it is read; convert it"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda path: (path / "model.safetensors").write_text("x"), "cannot read .*safetensors"),
        (lambda path: (path / "config.json").unlink(), "cannot read a head's .*config.json"),
        (reconfigured("hidden_size", None), "must hold hidden_size"),
        (reconfigured("hidden_size", "32"), "hidden_size must be an integer, got '32'"),
        (reconfigured("num_hidden_layers", 2), "num_hidden_layers of a head must be 1, got 2"),
    ],
)
def test_a_damaged_head_is_refused_by_name(damage, message, tmp_path):
    path = head_folder(hf_models.tiny("llama"), tmp_path)
    damage(path)
    with pytest.raises(ValueError, match=message):
        load_head(path)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_angles_that_depend_on_the_longest_text_are_those_of_the_text(kind, monkeypatch):
    """A table for places beyond the text would turn all of them by other angles."""
    target = hf_models.build("llama", layers=4)
    half = target.config.hidden_size // target.config.num_attention_heads // 2
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * half, "long_factor": [8.0] * half,
            "original_max_position_embeddings": 64,
        }  # fmt: skip
    shaped = copy.deepcopy(target)
    shaped.config.rope_parameters = rope
    shaped.config.max_position_embeddings = 64
    head = head_for(shaped, noise=0.05).requires_grad_(False)
    seen = drafted(monkeypatch, Eagle3ChainDrafter, target, head, do_sample=False)
    assert largest_difference(target, head, seen) < 1e-4
    # Negative control: a table of more places than the text has.
    monkeypatch.setattr("specdec_hf.drafters.heads.head_draft.NO_TABLE", ())
    seen = drafted(monkeypatch, Eagle3ChainDrafter, target, head, do_sample=False)
    assert largest_difference(target, head, seen) > 1e-3
