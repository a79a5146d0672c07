"""NASD: its counts, what it learns of the target in a round, and the text that it drafts for."""

import numpy as np
import pytest
from specdec_hf import Candidates, DraftOutcome, NasdDrafter
from specdec_hf.drafters.ngram_table import NgramCounts
from support import hf_models
from support.histories import chains_of, history_of, propose


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
    model = hf_models.tiny("llama")
    num_proposals = 1


def proposed(drafter, history, gamma=4):
    draft = propose(drafter, history, gamma)
    if draft is None:
        return None
    return [[token for token in row if token >= 0] for row in draft.tokens.tolist()]


def started(*arguments, **options):
    drafter = NasdDrafter(*arguments, **options)
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
    drafter.commit(DraftOutcome.of_chain(np.array([4, 2]), np.array([1, 0]), tokens[:, 1:]))
    # Draft 2 was accepted and 8 is the recovered token, so the row of draft 3 teaches nothing.
    history = history_of([*prompts[0], 2, 8], [*prompts[1], 6])
    assert proposed(drafter, history, 1) == [[], [6]]
    counts = drafter._counts[0]
    assert counts.ranking([3, 1]) == [2, 7]  # 2 was counted as committed and as likely
    assert counts.ranking([1, 2]) == [8, 3, 9]
    assert counts.ranking([2, 3]) == [1]
    assert counts.ranking([2, 8]) == []
    assert drafter._counts[1].ranking([5, 6]) == [6, 4]
    drafter._num_proposals = 2
    draft = propose(drafter, history_of([*prompts[0], 2, 8, 1, 2], prompts[1]), 3)
    assert chains_of(draft)[0] == [[8, 1, 2], [3, 1, 2]]


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


def test_a_chain_goes_on_after_an_unknown_ending():
    """With guesses that follow from the seed and the position alone, as the source's code does."""
    texts = [1, 2, 3, 1], [9]
    assert proposed(started(2, 2), history_of([1, 2, 3, 1, 2], [9])) == [[3, 1, 2, 3], []]
    guessed = proposed(started(2, 2, stop_if_unknown=False), history_of(*texts), 12)
    assert [len(chain) for chain in guessed] == [12, 12]
    vocab_size = Context.model.config.vocab_size
    assert all(0 <= token < vocab_size for chain in guessed for token in chain)
    assert guessed[0][:9] == guessed[1][3:]  # the same positions
    assert len(set(guessed[0])) > 6
    swapped = proposed(started(2, 2, stop_if_unknown=False), history_of(*texts[::-1]), 12)
    assert swapped == guessed[::-1]
    assert proposed(started(2, 2, stop_if_unknown=False, seed=1), history_of(*texts), 12) != guessed
    # What is known comes first, and is drafted again after a guess that led to it.
    known = proposed(started(1, 1, stop_if_unknown=False), history_of([5, 6, 5], [9]), 3)[0]
    assert known == [6, 5, 6]


def test_counts_of_finished_calls_are_kept():
    drafter = started(2, 2, max_kept=100)
    drafter.finish(history_of([1, 2, 3, 4], [5, 6, 7], active=(False, False)))
    drafter.start(Context())
    assert proposed(drafter, history_of([9, 1, 2], [5, 6]), 2) == [[3, 4], [7]]
    # Counts of the text are added to them.
    assert proposed(drafter, history_of([9, 1, 2, 8, 1, 2, 8, 1, 2], [5, 6]), 1) == [[8], [7]]
    without = started(2, 2)
    without.finish(history_of([1, 2, 3, 4], [5, 6, 7], active=(False, False)))
    without.start(Context())
    assert proposed(without, history_of([9, 1, 2], [5, 6]), 2) is None

    class OfAnotherVocabulary(Context):
        model = hf_models.build("llama", vocab_size=11)

    drafter.start(OfAnotherVocabulary())
    assert proposed(drafter, history_of([9, 1, 2], [5, 6]), 2) is None


def test_only_the_latest_ngrams_are_kept():
    kept = NgramCounts(1, 1)
    for text in ([1, 2, 3], [4, 5, 6], [1, 7]):
        counts = NgramCounts(1, 1)
        counts.extend(np.array(text))
        kept.take_over(counts, 3)
    assert kept.ranking([1]) == [7]  # 1 was dropped with the first text's [2] and counted again
    assert kept.ranking([4]) == [5]
    assert kept.ranking([2]) == []
