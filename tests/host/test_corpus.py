"""Suffix arrays, drafts from a corpus and its files, against their definitions by brute force."""

import numpy as np
import pytest
from host import slow_copying
from specdec_host import Corpus, SuffixAutomaton
from specdec_host.corpus_file import HEADER, MAGIC


def texts(count):
    generator = np.random.default_rng(1)
    for _ in range(count):
        text = generator.integers(0, generator.integers(1, 6), generator.integers(0, 60))
        if generator.random() < 0.3:
            text = np.tile(text, 3)
        yield generator, text


def long_texts():
    generator = np.random.default_rng(2)
    yield generator.integers(0, 2**31, 600)
    yield np.full(600, 2**31 - 1)
    yield np.tile(generator.integers(0, 3, 50), 12)
    yield np.array([bin(i).count("1") % 2 for i in range(512)])  # Thue and Morse


def test_the_suffix_array_holds_the_suffixes_in_ascending_order():
    for text in (*(text for _, text in texts(400)), *long_texts()):
        tokens = text.tolist()
        expected = sorted(range(len(tokens)), key=lambda i: tokens[i:])
        assert Corpus(text).suffixes.tolist() == expected


def expected_chain(text, context, gamma, max_match, min_match):
    """The chain of the longest end of the context that occurs; the lowest of equal ids first."""
    for length in range(min(max_match, len(context)), min_match - 1, -1):
        match = context[len(context) - length :]
        if slow_copying.ends_of(text, match):
            break
    else:
        return [], [], 0
    chain, confidences, longest = [], [], len(match)
    while len(chain) < gamma:
        seen = sorted(slow_copying.followers(text, match), key=lambda f: (-f[1], f[0]))
        if not seen:
            break
        token, count, _ = seen[0]
        chain.append(token)
        confidences.append(count / (sum(s[1] for s in seen) + 2 / len(match)))
        match = [*match, token]
    return chain, confidences, longest


def texts_of_few_tokens(count):
    """A context of one or two of them has a hundred matches or more, which are not all read."""
    generator = np.random.default_rng(3)
    for _ in range(count):
        yield generator, generator.integers(0, 3, 400)


def test_drafts_from_a_corpus_equal_their_definition():
    found = 0
    for generator, text in (*texts(400), *texts_of_few_tokens(40)):
        corpus = Corpus(text)
        context = generator.integers(0, 6 if len(text) < 400 else 3, generator.integers(0, 9))
        gamma, max_match = (int(n) for n in generator.integers(1, 7, 2))
        min_match = int(generator.integers(1, max_match + 1))
        got = corpus.propose(context, gamma, min_match=min_match, max_match=max_match)
        tokens, confidences, length = expected_chain(
            text.tolist(), context.tolist(), gamma, max_match, min_match
        )
        assert got.tokens[0].tolist() == tokens + [-1] * (gamma - len(tokens))
        np.testing.assert_allclose(got.confidence[0, : len(tokens)], confidences, rtol=1e-6)
        assert got.match_length == length
        found += bool(tokens)
    assert found > 80


def test_an_automaton_copies_from_the_longer_of_both_matches():
    corpus = Corpus(np.array([1, 2, 3, 4, 9, 8, 7]))
    text = SuffixAutomaton(corpus=corpus)
    text.append(np.array([4, 5, 2, 3, 4]))
    got = text.propose(3, count=2)
    assert got.match_length == 3
    assert got.tokens.tolist() == [[9, 8, 7], [5, 2, 3]]
    # 1 / (1 + 2 / 3), and of the rest 1 / (1 + 2 / 1)
    np.testing.assert_allclose(got.confidence[:, 0], [0.6, 0.4 / 3], rtol=1e-6)
    text.append(np.array([5, 2, 3, 4]))
    got = text.propose(3, count=2)
    assert got.tokens.tolist() == [[5, 2, 3], [9, 8, 7]]
    del corpus  # the automaton keeps it
    assert text.propose(3).match_length == 5


def test_a_match_in_a_corpus_begins_in_an_earlier_append():
    text = SuffixAutomaton(max_match=3, corpus=Corpus(np.array([2, 3, 4, 9, 5, 4, 8])))
    for token in (7, 2, 3, 4):
        text.append(np.array([token]))
    got = text.propose(1)
    assert (got.tokens.tolist(), got.match_length) == ([[9]], 3)


def test_a_damaged_suffix_array_is_read_within_bounds():
    generator = np.random.default_rng(4)
    text = generator.integers(0, 4, 200)
    for low, high in ((-(2**31), 2**31), (0, 400)):
        for _ in range(20):
            wrong = generator.integers(low, high, 200).astype(np.int32)
            got = Corpus(text, wrong).propose(text[:5], 6, count=3)
            assert got.tokens.max() < 4


# Files: what is written is what is mapped, and other files are refused by name.

TOKENS = np.random.default_rng(0).integers(0, 20, 500)


@pytest.fixture
def path(tmp_path):
    Corpus(TOKENS).save(tmp_path / "corpus", vocab_size=20, fingerprint=b"f" * 32)
    return tmp_path / "corpus"


def test_a_mapped_corpus_drafts_as_the_one_that_was_saved(path):
    mapped, made = Corpus.open(path), Corpus(TOKENS)
    assert (mapped.vocab_size, mapped.fingerprint) == (20, b"f" * 32)
    assert (made.vocab_size, made.fingerprint) == (None, bytes(32))
    assert path.stat().st_size == HEADER.size + 8 * len(TOKENS)
    assert len(mapped) == len(TOKENS)
    assert not mapped.tokens.flags.writeable
    for begin in range(0, 500, 50):
        context = TOKENS[begin : begin + 4]
        for got, expected in zip(
            mapped.propose(context, 5, count=3), made.propose(context, 5, count=3), strict=True
        ):
            assert np.array_equal(got, expected)
    assert [p.name for p in path.parent.iterdir()] == ["corpus"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is no corpus: it must begin with SDCORPUS and a header"),
        (lambda data: b"PK" + data[2:], "is no corpus: it must begin with SDCORPUS and a header"),
        (lambda data: data[:8] + b"\2" + data[9:], "must be a corpus of version 1, got version 2"),
        (lambda data: data[:-1], "must have 4064 bytes for 500 tokens, got 4063"),
        (lambda data: HEADER.pack(MAGIC, 1, 5, 0, b""), "must have 64 bytes for 0 tokens, got 64"),
    ],
)
def test_what_is_no_corpus_is_refused_by_name(path, change, message):
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError) as raised:
        Corpus.open(path)
    assert str(raised.value) == f"{path} {message}"


@pytest.mark.parametrize(
    ("tokens", "settings", "message"),
    [
        ([], {"vocab_size": 9}, "tokens must hold at least 1 id, got 0"),
        ([9], {"vocab_size": 9}, r"tokens must hold ids in \[0, vocab_size\) = \[0, 9\), got 9"),
        ([1], {"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ([1], {"vocab_size": 9, "fingerprint": b"f"}, "fingerprint must have 32 bytes, got 1"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, tokens, settings, message):
    with pytest.raises(ValueError, match=message):
        Corpus(np.array(tokens, dtype=np.int64)).save(tmp_path / "corpus", **settings)
    assert not list(tmp_path.iterdir())
