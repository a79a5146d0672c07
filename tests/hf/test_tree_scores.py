"""The probabilities that a growing tree gives to its nodes, and how far it grows by them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from specdec_hf import EagleTree, History, TrieTree, generate
from specdec_hf.drafters.heads.eagle3 import Eagle3Drafter
from specdec_hf.drafters.heads.head_draft import HeadDraft
from specdec_hf.drafters.tree_drafter import TreeDraft, TreeDrafter
from specdec_hf.drafters.trees.chain_source import TreeSource
from support import hf_models
from support.heads import expected_logits, head_for

LAYOUT = EagleTree(width=2, depth=3, size=6)


class Listed(TreeDrafter):
    """Proposes one tree."""

    def __init__(self, draft):
        self.draft = draft

    def propose(self, history, limits):
        return self.draft


def generated(target, head, layout, monkeypatch, prompts=(9, 4, 12)):
    """The text, the trees with the text before each, and how many forwards the head made."""
    trees, forwards = [], []
    propose, feed = Eagle3Drafter.propose, HeadDraft.feed

    def keep(self, history, limits):
        draft = propose(self, history, limits)
        if draft is not None:
            rows = zip(history.tokens, history.lengths, strict=True)
            trees.append(([row[:n].tolist() for row, n in rows], draft))
        return draft

    def count(self, *arguments):
        forwards.append(1)
        return feed(self, *arguments)

    monkeypatch.setattr(Eagle3Drafter, "propose", keep)
    monkeypatch.setattr(HeadDraft, "feed", count)
    inputs = hf_models.prompts(prompts, vocab_size=target.config.vocab_size)
    text = generate(
        target, **inputs, drafter=Eagle3Drafter(head, layout), max_new_tokens=12, guard=False
    )
    return text.tolist(), trees, len(forwards)


def test_scores_are_the_probabilities_of_the_paths(monkeypatch):
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    _, trees, _ = generated(target, head, LAYOUT, monkeypatch, (9,))
    for (committed,), draft in trees:
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
    assert len(trees) > 3


def test_a_tree_that_is_unlikely_to_be_right_ends_early(monkeypatch):
    target = hf_models.tiny("llama")
    head = head_for(target, range(3, 40), noise=0.1)
    text, trees, all_forwards = generated(target, head, LAYOUT, monkeypatch)
    monkeypatch.undo()
    short = EagleTree(width=2, depth=3, size=6, least=1.0)
    same, cut, none = generated(target, head, short, monkeypatch)
    assert same == text
    assert none == 0 < all_forwards
    assert all(draft.depth == 1 and draft.tokens.shape[1] == 2 for _, draft in cut)
    assert any(draft.depth > 1 for _, draft in trees)
    monkeypatch.undo()
    # The sum over the paths decides: some trees end and others go on.
    some = EagleTree(width=2, depth=3, size=6, least=0.2)
    same, _, between = generated(target, head, some, monkeypatch)
    assert same == text
    assert 0 < between < all_forwards


def test_the_paths_of_a_tree_keep_their_probabilities():
    scores = torch.tensor([[-0.1, -1.0, -0.3, -2.0], [-0.2, -0.5, -0.9, -9.0]])
    draft = TreeDraft(
        torch.tensor([[5, 6, 7, -1], [5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 0], [-1, 0, 1, -1]]),
        3, scores=scores,
    )  # fmt: skip
    model, history = hf_models.tiny("llama"), History(np.zeros((2, 5), int), np.full(2, 5), None)
    source = TreeSource(Listed(draft))
    source.start(SimpleNamespace(model=model))
    chains = source.propose(history, np.array([3, 3]))
    assert chains.tokens.tolist() == [[[6, -1, -1], [5, 7, -1]], [[5, 6, 7], [8, -1, -1]]]
    got = np.log(chains.values)
    assert got[0, 1, :2] == pytest.approx([-0.1, -0.3])
    assert got[0, 0, 0] == pytest.approx(-1.0)
    assert got[1, 0] == pytest.approx([-0.2, -0.5, -0.9])
    assert got[1, 1, 0] == pytest.approx(-9.0)
    draft.scores = None
    assert source.propose(history, np.array([3, 3])).values is None


def test_unlikely_nodes_are_not_verified():
    target = hf_models.build("llama", vocab_size=7)
    inputs = hf_models.prompts((9, 4, 12), vocab_size=7)

    def call(least):
        return generate(
            target, **inputs, max_new_tokens=24, do_sample=False, guard=False,
            drafter=[Eagle3Drafter(head_for(target), LAYOUT), "prompt_lookup"],
            tree=TrieTree(2, 3, 8, least), return_dict_in_generate=True,
        )  # fmt: skip

    everything, likely = call(0.0), call(0.3)
    assert likely.sequences.tolist() == everything.sequences.tolist()
    assert likely.stats.drafted < everything.stats.drafted
