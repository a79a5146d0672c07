"""Pieces of a text as its tokens come, however rounds divide them."""

import random

import pytest
from specdec_hf.detokenizer import INCOMPLETE, StopCriterion, decode_behind
from specdec_hf.loop.streaming import Step
from support import cli_models
from support.text_server import EXTRA

pytest.importorskip("fastapi", reason=EXTRA)

from specdec_serve.growing_text import GrowingText

pytestmark = pytest.mark.server

KINDS = {"bytes": cli_models.tokenizer, **cli_models.KINDS}
TEXT = "é ab abab\N{GRINNING FACE} abc ab\N{GREEK SMALL LETTER ALPHA}"


def pieces_of(tokenizer, prompt, ids, size, stop=(), reason="length"):
    """The pieces of a text that comes in rounds of so many tokens, each with a log probability.

    It ends with the token that completes a stop string, as a batch of the queue does.
    """
    criterion = StopCriterion(tokenizer, prompt, stop)
    ends = next((n for n in range(1, len(ids) + 1) if criterion(ids[:n])), None)
    ids, reason = ids[:ends], reason if ends is None else "criteria"
    growing = GrowingText(tokenizer, prompt, stop)
    made = []
    for begin in range(0, len(ids), size):
        new = ids[begin : begin + size]
        last = begin + size >= len(ids)
        listed = [{token: -float(begin + n)} for n, token in enumerate(new)]
        made.append(growing.add(Step(0, new, [], [], reason if last else "", top_logprobs=listed)))
    return growing, made


def check_log_probabilities(made, text, count):
    listed = [one for piece in made for one in piece.logprobs]
    assert [one.logprob for one in listed] == [-float(n) for n in range(count)]
    assert [one.begin for one in listed] == sorted(one.begin for one in listed)
    covered = set()
    for one in listed:
        covered |= set(range(one.begin, one.end))
        near = text[max(one.begin - 8, 0) : one.end + 8]  # bytes that are no text move others
        if one.token and INCOMPLETE not in one.token + near:
            assert text[one.begin : one.end] in (one.token, "")
    assert covered >= {n for n, character in enumerate(text) if character != INCOMPLETE}
    sent = 0
    for piece in made[:-1]:
        sent += len(piece.text)
        assert all(one.end <= sent for one in piece.logprobs)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_and_log_probabilities_agree_with_the_text_of_every_kind_of_tokenizer(kind):
    """Root: texts were decoded without their prompt, and names of tokens behind the one before."""
    rng = random.Random(kind)
    tokenizer = KINDS[kind]()
    if kind == "bytes":
        for size in (1, 2, 3, 5, 100):
            _, made = pieces_of(tokenizer, [5], ids := tokenizer(TEXT)["input_ids"], size)
            assert "".join(piece.text for piece in made) == TEXT
            assert not any(INCOMPLETE in piece.text for piece in made), "half a character"
            check_log_probabilities(made, TEXT, len(ids))
    for size in (1, 2, 3, 7, 30) * 6:
        prompt = [rng.choice([tokenizer.eos_token_id, 3])]
        ids = [rng.randrange(len(tokenizer)) for _ in range(30)]
        if "<0x00>" in tokenizer.get_vocab() or kind in ("byte_level", "byt5", "bytes"):
            ids[5:5] = cli_models.byte_ids(tokenizer, "é 😄")
        text = decode_behind(tokenizer, prompt, ids)
        growing, made = pieces_of(tokenizer, prompt, ids, size)
        assert "".join(piece.text for piece in made) == growing.text == text
        assert [piece.finished for piece in made] == [""] * (len(made) - 1) + ["length"]
        check_log_probabilities(made, text, len(ids))


@pytest.mark.parametrize("kind", ["sentence_piece", "byte_level", "word_piece"])
def test_a_text_is_cut_where_its_stop_string_begins_however_rounds_divide_it(kind):
    """Also within bytes whose text is not final. Of strings that end together, the first begins."""
    rng, found = random.Random(kind), 0
    tokenizer = cli_models.KINDS[kind]()
    for size in (1, 2, 3, 30) * 15:
        ids = rng.choices(range(len(tokenizer)), k=20)
        if kind != "word_piece":
            ids[6:6] = [3, *cli_models.byte_ids(tokenizer, "a\n\n你é\n"), 3]
        text, stop = decode_behind(tokenizer, [3], ids), []
        for _ in range(2):
            begin = rng.randrange(len(text))
            stop += [text[begin : begin + 5], text[begin + 2 : begin + 5], "\n你"]
        stop = [one for one in stop if one and INCOMPLETE not in one] or ["zz"]
        growing, made = pieces_of(tokenizer, [3], ids, size, stop)  # nothing of it was sent before
        given = [token for piece in made for token in piece.step.tokens]
        text = decode_behind(tokenizer, [3], given)
        places = [text.index(one) for one in stop if one in text]
        assert growing.finished == ("criteria" if places else "length")
        assert growing.text == "".join(piece.text for piece in made)
        assert growing.text == text[: min(places, default=None)]
        found += bool(places)
        _, (whole,) = pieces_of(tokenizer, [3], ids, 100, stop)
        listed = [one for piece in made for one in piece.logprobs]
        assert [vars(one) for one in listed] == [vars(one) for one in whole.logprobs]
        assert all(one.begin < len(growing.text) for one in listed if places)
    assert found > 8


def test_bytes_that_are_no_character_share_the_place_of_their_text():
    """Of eight the last three may still begin a character; the end says that they do not."""
    tokenizer = cli_models.tokenizer()
    ids = tokenizer("\N{CYRILLIC SMALL LETTER A}")["input_ids"][1:] * 8
    growing, made = pieces_of(tokenizer, [5], ids, 1)
    assert growing.text == 8 * INCOMPLETE
    places = [(one.begin, one.end) for piece in made for one in piece.logprobs]
    assert places == [(0, 5)] * 5 + [(5, 8)] * 3


def test_a_text_is_not_cleaned_up():
    """Some tokenizers take away blanks before marks, which may come later than the blanks."""
    tokenizer = cli_models.byte_level()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    ids = tokenizer.convert_tokens_to_ids(["a", "Ġ.", "Ġ", "b", "Ġ", ",", "c"])
    text = "a . b ,c"
    assert tokenizer.decode(ids) != text
    growing, made = pieces_of(tokenizer, [5], ids, 2)
    assert "".join(piece.text for piece in made) == growing.text == text
    assert "".join(one.token for piece in made for one in piece.logprobs) == text
