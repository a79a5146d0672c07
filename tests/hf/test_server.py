"""Clients that leave, texts that fail, limits and the end of a server, over the loopback."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.text_server import SECONDS, alone, httpx, serving, until

pytestmark = pytest.mark.server

GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server():
    """A client, and the queue of the server that it is connected to."""
    with serving() as made:
        yield made


def body(text, **parameters):
    """A request for a sampled text, and for what is known of it."""
    return {"inputs": text, "parameters": {"do_sample": True, "details": True, **parameters}}


def stream(client, asked):
    """The events of a streamed answer."""
    with client.stream("POST", "/generate_stream", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]


def message_of(answer, status):
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_sequence_alone(server):
    client, queue = server
    queue.decoder.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, GENERATE, json=body("first", max_new_tokens=1, seed=1))
        until(lambda: len(queue.submitted) == 1)
        stays = pool.submit(stream, client, body("stays", max_new_tokens=40, seed=2))
        leaves = body("leaves", max_new_tokens=200, seed=3)
        with client.stream("POST", "/generate_stream", json=leaves) as answer:
            until(lambda: len(queue.submitted) == 3)
            queue.decoder.seconds = 0.01
            queue.decoder.gate.set()
            next(answer.iter_lines())
        first.result(SECONDS)
        expected = alone("stays", max_new_tokens=40, seed=2)[0]
        assert stays.result(SECONDS)[-1]["generated_text"] == expected
    assert queue.decoder.new < 241


WAITING = {
    GENERATE: body("waits"),
    "/generate_stream": body("waits"),
    COMPLETE: {"prompt": ["waits", "too"], "n": 2},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "stream": True},
}


@pytest.mark.parametrize("path", WAITING)
def test_a_client_that_leaves_while_its_sequences_wait_cancels_all_of_them(path):
    with serving(batch_size=1) as (client, queue), ThreadPoolExecutor(1) as pool:
        queue.decoder.gate.clear()
        first = pool.submit(client.post, GENERATE, json=body("first", max_new_tokens=2, seed=1))
        until(lambda: len(queue.submitted) == 1)
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=WAITING[path], timeout=0.1)
        until(lambda: all(sequence.cancelled for sequence in queue.submitted[1:]))
        assert len(queue.submitted) == (5 if path == COMPLETE else 2)
        assert not queue.submitted[0].cancelled
        queue.decoder.gate.set()
        assert first.result(SECONDS).status_code == 200
        assert client.post(GENERATE, json=body("b", max_new_tokens=1)).status_code == 200
        assert queue.decoder.new == 3  # nothing of those that had left was decoded


def test_without_a_seed_texts_differ_and_can_be_repeated(server):
    client, _ = server
    drawn = [client.post(GENERATE, json=body("abc", max_new_tokens=16)).json() for _ in "ab"]
    assert drawn[0]["generated_text"] != drawn[1]["generated_text"]
    seed = drawn[0]["details"]["seed"]
    again = client.post(GENERATE, json=body("abc", max_new_tokens=16, seed=seed)).json()
    assert again == drawn[0]


def test_texts_beyond_the_limit_are_refused_until_others_have_ended():
    with serving(batch_size=1, max_waiting=2) as (client, queue), ThreadPoolExecutor(2) as pool:
        queue.decoder.gate.clear()
        asked = {"prompt": "a", "max_tokens": 2, "seed": 1}
        busy = [pool.submit(client.post, COMPLETE, json=asked | {"n": n}) for n in (1, 1)]
        until(lambda: len(queue.submitted) == 2)
        answer = client.post(COMPLETE, json=asked | {"n": 2})
        assert message_of(answer, 429) == "the server is busy: 2 of at most 3 texts are open"
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        queue.decoder.gate.set()
        texts = {one.result(SECONDS).json()["choices"][0]["text"] for one in busy}
        assert texts == {alone("a", max_new_tokens=2, seed=1)[0]}
        assert client.post(COMPLETE, json=asked | {"n": 3}).status_code == 200


def test_texts_end_with_the_server_before_the_round_that_runs(monkeypatch, capfd):
    """Those that run and those that wait; a text that had ended before is whole.

    A prompt of thousands of tokens is read for longer than open requests get.
    """
    monkeypatch.setattr("specdec_hf.server.app.SECONDS_TO_END", 0.1)
    with serving(batch_size=1) as (client, queue), ThreadPoolExecutor(2) as pool:
        whole = stream(client, body("whole", max_new_tokens=1))[-1]
        queue.decoder.gate.clear()
        asked = {"prompt": "a", "max_tokens": 200}
        runs = pool.submit(client.post, COMPLETE, json=asked)
        until(lambda: len(queue.submitted) == 2)
        waits = pool.submit(client.post, COMPLETE, json=asked | {"stream": True})
        until(lambda: len(queue.submitted) == 3)
        queue.server.should_exit = True
        assert message_of(runs.result(SECONDS), 503) == "the server ends"
        line = waits.result(SECONDS).text
        assert json.loads(line.removeprefix("data: "))["error"]["message"] == "the server ends"
        assert not queue.decoder.gate.is_set()
    assert whole["details"]["finish_reason"] == "length"
    assert queue.decoder.new < 100
    assert "Traceback" not in capfd.readouterr().err


def test_a_failing_batch_fails_its_requests_and_the_server_goes_on(server):
    client, queue = server
    queue.decoder.fails = True
    says = "the text could not be decoded: RuntimeError: planted"
    for path, asked in ((GENERATE, body("abc")), (COMPLETE, {"prompt": "a", "n": 2})):
        answer = client.post(path, json=asked)
        assert message_of(answer, 500) == says
        assert answer.json()["error"]["type"] == "server_error"
        for route in (path, "/generate_stream", "/") if path == GENERATE else (path,):
            (line,) = client.post(route, json=asked | {"stream": True}).text.split("\n\n")[:-1]
            assert json.loads(line.removeprefix("data: "))["error"]["message"] == says
    queue.decoder.fails = False
    assert stream(client, body("abc", max_new_tokens=3))[-1]["generated_text"]
