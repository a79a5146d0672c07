"""Files of corpora: what is written is what is mapped, and other files are refused by name."""

import numpy as np
import pytest
from specdec_host import Corpus
from specdec_host.corpus_file import HEADER, MAGIC

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


def test_a_file_that_is_replaced_stays_mapped(path):
    mapped = Corpus.open(path)
    before = mapped.propose(TOKENS[:4], 5).tokens.tolist()
    Corpus(np.zeros(9, dtype=np.int64)).save(path, vocab_size=1)
    assert mapped.propose(TOKENS[:4], 5).tokens.tolist() == before
    assert len(Corpus.open(path)) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is no corpus: it must begin with SDCORPUS and a header"),
        (lambda data: data[:40], "is no corpus: it must begin with SDCORPUS and a header"),
        (lambda data: b"PK" + data[2:], "is no corpus: it must begin with SDCORPUS and a header"),
        (lambda data: data[:8] + b"\2" + data[9:], "must be a corpus of version 1, got version 2"),
        (lambda data: data[:-1], "must have 4064 bytes for 500 tokens, got 4063"),
        (lambda data: data + b"\0", "must have 4064 bytes for 500 tokens, got 4065"),
        (lambda data: HEADER.pack(MAGIC, 1, 5, 0, b""), "must have 64 bytes for 0 tokens, got 64"),
    ],
)
def test_other_files_are_refused_by_name(path, change, message):
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


def test_a_missing_folder_and_file_are_errors_of_the_system(tmp_path):
    with pytest.raises(FileNotFoundError):
        Corpus.open(tmp_path / "no")
    with pytest.raises(FileNotFoundError):
        Corpus(TOKENS).save(tmp_path / "no" / "corpus", vocab_size=20)
