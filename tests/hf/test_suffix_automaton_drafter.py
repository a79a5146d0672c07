"""The drafter over suffix automata: what it drafts, and the text that it drafts for."""

import numpy as np
from specdec_hf import SuffixAutomatonDrafter
from specdec_host import Corpus, SuffixAutomaton
from support import hf_models
from support.drafter_proof import VOCAB
from support.hf_models import one_thread  # noqa: F401  # autouse here
from support.histories import chains_of, counts_of, history_of, propose

CORPUS = np.random.default_rng(0).integers(0, VOCAB, 300)


class Context:
    batch_size = 2
    model = hf_models.tiny("llama")
    max_length = 40
    encoder = None
    num_proposals = 1

    def note(self, text):
        """Remarks are of no interest here."""


class SeveralProposals(Context):
    num_proposals = 3


def started(*args, context=Context, **kwargs):
    drafter = SuffixAutomatonDrafter(*args, **kwargs)
    drafter.start(context())
    return drafter


def test_every_sequence_has_an_automaton_that_gets_only_the_new_tokens():
    drafter = started(min_match=1)
    texts = [1, 2, 3, 1], [5, 6]
    draft = propose(drafter, history_of(*texts), 3)
    assert draft.tokens.tolist() == [[2, 3, 1], [-1] * 3]
    assert counts_of(draft) == [3, 0]
    expected = [[1 / (1 + 2 / length) for length in (1, 2, 3)], [0] * 3]
    np.testing.assert_allclose(draft.confidence, expected, rtol=1e-6)
    texts = [*texts[0], 2, 9], [*texts[1], 6]
    draft = propose(drafter, history_of(*texts), 2)
    assert draft.tokens.tolist() == [[-1] * 2, [6, 6]]
    for b, text in enumerate(texts):
        assert len(drafter._texts[b]) == len(text)
        alone = SuffixAutomaton()
        alone.append(np.array(text))
        assert drafter._texts[b].num_states == alone.num_states
    assert propose(drafter, history_of(*texts, active=(True, False)), 2) is None
    drafter.start(Context())
    assert len(drafter._texts[0]) == 0


def test_matches_that_are_too_short_draft_nothing():
    history = history_of([1, 2, 3, 1, 2], [4, 5, 4])
    assert counts_of(propose(started(), history, 2)) == [2, 2]
    assert counts_of(propose(started(min_match=2), history, 2)) == [2, 0]
    assert propose(started(min_match=3), history, 2) is None
    assert propose(started(min_match=3, context=SeveralProposals), history, 2) is None


def test_a_chain_ends_where_it_is_hardly_probable():
    history = history_of([4, 5, 4], [1, 2, 3, 1, 2])
    # Contexts of L tokens that were seen once have the confidence 1 / (1 + 2 / L).
    for least, counts in ((0, [4, 4]), (0.11, [2, 3]), (0.4, [0, 1]), (1, None)):
        draft = propose(started(min_confidence=least), history, 4)
        assert (None if draft is None else counts_of(draft)) == counts


def test_several_chains_come_from_the_text_and_the_corpus():
    shared = Corpus(np.array([1, 2, 8, 1, 2, 8]))
    for corpus in (shared, shared.tokens):
        drafter = started(corpus, min_match=1, context=SeveralProposals)
        chains = chains_of(propose(drafter, history_of([1, 2, 3, 1, 2], [1]), 2))
        assert chains[0] == [[3, 1], [8, 1], [-1, -1]]
        assert chains[1] == [[2, 8], [-1, -1], [-1, -1]]
