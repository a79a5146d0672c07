"""Trees that grow: how far, and the probabilities that they give to their nodes."""

import pytest
import torch
from specdec_hf import EagleTree, TrieTree, generate
from specdec_hf.drafters.growing_tree import EagleDrafter, GrowingTreeDrafter
from specdec_hf.drafters.model import DraftModel
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from support import hf_models
from support.heads import expected_logits, head_for, rounds_of

LAYOUT = EagleTree(width=3, depth=6, size=5)
MIN_PROBABILITY = 0.1  # of the probability of two paths


@pytest.fixture(scope="module")
def models():
    target = hf_models.build("llama")
    return target, hf_models.with_noise(target, 0.02)


def drafted(models, inputs, monkeypatch, layout=LAYOUT):
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
        text = generate(target, **inputs, drafter=draft, tree=layout,
                        max_new_tokens=16, do_sample=False, guard=False)  # fmt: skip
    return text, [(x.tokens, x.parents) for x in trees if x is not None], len(fed)


def same(ones, others):
    return len(ones) == len(others) and all(
        torch.equal(x, y) for one, other in zip(ones, others, strict=True)
        for x, y in zip(one, other, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("lengths", [(9,), (9, 4, 12)], ids=["one", "ragged"])
def test_the_trees_are_those_of_all_levels_in_fewer_steps(lengths, models, monkeypatch):
    text, trees, fed = drafted(models, hf_models.prompts(lengths), monkeypatch)
    monkeypatch.setattr(GrowingTreeDrafter, "_continues", lambda *_: None)
    all_text, all_trees, all_fed = drafted(models, hf_models.prompts(lengths), monkeypatch)
    assert torch.equal(text, all_text)
    assert same(trees, all_trees)
    assert fed < all_fed


def own_trees(trees, row):
    """The present nodes of each tree of one sequence, with their parents."""
    found = []
    for tokens, parents in trees:
        present = tokens[row] >= 0
        if present.any():
            found.append((tokens[row][present].tolist(), parents[row][present].tolist()))
    return found


@pytest.mark.parametrize("decided", ["alone", "together"])
def test_a_sequence_has_the_same_trees_alone_and_in_a_batch(decided, models, monkeypatch):
    """Where another sequence of the batch goes on to a deeper level, too."""
    layout = EagleTree(width=2, depth=5, size=14, min_probability=MIN_PROBABILITY)
    if decided == "together":  # negative control: all go on where one does
        continue_drafting = GrowingTreeDrafter._continues
        monkeypatch.setattr(
            GrowingTreeDrafter, "_continues",
            lambda *args: (mine := continue_drafting(*args)) | mine.any(),
        )  # fmt: skip
    inputs = hf_models.prompts((9, 4, 12))
    _, trees, _ = drafted(models, inputs, monkeypatch, layout)
    equal = []
    for row, mask in enumerate(inputs["attention_mask"]):
        own = {name: x[row : row + 1, mask.argmax() :] for name, x in inputs.items()}
        _, alone, _ = drafted(models, own, monkeypatch, layout)
        equal.append(own_trees(trees, row) == own_trees(alone, 0))
    assert all(equal) == (decided == "alone")
    assert len({len(tree[0]) for tree in own_trees(trees, 0)}) > 1  # some go on and some do not


SMALL = EagleTree(width=2, depth=3, size=6)


def test_scores_are_the_probabilities_of_the_paths():
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    for (committed,), draft in rounds_of(target, Eagle3Drafter(head, SMALL), (9,))[1]:
        paths = {-1: []}
        tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
        for n, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if token < 0:
                continue
            paths[n] = [*paths[parent], token]
            logits = expected_logits(target, head, committed, paths[parent])
            place = head.tokens.tolist().index(token)
            above = 0.0 if parent < 0 else draft.scores[0, parent]
            want = above + logits.log_softmax(-1)[place]
            assert draft.scores[0, n] == pytest.approx(float(want), abs=1e-3)


def test_unlikely_nodes_are_not_verified():
    """Of a head whose tree is merged with copied text: it reads the states of either."""
    target = hf_models.build("llama", vocab_size=7)
    drafter = [Eagle3Drafter(head_for(target), SMALL), "prompt_lookup"]
    everything, likely = (
        hf_models.decode_as_generate(
            target, (9, 4, 12), drafter=drafter, tree=TrieTree(2, 3, 8, least), max_new_tokens=24
        ).stats
        for least in (0.0, 0.3)
    )
    assert likely.accepted > 0
    assert likely.drafted < everything.drafted
