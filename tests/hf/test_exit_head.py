"""An early exit with a trained norm and projection: drafts, files and training."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec_hf import EarlyExitDrafter, ExitHeadDrafter, generate
from specdec_hf.heads.exit import ExitConfig, ExitHead, load_exit
from specdec_hf.heads.training.pipeline import Pipeline, Progress, TrainingSettings
from specdec_hf.heads.training.unrolled import unroll
from support import hf_models
from support.cli_models import END, tokenizer
from support.heads import exit_folder, exit_head, text_batch
from support.hf_models import one_thread  # noqa: F401  # autouse here


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=4)


def recorded(target, drafter):
    """The text of a greedy call, and what was drafted: its tokens and logits, round by round."""
    seen, propose = [], drafter.propose

    def proposed(history, gamma):
        draft = propose(history, gamma)
        if draft is not None:
            text = history.tokens[0, : history.lengths[0]].tolist()
            seen.append((text, draft.tokens[0].tolist(), drafter._draft.hidden))
        return draft

    drafter.propose = proposed
    out = generate(
        target, **hf_models.prompts((9,)), drafter=drafter, max_new_tokens=14, guard=False, gamma=3
    )
    assert len(seen) > 2
    return out, seen


def test_the_drafts_are_those_of_the_trained_exit(target, tmp_path):
    head = load_exit(exit_folder(target, tmp_path))
    for text, drafts, _ in recorded(target, ExitHeadDrafter(head))[1]:
        for n, token in enumerate(drafts):
            states = target(torch.tensor([text + drafts[:n]]), output_hidden_states=True)
            x = states.hidden_states[1][0, -1]
            x = head.projection.weight @ (x * (x.pow(2).mean() + 1e-5).rsqrt() * head.norm.weight)
            assert token == int(target.lm_head(target.model.norm(x)).argmax())


def test_training_unrolls_what_is_drafted(target):
    head = exit_head(target)
    head.borrow(target)
    for text, drafts, _ in recorded(target, ExitHeadDrafter(head))[1]:
        whole = [*text, *drafts]
        (logits,) = unroll(head, text_batch(target, (1,), whole), 3)
        assert logits.shape[1] == len(whole) - 1
        drafted = logits[0, len(text) - 2 : len(whole) - 2].argmax(dim=-1)
        assert drafted.tolist() == drafts


def test_a_head_that_has_learnt_nothing_drafts_as_early_exit_does(target, tmp_path):
    """And one that has learnt something drafts otherwise."""
    head = ExitHead(ExitConfig.for_target(target, 2))
    head.begin_as(target)
    want = [drafts for _, drafts, _ in recorded(target, EarlyExitDrafter(2))[1]]
    assert [drafts for _, drafts, _ in recorded(target, ExitHeadDrafter(head))[1]] == want
    with torch.no_grad():
        head.projection.weight.neg_()
    assert [drafts for _, drafts, _ in recorded(target, ExitHeadDrafter(head))[1]] != want


def test_a_head_is_read_back_as_it_was_written(target, tmp_path):
    folder = exit_folder(target, tmp_path)
    head, tensors = load_exit(folder), load_file(folder / "model.safetensors")
    assert head.config == ExitConfig(32, 67, 1)
    assert all(torch.equal(x, tensors[name]) for name, x in head.state_dict().items())
    assert tensors.keys() == {"norm.weight", "projection.weight"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer", None, "must hold layer"),
        ("layer", 0, "layer must be at least 1, got 0"),
        ("norm.weight", None, "lacks norm.weight"),
        ("fc.weight", torch.ones(2), "holds fc.weight, which no ExitHead has"),
        ("norm.weight", torch.ones(2), r"norm.weight .* must be \[32\], got \[2\]"),
    ],
)
def test_a_damaged_head_is_refused_by_name(name, value, message, target, tmp_path):
    folder = exit_folder(target, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    held = tensors if "." in name else config
    held.pop(name, None)
    if value is not None:
        held[name] = value
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_exit(folder)


def test_another_target_is_refused(target, tmp_path):
    drafter = ExitHeadDrafter(exit_folder(target, tmp_path))
    few = hf_models.build("llama", layers=1)
    with pytest.raises(ValueError, match="more layers than the 1 that it exits after, got 1"):
        generate(few, **hf_models.prompts((4,)), drafter=drafter)
    with pytest.raises(ValueError, match=r"layer must be .* in \[1, 3\], got 4"):
        ExitConfig.for_target(target, 4)


@pytest.mark.slow
def test_a_head_learns_texts_by_heart(tmp_path):
    target = hf_models.build("llama", vocab_size=END + 1, layers=3)
    settings = TrainingSettings(
        head="exit_head", tokens=900, length=24, turn_length=8, rows=8, steps=60, batch_size=4,
        learning_rate=5e-3,
    )  # fmt: skip
    texts = ["the cat sat on the mat and ate. ", "a dog ran over the hill. "] * 14
    pipeline = Pipeline(target, tokenizer(), tmp_path, settings, Progress())
    head = pipeline.run(texts=texts)
    curves = pipeline.curves
    assert head.config.layer == 1
    assert len(curves.losses[-1]) == 1
    assert curves.losses[-1][0] < curves.losses[0][0] - 0.05
    assert curves.shared[-1][0] > curves.shared[0][0]
    assert all(weight.grad is None for weight in target.parameters())
    inputs = tokenizer()(texts[0], return_tensors="pt", return_token_type_ids=False)
    out = generate(
        target, **inputs, drafter=f"exit_head:{tmp_path}", max_new_tokens=12, guard=False,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert out.stats.drafted > 0
