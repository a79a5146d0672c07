"""Heads in the package: each serves the weights it was trained for, and others that are close."""

import copy
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from hf.published_heads import Reference
from specdec_hf import pack_
from specdec_hf.cli.sources import EMBEDDED_NAME
from specdec_hf.heads import shipped
from specdec_hf.heads.auto import BENEFIT_OF_HEAD, AutoDrafter
from specdec_hf.heads.eagle3.files import load_head, save_head
from specdec_hf.heads.sample import SAMPLE, Sample, agreement_of
from support import hf_models


@pytest.fixture
def target():
    return hf_models.build("llama", vocab_size=11)


@pytest.fixture
def head(target, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "SHIPPED", tmp_path / "shipped")
    folder = tmp_path / "shipped" / "tiny"
    save_head(hf_models.head_for(target, noise=0.1), folder, torch.float32)
    shipped.record_target(folder, target)
    return folder


@torch.no_grad()
def one_number(target):
    target.model.layers[1].mlp.down_proj.weight[3, 5] *= 1.01


@pytest.mark.parametrize(
    "change",
    [
        one_number,
        lambda target: target.lm_head.weight.copy_(target.lm_head.weight.flip(0)),
        lambda target: setattr(target.lm_head.weight, "data", target.lm_head.weight * 2),
        lambda target: setattr(target.model, "adapter", torch.nn.Parameter(torch.ones(2))),
        lambda target: target.to("meta"),
    ],
    ids=["number", "order of rows", "memory", "parameter", "not in memory"],
)
def test_a_target_of_other_weights_is_not_served(change, target, head):
    assert shipped.find_head(target).folder == head
    with torch.no_grad():
        change(target)
    assert shipped.find_head(target).folder is None


@pytest.mark.parametrize("name", ["llama", "qwen2"])  # the second ties its output layer
def test_a_target_that_was_packed_in_place_keeps_its_digest(name):
    model = hf_models.build(name, tie_word_embeddings=name == "qwen2")
    before = shipped.digest_of(model)
    pack_(model)
    assert shipped.digest_of(model) == before


def test_a_head_beside_the_target_comes_first(target, head, tmp_path):
    target.config._name_or_path = str(tmp_path)
    beside = tmp_path / shipped.HEAD_FOLDER
    assert shipped.find_head(target).folder == head
    save_head(hf_models.head_for(target), beside)
    assert shipped.find_head(target).folder == beside


def test_what_is_shipped_is_small_and_made_by_the_command_of_the_page():
    (folder,) = shipped.shipped_heads()
    load_head(folder)
    assert (folder / "model.safetensors").stat().st_size <= 12_000_000
    assert shipped.target_name(folder) == EMBEDDED_NAME == "SmolLM2-135M-Instruct (Q4_1)"
    (command,) = re.findall(r"Command: `(.*)`", (folder / "README.md").read_text())
    page = (Path(__file__).parents[2] / "docs" / "heads.md").read_text().replace(" \\\n  ", " ")
    assert f"\n{command}\n" in page


TEXT = Sample([6, 10, 5, 6, 9, *[5] * 11, 7, *[5] * 11, 8, *[5] * 4, 8, 5, 8, 8, 5, 8, 8, 6], 4)


@pytest.fixture
def trained_head(target, head):
    """It is shipped after a few steps on a text, which is beside it."""
    made = hf_models.learnt(target, TEXT.tokens, steps=1, rate=0.01)
    save_head(made, head, torch.float32)
    config = json.loads((head / "config.json").read_text()) | {shipped.TARGET_NAME: "tiny (Q4_1)"}
    (head / "config.json").write_text(json.dumps(config))
    shipped.record_target(head, target, TEXT)
    return head


SERVED = (
    r"the head that is shipped for tiny \(Q4_1\) drafts for other weights: it agrees with {} of a "
    "sample"
)
REFUSED = (
    r"a head is shipped for tiny \(Q4_1\), which has this model's sizes but other weights; {}so it "
    "does not draft"
)


def test_close_weights_are_served_and_the_text_is_theirs(target, trained_head):
    close, drafter, states = hf_models.with_noise(target, 0.02).bfloat16(), AutoDrafter(), []
    drafter.begin = lambda call: states.append(AutoDrafter.begin(drafter, call)) or states[0]
    out = hf_models.decode_as_generate(close, drafter=drafter)
    assert states[0].drafter.name.startswith("eagle3, ")
    assert states[0].expected_benefit == BENEFIT_OF_HEAD
    assert any(re.fullmatch(SERVED.format(r"8\d%"), note) for note in out.stats.remarks)


@pytest.mark.parametrize("measured", [True, False])
def test_weights_that_disagree_or_cannot_be_compared_have_no_head_and_the_call_says_so(
    measured, trained_head
):
    drafter, figure = AutoDrafter(), r"it agrees with \d% of a sample only, "
    if not measured:
        (trained_head / SAMPLE).unlink()
    other = hf_models.build("llama", 1, vocab_size=11)
    out = hf_models.decode(other, (9, 4), drafter=drafter)
    assert not drafter.has_head(other)
    note = REFUSED.format(figure if measured else "")
    assert any(re.fullmatch(note, one) for one in out.stats.remarks)


def test_the_agreement_is_that_of_the_first_drafts(target, trained_head):
    close, tokens = hf_models.with_noise(target, 0.02), list(TEXT.tokens)
    reference = Reference("eagle3", close, trained_head)
    choices = close(torch.tensor([tokens])).logits[0].argmax(dim=-1)
    ends = range(TEXT.answer, len(tokens) + 1)
    hits = [int(reference.logits(tokens[:end], []).argmax()) == choices[end - 1] for end in ends]
    share = sum(hits) / len(ends)
    assert agreement_of(load_head(trained_head), close, TEXT) == pytest.approx(float(share))


def test_the_check_leaves_no_trace_and_is_made_once_for_the_same_weights(
    target, trained_head, monkeypatch
):
    close = hf_models.with_noise(target, 0.02).train()

    def state():
        hooks = [list(module._forward_hooks) for module in close.modules()]
        return hooks, close.model.training, torch.get_rng_state().tolist()

    before = state()
    found = shipped.find_head(close)
    assert found.folder == trained_head
    assert state() == before
    with monkeypatch.context() as patched:
        patched.setattr("specdec_hf.heads.sample.agreement_of", None)
        assert shipped.find_head(close) == found
        assert shipped.find_head(target) == (trained_head, None), "its own weights need none"
    close.load_state_dict(hf_models.build("llama", seed=1, vocab_size=11).state_dict())
    assert shipped.find_head(close).folder is None


def test_of_two_heads_for_other_weights_the_second_may_serve(target, trained_head, monkeypatch):
    second = trained_head.with_name("tiny2")
    shutil.copytree(trained_head, second)
    shares = [shipped.LEAST_AGREEMENT - 0.01, shipped.LEAST_AGREEMENT]
    monkeypatch.setattr("specdec_hf.heads.sample.agreement_of", lambda *_: shares.pop(0))
    assert shipped.find_head(hf_models.with_noise(target, 0.02)).folder == second


@torch.no_grad()
def rounded_otherwise(model):
    """A copy whose weights differ by the rounding of Q4_1, which has 16 levels in a block of 32."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    for weight in copied.parameters():
        if weight.ndim == 2:
            blocks = weight.view(-1, 32)
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
            blocks += step * (torch.rand(blocks.shape, generator=generator) - 0.5)
    return copied


@pytest.mark.full  # of the model's own sizes, which take a minute
@pytest.mark.model
def test_the_embedded_model_and_its_weights_before_rounding_have_the_head_and_others_none():
    model = hf_models.smollm()[0]
    for own in (model, copy.deepcopy(model).bfloat16()):
        assert shipped.find_head(own) == (shipped.shipped_heads()[0], None)
    close = shipped.find_head(rounded_otherwise(model).bfloat16())
    assert "SmolLM2-135M-Instruct (Q4_1) drafts for other weights: it agrees with 4" in close.note
    with torch.random.fork_rng(devices=[]):
        random = type(model)(model.config).eval()
    other = shipped.find_head(random)
    assert other.folder is None
    assert "it agrees with 0% of a sample only, so it does not draft" in other.note
