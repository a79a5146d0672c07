"""Drafters that copy against searches that anybody can check, on random texts of few tokens."""

import numpy as np
import pytest
from host.slow_copying import chains, ends_of, match
from specdec_hf import KeptTexts, PromptLookupDrafter, RestDrafter, SuffixAutomatonDrafter
from specdec_host import Corpus
from support.drafter_proof import begun, history_of

LENGTHS = np.random.default_rng(5).integers(1, 40, 60)
TEXTS = [np.random.default_rng(n).integers(0, 3, size).tolist() for n, size in enumerate(LENGTHS)]


def drafted(drafter, count, texts, limits):
    """For each text, its different chains, each as long as its limit or what was found."""
    state = begun(drafter, len(texts), num_proposals=count)
    draft = state.propose(history_of(*texts), np.array(limits))
    if draft is None:
        return [[] for _ in texts]
    rows = draft.tokens.numpy().reshape(len(texts), count, -1)
    found = [[[t for t in chain if t >= 0] for chain in row.tolist()] for row in rows]
    return [[chain for chain in row if chain] for row in found]


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
        got = drafted(PromptLookupDrafter(longest, shortest), count, texts, limits)
        want = [
            searched(text, limit, count, longest, shortest)
            for text, limit in zip(texts, limits, strict=True)
        ]
        assert got == want
        hits += len(want[0]) + len(want[1])
    assert hits > 20


@pytest.mark.parametrize("count", [1, 3], ids=["one", "several"])
@pytest.mark.parametrize("shortest", [1, 3])
def test_a_suffix_automaton_copies_what_a_search_finds(shortest, count):
    for text in TEXTS:
        drafter = SuffixAutomatonDrafter(min_match=shortest, max_match=5, min_confidence=0.2)
        (got,) = drafted(drafter, count, [text], [4])
        want = chains(text, 4, count, 5, shortest, 0.2)
        assert got == [tokens for tokens, _ in want]


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
        (got,) = drafted(drafter, 1, [text], [1])
        mine = len(match(own, 6)) if own else 0
        sizes = (n for n in range(min(6, len(text)), 0, -1) if ends_of(kept, text[-n:]))
        longest = next(sizes, 0)
        others += longest > mine
        source, size = (kept, longest) if longest > mine else (own, mine)
        want = most_frequent(source, text[-size:]) if size else set()
        assert got[0][0] in want if want else not got, (kept, text)
    assert 5 < others < 30 or kind == "rest"
