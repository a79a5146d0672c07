"""Drafters that copy against searches that anybody can check, on random texts of few tokens."""

import numpy as np
import pytest
from host.slow_copying import chains, ends_of, match
from specdec_hf import KeptTexts, PromptLookupDrafter, RestDrafter, SuffixAutomatonDrafter
from specdec_host import Corpus
from support.drafter_proof import begun, history_of

LENGTHS = np.random.default_rng(5).integers(1, 40, 60)
TEXTS = [np.random.default_rng(n).integers(0, 3, size).tolist() for n, size in enumerate(LENGTHS)]


def drafted(state, count, texts, limits):
    """For each text, its different chains, each as long as its limit; and all confidences."""
    draft = state.propose(history_of(*texts), np.array(limits))
    if draft is None:
        return [[] for _ in texts], []
    rows = draft.tokens.numpy().reshape(len(texts), count, -1)
    found = [[[t for t in chain if t >= 0] for chain in row.tolist()] for row in rows]
    confidences = [] if draft.confidence is None else draft.confidence[draft.tokens.numpy() >= 0]
    return [[chain for chain in row if chain] for row in found], confidences


def searched(text, gamma, count, max_ngram, min_ngram):
    """What followed the matches of the ending: the longest first, of these the latest."""
    found = []
    for size in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        for end in reversed(ends_of(text, text[-size:])[:-1]):
            source = text[end:]  # a copy that reaches the end goes on from its own beginning
            chain = [source[i % len(source)] for i in range(gamma)]
            if chain not in found:
                found.append(chain)
    return found[:count] if gamma else []


@pytest.mark.parametrize("count", [1, 3], ids=["one", "several"])
@pytest.mark.parametrize(("longest", "shortest"), [(1, 1), (3, 1), (4, 2), (32, 3)])
def test_prompt_lookup_copies_what_a_search_finds(longest, shortest, count):
    hits = 0
    for texts in zip(TEXTS[::2], TEXTS[1::2], strict=True):
        limits = [len(texts[0]) % 5, 1 + len(texts[1]) % 5]
        state = begun(PromptLookupDrafter(longest, shortest), 2, num_proposals=count)
        got, _ = drafted(state, count, texts, limits)
        want = [
            searched(text, limit, count, longest, shortest)
            for text, limit in zip(texts, limits, strict=True)
        ]
        assert got == want
        hits += len(want[0]) + len(want[1])
    assert hits > 20


@pytest.mark.parametrize("count", [1, 3], ids=["one", "several"])
@pytest.mark.parametrize(("shortest", "least"), [(1, 0.0), (1, 0.2), (2, 0.4), (3, 0.2)])
def test_a_suffix_automaton_copies_what_a_search_finds(shortest, least, count):
    """Also where a state has already seen the first half of the texts."""
    drafter = SuffixAutomatonDrafter(min_match=shortest, max_match=5, min_confidence=least)
    for texts in zip(TEXTS[::2], TEXTS[1::2], strict=True):
        state = begun(drafter, 2, num_proposals=count)
        for given in ([text[: (len(text) + 1) // 2] for text in texts], texts):
            got, confidences = drafted(state, count, given, [4, 3])
            want = [
                chains(text, n, count, 5, shortest, least)
                for text, n in zip(given, (4, 3), strict=True)
            ]
            assert got == [[tokens for tokens, _ in row] for row in want]
            if count == 1:  # else they are not told
                expected = [confidence for row in want for _, chain in row for confidence in chain]
                np.testing.assert_allclose(confidences, expected, rtol=1e-6)


def most_frequent(text, context):
    after = [text[end] for end in ends_of(text, context) if end < len(text)]
    counts = {token: after.count(token) for token in after}
    return {token for token, count in counts.items() if count == max(counts.values())}


@pytest.mark.parametrize("kind", ["rest", "kept"])
def test_a_text_that_was_kept_is_copied_from_where_its_match_is_the_longest(kind):
    """Negative control: the own text alone would give other tokens."""
    others = 0
    for kept, text in zip(TEXTS[::2], TEXTS[1::2], strict=True):
        if kind == "rest":
            drafter, own = RestDrafter(Corpus(np.array(kept)), 1, 6, 0.0), []
        else:
            drafter, own = SuffixAutomatonDrafter(max_match=6, keep=KeptTexts(2**16)), text
            begun(drafter).end(history_of(kept))
        (got,), _ = drafted(begun(drafter), 1, [text], [1])
        mine = len(match(own, 6)) if own else 0
        sizes = (n for n in range(min(6, len(text)), 0, -1) if ends_of(kept, text[-n:]))
        longest = next(sizes, 0)
        others += longest > mine
        source, size = (kept, longest) if longest > mine else (own, mine)
        want = most_frequent(source, text[-size:]) if size else set()
        assert got[0][0] in want if want else not got, (kept, text)
    assert 5 < others < 30 or kind == "rest"
