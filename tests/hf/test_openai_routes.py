"""The routes of OpenAI's API: one whole exchange of each, OpenAI's own client, and the programs of
docs/server.md."""

import json
import re
import time
from pathlib import Path

import pytest
import torch
from specdec_hf.request.sampling import sequence_seeds
from support.text_server import MODEL, NAME, TOKENIZER, Server, alone, serving

pytestmark = pytest.mark.server

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT, READ, NEW = "the cat sat", "<user>the cat</s><assistant>", 9
PARTS = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
MESSAGES = [{"role": "user", "content": PARTS}]


def ask(client, path, asked):
    """The objects of an answer, without what is another one each time."""
    answer = client.post(path, json=asked)
    if asked.get("stream"):
        assert answer.headers["content-type"].startswith("text/event-stream")
        *lines, done, end = answer.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        answers = [json.loads(line.removeprefix("data: ")) for line in lines]
    else:
        answers = [answer.json()]
    prefix = "cmpl-" if path == COMPLETE else "chatcmpl-"
    assert {one.pop("id").startswith(prefix) for one in answers} == {True}
    assert all(isinstance(one.pop("created"), int) for one in answers)
    return answers


def usage(read, new, accepted=0, rejected=0, cached=0):
    found = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
    counts = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
    counts["prompt_tokens_details"] = {"cached_tokens": cached}
    return {**counts, "completion_tokens_details": found}


def test_a_completion_is_written_as_openai_writes_it(server):
    """Its log probabilities are those of the model, before temperature and filters."""
    given = {"seed": 5, "temperature": 0.6}
    text, tokens = alone(PROMPT, max_new_tokens=NEW, **given)
    ids = torch.tensor([TOKENIZER(PROMPT)["input_ids"] + tokens])
    with torch.inference_mode():
        rows = MODEL(ids).logits[0, -NEW - 1 : -1].log_softmax(dim=-1)
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": NEW, "logprobs": 2, **given}
    (whole,) = ask(server[0], COMPLETE, asked)
    listed = whole["choices"][0].pop("logprobs")
    read, counts = len(PROMPT), whole.pop("speculation")
    assert counts["rounds"] + counts["accepted_tokens"] == NEW
    assert 0 < counts["accepted_tokens"] <= counts["drafted_tokens"]
    assert counts["mean_acceptance_length"] == pytest.approx(NEW / counts["rounds"], abs=1e-4)
    assert whole == {
        "object": "text_completion",
        "model": NAME,
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
        "usage": usage(read, NEW),
    }
    assert listed["token_logprobs"] == pytest.approx(rows[range(NEW), tokens].tolist(), abs=1e-4)
    best = rows.max(dim=-1).values.tolist()
    assert [max(one.values()) for one in listed["top_logprobs"]] == pytest.approx(best, abs=1e-4)
    assert all(1 <= len(one) <= 3 for one in listed["top_logprobs"])
    for token, begin in zip(listed["tokens"], listed["text_offset"], strict=True):
        assert text[begin:].startswith(token) or "\N{REPLACEMENT CHARACTER}" in token

    chunks = ask(server[0], COMPLETE, asked | {"stream": True})
    assert len(chunks) > 1
    choices = [choice for chunk in chunks for choice in chunk.pop("choices")]
    assert all(chunk == {"object": "text_completion", "model": NAME} for chunk in chunks)
    assert "".join(choice["text"] for choice in choices) == text
    *others, last = (choice["finish_reason"] for choice in choices)
    assert (set(others), last) == ({None}, "length")


def test_a_chat_is_written_as_openai_writes_it(server):
    given = {"seed": 5, "temperature": 0.8, "top_p": 0.9}
    text, tokens = alone(READ, max_new_tokens=NEW, **given)
    asked = {"messages": MESSAGES, "max_completion_tokens": NEW, "user": "me", **given}
    head, read = {"model": NAME, "object": "chat.completion"}, len(TOKENIZER(READ)["input_ids"])
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}
    (whole,) = ask(server[0], CHAT, asked)
    end = {"usage": usage(read, NEW), "speculation": whole["speculation"]}
    assert whole == {**head, "choices": [choice], **end}

    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask(server[0], CHAT, asked | streamed)
    head["object"] += ".chunk"
    end["usage"] = usage(read, NEW, cached=read - 1)
    assert last == {**head, "choices": [], **end}
    assert all(chunk == {**head, "usage": None, "choices": chunk["choices"]} for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.pop("role", "") for delta in deltas] == ["assistant"] + [""] * (len(deltas) - 1)
    assert "".join(delta["content"] for delta in deltas) == text
    *chunks, _ = ask(server[0], CHAT, asked | streamed | {"n": 3})
    parts = [part for chunk in chunks for part in chunk["choices"] if "role" in part["delta"]]
    assert sorted(part["index"] for part in parts) == [0, 1, 2]

    (whole,) = ask(server[0], CHAT, asked | {"logprobs": True, "top_logprobs": 3})
    content = whole["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in content] == [TOKENIZER.decode([token]) for token in tokens]
    for one in content:
        top = [found["logprob"] for found in one["top_logprobs"]]
        assert len(top) == 3
        assert top == sorted(top, reverse=True)
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]


def test_prompts_may_be_token_ids(server):
    ids = TOKENIZER("the cat")["input_ids"]
    asked = {"max_tokens": 5, "seed": 3}
    expected = alone("the cat", max_new_tokens=5, seed=3)[0]
    for prompt in ("the cat", ids, [ids], ["the cat"]):
        (answer,) = ask(server[0], COMPLETE, asked | {"prompt": prompt})
        assert [choice["text"] for choice in answer["choices"]] == [expected]
    (two,) = ask(server[0], COMPLETE, asked | {"prompt": [ids, ids[:3]]})
    assert [choice["index"] for choice in two["choices"]] == [0, 1]


def test_choices_have_seeds_of_their_own(server):
    """Each prompt has ``n`` of them. In a stream they come together, not one after the other."""
    asked = {"prompt": ["the cat", "a"], "n": 2, "max_tokens": 9, "seed": 3}
    (whole,) = ask(server[0], COMPLETE, asked)
    found = [choice["text"] for choice in whole["choices"]]
    assert found == [
        alone(asked["prompt"][n // 2], max_new_tokens=9, seed=seed)[0]
        for n, seed in enumerate(sequence_seeds(3, 4))
    ]
    assert len(set(found)) == 4
    assert whole["usage"]["prompt_tokens"] == sum(map(len, asked["prompt"]))  # each is read once
    chunks = ask(server[0], COMPLETE, asked | {"stream": True})
    parts = [(chunk["choices"][0]["index"], chunk["choices"][0]["text"]) for chunk in chunks]
    assert ["".join(text for n, text in parts if n == index) for index in range(4)] == found
    order = [index for index, _ in parts]
    assert order != sorted(order)


def test_the_length_that_is_not_given(server):
    """Of a completion 16 tokens, of a chat the limit of the server or what the model has left."""
    with serving(max_new_tokens=7) as (limited, _):
        for client, path, text, name, count in (
            (server[0], COMPLETE, {"prompt": "a"}, "completion_tokens", 16),
            (server[0], CHAT, {"messages": MESSAGES}, "total_tokens", 256),  # the context
            (limited, COMPLETE, {"prompt": "a"}, "completion_tokens", 7),
            (limited, CHAT, {"messages": MESSAGES}, "completion_tokens", 7),
        ):
            (answer,) = ask(client, path, text | {"seed": 1})
            assert answer["usage"][name] == count


def test_the_usage_says_how_much_of_a_prompt_was_known(server):
    """To a prompt of the same salt; a prompt of several choices counts once."""
    client, queue = server
    asked = {"prompt": READ, "max_tokens": 9, "seed": 3}
    salted, most = {"cache_salt": "mine"}, len(TOKENIZER(READ)["input_ids"]) - 1
    turns = (
        ({}, 0),
        (salted, 0),
        (salted, most),
        (salted, most),
        ({"n": 2}, most),
        ({"cache_salt": "other"}, 0),
    )
    for more, known in turns:
        (answer,) = ask(client, COMPLETE, asked | more)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": known}
        assert answer["choices"][0]["text"] == alone(READ, max_new_tokens=9, seed=3)[0]
    assert queue.prefix_cache.hits >= 3
    (answer,) = ask(client, CHAT, {"messages": MESSAGES, "max_tokens": 9, "seed": 3})
    said = {"role": "assistant", "content": answer["choices"][0]["message"]["content"]}
    chat = [*MESSAGES, said, {"role": "user", "content": "a"}]
    (answer,) = ask(client, CHAT, {"messages": chat, "max_tokens": 1, "seed": 3})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= most
    kept = queue.prefix_cache
    before = -1
    while before != (before := kept.bytes):  # a text is kept after its last token was sent
        time.sleep(0.2)
    counted = client.get("/metrics").text
    counts = {"queries_total": kept.queries, "hits_total": kept.hits, "bytes": kept.bytes}
    counts |= {"tokens_total": kept.reused_tokens, "evictions_total": 0, "texts": len(kept)}
    assert len(set(counts.values())) == len(counts)
    for name, value in counts.items():
        assert f"specdec_prefix_cache_{name} {float(value)}\n" in counted


@pytest.fixture
def programs():
    """The programs that docs/server.md prints: of two clients and of a server."""
    page = Path(__file__).parents[2] / "docs/server.md"
    if not page.is_file():
        pytest.skip("the documents are not beside the tests")
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    ("number", "package", "prompt", "sampling"),
    [
        (0, "openai", "<user>{}</s><assistant>", {"seed": 1, "temperature": 0.7, "top_k": 40}),
        (1, "huggingface_hub", "{}", {"seed": 0, "temperature": 0.0}),
    ],
)
def test_the_clients_of_the_page_print_the_answer(
    number, package, prompt, sampling, programs, capsys
):
    pytest.importorskip(package)
    address = "http://127.0.0.1:8000"
    assert address in programs[number]
    with serving(name="embedded") as (client, _):
        exec(programs[number].replace(address, str(client.base_url)), {})
    expected, _ = alone(prompt.format("Why is the sky blue?"), max_new_tokens=64, **sampling)
    assert capsys.readouterr().out == f"{expected}\n"


def test_the_server_of_the_page_is_made(programs, monkeypatch):
    ran = []
    monkeypatch.setattr(Server, "run", lambda server: ran.extend([server]))
    exec(programs[2], {"model": MODEL, "tokenizer": TOKENIZER})
    (server,) = ran
    assert server.config.app.state.service.limits.max_waiting == 16
