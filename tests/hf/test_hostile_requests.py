"""Requests that are large, wrong or left behind take little of the time of others.

Work is counted: calls of functions between two turns of the event loop, and texts that reach the
tokenizer.
"""

import gc
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from specdec_serve.encoder import NFC_JOINS, token_capacity
from specdec_serve.fields import MAX_MESSAGES
from support import cli_models
from support.text_server import SECONDS, TOKENIZER, Server, httpx, serving, until
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.server

GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
CALLS = 50_000  # between two turns: a few milliseconds
BYTES = 2**20 - 10_100
LOOP = "event loop"
JSON = {"Content-Type": "application/json"}


def many(item):
    """As many items of a list as a body may hold."""
    return ",".join([item] * (BYTES // (len(item) + 1)))


USER = '"messages":[{"role":"user","content":"a"}]'
KEYS = ",".join(f'"{number:x}":1' for number in range(80_000))
MESSAGE, PART = '{"role":"user","content":""}', '{"type":"text","text":""}'
MESSAGES = ",".join([MESSAGE] * MAX_MESSAGES)
NESTED = "[" * 900 + "]" * 900
SAID = '{"messages":[{"role":"user","content":'
HOSTILE = {  # where, what, and the field that the answer names
    "prompts": (COMPLETE, f'{{"prompt":[{many(chr(34) * 2)}]}}', "prompt"),
    "ids": (COMPLETE, f'{{"n":68,"prompt":[{many("0")}]}}', "prompt"),
    "parts": (CHAT, f'{SAID}[{many(PART)}]}}],"n":0}}', "n"),
    "unknown fields": (CHAT, f"{{{USER},{KEYS}}}", "0"),
    "messages and a fault": (CHAT, f'{{"messages":[{MESSAGES}],"n":0}}', "n"),
    "metadata": (CHAT, f'{{{USER},"metadata":{{{KEYS}}}}}', "metadata"),
    "stop": (CHAT, f'{{{USER},"stop":[{many(chr(34) * 2)}]}}', "stop"),
    "lists in lists": (COMPLETE, f'{{"prompt":{NESTED}}}', "prompt"),
    "a long name": (COMPLETE, f'{{"prompt":"a","model":"{"a " * (BYTES // 2)}"}}', "model"),
    "a long field": (COMPLETE, f'{{"prompt":"a","{"a " * (BYTES // 2)}":1}}', None),
    "a long text": (GENERATE, f'{{"inputs":"{"a" * BYTES}"}}', "inputs"),
    "a long chat": (CHAT, f'{SAID}"{"a" * BYTES}"}}]}}', "messages"),
}


@contextmanager
def counting():
    """Calls of functions in each turn of the event loop, which runs in the server's thread."""
    turns, run = [0], Server.run

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_name == "_run_once":
            turns.append(0)
        elif event in ("call", "c_call"):
            turns[-1] += 1

    def profiled(server, *arguments):
        threading.current_thread().name = LOOP
        sys.setprofile(profile)
        try:
            run(server, *arguments)
        finally:
            sys.setprofile(None)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Server, "run", profiled)
        yield turns


class Gated:
    """A tokenizer that waits for its gate, and remembers the texts that it encoded and where."""

    def __init__(self, tokenizer=TOKENIZER):
        self.tokenizer, self.texts, self.threads = tokenizer, [], set()
        self.gate = threading.Event()

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text):
        self.texts.append(text)
        self.threads.add(threading.current_thread().name)
        assert self.gate.wait(SECONDS)
        return self.tokenizer(text)


def test_little_is_done_for_a_hostile_body_between_two_turns():
    """Lists were read to their end, each fault was collected, and long values were written out.

    Negative control: what is counted is more than the limit where work is done in a turn.
    """
    tokenizer = Gated()
    tokenizer.gate.set()
    with counting() as turns, serving(tokenizer=tokenizer) as (client, queue):
        for name, (path, content, param) in HOSTILE.items():
            turns[:] = [0]
            answer = client.post(path, content=content, headers=JSON)
            assert answer.status_code in (400, 404), name
            error = answer.json()["error"]
            assert param is None or error["param"] == param, (name, error)
            assert len(error["message"]) <= 300
            if name == "a long text":
                assert "must have at most 255 tokens, one less than" in error["message"]
            assert max(turns) < CALLS, name
        # A list of lists lets the collector run; it must not walk over the libraries each time.
        assert gc.get_freeze_count() > 50_000
        assert not queue.submitted
        assert not tokenizer.texts, "a text that cannot fit was encoded"
        submit = queue.submit
        queue.submit = lambda *given, **more: (
            [len(given) for _ in range(CALLS)] and submit(*given, **more)
        )
        assert client.post(GENERATE, json=asked("a")).status_code == 200
        assert max(turns) > CALLS
        assert LOOP not in tokenizer.threads


def asked(text):
    return {"inputs": text, "parameters": {"max_new_tokens": 1}}


def test_texts_whose_client_has_left_are_never_encoded():
    tokenizer = Gated()
    with serving(tokenizer=tokenizer) as (client, queue), ThreadPoolExecutor(2) as pool:
        service = queue.server.service
        first = pool.submit(client.post, GENERATE, json=asked("first"))
        until(lambda: len(tokenizer.texts) == 1)
        chat = {"messages": [{"role": "user", "content": "left"}]}
        many_texts = {"prompt": ["left"] * 3, "stream": True}
        for path, body in ((GENERATE, asked("left")), (COMPLETE, many_texts), (CHAT, chat)):
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=0.1)
        until(lambda: service.places == 1)  # their places are free at once
        tokenizer.gate.set()
        assert first.result(SECONDS).status_code == 200
        assert client.post(GENERATE, json=asked("after")).status_code == 200
    assert tokenizer.texts == ["first", "after"]


def test_a_text_that_waits_for_another_to_be_encoded_ends_with_the_server(monkeypatch):
    monkeypatch.setattr("specdec_serve.app.SECONDS_TO_END", 0.1)
    tokenizer = Gated()
    with serving(tokenizer=tokenizer) as (client, queue), ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, GENERATE, json=asked("first"))
        until(lambda: len(tokenizer.texts) == 1)
        waits = pool.submit(client.post, GENERATE, json=asked("waits"))
        until(lambda: queue.server.service.places == 2)
        queue.server.should_exit = True
        assert waits.result(SECONDS).status_code == 503
        tokenizer.gate.set()
        assert first.result(SECONDS).status_code == 503
    assert tokenizer.texts == ["first"]


def byte_level(*pieces, normalizer=None, split=None, added=(), lacks=""):
    """A tokenizer of bytes and of these pieces of them."""
    alphabet = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(lacks))
    merges = [(piece[:-1], piece[-1]) for piece in pieces]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *pieces])}
    core = Tokenizer(models.BPE(vocabulary, merges))
    core.normalizer = normalizer
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([split, last]) if split else last
    core.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=core)


BLANKS = Regex(" +")
# Tokenizers, and how many characters a token holds at most; None where it may be any number.
CAPACITIES = {
    "bytes": (byte_level(), 1),
    "pieces": (byte_level("ab", "abc"), 3),
    "a special token": (byte_level("aa", added=["<|end|>"]), 7),
    "joined characters": (byte_level("aa", normalizer=normalizers.NFC()), 2 * NFC_JOINS),
    "a split": (byte_level("aa", split=pre_tokenizers.Split(BLANKS, "isolated")), 2),
    "a byte that is lacking": (byte_level("aa", lacks="\u0104"), 2),  # the name of \x04
    "a blank in the place of many": (byte_level(normalizer=normalizers.Replace(BLANKS, " ")), None),
    "removed blanks": (byte_level(split=pre_tokenizers.Split(BLANKS, "removed")), None),
    "blanks before a special token": (byte_level(added=[AddedToken("<end>", lstrip=True)]), None),
    "the last byte of a character is lacking": (byte_level(lacks="\u0122"), None),  # that of 0x80
    "words": (
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")),
            unk_token="[UNK]",
        ),
        None,
    ),
    "no fast tokenizer": (object(), None),
}
TEXTS = ["a", " ", "<|end|>", "<end>", "\x04", "\u0300", "é", "\U0001f600", "abc"]
TEXTS = [
    *(one * 60 for one in TEXTS),
    "\u03b1\u0313\u0300\u0345" * 60,  # four characters that NFC makes one
    f"{' ' * 200}<end>{' ' * 200}",
]


@pytest.mark.parametrize("name", CAPACITIES)
def test_no_text_has_fewer_tokens_than_its_characters_say(name):
    """Otherwise a text that fits into the context would be refused."""
    tokenizer, longest = CAPACITIES[name]
    capacity = token_capacity(tokenizer)
    if longest is None:
        assert capacity is None
        return
    assert capacity.characters == longest
    least = [(capacity.min_tokens(text), len(tokenizer(text)["input_ids"])) for text in TEXTS]
    assert all(minimum <= count for minimum, count in least)
    # Negative control: a text is at the bound, so that no higher one would hold.
    at_bound = any(minimum == count > 0 for minimum, count in least)
    assert at_bound or name == "joined characters"  # which have several bytes


def test_a_long_text_that_fits_is_served():
    """Of another tokenizer, of lost characters, and in a chat whose template leaves it out."""
    blanks = cli_models.tokenizer()
    blanks.backend_tokenizer.normalizer = normalizers.Replace(BLANKS, " ")
    short = cli_models.tokenizer(cli_models.TEMPLATE.replace("m.content", "m.content | trim"))
    chat = {"messages": [{"role": "user", "content": " " * 5000}], "max_tokens": 1}
    for tokenizer, path, body in ((blanks, GENERATE, asked(" " * 5000)), (short, CHAT, chat)):
        with serving(tokenizer=tokenizer) as (client, _):
            assert client.post(path, json=body).status_code == 200
