"""The drafter over suffix automata: what it drafts, and the texts that it keeps for later calls."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import specdec_host
import torch
from specdec_hf import KeptTexts, SpeculativeDecoder, SuffixAutomatonDrafter
from specdec_hf.drafters.kept_texts import END, kept_with
from specdec_host import Corpus
from support import hf_models
from support.drafter_proof import begun, chains_of, history_of, propose


def started(*args, **kwargs):
    return begun(SuffixAutomatonDrafter(*args, **kwargs), 2)


@pytest.mark.parametrize("given", [lambda corpus: corpus, lambda corpus: corpus.tokens])
def test_several_chains_come_from_the_text_and_the_corpus(given):
    shared = given(Corpus(np.array([1, 2, 8, 1, 2, 8])))
    state = begun(SuffixAutomatonDrafter(shared, min_match=1), 2, num_proposals=3)
    chains = chains_of(propose(state, history_of([1, 2, 3, 1, 2], [1]), 2))
    assert chains == [[[3, 1], [8, 1], [-1, -1]], [[2, 8], [-1, -1], [-1, -1]]]


KEPT = ([1, 2, 3, 4, 5], [7, 8, 9])


def second_call(keep, *texts, **options):
    """What a drafter copies for a text after a call that ended with the texts `KEPT`."""
    drafter = SuffixAutomatonDrafter(keep=keep, **options)
    begun(drafter, 2).end(history_of(*KEPT, active=(False, False)))
    return propose(begun(drafter, 2), history_of(*texts), 4)


def test_a_later_call_copies_from_texts_that_are_kept():
    texts = [9, 9, 2, 3], [6, 8]
    assert second_call(0, *texts) is None
    draft = second_call(2**10, *texts)
    # A text ends there, and nothing of the text after it is drafted.
    assert draft.tokens.tolist() == [[4, 5, -1, -1], [9, -1, -1, -1]]
    assert (draft.confidence[:, 2:] == 0).all()
    assert (draft.confidence > 0).sum() == 3


def test_the_longer_match_wins_then_the_text_itself_then_newer_texts():
    assert second_call(2**10, [2, 3, 6, 2, 3], [1]).tokens[0].tolist() == [6, 2, 3, 6]
    assert second_call(2**10, [3, 6, 2, 3], [1]).tokens[0, :2].tolist() == [4, 5]
    assert second_call(2**10, [3, 6, 2, 3], [1], max_match=1).tokens[0, 0] == 6
    for max_bytes, expected in ((2**10, 3), (8 * 20, 4)):  # in one array, and in one each
        kept = KeptTexts(max_bytes)
        for text in ([1, 2, 3], [1, 2, 4]):
            kept.add([np.array(text)], hf_models.VOCAB)
        draft = propose(started(keep=kept), history_of([1, 2], [0]), 1)
        assert draft.tokens.tolist() == [[expected], [-1]]


def test_the_oldest_texts_are_dropped_first():
    generator, limit = np.random.default_rng(0), 8 * 400
    kept, texts = KeptTexts(limit), []
    for _ in range(300):
        texts.append(generator.integers(0, 50, generator.integers(1, 30)))
        kept.add(texts[-1:], 50)
        assert kept.nbytes <= limit
        held = np.concatenate([one.tokens for one in kept.corpora(50)[::-1]])
        everything = np.concatenate([np.append(text, END) for text in texts])
        assert (held == everything[-len(held) :]).all()
        assert len(held) >= min(len(everything), 400 - 50 - 30)
        assert len(kept.corpora(50)) < 24
    assert kept.corpora(51) == ()
    kept.add([np.arange(1000) % 50], 50)
    assert kept.nbytes == limit
    kept.add([np.array([3])], 51)
    assert kept.corpora(50) == ()
    assert kept.nbytes == 16


def test_seeds_are_kept_longer_than_their_texts():
    """When a text is dropped depends on how long it is, and so on its noise."""
    kept = KeptTexts(8 * 4)
    for seed in (7, 9):
        kept.add([np.arange(9)], 50, [seed])
    (corpus,) = kept.corpora(50)
    assert corpus.tokens.tolist() == [6, 7, 8, END]
    assert kept.seeds == {7, 9}


def test_a_seed_that_has_drawn_a_text_copies_no_other_text_either():
    """Which texts share an array with its own depends on how long that is, and so on its noise."""
    kept, notes = KeptTexts(2**10), []
    sampled = {"rule": "token", "seeds": torch.tensor([7, 8]), "note": notes.append}
    for text, seed in (([1, 2, 3, 4, 5], 6), ([9], 7)):
        kept.add([np.array(text)], hf_models.VOCAB, [seed])
    assert len(kept.corpora(hf_models.VOCAB)) == 2
    drafter = SuffixAutomatonDrafter(keep=kept)
    draft = propose(begun(drafter, 2, **sampled), history_of([2, 3], [2, 3]), 2)
    assert draft.tokens.tolist() == [[-1, -1], [4, 5]]
    for seeds in ([6], [6, 7, 8]):  # where none copies, no text depends on earlier calls
        kept.add([np.array([9])], hf_models.VOCAB, seeds)
        notes.clear()
        begun(drafter, 2, **sampled)
        assert any("the text depends on them" in note for note in notes) == (8 not in seeds)


def test_threads_share_what_is_kept(monkeypatch):
    def slow(tokens):
        time.sleep(0.002)  # others begin to add meanwhile
        return Corpus(tokens)

    monkeypatch.setattr(specdec_host, "Corpus", slow)
    kept = KeptTexts(2**20)

    def call(n):
        kept.add([np.full(20, n)], 100)
        return propose(started(keep=kept), history_of([n, n], [99]), 2).tokens.tolist()

    with ThreadPoolExecutor(8) as pool:
        drafts = list(pool.map(call, range(64)))
    assert drafts == [[[n, n], [-1, -1]] for n in range(64)]
    held = np.concatenate([one.tokens for one in kept.corpora(100)])
    assert (np.bincount(held[held != END], minlength=64) == 20).all()
    assert (held == END).sum() == 64


@pytest.mark.parametrize("settings", [{}, {"do_sample": True, "rule": "match", "seed": [5, 6, 7]}])
def test_what_is_kept_changes_drafts_and_no_text(settings):
    """The store of a name belongs to the target."""
    models = [hf_models.build("llama", vocab_size=50) for _ in range(2)]
    name, settings = "suffix_automaton:keep=1MiB", {**settings, "max_new_tokens": 24}
    calls = [(models[0], "suffix_automaton"), *[(models[0], name)] * 2, (models[1], name)]
    outs = [
        hf_models.decode(model, (9, 1, 12), drafter=drafter, gamma=5, **settings)
        for model, drafter in calls
    ]
    assert all(out.sequences.equal(outs[0].sequences) for out in outs)
    alone, first, second, other = (out.stats.mean_acceptance_length for out in outs)
    assert alone == first == other < second - 1
    assert kept_with(models[0], 2**20).nbytes == 8 * 2 * (9 + 1 + 12 + 3 * 25)


def test_texts_of_calls_that_were_ended_early_are_not_kept():
    kept, model = KeptTexts(2**20), hf_models.tiny("llama")
    decoder = SpeculativeDecoder(SuffixAutomatonDrafter(keep=kept))
    stream = decoder.stream(model, **hf_models.prompts((5,)), max_new_tokens=8, do_sample=False)
    next(stream)
    stream.close()
    assert kept.nbytes == 0
    for _ in decoder.stream(model, **hf_models.prompts((5,)), max_new_tokens=8, do_sample=False):
        assert kept.nbytes == 0
    assert kept.nbytes == 8 * (5 + 8 + 1)
