"""Lookahead decoding: the pool, the Jacobi window in the draft tree, and the text it drafts for."""

import numpy as np
import pytest
import torch
from hf.test_generate import run
from specdec_hf import Candidates, LookaheadDrafter, TrieTree
from specdec_hf.drafters.trees.lookahead import NgramPool, Window
from support import hf_models
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.histories import history_of


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_the_pool_keeps_the_ngrams_that_were_added_last(capacity):
    generator = np.random.default_rng(0)
    pool, added = NgramPool(capacity), []
    for _ in range(400):
        ngram = tuple(generator.integers(0, 3, 3).tolist())
        pool.add(ngram)
        added.append(ngram)
        first = int(generator.integers(0, 4))
        latest = [rest for head, *rest in reversed(added) if head == first]
        expected = [list(rest) for rest in dict.fromkeys(map(tuple, latest))][:capacity]
        assert [list(rest) for rest in pool.after(first)] == expected


def test_a_window_begins_with_tokens_of_the_text():
    assert Window([10, 11, 12, 13], columns=3, depth=2).levels == [[10, 11, 12], [11, 12, 13]]
    assert Window([5], columns=2, depth=3).levels == [[5, 5], [5, 5], [5, 5]]


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


def test_three_rounds_by_hand():
    """W = 3, N = 3: two levels. Primes are the tokens that the target answers."""
    drafter = LookaheadDrafter(3, 3, 1, text_ngrams=False)
    drafter.start(Context())
    first = history_of([20, 21, 22, 23])
    draft = drafter.propose(first, np.array([9]))
    # The places ahead are guessed as 20, 21, 22 and 23, of which place 0 is the pending 23.
    assert paths(draft) == [(21,), (21, 22), (21, 22, 23)]  # (21,) is also column 0 of level 1
    assert draft.depth == 3
    answers = {(21,): 30, (21, 22): 31, (21, 22, 23): 32}
    drafter.observe(first, shown(draft, 23, answers))
    pool = drafter._pools[0]
    assert [pool.after(token) for token in (23, 21, 22)] == [[(21, 30)], [(22, 31)], [(23, 32)]]
    assert drafter._windows[0].levels == [[21, 22, 23], [30, 31, 32]]

    second = history_of([20, 21, 22, 23, 21])
    draft = drafter.propose(second, np.array([9]))
    window = [(22,), (22, 23), (30,), (22, 31), (22, 23, 32)]
    assert paths(draft) == window  # the pool's (22, 31) after 21 is a path of the window
    answers = {(30,): 40, (22, 31): 41, (22, 23, 32): 42}
    drafter.observe(second, shown(draft, 21, answers))
    assert pool.after(21) == [(30, 40)]  # which took the place of (22, 31)
    assert [pool.after(token) for token in (22, 23)] == [[(31, 41)], [(32, 42)]]
    assert drafter._windows[0].levels == [[30, 31, 32], [40, 41, 42]]

    third = history_of([20, 21, 22, 23, 21, 22])
    draft = drafter.propose(third, np.array([9]))
    assert paths(draft) == [
        (31,), (31, 32), (40,), (31, 41), (31, 32, 42),
    ]  # fmt: skip
    # A tree that is too shallow for the window keeps it as it is.
    shallow = drafter.propose(third, np.array([2]))
    assert paths(shallow) == [(31,), (31, 32), (40,), (31, 41)]
    before = [list(level) for level in drafter._windows[0].levels]
    drafter.observe(third, shown(shallow, 22, {}))
    assert drafter._windows[0].levels == before
    assert drafter.propose(third, np.array([0])) is None


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


@pytest.mark.parametrize("numbers", [(3, 3, 3), (2, 4, 2), (4, 2, 4)], ids=str)
def test_ngrams_are_those_that_plain_forwards_give(numbers):
    drafter = Recorder(*numbers)
    run(hf_models.tiny("llama"), hf_models.prompts((9, 6)), drafter=drafter, max_new_tokens=16)
    assert drafter.rounds > 20


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
