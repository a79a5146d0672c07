"""Texts of tokens as they come, and the stop strings in them."""

import functools
import random
import sys

import numpy as np
import pytest
from specdec_hf.detokenizer import (
    INCOMPLETE,
    Detokenizer,
    StopCriterion,
    StopStrings,
    decode_behind,
)
from support import cli_models
from support.cli_models import Counting, byte_ids

LETTERS = ["é", "你", "😄", "a", " ", "\n"]
BYTES = ("sentence_piece", "byte_level", "byt5")  # kinds with a token for each byte


@functools.cache
def tokenizer_of(kind):
    return cli_models.KINDS[kind]()


def decoded(tokenizer, ids):
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def behind(tokenizer, prompt, ids):
    """The text of tokens behind a prompt by decoding all of them: quadratic, and the definition."""
    return decoded(tokenizer, [*prompt, *ids]).removeprefix(decoded(tokenizer, prompt))


def is_word(tokenizer, token):
    is_byte = tokenizer.convert_ids_to_tokens(token) in cli_models.BYTES
    return not is_byte and INCOMPLETE not in tokenizer.decode([token])


def random_case(kind, rng):
    tokenizer = tokenizer_of(kind)
    size = len(tokenizer)
    special = set(tokenizer.all_special_ids)
    words = [n for n in range(size) if n not in special and is_word(tokenizer, n)]
    begins = [[], [tokenizer.eos_token_id], rng.choices(words, k=rng.randrange(1, 6))]
    prompt = rng.choice(begins)
    if kind in BYTES and rng.random() < 0.4:
        ids = byte_ids(tokenizer, "".join(rng.choices(LETTERS, k=9)))
        for _ in range(rng.randrange(3)):
            ids.insert(rng.randrange(len(ids)), rng.randrange(size))
    else:
        unknown = 0 if kind == "byt5" else 2
        ids = [rng.choice(rng.choice([words, range(size + unknown)])) for _ in range(25)]
    return tokenizer, prompt, ids


@pytest.mark.parametrize("kind", cli_models.KINDS)
def test_a_text_is_that_of_a_decode_of_all_tokens_whatever_was_taken_back(kind):
    """Where the bytes of all tokens are text; a piece is not taken back where others are not."""
    rng, compared = random.Random(kind), 0
    for _ in range(60):
        tokenizer, prompt, ids = random_case(kind, rng)
        text, pieces = Detokenizer(tokenizer, prompt), []
        for n, token in enumerate(ids):
            pieces.append(text.add(token))
            if rng.random() < 0.3:
                text.truncate(back := rng.randrange(n + 1))
                del pieces[back:]
                pieces += [text.add(again) for again in ids[back : n + 1]]
            whole = behind(tokenizer, prompt, ids[: n + 1])
            found = "".join([*pieces, text.rest()])
            if INCOMPLETE not in whole:
                compared += 1
                assert found == whole
        assert decode_behind(tokenizer, prompt, ids) == found
    assert compared > 200


def test_characters_and_blanks_are_whole_behind_a_prompt_and_behind_bytes_of_none():
    """Root: where too many bytes waited, the half of a character behind them was cut off."""
    for kind in ("sentence_piece", "byte_level"):
        tokenizer = tokenizer_of(kind)
        first, *others = byte_ids(tokenizer, "你")
        prompt = [*byte_ids(tokenizer, "a"), first]
        assert decode_behind(tokenizer, prompt, others) == "你"
    for broken in range(12):
        bad = byte_ids(tokenizer, "😄")[:1] * broken
        ids = [*bad, *byte_ids(tokenizer, "😄"), *byte_ids(tokenizer, "bc")]
        assert decode_behind(tokenizer, [], ids) == INCOMPLETE * broken + "😄bc"
    tokenizer = tokenizer_of("sentence_piece")
    hello, the = (tokenizer.convert_tokens_to_ids(x) for x in ("▁Hello", "▁the"))
    assert decode_behind(tokenizer, [the], [hello, the]) == " Hello the"  # with its first blank


def long_texts(kind):
    """Many tokens that are hard for a detokenizer that waits for something to end."""
    tokenizer, size = tokenizer_of(kind), 1200
    rng, end = random.Random(1), tokenizer.eos_token_id
    yield rng.choices(range(len(tokenizer)), k=size)
    yield [end] * size
    if kind in BYTES:
        smile = byte_ids(tokenizer, "😄")
        yield smile * (size // 4)
        yield byte_ids(tokenizer, "a") * size
        yield smile[:1] * size
        yield smile[:3] * (size // 3)
        yield [x for byte in smile * (size // 8) for x in (byte, end)]


@pytest.mark.parametrize("kind", cli_models.KINDS)
def test_the_work_is_linear_in_the_number_of_tokens(kind):
    """Root: all tokens were decoded for each new one, 720,000 for 1200 tokens."""
    for ids in long_texts(kind):
        tokenizer = Counting(tokenizer_of(kind))
        prompt, array = [0] * 3000, np.array(ids)
        text = Detokenizer(tokenizer, prompt)
        criterion = StopCriterion(tokenizer, prompt, ["z" * 9])
        for n, token in enumerate(ids):
            text.add(token)
            assert not criterion(array[: n + 1])
        assert tokenizer.decoded < 2 * 20 * len(ids)


@pytest.mark.parametrize("string", ["aab" * 300 + "z", "a" * 10**6])
def test_what_nearly_is_a_stop_string_costs_no_more_than_the_text(string):
    """Root: each round compared each beginning of each string with the end of the whole text."""
    lines, before = [], sys.gettrace()

    def count(frame, event, argument):
        lines.append(event)
        return count

    stop = StopStrings([string, string[1:] + "x"])
    places = stop.start
    sys.settrace(count)
    try:
        for character in (string[:-1] * 5)[:4000]:
            places = stop.follow(places, character)
    finally:
        sys.settrace(before)
    assert len(lines) < 40 * 4000


def test_stop_strings_are_found_as_a_search_finds_them():
    """However the text is divided. Negative control: no place would find none."""
    rng = random.Random(3)
    for _ in range(500):
        strings = ["".join(rng.choices("ab", k=rng.randrange(1, 9))) for _ in range(3)]
        text = "".join(rng.choices(["a", "b", "c", *(one[:-1] for one in strings)], k=8))
        stop, places, begin = StopStrings(strings), None, 0
        places = stop.start
        while begin < len(text):
            end = begin + rng.randrange(1, 5)
            places, begin = stop.follow(places, text[begin:end]), min(end, len(text))
            seen = text[:begin]
            assert stop.is_complete(places) is any(one in seen for one in strings)
            for place, one in zip(places, strings, strict=True):
                begun = (n for n in range(len(one)) if seen.endswith(one[:n]))
                assert place == (len(one) if one in seen else max(begun))
        firsts = [text.index(one) for one in strings if one in text]
        assert stop.cut(text) == min(firsts, default=len(text))
