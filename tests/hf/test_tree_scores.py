"""The probabilities that a growing tree gives to its nodes, and how far it grows by them."""

import pytest
from specdec_hf import EagleTree, TrieTree, generate
from specdec_hf.heads.eagle3.drafter import Eagle3Drafter
from specdec_hf.heads.pairs.draft import HeadDraft
from support import hf_models
from support.heads import expected_logits, head_for

LAYOUT = EagleTree(width=2, depth=3, size=6)


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


def test_unlikely_nodes_are_not_verified():
    target = hf_models.build("llama", vocab_size=7)
    inputs = hf_models.prompts((9, 4, 12), vocab_size=7)

    def call(min_probability):
        return generate(
            target, **inputs, max_new_tokens=24, do_sample=False, guard=False,
            drafter=[Eagle3Drafter(head_for(target), LAYOUT), "prompt_lookup"],
            tree=TrieTree(2, 3, 8, min_probability), return_dict_in_generate=True,
        )  # fmt: skip

    everything, likely = call(0.0), call(0.3)
    assert likely.sequences.tolist() == everything.sequences.tolist()
    assert likely.stats.drafted < everything.stats.drafted
