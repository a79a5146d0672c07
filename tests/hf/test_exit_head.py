"""An early exit with a trained norm and projection: what it drafts and is trained on."""

import pytest
import torch
from specdec_hf import EarlyExitDrafter, ExitHeadDrafter
from specdec_hf.heads.exit_head import ExitConfig, ExitHead, load_exit
from specdec_hf.lab.training.unrolled import unroll
from support import hf_models
from support.heads import exit_folder, exit_head, rounds_of, text_batch


@pytest.fixture(scope="module")
def target():
    return hf_models.build("llama", layers=4)


def drafts_of(target, drafter):
    """Of each round of a greedy call, the text and the drafted tokens."""
    rounds = rounds_of(target, drafter, (9,), max_new_tokens=10, gamma=3)[1]
    return [(texts[0], draft.tokens[0].tolist()) for texts, draft in rounds]


def test_the_drafts_are_those_of_the_trained_exit(target, tmp_path):
    head = load_exit(exit_folder(target, tmp_path))
    for text, drafts in drafts_of(target, ExitHeadDrafter(head)):
        for n, token in enumerate(drafts):
            states = target(torch.tensor([text + drafts[:n]]), output_hidden_states=True)
            x = states.hidden_states[1][0, -1]
            x = head.projection.weight @ (x * (x.pow(2).mean() + 1e-5).rsqrt() * head.norm.weight)
            assert token == int(target.lm_head(target.model.norm(x)).argmax())


def test_training_unrolls_what_is_drafted(target):
    head = exit_head(target)
    head.borrow(target)
    for text, drafts in drafts_of(target, ExitHeadDrafter(head)):
        whole = [*text, *drafts]
        (logits,) = unroll(head, text_batch(target, (1,), whole), 3)
        assert logits.shape[1] == len(whole) - 1
        drafted = logits[0, len(text) - 2 : len(whole) - 2].argmax(dim=-1)
        assert drafted.tolist() == drafts


def test_a_head_that_has_learnt_nothing_drafts_as_early_exit_does(target, tmp_path):
    """And one that has learnt something drafts otherwise."""
    with pytest.raises(ValueError, match=r"layer must be .* in \[1, 3\], got 4"):
        ExitConfig.for_target(target, 4)
    head = ExitHead(ExitConfig.for_target(target, 2))
    head.begin_as(target)
    want = drafts_of(target, EarlyExitDrafter(2))
    assert drafts_of(target, ExitHeadDrafter(head)) == want
    with torch.no_grad():
        head.projection.weight.neg_()
    assert drafts_of(target, ExitHeadDrafter(head)) != want
