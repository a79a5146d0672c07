"""Drafters of n-grams: tables, NASD, lookahead decoding, and REST; what they learn and draft."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from proofs import chi_square_of_counts
from specdec_hf import RestDrafter, SuffixAutomatonDrafter, TrieTree
from specdec_hf.drafting.context import Candidates
from specdec_hf.drafting.drafter import Round
from specdec_host import Corpus
from specdec_papers.lookahead import LookaheadDrafter, LookaheadState
from specdec_papers.nasd import NasdDrafter
from specdec_papers.ngram import NgramDrafter, RandomDrafter
from specdec_papers.ngram_table import NgramCounts, NgramTable
from support import hf_models
from support.drafter_proof import begun, chains_of, counts_of, history_of, propose

pytestmark = pytest.mark.papers

VOCAB, LLAMA = hf_models.VOCAB, hf_models.tiny("llama")


def counted(texts, context, min_count=1):
    """Brute force: what follows a context in the texts."""
    found: Counter[int] = Counter()
    n = len(context)
    for text in texts:
        for i in range(len(text) - n):
            if text[i : i + n].tolist() == list(context):
                found[int(text[i + n])] += 1
    return {token: count for token, count in found.items() if count >= min_count}


def as_dict(followers):
    return dict(zip(*(part.tolist() for part in followers), strict=True))


@pytest.mark.parametrize("min_count", [1, 2])
def test_a_table_counts_as_brute_force_does(min_count, tmp_path):
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, 5, size) for size in (60, 1, 0, 40)]
    made = NgramTable.build(texts, 5, 3, min_count)
    made.save(tmp_path / "table")
    for table in (made, NgramTable.load(tmp_path / "table")):
        assert (table.vocab_size, table.order) == (5, 3)
        for context in [
            (),
            *((a,) for a in range(5)),
            *((a, b) for a in range(5) for b in range(5)),
        ]:
            kept = all(context[-1] in counted(texts, context[:-1], min_count) for _ in context[:1])
            expected = counted(texts, context, min_count) if kept else {}
            assert as_dict(table.followers(context)) == expected, context
        assert as_dict(table.followers((1, 2, 3))) == {}
        assert as_dict(table.followers((9,))) == {}
    NgramTable.build(texts, 5, 1).save(tmp_path / "unigrams")
    unigrams = NgramTable.load(tmp_path / "unigrams")
    assert as_dict(unigrams.followers(())) == counted(texts, ())


def shares(drafter, text, draws=4000):
    seeds = torch.arange(draws)
    state = begun(drafter, draws, rule="token", seeds=seeds)
    draft = propose(state, history_of(*[text] * draws), 1)
    return np.bincount(draft.tokens[:, 0].numpy(), minlength=VOCAB), draft


def test_drafts_are_drawn_as_often_as_the_table_counts():
    text = np.array([1, 2, 1, 3, 1, 2, 1, 2, 1, 4, 2, 1])
    table = NgramTable.build([np.array([1, 5, 1, 5, 1, 2])], VOCAB, 2)
    got, draft = shares(NgramDrafter(table), text)
    expected = np.zeros(VOCAB)
    expected[[2, 3, 4, 5]] = np.array([3 + 1, 1, 1, 2]) / 8
    seen = expected > 0
    assert got[~seen].sum() == 0
    assert chi_square_of_counts(got[seen], expected[seen] * got.sum()) > 1e-4
    # Negative control: the counts of the table alone.
    wrong = np.array([1, 2]) / 3
    assert chi_square_of_counts(got[[2, 5]], wrong * got[[2, 5]].sum()) < 1e-6
    rows = draft.drawn.logits[0, 0].double()
    assert torch.allclose(rows.exp() / rows.exp().sum(), torch.from_numpy(expected), atol=1e-6)


def test_random_drafts_are_uniform_at_every_temperature():
    drafter = RandomDrafter()
    got, _ = shares(drafter, np.array([1, 2]), 6700)
    assert chi_square_of_counts(got, got.mean()) > 1e-4
    tokens = propose(begun(drafter), history_of([1, 2]), 8).tokens
    assert len(set(tokens[0].tolist())) > 4
    assert tokens.shape == (1, 8)


@pytest.mark.parametrize(
    "damage",
    [
        lambda table: table.tokens.__setitem__(1, table.tokens[1] + VOCAB),
        lambda table: table.counts.__setitem__(0, table.counts[0] - 1),
        lambda table: table.counts.__setitem__(0, table.counts[0][1:]),
        lambda table: table.begins.__setitem__(1, table.begins[1] + 1),
        lambda table: setattr(table, "fingerprint", b"f" * 31),
    ],
)
def test_a_damaged_table_is_refused(damage, tmp_path):
    table = NgramTable.build([np.array([1, 2, 1, 3])], VOCAB, 2)
    damage(table)
    table.save(tmp_path / "table")
    with pytest.raises(ValueError, match=r"path must name a(n| valid) n-gram table, got"):
        NgramTable.load(tmp_path / "table")


@pytest.mark.parametrize("made", [NgramDrafter, RestDrafter, SuffixAutomatonDrafter])
def test_ids_of_another_vocabulary_are_refused(made, tmp_path):
    Corpus(np.arange(4)).save(tmp_path / "store", vocab_size=4)
    drafter = NgramDrafter(NgramTable.build([np.array([1, 2])], 4, 2))
    if made is not NgramDrafter:
        drafter = made.from_text(str(tmp_path / "store"))
    with pytest.raises(ValueError, match=r"(table|corpus) must have the model's vocabulary of 67 "):
        hf_models.decode(LLAMA, drafter=drafter)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=rf"must hold ids in \[0, 4\), got {wrong}$"):
            NgramTable.build([np.array([0, wrong, 2])], 4, 2)


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


def proposed(state, history, gamma=4):
    draft = propose(state, history, gamma)
    if draft is None:
        return None
    return [[token for token in row if token >= 0] for row in draft.tokens.tolist()]


def started(*arguments, **options):
    return begun(NasdDrafter(*arguments, **options), 2)


def test_a_chain_goes_on_after_an_unknown_ending():
    """With guesses that follow from the seed and the position alone, as the source's code does."""
    texts = [1, 2, 3, 1], [9]
    assert proposed(started(2, 2), history_of([1, 2, 3, 1, 2], [9])) == [[3, 1, 2, 3], []]
    guessed = proposed(started(2, 2, stop_if_unknown=False), history_of(*texts), 12)
    assert [len(chain) for chain in guessed] == [12, 12]
    assert guessed[0][:9] == guessed[1][3:]  # the same positions
    assert len(set(guessed[0])) > 6
    assert proposed(started(2, 2, stop_if_unknown=False, seed=1), history_of(*texts), 12) != guessed
    # What is known comes first, and is drafted again after a guess that led to it.
    known = proposed(started(1, 1, stop_if_unknown=False), history_of([5, 6, 5], [9]), 3)[0]
    assert known == [6, 5, 6]
    # A text shorter than the longest ending is one itself.
    assert proposed(started(4, 2), history_of([5, 5, 5], [9]), 2) == [[5, 5], []]
    # So is one after which the target's likeliest next token was seen, and not committed.
    state, pending = begun(NasdDrafter(4, 2), 2, num_proposals=2), np.array([[2], [9]])
    seen = Candidates(pending, np.full_like(pending, -1), pending[:, None] + 5)
    before, after = history_of([1, 2], [9]), history_of([1, 2, 3], [9, 4])
    done = Round.of_chain(before.lengths, before.active, np.zeros(2, int), pending[:, :0])
    state.commit(after, dataclasses.replace(done, candidates=seen))
    assert proposed(state, history_of([1, 2, 3, 1, 2], [9, 4]), 1) == [[3, 7], []]


@pytest.mark.parametrize(("kept", "drafts"), [(100, [[3, 4], [7]]), (0, None)])
def test_counts_of_finished_calls_are_kept_for_models_of_their_vocabulary(kept, drafts):
    drafter = NasdDrafter(2, 2, max_kept=kept)
    begun(drafter, 2).end(history_of([1, 2, 3, 4], [5, 6, 7], active=(False, False)))
    assert proposed(begun(drafter, 2), history_of([9, 1, 2], [5, 6]), 2) == drafts
    other = begun(drafter, 2, model=hf_models.build("llama", vocab_size=11))
    assert proposed(other, history_of([9, 1, 2], [5, 6]), 2) is None


def test_ngrams_that_were_counted_long_ago_are_forgotten_first():
    drafter = NasdDrafter(2, 2, max_kept=2)
    for text in ([1, 2, 3, 4], [1, 2, 8], [5, 6, 7]):
        begun(drafter, 2).end(history_of(text, [9], active=(False, False)))
    state = begun(drafter, 2)
    assert proposed(state, history_of([9, 1, 2], [9, 2, 3]), 1)[0]
    assert proposed(state, history_of([9, 5, 6], [9, 2, 3]), 1) == [[7], []]


def paths(draft):
    """The tokens from the root to every node, in the order of the nodes."""
    of = {-1: ()}
    for n, (token, parent) in enumerate(zip(draft.tokens[0], draft.parents[0], strict=True)):
        of[n] = (*of[int(parent)], int(token))
    return list(of.values())[1:]


def test_the_pool_is_drafted_after_the_pending_token():
    history = history_of([9, 1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 7, 1])
    draft = propose(begun(LookaheadDrafter(1, 4, 2)), history, 9)
    # The window's guesses are tokens 0, 4 and 9 of the text. The oldest of three n-grams is gone.
    assert paths(draft) == [(4,), (4, 1), (2,), (2, 3), (2, 3, 7), (2, 5), (2, 5, 6)]


def test_ngrams_of_a_text_join_the_pool_in_whatever_rounds_it_comes():
    text, drafts = [9, 1, 2, 3, 4, 5, 1], []
    for begins in ((), (2, 3, 5)):
        state = begun(LookaheadDrafter(1, 4, 2))
        for end in (*begins, len(text)):
            draft = propose(state, history_of(text[:end]), 9)
        drafts.append((2, 3, 4) in paths(draft))
    assert drafts == [True, True]


class Recorder(LookaheadDrafter):
    """Makes every round's n-grams once more, by plain forwards of the target."""

    rounds = 0

    def begin(self, call):
        return RecorderState(self, call)


class RecorderState(LookaheadState):
    def commit(self, texts, done):
        expected = []
        for b in np.flatnonzero(done.active):
            window = self.windows[b]
            if window is None or self.ends[b] is None:
                continue
            text = texts.tokens[b, : done.lengths[b]].tolist()
            window.levels[0][0] = text[-1]
            for j in range(self.drafter.window):
                column = [level[j] for level in window.levels]
                ids = torch.tensor([text[:-1] + window.levels[0][:j] + column])
                new = int(LLAMA(ids).logits[0, -1].argmax())
                expected.append((b, j, (*column, new)))
        before = [window and [list(level) for level in window.levels] for window in self.windows]
        super().commit(texts, done)
        stepped = [window and window.levels for window in self.windows]
        expected = [made for made in expected if stepped[made[0]] != before[made[0]]]
        for b, j, ngram in expected:
            assert ngram[1:] in self.pools[b].after(ngram[0])
            assert [level[j] for level in self.windows[b].levels] == list(ngram[1:])
        self.drafter.rounds += len(expected)


# The drafters of the tree; the most nodes, of which two have no room for a window of three.
MERGED = {
    "alone": (lambda drafter: drafter, None, True),
    "first": (lambda drafter: [drafter, "prompt_lookup"], TrieTree(2, 3), True),
    "second": (lambda drafter: ["prompt_lookup", drafter], TrieTree(2, 3, 10), True),
    "of two nodes": (lambda drafter: [drafter, "prompt_lookup"], TrieTree(2, 3, 2), False),
}


@pytest.mark.parametrize("place", MERGED)
def test_ngrams_in_a_merged_tree_are_those_that_plain_forwards_give(place):
    drafter = Recorder(2, 3, 2)
    merged, tree, steps = MERGED[place]
    settings = {"drafter": merged(drafter), "tree": tree, "max_new_tokens": 16}
    hf_models.decode(LLAMA, (9, 6), **settings)
    assert (drafter.rounds > 10) == steps


def test_the_most_frequent_continuations_of_the_longest_match_are_drafted():
    corpus = Corpus(np.array([1, 2, 3, 4, 9, 1, 2, 3, 5, 9, 1, 2, 3, 5, 8, 2, 3, 7]))
    drafter, history = RestDrafter(corpus), history_of([6, 1, 2, 3], [6, 3])
    draft = propose(begun(drafter, 2), history, 2)
    assert draft.tokens.tolist() == [[5, 8], [-1, -1]]
    assert counts_of(draft) == [2, 0]
    assert draft.confidence[0].tolist() == pytest.approx([2 / (3 + 2 / 3), 1 / (2 + 2 / 4)])
    chains = chains_of(propose(begun(drafter, 2, num_proposals=3), history, 2))
    assert chains[0] == [[5, 8], [4, 9], [5, 9]]
    state = begun(RestDrafter(corpus, min_match=1, max_match=2), 2, num_proposals=3)
    chains = chains_of(propose(state, history, 1))
    assert chains == [[[5], [4], [7]]] * 2
    assert propose(begun(RestDrafter(corpus, min_match=4), 2), history, 2) is None
