"""Heads in the package: each serves the weights that it was trained for and no others."""

import copy
import json
import re

import pytest
import torch
from specdec_hf import generate
from specdec_hf.drafters.trees.auto import AutoDrafter
from specdec_hf.heads import shipped
from specdec_hf.heads.files import load_head, save_head
from support import heads, hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.sources import ROOT

MOST_BYTES = 12_000_000
SHIPPED = shipped.shipped_heads()


@pytest.fixture
def target():
    return hf_models.build("llama", vocab_size=11)


@pytest.fixture
def head(target, tmp_path, monkeypatch):
    """The folder of a head that is shipped for the target."""
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    folder = tmp_path / "shipped" / "tiny"
    save_head(heads.head_for(target, noise=0.1), folder, torch.float32)
    shipped.record_target(folder, target)
    return folder


def run(target):
    drafter = AutoDrafter()
    out = generate(
        target, **hf_models.prompts((9, 4), vocab_size=11), drafter=drafter, max_new_tokens=12,
        guard=False, do_sample=False, return_dict_in_generate=True,
    )  # fmt: skip
    return drafter.chosen, out


@pytest.mark.parametrize("trained", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_head_is_found_for_copies_of_its_target(trained, dtype, target, head):
    shipped.record_target(head, copy.deepcopy(target).to(trained))
    assert shipped.head_for(copy.deepcopy(target).to(dtype)) == head


def test_drafter_auto_takes_it(target, head):
    chosen, out = run(target)
    assert chosen.startswith("eagle3, ")
    plain = target.generate(
        **hf_models.prompts((9, 4), vocab_size=11), max_new_tokens=12, do_sample=False
    )
    assert out.sequences.tolist() == plain.tolist()


@torch.no_grad()
def one_number(target):
    target.model.layers[1].mlp.down_proj.weight[3, 5] *= 1.01


@torch.no_grad()
def rows_change_places(target):
    weight = target.model.embed_tokens.weight
    weight.copy_(weight.flip(0))


@torch.no_grad()
def other_memory(target):
    target.lm_head.weight.data = target.lm_head.weight * 2


def another_parameter(target):
    target.model.adapter = torch.nn.Parameter(torch.ones(2))


def not_in_memory(target):
    target.to("meta")


@pytest.mark.parametrize(
    "change", [one_number, rows_change_places, other_memory, another_parameter, not_in_memory]
)
def test_a_target_of_other_weights_is_not_served(change, target, head):
    assert shipped.head_for(target) == head
    change(target)
    assert shipped.head_for(target) is None


def test_a_target_of_the_same_shape_is_not_served(head):
    chosen, _ = run(hf_models.build("llama", seed=1, vocab_size=11))
    assert "eagle3" not in chosen


def test_no_weights_are_read_of_a_target_of_other_sizes(head, monkeypatch):
    monkeypatch.setattr(shipped, "digest_of", None)
    assert shipped.head_for(hf_models.build("llama", vocab_size=13)) is None


def test_weights_are_read_once(target, head, monkeypatch):
    assert shipped.head_for(target) == head
    monkeypatch.setattr(shipped, "_digest", None)
    assert shipped.head_for(target) == head


def test_a_head_beside_the_target_comes_first(target, head, tmp_path):
    target.config._name_or_path = str(tmp_path)
    beside = tmp_path / shipped.HEAD_FOLDER
    assert shipped.head_for(target) == head
    save_head(heads.head_for(target), beside)
    assert shipped.head_for(target) == beside


def no_target(folder):
    config = json.loads((folder / "config.json").read_text())
    del config[shipped.TARGET]
    (folder / "config.json").write_text(json.dumps(config))


def no_sizes(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({shipped.TARGET: config[shipped.TARGET]}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").write_text("{"), r"tiny.config\.json"),
        (no_target, r"tiny.config\.json must hold target_digest, got None"),
        (no_sizes, r"config\.json of a head must hold vocab_size"),
        (lambda folder: (folder / "model.safetensors").unlink(), "tiny holds no head"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"0" * 20), "tiny.model"),
    ],
    ids=["no JSON", "no target", "no sizes", "no weights", "damaged weights"],
)
def test_a_damaged_head_is_refused_by_name(damage, message, target, head):
    damage(head)
    with pytest.raises(ValueError, match=message):
        run(target)


def test_a_target_without_numbers_cannot_be_recorded(target, head):
    with pytest.raises(ValueError, match="weights of LlamaForCausalLM must be plain tensors"):
        shipped.record_target(head, target.to("meta"))


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_what_is_shipped_is_small_and_complete(folder):
    assert (folder / "model.safetensors").stat().st_size <= MOST_BYTES
    assert folder.name in (folder / "README.md").read_text()
    assert len(json.loads((folder / "config.json").read_text())[shipped.TARGET]) == 64
    load_head(folder)


def test_the_page_gives_the_command_of_the_shipped_head():
    assert [folder.name for folder in SHIPPED] == ["SmolLM2-135M-Instruct"]
    card = (SHIPPED[0] / "README.md").read_text()
    (command,) = re.findall(r"Command: `(.*)`", card)
    assert f"\n{command}\n" in (ROOT / "docs" / "heads.md").read_text()


@pytest.mark.model
def test_the_embedded_model_has_a_head():
    model = hf_models.smollm()[0]
    name = "SmolLM2-135M-Instruct"
    found = [shipped.head_for(one) for one in (model, copy.deepcopy(model).bfloat16())]
    assert [folder.name for folder in found] == [name, name]
