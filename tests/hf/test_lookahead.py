"""Lookahead decoding: the pool, the Jacobi window in the draft tree, and the text it drafts for."""

import numpy as np
import pytest
import torch
from hf.test_generate import run
from specdec_hf import Candidates, LookaheadDrafter, TrieTree
from support import hf_models
from support.histories import history_of


class Context:
    batch_size = 1
    model = hf_models.tiny("llama")


def paths(draft):
    """The tokens from the root to every node, in the order of the nodes."""
    of = {-1: ()}
    for n, (token, parent) in enumerate(zip(draft.tokens[0], draft.parents[0], strict=True)):
        of[n] = (*of[int(parent)], int(token))
    return list(of.values())[1:]


def shown(draft, pending, answers):
    """The candidates of a round, with the target's answer after each path."""
    tokens = np.concatenate([[[pending]], draft.tokens.numpy()], axis=1)
    parents = np.concatenate([[[-1]], draft.parents.numpy() + 1], axis=1)
    ids = [answers.get(path, 0) for path in [(), *paths(draft)]]
    return Candidates(tokens, parents, np.array(ids)[None, :, None])


def test_the_pool_is_drafted_after_the_pending_token():
    drafter = LookaheadDrafter(1, 4, 2)
    drafter.start(Context())
    history = history_of([1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 7, 1])
    draft = drafter.propose(history, np.array([9]))
    # The window's guesses are tokens 0, 4 and 8 of the text. The oldest of three n-grams is gone.
    assert paths(draft) == [
        (1,), (1, 1), (2,), (2, 3), (2, 3, 7), (2, 5), (2, 5, 6),
    ]  # fmt: skip


def test_ngrams_of_the_text_join_the_pool_once():
    """Those that a later round makes stay, where the pool has room for one."""
    drafter = LookaheadDrafter(1, 3, 1)
    drafter.start(Context())
    first = history_of([1, 2, 3, 4, 1])
    draft = drafter.propose(first, np.array([9]))
    assert paths(draft) == [(3,), (2,), (2, 3)]
    drafter.observe(first, shown(draft, 1, {(3,): 9}))
    draft = drafter.propose(history_of([1, 2, 3, 4, 1, 1]), np.array([9]))
    assert paths(draft) == [(9,), (3,), (3, 9)]


class Recorder(LookaheadDrafter):
    """Makes every round's n-grams once more, by plain forwards of the target."""

    rounds = 0

    def start(self, context):
        super().start(context)
        self.model = context.model

    def observe(self, history, candidates):
        expected = []
        for b in np.flatnonzero(history.active):
            window = self._windows[b]
            if window is None or self._ends[b] is None:
                continue
            text = history.tokens[b, : history.lengths[b]].tolist()
            window.levels[0][0] = text[-1]
            for j in range(self.window):
                column = [level[j] for level in window.levels]
                ids = torch.tensor([text[:-1] + window.levels[0][:j] + column])
                new = int(self.model(ids).logits[0, -1].argmax())
                expected.append((b, j, (*column, new)))
        before = [window and [list(level) for level in window.levels] for window in self._windows]
        super().observe(history, candidates)
        stepped = [window and window.levels for window in self._windows]
        expected = [made for made in expected if stepped[made[0]] != before[made[0]]]
        for b, j, ngram in expected:
            assert ngram[1:] in self._pools[b].after(ngram[0])
            assert [level[j] for level in self._windows[b].levels] == list(ngram[1:])
        self.rounds += len(expected)


@pytest.mark.parametrize("numbers", [(3, 3, 3), (2, 4, 2)], ids=str)
def test_ngrams_are_those_that_plain_forwards_give(numbers):
    drafter = Recorder(*numbers)
    run(hf_models.tiny("llama"), hf_models.prompts((9, 6)), drafter=drafter, max_new_tokens=16)
    assert drafter.rounds > 20


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("size", "steps"), [(None, True), (10, True), (2, False)])
def test_ngrams_in_a_merged_tree_are_those_that_plain_forwards_give(first, size, steps):
    drafter = Recorder(2, 3, 2)
    drafters = [drafter, "prompt_lookup"] if first else ["prompt_lookup", drafter]
    run(
        hf_models.tiny("llama"), hf_models.prompts((9, 6)), drafter=drafters,
        tree=TrieTree(2, 3, size), max_new_tokens=16,
    )  # fmt: skip
    # Two nodes have no room for a window of three, which then stays as it is.
    assert (drafter.rounds > 10) == steps
