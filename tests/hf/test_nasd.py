"""NASD: its counts, what it learns of the target in a round, and the text that it drafts for."""

import numpy as np
import pytest
from hf.test_generate import run
from specdec_hf import Candidates, NasdDrafter, TrieTree, generate
from specdec_hf.drafters.model_free.ngram_counts import NgramCounts
from support import hf_models
from support.drafter_proof import assert_greedy_identical, joint_p_value
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.histories import history_of
from support.providers import SIGNIFICANCE


def slow_ranking(additions, text, longest, shortest):
    """The definition of `NgramCounts.ranking`, from the list of all additions."""
    ranked = []
    for size in range(min(longest, len(text)), shortest - 1, -1):
        times = {}  # of each token, when it was counted
        for time, (before, token) in enumerate(additions):
            if len(before) >= size and before[-size:] == text[-size:]:
                times.setdefault(token, []).append(time)
        by_count = sorted(times, key=lambda token: (-len(times[token]), times[token][-1]))
        ranked += [token for token in by_count if token not in ranked]
    return ranked


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (2, 2), (4, 2)])
def test_counts_equal_their_definition(longest, shortest):
    generator = np.random.default_rng(0)
    counts, additions, found = NgramCounts(longest, shortest), [], 0
    for _ in range(300):
        text = generator.integers(0, 3, generator.integers(0, 6)).tolist()
        tokens = generator.permutation(4)[: generator.integers(1, 4)].tolist()
        counts.add(text, tokens)
        additions += [(text, token) for token in tokens]
        asked = generator.integers(0, 3, generator.integers(0, 6)).tolist()
        expected = slow_ranking(additions, asked, longest, shortest)
        assert counts.ranking(asked) == expected
        assert counts.best(asked) == (expected[0] if expected else None)
        found += len(expected) > 1
    assert found > 100


class Context:
    batch_size = 2


def proposed(drafter, history, gamma=4):
    draft = drafter.propose(history, gamma)
    if draft is None:
        return None
    return [[token for token in row if token >= 0] for row in draft.tokens.tolist()]


def started(*arguments):
    drafter = NasdDrafter(*arguments)
    drafter.start(Context())
    return drafter


def test_a_round_teaches_the_tokens_after_what_was_committed():
    drafter = started(2, 1, 2)
    prompts = [1, 2, 3, 1], [5, 6]
    assert proposed(drafter, history_of(*prompts)) == [[2, 3, 1, 2], []]
    # The rows are the pending token and drafts 2, 3 and 1; the second sequence has no drafts.
    ids = np.array([[[2, 7], [8, 9], [1, 9], [9, 8]], [[6, 4], [0, 0], [0, 0], [0, 0]]])
    tokens = np.array([[1, 2, 3, 1], [6, -1, -1, -1]])
    parents = np.array([[-1, 0, 1, 2]] * 2)
    drafter.observe(history_of(*prompts), Candidates(tokens, parents, ids))
    drafter.commit(np.array([4, 2]), np.array([1, 0]))
    # Draft 2 was accepted and 8 is the recovered token, so the row of draft 3 teaches nothing.
    history = history_of([*prompts[0], 2, 8], [*prompts[1], 6])
    assert proposed(drafter, history, 1) == [[], [6]]
    counts = drafter._counts[0]
    assert counts.ranking([3, 1]) == [2, 7]  # 2 was counted as committed and as likely
    assert counts.ranking([1, 2]) == [8, 3, 9]
    assert counts.ranking([2, 3]) == [1]
    assert counts.ranking([2, 8]) == []
    assert drafter._counts[1].ranking([5, 6]) == [6, 4]
    several = drafter.propose_several(history_of([*prompts[0], 2, 8, 1, 2], prompts[1]), 3, 2)
    assert several[0].tolist() == [[8, 1, 2], [3, 1, 2]]


def test_rounds_without_drafts_teach_as_well():
    """A round whose length is 0 everywhere does not ask for drafts."""
    drafter = started(2, 2, 1)
    row = Candidates(np.array([[2], [5]]), np.array([[-1], [-1]]), np.array([[[9]], [[4]]]))
    drafter.observe(history_of([1, 2], [6, 5]), row)
    row = Candidates(np.array([[9], [4]]), np.array([[-1], [-1]]), np.array([[[1]], [[4]]]))
    drafter.observe(history_of([1, 2, 9], [6, 5, 4]), row)
    history = history_of([1, 2, 9, 1, 2], [6, 5, 4], active=(True, False))
    assert proposed(drafter, history, 2) == [[9, 1], []]
    history = history_of([1, 2, 9, 1, 2, 0], [6, 5, 4], active=(True, False))
    assert proposed(drafter, history) is None


def test_the_targets_likely_tokens_are_among_several_chains():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))

    class Watching(NasdDrafter):
        most = 0

        def propose_several(self, history, gamma, count):
            chains = super().propose_several(history, gamma, count)
            self.most = max(self.most, 0 if chains is None else int((chains[0, :, 0] >= 0).sum()))
            return chains

    most = []
    for top_k in (0, 4):
        drafter = Watching(1, 1, top_k)
        run(model, inputs, drafter=drafter, tree=TrieTree(4, 2), max_new_tokens=40)
        most.append(drafter.most)
    assert most[0] < most[1] == 4


@pytest.mark.parametrize("tree", [None, TrieTree(3, 4)], ids=["chain", "trie"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_greedy_equals_plain_generation(name, tree):
    assert_greedy_identical(lambda: NasdDrafter(3, 1), hf_models.tiny(name), tree=tree)


@pytest.mark.slow
def test_the_distribution_of_the_text_is_the_targets():
    assert joint_p_value(NasdDrafter(3, 1), "block", texts=1500) > SIGNIFICANCE


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"max_ngram": 0}, ValueError, r"max_ngram must be an integer in \[1, 1024\], got 0"),
        ({"min_ngram": 5}, ValueError, "min_ngram must be at most max_ngram=4, got 5"),
        ({"top_k": -1}, ValueError, r"top_k must be an integer in \[0, 1024\], got -1"),
        ({"top_k": True}, TypeError, "top_k must be an integer .* got True"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        NasdDrafter(**arguments)


def test_the_name_makes_the_drafter():
    model, inputs = hf_models.tiny("llama"), hf_models.prompts((9,))
    out = generate(
        model, **inputs, drafter="nasd", max_new_tokens=4, return_dict_in_generate=True
    )  # fmt: skip
    assert out.stats.drafter == "nasd"
