"""The suffix automaton of specdec_host against its definition by brute force."""

import itertools
import threading

import numpy as np
import pytest
from host import slow_copying
from specdec_host import Corpus, SuffixAutomaton


def random_texts(count, longest=40):
    generator = np.random.default_rng(0)
    for _ in range(count):
        size = int(generator.integers(1, longest))
        text = generator.integers(0, generator.integers(1, 5), size)
        if generator.random() < 0.3:  # long runs and repeats
            text = np.repeat(text, generator.integers(1, 5, size))
        yield generator, text.astype(generator.choice([np.int32, np.int64]))


def test_counts_equal_brute_force_after_every_token():
    for generator, text in random_texts(40, longest=20):
        max_match = int(generator.integers(1, 4))
        automaton = SuffixAutomaton(max_match)
        for i, token in enumerate(text):
            automaton.append(np.array([token]))
            before = text[: i + 1].tolist()
            for n in range(1, max_match + 2):
                for ngram in itertools.product(range(max(before) + 1), repeat=n):
                    expected = len(slow_copying.ends_of(before, list(ngram)))
                    assert automaton.count(np.array(ngram)) == expected


def test_chains_and_confidences_equal_their_definition():
    proposed = several = 0
    for generator, text in random_texts(300):
        gamma, count, max_match = (int(n) for n in generator.integers(1, 7, 3))
        min_match = int(generator.integers(1, max_match + 1))
        automaton = SuffixAutomaton(max_match)
        for piece in np.split(text, sorted(generator.integers(0, len(text), 3))):
            automaton.append(piece)
        least = float(generator.choice([0, 0.1, 0.3]))
        got = automaton.propose(gamma, count=count, min_match=min_match, min_confidence=least)
        expected = slow_copying.chains(text.tolist(), gamma, count, max_match, min_match, least)
        assert got.tokens.shape == got.confidence.shape == (count, gamma)
        for k, (tokens, confidences) in enumerate(expected):
            rest = [-1] * (gamma - len(tokens))
            assert got.tokens[k].tolist() == tokens + rest
            np.testing.assert_allclose(got.confidence[k, : len(tokens)], confidences, rtol=1e-6)
            assert (got.confidence[k, len(tokens) :] == 0).all()
        assert (got.tokens[len(expected) :] == -1).all()
        assert got.match_length == len(slow_copying.match(text.tolist(), max_match))
        proposed += bool(expected)
        several += len(expected) > 1
    assert proposed > 200
    assert several > 60


def test_a_draft_takes_the_most_frequent_token_and_of_equals_the_latest():
    text = SuffixAutomaton()
    text.append(np.array([1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2]))
    assert text.propose(1).tokens.tolist() == [[8]]
    text.append(np.array([7, 1, 2]))
    # Only the longest context counts: 8 1 2 7 1 2 is new, 2 7 1 2 occurred once before an 8.
    assert text.propose(1).tokens.tolist() == [[8]]
    short = SuffixAutomaton(max_match=2)
    short.append(np.array([1, 2, 7, 1, 2, 8, 1, 2, 8, 1, 2, 7, 1, 2]))
    assert short.propose(1).tokens.tolist() == [[7]]


def test_a_context_that_very_many_tokens_followed_counts_the_newest_of_them():
    followers = np.arange(1, 1401)
    text = SuffixAutomaton()
    text.append(np.array([0, 1, 0]))
    text.append(np.stack([followers, np.zeros_like(followers)], axis=1).ravel())
    got = text.propose(1, min_match=1)
    assert got.tokens.tolist() == [[1400]]  # 1 followed twice, but before 1024 others
    np.testing.assert_allclose(got.confidence, 1 / 1026, rtol=1e-6)


def test_ids_of_31_bits_and_strided_arrays_are_read():
    text = SuffixAutomaton()
    text.append(np.array([2**31 - 1, 5, 3, 5, 2**31 - 1, 5], dtype=np.int64)[::2])
    text.append(np.array([3], dtype=np.int32))
    text.append(np.array([2**31 - 1], dtype=np.longlong))
    assert len(text) == 5
    assert text.propose(3).tokens.tolist() == [[3, 2**31 - 1, 3]]


@pytest.mark.parametrize(
    ("tokens", "error", "message"),
    [
        (np.array([3, -1]), ValueError, r"tokens must hold ids in \[0, 2\^31\), got -1 at 1"),
        (np.array([2**31]), ValueError, r"tokens must hold ids in \[0, 2\^31\), got 2147483648 at"),
        (np.array([[3]]), ValueError, "tokens must be 1-D, got 2 dimensions"),
        (np.array([3.0]), TypeError, "tokens must be int32 or int64, got float64"),
        (np.array([3], ">i8"), TypeError, "tokens must be int32 or int64, got >i8"),
        ([3], TypeError, "tokens must be an array, got"),
    ],
)
def test_wrong_tokens_are_named_and_nothing_is_appended(tokens, error, message):
    text = SuffixAutomaton()
    with pytest.raises(error, match=message):
        text.append(tokens)
    with pytest.raises(error, match=message.replace("tokens", "ngram")):
        text.count(tokens)
    with pytest.raises(error, match=message.split(" at")[0]):
        Corpus(tokens)
    assert len(text) == 0


def propose(max_match=16, gamma=1, **given):
    SuffixAutomaton(max_match).propose(gamma, **given)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SuffixAutomaton(0), ValueError, "max_match must be at least 1, got 0"),
        (lambda: SuffixAutomaton(2**16 + 1), ValueError, "max_match must be at most 65536"),
        (lambda: SuffixAutomaton(4, [1]), TypeError, "corpus must be a Corpus or None, got list"),
        (lambda: propose(gamma=0), ValueError, "gamma must be at least 1, got 0"),
        (lambda: propose(gamma=2**20, count=99), ValueError, r"gamma \* count must be"),
        (lambda: propose(min_confidence=1.5), ValueError, r"must be in \[0, 1\], got 1.5"),
        (lambda: propose(3, min_match=4), ValueError, "min_match must be at mo"),
        (lambda: SuffixAutomaton().reserve(-1), ValueError, "tokens must be at least 0, got -1"),
        (lambda: SuffixAutomaton(2).count(np.arange(4)), ValueError,
         r"ngram must hold at most max_match \+ 1 = 3 tokens, got 4"),
    ],
)  # fmt: skip
def test_wrong_numbers_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_memory_and_states_stay_within_their_bounds():
    texts = {
        "one token": np.zeros(3000, dtype=np.int64),
        "all different": np.arange(3000),
        "random": np.random.default_rng(0).integers(0, 3, 3000),
        "most states": np.array([0] + [1] * 2999),
        "most edges": np.array([0] + [1] * 2998 + [2]),
    }
    for name, tokens in texts.items():
        text = SuffixAutomaton()
        text.append(tokens)
        assert text.num_states <= 2 * len(tokens), name
        assert text.nbytes <= 230 * len(tokens), name
        reserved = SuffixAutomaton()
        reserved.reserve(len(tokens))
        before = reserved.nbytes
        reserved.append(tokens)
        assert reserved.nbytes == before, name


def test_threads_take_turns():
    text, size = SuffixAutomaton(4), 2000
    failures = []

    def work(token):
        try:
            for _ in range(size):
                text.append(np.array([token]))
                text.propose(3, count=2)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(token,)) for token in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [text.count(np.array([token])) for token in range(4)] == [size] * 4
