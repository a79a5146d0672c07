"""Trees that grow: no level is drafted from which no candidate can be proposed."""

import pytest
import torch
from specdec_hf import EagleTree, generate
from specdec_hf.drafters.models.draft_model import DraftModel
from specdec_hf.drafters.trees.eagle import EagleDrafter, GrowingTreeDrafter
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here

LAYOUT = EagleTree(width=3, depth=6, size=5)


@pytest.fixture(scope="module")
def models():
    target = hf_models.build("llama")
    return target, hf_models.with_noise(target, 0.02)


def drafted(models, lengths, monkeypatch):
    """The text, the proposed trees, and how many levels were fed to the draft model."""
    target, draft = models
    trees, fed = [], []
    propose, feed = EagleDrafter.propose, DraftModel.feed

    def recorded(self, history, limits):
        trees.append(propose(self, history, limits))
        return trees[-1]

    def counted(self, *args):
        fed.append(1)
        return feed(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(EagleDrafter, "propose", recorded)
        patch.setattr(DraftModel, "feed", counted)
        text = generate(target, **hf_models.prompts(lengths), drafter=draft, tree=LAYOUT,
                        max_new_tokens=16, do_sample=False, guard=False)  # fmt: skip
    return text, [(x.tokens, x.parents) for x in trees if x is not None], len(fed)


def same(ones, others):
    return len(ones) == len(others) and all(
        torch.equal(x, y) for one, other in zip(ones, others, strict=True)
        for x, y in zip(one, other, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
def test_the_trees_are_those_of_all_levels_in_fewer_steps(lengths, models, monkeypatch):
    text, trees, fed = drafted(models, lengths, monkeypatch)
    monkeypatch.setattr(GrowingTreeDrafter, "_is_grown", lambda *_: False)
    all_text, all_trees, all_fed = drafted(models, lengths, monkeypatch)
    assert torch.equal(text, all_text)
    assert same(trees, all_trees)
    assert fed < all_fed


def test_a_level_that_is_left_out_too_early_changes_trees(models, monkeypatch):
    """Negative control of the test above."""
    _, trees, _ = drafted(models, (9,), monkeypatch)
    monkeypatch.setattr(GrowingTreeDrafter, "_is_grown", lambda *_: True)
    _, fewer, _ = drafted(models, (9,), monkeypatch)
    assert not same(trees, fewer)
