"""The server of `specdec_hf.server`, asked by a real client over the loopback interface."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from specdec_hf import QueuedSequence
from support import cli_models, hf_models
from support.text_server import MODEL, NAME, SECONDS, TOKENIZER, alone, httpx, serving, until


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


RAGGED = [
    ("the cat sat on the cat sat on", {"max_new_tokens": 12, "seed": 5}),
    ("abc", {"max_new_tokens": 3, "seed": -6, "temperature": 0.7, "top_k": 20}),
    ("x y x y x y", {"max_new_tokens": 20, "seed": 7, "temperature": 0.0}),
    ("dog", {"max_new_tokens": 7, "seed": 8, "top_p": 0.8, "min_p": 0.01}),
]


def test_waiting_requests_have_the_texts_that_they_have_alone(server):
    client, queue = server
    queue.decoder.gate.clear()
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(client.post, "/generate", json=body("first", max_new_tokens=2, seed=1))
        until(lambda: len(queue.submitted) == 1)
        others = [pool.submit(stream, client, body(text, **asked)) for text, asked in RAGGED]
        until(lambda: len(queue.submitted) == 5)
        queue.decoder.gate.set()
        answers = [other.result(SECONDS) for other in others]
    assert first.result().json()["generated_text"] == alone("first", max_new_tokens=2, seed=1)[0]
    for (text, asked), events in zip(RAGGED, answers, strict=True):
        expected, tokens = alone(text, **asked)
        assert [event["token"]["id"] for event in events] == tokens
        assert [event["index"] for event in events] == list(range(1, len(tokens) + 1))
        assert "".join(event["token"]["text"] for event in events) == expected
        assert events[-1]["generated_text"] == expected
        assert events[-1]["details"]["seed"] == asked["seed"]
        assert all(event["details"] is event["generated_text"] is None for event in events[:-1])
    assert queue.decoder.rounds < queue.decoder.new, "no drafts"


@pytest.mark.parametrize(
    ("path", "heard"),
    [("/generate_stream", True), pytest.param("/generate_stream", False, marks=pytest.mark.full)],
)
def test_a_client_that_leaves_ends_its_sequence_alone(server, path, heard, monkeypatch):
    """Negative control: where the server does not hear of it, the text goes on to its end."""
    client, queue = server
    if not heard:
        ignored = property(lambda s: False, lambda s, value: None)
        monkeypatch.setattr(QueuedSequence, "cancelled", ignored)
    queue.decoder.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/generate", json=body("first", max_new_tokens=1, seed=1))
        until(lambda: len(queue.submitted) == 1)
        stays = pool.submit(stream, client, body("stays", max_new_tokens=40, seed=2))
        leaves = body("leaves", max_new_tokens=200, seed=3)
        with client.stream("POST", path, json=leaves) as answer:
            until(lambda: len(queue.submitted) == 3)
            queue.decoder.seconds = 0.01 if heard else 0.0
            queue.decoder.gate.set()
            next(answer.iter_lines())
        first.result(SECONDS)
        expected = alone("stays", max_new_tokens=40, seed=2)[0]
        assert stays.result(SECONDS)[-1]["generated_text"] == expected
    if heard:
        assert queue.decoder.new < 241
    else:
        until(lambda: queue.decoder.new == 241)


WAITING = {
    "/generate": body("waits"),
    "/generate_stream": body("waits"),
    "/v1/completions": {"prompt": ["waits", "too"], "n": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "stream": True},
}


@pytest.mark.parametrize("path", WAITING)
def test_a_client_that_leaves_while_its_sequences_wait_cancels_all_of_them(path):
    with serving(batch_size=1) as (client, queue), ThreadPoolExecutor(1) as pool:
        queue.decoder.gate.clear()
        first = pool.submit(client.post, "/generate", json=body("first", max_new_tokens=2, seed=1))
        until(lambda: len(queue.submitted) == 1)
        with pytest.raises(httpx.ReadTimeout):
            client.post(path, json=WAITING[path], timeout=0.1)
        until(lambda: all(sequence.cancelled for sequence in queue.submitted[1:]))
        assert len(queue.submitted) == (5 if path == "/v1/completions" else 2)
        assert not queue.submitted[0].cancelled
        queue.decoder.gate.set()
        assert first.result(SECONDS).status_code == 200
        assert client.post("/generate", json=body("b", max_new_tokens=1)).status_code == 200
        assert queue.decoder.new == 3  # nothing of those that had left was decoded


def test_the_end_of_a_text_has_a_reason(server, monkeypatch):
    client, _ = server
    ids = alone("abc", max_new_tokens=10, seed=4)[1]
    monkeypatch.setattr(MODEL.generation_config, "eos_token_id", ids[5])
    ends = ids.index(ids[5]) + 1
    for new, reason in ((ends, "eos_token"), (ends - 1, "length")):
        answer = client.post("/generate", json=body("abc", max_new_tokens=new, seed=4)).json()
        found = answer["details"]
        assert (found["finish_reason"], found["seed"]) == (reason, 4)
        assert [token["id"] for token in found["tokens"]] == ids[:new]
        assert found["tokens"][-1]["special"] is False  # of the tokenizer, which has another end
        assert found["generated_tokens"] == new
        assert answer["generated_text"] == TOKENIZER.decode(ids[:new], skip_special_tokens=True)


def test_without_a_seed_texts_differ_and_can_be_repeated(server):
    client, _ = server
    drawn = [client.post("/generate", json=body("abc", max_new_tokens=16)).json() for _ in "ab"]
    assert drawn[0]["generated_text"] != drawn[1]["generated_text"]
    seed = drawn[0]["details"]["seed"]
    again = client.post("/generate", json=body("abc", max_new_tokens=16, seed=seed)).json()
    assert again == drawn[0]


GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
USER = '{"messages": [{"role": "user", "content": "a"}]'
# ruff: noqa: E501
REFUSED = [  # path, body, the field, what the one line says
    (GENERATE, '{"inputs": "a", "parameters": {"stop": 3}}', "parameters.stop", "parameters.stop must be [], got 3"),
    (GENERATE, '{"inputs": "a", "parameters": {"truncate": 3}}', "parameters.truncate", "parameters.truncate must not be given, since it is not served, got 3"),
    (GENERATE, '{"inputs": "a", "parameters": {"temperature": -1.0}}', "parameters.temperature", "parameters.temperature must be at least 0.0, got -1.0"),
    (GENERATE, '{"inputs": "a", "parameters": {"temperature": 1e39}}', "temperature", "temperature must be fini"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_p": 1e-46}}', "top_p", "top_p must be in (0, 1] in flo"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_k": "\\ud800"}}', "parameters.top_k", "parameters.top_k must be an integer, got '\\ud800'"),
    (GENERATE, '{"inputs": "a", "parameters": {"seed": 9223372036854775808}}', "parameters.seed", "seed must be below 9223372036854775808, got 9223372036854775808"),
    (GENERATE, '{"inputs": "a", "parameters": {"max_new_tokens": 300}}', "max_new_tokens", "must be at most 255"),
    (GENERATE, '{"inputs": "a", "parameters": {"max_new_tokens": 513}}', "max_new_tokens", "at most 512, got 513"),
    (GENERATE, '{"inputs": ""}', "inputs", "inputs must have 1 to 156 tokens, the model's context of 256 less max_new_tokens, got 0"),
    (GENERATE, '{"inputs": "a", "stream": 1}', "stream", "stream must be true or false, got 1"),
    (GENERATE, '{"input": "a"}', "input", "input must not be given, since it is not served, got 'a'"),
    (GENERATE, '{"inputs": "a", "\\ud800": true}', None, "the body must "),
    (GENERATE, '{"inputs": "\\ud800"}', "inputs", "inputs cannot be encoded"),
    (GENERATE, "NaN", None, "the body must be an object, got nan"),
    (f"{GENERATE}_stream", f'{{"inputs": "{"a" * 256}"}}', "inputs", "tokens, the model's context of 256 less max_new_tokens, got 256"),
    (COMPLETE, '{"prompt": ""}', "prompt", "prompt must have 1 to 240 tokens, the model's context of 256 less max_tokens, got 0"),
    (COMPLETE, '{"prompt": []}', "prompt", "prompt must be a string, a list of strings, token ids"),
    (COMPLETE, '{"prompt": ["a", 3]}', "prompt", "prompt must be a string"),
    (COMPLETE, '{"prompt": [3, 258]}', "prompt", "prompt[1] must be an integer in [0, 257], got 258"),
    (COMPLETE, '{"prompt": "a", "max_tokens": 1' + 300 * "0" + "}", "max_tokens", "max_tokens"),
    (COMPLETE, '{"prompt": "a", "max_tokens": 300}', "max_tokens", "max_tokens must be at most 255"),
    (COMPLETE, '{"prompt": "a", "stop": 3}', "stop", "a list of at most 4 strings, got 3"),
    (COMPLETE, '{"prompt": "a", "stop": ["a", ""]}', "stop", "at least one character"),
    (COMPLETE, '{"prompt": "a", "n": 129}', "n", "n must be at most 128, got 129"),
    (COMPLETE, '{"prompt": "a", "n": 69}', "n", "n must make at most 68 texts, the places of the server, got 69"),
    (COMPLETE, '{"prompt": "a", "logprobs": 6}', "logprobs", "logprobs must be at most 5, got 6"),
    (COMPLETE, '{"prompt": "a", "echo": true}', "echo", "echo must be false, got True"),
    (COMPLETE, '{"prompt": "a", "best_of": 2}', "best_of", "best_of must be 1, got 2"),
    (COMPLETE, '{"prompt": "a", "presence_penalty": 0.5}', "presence_penalty", "presence_penalty must be 0, got 0.5"),
    (COMPLETE, '{"prompt": "a", "stream_options": {"include_usage": true}}', "stream_options", "stream_options must not be given without stream, got {'include_usage': True}"),
    (CHAT, '{"messages": []}', "messages", "messages must have a length of at least 1, got []"),
    (CHAT, '{"messages": [{"role": "user", "content": "\\udfff"}]}', "messages", "messages cannot be"),
    (CHAT, '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages.0.content", "parts of type text"),
    (CHAT, '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "messages.0.content", "a string as text"),
    (CHAT, USER + ', "top_logprobs": 2}', "top_logprobs", "top_logprobs must not be given without logprobs, got 2"),
    (CHAT, USER + ', "max_tokens": 2, "max_completion_tokens": 2}', "max_tokens", "max_tokens must not be given with max_completion_tokens, got 2"),
    (CHAT, USER + ', "max_completion_tokens": 999}', "max_completion_tokens", "at most 512, got 999"),
    (COMPLETE, '{"max_tokens": 1}', "prompt", "prompt must be given"),
    (COMPLETE, '{"prompt": "a", "tools": []}', "tools", "tools must not be given, since it is not served, got []"),
    (COMPLETE, '{"prompt": "a", "prompts": 3}', "prompts", "prompts must not be given"),
    (COMPLETE, '{"prompt": "a", "stream_options": 3}', "stream_options", "stream_options must be an object, got 3"),
    (COMPLETE, '{"prompt": "a", "temperature": Infinity}', "temperature", "temperature must be finite, got inf"),
    (COMPLETE, '{"prompt": "a", "top_p": 0}', "top_p", "top_p must be above 0.0, got 0"),
    (COMPLETE, '{"prompt": ["' + 68 * 'a", "' + 'a"]}', "prompt", "prompt must make at most 68 texts"),
    (CHAT, '{"messages": 3}', "messages", "messages must be a list, got 3"),
    (CHAT, '{"messages": [3]}', "messages.0", "messages.0 must be an object, got 3"),
    (CHAT, '{"messages": [{"role": "x", "content": "a"}]}', "messages.0.role", "must be 'system', 'developer', 'user', 'assistant' or 'tool', got 'x'"),
]  # fmt: skip
NO_JSON = [b"", b"{", b"\xff", b'{"inputs": "\xff"}', b"[" * 9999, b"1" * 5000]


def refused(answer, status=400):
    """The error of an answer, in the form of OpenAI's API."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert len(error["message"]) <= 300
    return error


def test_a_wrong_request_is_refused_by_name_in_one_line(server):
    """Also what JSON cannot repeat, such as a lone surrogate or a number without an end."""
    client, queue = server
    assert client.get("/health").json() == {"status": "ok"}
    json_type = {"Content-Type": "application/json"}
    for path, raw, param, says in REFUSED:
        error = refused(client.post(path, content=raw, headers=json_type))
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), raw
        assert says in error["message"], raw
        assert "Input should" not in error["message"], "the words of Pydantic"
        long = error["code"] == "context_length_exceeded"
        assert long is error["message"].endswith("less max_new_tokens, got 256")
    error = refused(client.post(GENERATE, content=b'{"inputs": "a"}'))
    assert error["message"] == "the body must be JSON, with Content-Type application/json"
    for raw in NO_JSON:
        refused(client.post(GENERATE, content=raw, headers=json_type))
    assert all(sequence.cancelled for sequence in queue.submitted)


def test_others_are_served_while_a_text_is_encoded():
    class Slow:
        """The tokenizer, which takes its time."""

        encodes, goes_on = threading.Event(), threading.Event()

        def __getattr__(self, name):
            return getattr(TOKENIZER, name)

        def __call__(self, text):
            self.encodes.set()
            assert self.goes_on.wait(SECONDS)
            return TOKENIZER(text)

    slow = Slow()
    with serving(tokenizer=slow) as (client, _), ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, GENERATE, json=body("a", max_new_tokens=1))
        try:
            assert slow.encodes.wait(SECONDS)
            assert client.get("/health", timeout=5).status_code == 200
        finally:
            slow.goes_on.set()
        assert first.result(SECONDS).status_code == 200


def test_what_is_not_there_is_refused_in_the_same_form(server):
    client, _ = server
    assert "/nowhere" in refused(client.get("/nowhere"), 404)["message"]
    refused(client.get(GENERATE), 405)
    asked = {"prompt": "a", "model": "another"}
    for answer in (client.post(COMPLETE, json=asked), client.get("/v1/models/another")):
        error = refused(answer, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "model must be tiny, which is served here, got 'another'" in error["message"]
    served = client.get("/v1/models").json()["data"]
    assert [one["id"] for one in served] == [NAME]
    assert client.get(f"/v1/models/{NAME}").json() == served[0]


def test_a_body_has_a_limit(server):
    client, queue = server
    error = refused(client.post(GENERATE, json=body("a" * 2**20)), 413)
    assert "a body must be at most 1048576 bytes" in error["message"]
    assert not queue.submitted


def test_texts_beyond_the_limit_are_refused_until_others_have_ended():
    with serving(batch_size=1, max_waiting=2) as (client, queue), ThreadPoolExecutor(2) as pool:
        queue.decoder.gate.clear()
        asked = {"prompt": "a", "max_tokens": 2, "seed": 1}
        busy = [pool.submit(client.post, COMPLETE, json=asked | {"n": n}) for n in (1, 1)]
        until(lambda: len(queue.submitted) == 2)
        answer = client.post(COMPLETE, json=asked | {"n": 2})
        error = refused(answer, 429)
        assert error["message"] == "the server is busy: 2 of at most 3 texts are open"
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert answer.headers["retry-after"] == "1"
        queue.decoder.gate.set()
        texts = {one.result(SECONDS).json()["choices"][0]["text"] for one in busy}
        assert texts == {alone("a", max_new_tokens=2, seed=1)[0]}
        assert client.post(COMPLETE, json=asked | {"n": 3}).status_code == 200


def test_texts_that_do_not_end_in_time_end_with_the_server(monkeypatch):
    """Those that run and those that wait; a text that had ended before is whole."""
    monkeypatch.setattr("specdec_hf.server.app.SECONDS_TO_END", 0.2)
    ended = []

    def read(client, asked):
        try:
            ended.append(stream(client, asked)[-1])
        except httpx.TransportError as error:
            ended.append(error)

    with serving(batch_size=1) as (client, queue), ThreadPoolExecutor(2) as pool:
        queue.decoder.seconds = 0.05
        read(client, body("whole", max_new_tokens=1))
        for text in ("runs", "waits"):
            pool.submit(read, client, body(text, max_new_tokens=200))
        until(lambda: len(queue.submitted) == 3)
        queue.server.should_exit = True
        until(lambda: len(ended) == 3)
    assert ended[0]["details"]["finish_reason"] == "length"
    assert [one["error"]["message"] for one in ended[1:]] == ["the server ends"] * 2
    assert queue.decoder.new < 100


def test_texts_end_with_the_server_before_the_round_that_runs(monkeypatch, capfd):
    """A prompt of thousands of tokens is read for longer than open requests get."""
    monkeypatch.setattr("specdec_hf.server.app.SECONDS_TO_END", 0.1)
    with serving(batch_size=1) as (client, queue), ThreadPoolExecutor(2) as pool:
        queue.decoder.gate.clear()
        asked = {"prompt": "a", "max_tokens": 9}
        whole = pool.submit(client.post, COMPLETE, json=asked)
        streamed = pool.submit(client.post, COMPLETE, json=asked | {"stream": True})
        until(lambda: len(queue.submitted) == 2)
        queue.server.should_exit = True
        assert refused(whole.result(SECONDS), 503)["message"] == "the server ends"
        line = streamed.result(SECONDS).text
        assert json.loads(line.removeprefix("data: "))["error"]["message"] == "the server ends"
        assert not queue.decoder.gate.is_set()
    assert "Traceback" not in capfd.readouterr().err


def test_a_failing_batch_fails_its_requests_and_the_server_goes_on(server):
    client, queue = server
    queue.decoder.fails = True
    says = "the text could not be decoded: RuntimeError: planted"
    for path, asked in ((GENERATE, body("abc")), (COMPLETE, {"prompt": "a", "n": 2})):
        error = refused(client.post(path, json=asked), 500)
        assert (error["message"], error["type"]) == (says, "server_error")
    assert stream(client, body("abc"))[-1]["error"]["message"] == says
    queue.decoder.fails = False
    assert stream(client, body("abc", max_new_tokens=3))[-1]["generated_text"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_text_that_fails_fails_its_request_alone(server, streams):
    """Its logits are not finite. All requests that ran had status 500."""
    client, queue = server
    text, tokens = alone("the cat sat", max_new_tokens=30, seed=5)
    (prompt,) = TOKENIZER(["the cat sat"])["input_ids"]
    wrong = min({*range(len(TOKENIZER))} - {*tokens, *prompt})
    queue.model = hf_models.build("llama", vocab_size=cli_models.END + 1)
    with torch.no_grad():
        queue.model.get_input_embeddings().weight[wrong] = torch.nan
    queue.decoder.gate.clear()
    good = {"prompt": "the cat sat", "seed": 5, "max_tokens": 30, "temperature": 1.0}
    bad = {"prompt": [prompt[0], wrong], "seed": 1, "max_tokens": 30, "stream": streams}
    with ThreadPoolExecutor() as pool:
        first = pool.submit(client.post, COMPLETE, json=good)
        until(lambda: len(queue.submitted) == 1)
        failing = pool.submit(client.post, COMPLETE, json=bad)
        until(lambda: len(queue.submitted) == 2)
        queue.decoder.gate.set()
        answer = failing.result(SECONDS)
        says = "the text could not be decoded: RuntimeError: logits of sequence 1 at position 2 are"
        if streams:
            assert json.loads(answer.text.removeprefix("data: "))["error"]["message"].startswith(
                says
            )
        else:
            assert refused(answer, 500)["message"].startswith(says)
        (choice,) = first.result(SECONDS).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, "length")
