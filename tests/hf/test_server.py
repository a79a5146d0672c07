"""The server of examples/server.py, asked by a real client over the loopback interface."""

import importlib.util
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from specdec_hf import QueuedSequence, SpeculativeDecoder, batch_queue, generate
from support import cli_models, hf_models
from support.sources import ROOT

EXTRA = "needs the extra [server]"
FILE = ROOT / "examples" / "server.py"

pytestmark = [
    pytest.mark.skipif(not FILE.is_file(), reason="the examples are not here"),
    pytest.mark.skipif(importlib.util.find_spec("fastapi") is None, reason=EXTRA),
]
httpx = pytest.importorskip("httpx", reason=EXTRA)
uvicorn = pytest.importorskip("uvicorn", reason=EXTRA)

MODEL = hf_models.build("llama", vocab_size=cli_models.END + 1)
DRAFTER = hf_models.with_noise(MODEL, 0.02)
TOKENIZER = cli_models.tokenizer()
SECONDS = 30  # that anything here may take at most


class Watched(SpeculativeDecoder):
    """Counts batches and new tokens, and can be made to wait or to fail."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sizes, self.new, self.running = [], {}, 0
        self.seconds, self.fails, self.gate = 0.0, False, threading.Event()
        self.gate.set()

    def stream(self, model, input_ids, **kwargs):
        if self.fails:
            raise RuntimeError("planted")
        self.sizes.append(len(input_ids))
        self.running += 1
        for step in super().stream(model, input_ids, **kwargs):
            assert self.gate.wait(SECONDS)
            time.sleep(self.seconds)
            key = (len(self.sizes), step.sequence)
            self.new[key] = self.new.get(key, 0) + len(step.tokens)
            yield step
        self.running -= 1


@pytest.fixture
def server(monkeypatch):
    """A client, and the decoder of the server that it is connected to."""
    spec = importlib.util.spec_from_file_location("example_server", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made = []
    monkeypatch.setattr(
        module, "SpeculativeDecoder", lambda *a, **k: made.append(Watched(*a, **k)) or made[0]
    )
    app = module.make_app(MODEL, TOKENIZER, DRAFTER, batch_size=4)
    (decoder,) = made
    decoder.submitted = []
    monkeypatch.setattr(
        batch_queue,
        "QueuedSequence",
        lambda *a: decoder.submitted.append(QueuedSequence(*a)) or decoder.submitted[-1],
    )
    config = uvicorn.Config(app, port=0, log_level="critical", timeout_graceful_shutdown=5)
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS) as client:
        yield client, decoder
    decoder.gate.set()
    running.should_exit = True
    thread.join(SECONDS)
    assert not thread.is_alive()


def until(holds):
    """Wait for a condition, for a bounded time."""
    for _ in range(SECONDS * 100):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("timed out")


def body(text, **parameters):
    return {"inputs": text, "parameters": parameters}


def stream(client, asked):
    """The events of a streamed answer."""
    with client.stream("POST", "/generate_stream", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line[5:]) for line in answer.iter_lines() if line.startswith("data:")]


def alone(text, *, max_new_tokens, seed, **sampling):
    """The text that a call of its own gives, without drafts."""
    inputs = TOKENIZER(text, return_tensors="pt")
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
    out = generate(
        MODEL, **inputs, **settings, drafter=None, rule="match", seed=seed,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    new = out[0, inputs["input_ids"].shape[1] :]
    return TOKENIZER.decode(new, skip_special_tokens=True), new.tolist()


RAGGED = [
    ("the cat sat on the cat sat on", {"max_new_tokens": 12, "seed": 5}),
    ("abc", {"max_new_tokens": 3, "seed": 6, "temperature": 0.7, "top_k": 20}),
    ("x y x y x y", {"max_new_tokens": 20, "seed": 7, "temperature": 0.0}),
    ("dog", {"max_new_tokens": 7, "seed": 8, "top_p": 0.8}),
]


def test_a_batch_of_waiting_requests_gives_each_the_text_that_it_has_alone(server):
    client, decoder = server
    decoder.gate.clear()
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(client.post, "/generate", json=body("first", max_new_tokens=2, seed=1))
        until(lambda: decoder.sizes == [1])
        others = [pool.submit(stream, client, body(text, **asked)) for text, asked in RAGGED]
        until(lambda: len(decoder.submitted) == 5)  # four wait for the batch that is running
        decoder.gate.set()
        answers = [other.result(SECONDS) for other in others]
    assert decoder.sizes == [1, 4]
    assert first.result().json()["generated_text"] == alone("first", max_new_tokens=2, seed=1)[0]
    for (text, asked), events in zip(RAGGED, answers, strict=True):
        expected, tokens = alone(text, **asked)
        assert [token for event in events for token in event["tokens"]] == tokens
        assert "".join(event["text"] for event in events) == expected
        assert events[-1]["generated_text"] == expected
        assert events[-1]["details"]["seed"] == asked["seed"]
        assert all("details" not in event for event in events[:-1])
    assert any(len(event["tokens"]) > 1 for events in answers for event in events), "no drafts"


@pytest.mark.parametrize(
    ("path", "heard"),
    [
        ("/generate_stream", True),
        pytest.param("/generate_stream", False, marks=pytest.mark.full),
        pytest.param("/generate", True, marks=pytest.mark.full),
    ],
)
def test_a_client_that_leaves_ends_its_sequence_alone(server, path, heard, monkeypatch):
    """Negative control: where the server does not hear of it, the text goes on to its end."""
    client, decoder = server
    decoder.seconds = 0.01  # each step of a sequence
    if not heard:
        ignored = property(lambda s: False, lambda s, value: None)
        monkeypatch.setattr(QueuedSequence, "cancelled", ignored)
    decoder.gate.clear()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.post, "/generate", json=body("first", max_new_tokens=1, seed=1))
        until(lambda: decoder.sizes == [1])
        stays = pool.submit(stream, client, body("stays", max_new_tokens=40, seed=2))
        leaves = body("leaves", max_new_tokens=200, seed=3)
        if path == "/generate":
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=leaves, timeout=0.2)
            until(lambda: len(decoder.submitted) == 3)
            decoder.gate.set()
        else:
            with client.stream("POST", path, json=leaves) as answer:
                until(lambda: len(decoder.submitted) == 3)
                decoder.gate.set()
                next(answer.iter_lines())
        decoder.seconds = 0.01 if heard else 0.0
        first.result(SECONDS)
        expected = alone("stays", max_new_tokens=40, seed=2)[0]
        assert stays.result(SECONDS)[-1]["generated_text"] == expected
    until(lambda: decoder.running == 0)
    assert decoder.sizes == [1, 2]
    assert (max(decoder.new.values()) < 200) == heard


def test_the_end_of_a_text_has_a_reason(server, monkeypatch):
    client, _ = server
    ids = alone("abc", max_new_tokens=10, seed=4)[1]
    monkeypatch.setattr(MODEL.generation_config, "eos_token_id", ids[5])
    ends = ids.index(ids[5]) + 1
    for new, reason in ((ends, "eos_token"), (ends - 1, "length")):
        answer = client.post("/generate", json=body("abc", max_new_tokens=new, seed=4)).json()
        assert answer["details"] == {"finish_reason": reason, "seed": 4}
        assert answer["generated_text"] == TOKENIZER.decode(ids[:new], skip_special_tokens=True)


def test_without_a_seed_texts_differ_and_can_be_repeated(server):
    client, _ = server
    drawn = [client.post("/generate", json=body("abc", max_new_tokens=16)).json() for _ in "ab"]
    assert drawn[0]["generated_text"] != drawn[1]["generated_text"]
    seed = drawn[0]["details"]["seed"]
    again = client.post("/generate", json=body("abc", max_new_tokens=16, seed=seed)).json()
    assert again == drawn[0]


GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
REFUSED = [  # path, body, what the one line of the answer names
    (GENERATE, '{"inputs": "a", "parameters": {"max_tokens": 3}}', "max_tokens"),
    (GENERATE, '{"inputs": "a", "parameters": {"temperature": -1.0}}', "temperature"),
    (GENERATE, '{"inputs": "a", "parameters": {"temperature": 1e39}}', "temperature must be fini"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_p": 1e-46}}', "top_p must be in (0, 1] in flo"),
    (GENERATE, '{"inputs": "a", "parameters": {"top_k": "\\ud800"}}', "parameters.top_k"),
    (GENERATE, '{"inputs": "a", "parameters": {"seed": 9223372036854775808}}', "seed"),
    (GENERATE, '{"inputs": "a", "parameters": {"max_new_tokens": 300}}', "must be at most 255"),
    (GENERATE, '{"inputs": ""}', "inputs must have 1 to 192 tokens, got 0"),
    (GENERATE, '{"inputs": "a", "stream": true}', "stream"),
    (GENERATE, '{"inputs": "\\ud800"}', "inputs cannot be encoded"),
    (GENERATE, "NaN", "body: Input should be a valid dictionary"),
    (f"{GENERATE}_stream", f'{{"inputs": "{"a" * 200}"}}', "must have 1 to 192 tokens, got 200"),
    (COMPLETE, '{"prompt": ""}', "prompt must have 1 to 192 tokens, got 0"),
    (COMPLETE, '{"prompt": "a", "max_tokens": 1' + 300 * "0" + "}", "max_tokens must"),
    (COMPLETE, '{"prompt": "a", "stop": 3}', "stop"),
    (COMPLETE, '{"prompt": "a", "n": 2}', "n: Extra inputs are not permitted"),
    (CHAT, '{"messages": []}', "messages"),
    (CHAT, '{"messages": [{"role": "a", "content": "\\udfff"}]}', "messages"),
]  # fmt: skip
NO_JSON = [b"", b"{", b"\xff", b'{"inputs": "\xff"}', b"[" * 9999, b"1" * 5000]


def test_a_wrong_request_is_refused_by_name_in_one_line(server):
    """Also what JSON cannot repeat, such as a lone surrogate or a number without an end."""
    client, _ = server
    assert client.get("/health").json() == {"status": "ok"}
    json_type = {"Content-Type": "application/json"}
    for path, raw, named in REFUSED:
        answer = client.post(path, content=raw, headers=json_type)
        assert answer.status_code == 422, raw
        line = answer.json()["detail"]
        assert named in line
        assert "\n" not in line
        assert len(line) <= 300
    for raw in NO_JSON:
        answer = client.post(GENERATE, content=raw, headers=json_type)
        assert answer.status_code in (400, 422), raw


def openai(client, path, asked):
    """The text, reason and last object of an answer of OpenAI's routes, streamed or not."""
    if not asked.get("stream"):
        answer = client.post(path, json=asked).json()
        choice = answer["choices"][0]
        return choice.get("text") or choice["message"]["content"], choice["finish_reason"], answer
    with client.stream("POST", path, json=asked) as answer:
        lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in lines]
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)
    assert all(c["finish_reason"] is None for c in choices[:-1])
    return text, choices[-1]["finish_reason"], chunks[-1]


@pytest.mark.covering(test=1)
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", [COMPLETE, CHAT])
def test_the_routes_of_openai_answer_with_the_text_of_the_seed(server, path, streams):
    asked = {"max_tokens": 12, "seed": 5, "temperature": 0.8, "top_p": 0.9, "stream": streams}
    if path == COMPLETE:
        prompt, kind = "the cat sat", "text_completion"
        asked["prompt"] = prompt
    else:
        prompt, kind = "<user>the cat</s><assistant>", "chat.completion" + ".chunk" * streams
        asked["messages"] = [{"role": "user", "content": "the cat"}]
    text, reason, last = openai(server[0], path, asked)
    assert text == alone(prompt, max_new_tokens=12, seed=5, temperature=0.8, top_p=0.9)[0]
    assert (reason, last["object"]) == ("length", kind)
    if not streams:
        read = len(TOKENIZER(prompt)["input_ids"])
        usage = {"prompt_tokens": read, "completion_tokens": 12, "total_tokens": read + 12}
        assert last["usage"] == usage


@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_text_ends_before_a_stop_string(server, streams):
    client, decoder = server
    asked = {"prompt": "the cat sat", "max_tokens": 30, "seed": 5, "stream": streams}
    whole = openai(client, COMPLETE, asked)[0]
    for start in (5, 6, 8):  # rounds end within some of them
        middle = whole[start : start + 3]
        stopped = openai(client, COMPLETE, asked | {"stop": ["never there", middle]})
        assert stopped[:2] == (whole[: whole.index(middle)], "stop")
    assert openai(client, COMPLETE, asked | {"stop": "never there"})[0] == whole
    until(lambda: decoder.running == 0)
    assert decoder.new[2, 0] < 30


def test_a_failing_batch_fails_its_requests_and_the_server_goes_on(server):
    client, decoder = server
    decoder.fails = True
    assert client.post("/generate", json=body("abc")).status_code == 500
    with pytest.raises(httpx.TransportError):  # an early end, or a reset connection
        stream(client, body("abc"))
    decoder.fails = False
    assert stream(client, body("abc", max_new_tokens=3))[-1]["generated_text"]
