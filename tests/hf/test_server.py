"""The server over the loopback, and the command `serve`: who may ask and leave, faults, the log."""

import inspect
import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from specdec_hf.cli.interrupt import InterruptState
from specdec_serve.batch_queue import PREFIX_CACHE
from specdec_serve.command import _bytes_of, _listening, serve
from support.cli_models import invoke, one_line_error, succeed, write_encoder_decoder
from support.text_server import (
    NAME,
    SECONDS,
    BatchQueue,
    Server,
    alone,
    httpx,
    make_app,
    serving,
    until,
)

pytestmark = pytest.mark.server

GENERATE, COMPLETE, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"


def body(text, **parameters):
    return {"inputs": text, "parameters": {"do_sample": True, "details": True, **parameters}}


def stream(client, asked):
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
    monkeypatch.setattr("specdec_serve.app.SECONDS_TO_END", 0.1)
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


PATHS = ("/health", "/v1/models", "/nowhere", "/docs")
LOCAL = ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "[0:0:0:0:0:0:0:1]"]
FOREIGN = [
    "evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example",
    "[::1]evil.example", "127.0.0.1@evil.example", "192.0.2.1", "[2001:db8::1]", "0.0.0.0", "",
    "localhost:80:80", "a" * 5000,
]  # fmt: skip


def statuses(client, hosts, path="/health"):
    return {host: client.get(path, headers={"Host": host}).status_code for host in hosts}


def test_requests_for_other_hosts_are_refused():
    """The name of another site that leads here, as a page within a browser may ask for."""
    with serving() as (client, queue):
        assert statuses(client, LOCAL) == dict.fromkeys(LOCAL, 200)
        for path in PATHS:
            assert statuses(client, FOREIGN, path) == dict.fromkeys(FOREIGN, 400)
        headers = {"Host": "evil.example"}
        answer = client.post("/generate", content=b"{", headers=headers)
        line = "the header Host must name the server, and --allowed-host adds names"
        assert answer.json()["error"]["message"] == f"{line}, got 'evil.example'"
        assert not queue.submitted
        answer = client.options("/v1/models", headers={"Origin": "http://evil.example"})
        assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    ("allowed", "taken", "refused"),
    [
        (["Mine.example", "192.0.2.1"], ["mine.example:8000", "192.0.2.1"], ["a.mine.example"]),
        (["0.0.0.0"], ["192.0.2.1:8000", "[2001:db8::1]", "0.0.0.0"], ["mine.example"]),
        (["0.0.0.0"], [], ["localhost"]), (["::"], ["192.0.2.1", "[fe80::1]:80"], ["mine.example"]),
        (["[::2]:80", "a.example:1"], ["a.example", "a.example.:80", "[::2]"], ["", "[]"]),
        (["*"], ["mine.example", "192.0.2.1", "a b"], []),
    ],
)  # fmt: skip
def test_hosts_may_be_added(allowed, taken, refused):
    with serving(access={"allowed_hosts": allowed}) as (client, _):
        assert statuses(client, taken) == dict.fromkeys(taken, 200)
        assert statuses(client, refused) == dict.fromkeys(refused, 400)


KEY = "clé à"  # whose last byte is a blank in other encodings


def test_a_key_is_wanted_where_there_is_one():
    with pytest.raises(ValueError, match="api_key must have at least one character, got ''"):
        make_app(BatchQueue(None, None), None, api_key="")
    with serving(access={"api_key": KEY}) as (client, queue):
        assert client.get("/health").status_code == client.head("/health").status_code == 200
        wrong = [None, "", KEY, "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer é"]
        for given in wrong:
            headers = {} if given is None else {"Authorization": given.encode()}
            for path in ("/v1/models", f"/v1/models/{NAME}", "/health/", "/docs", "/nowhere"):
                answer = client.get(path, headers=headers)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert KEY not in answer.text
            for path in ("/", "/generate", "/generate_stream", "/v1/completions"):
                assert client.post(path, content=b"{", headers=headers).status_code == 401
        for given in (f"Bearer {KEY}", f"bearer {KEY}", f"Bearer  {KEY}"):
            headers = {"Authorization": given.encode()}
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert not queue.submitted


def test_the_command_tells_the_server_whom_to_take(folder, monkeypatch):
    answers, started = [], Server.startup

    async def startup(self, sockets=None):
        await started(self, sockets)
        address = "http://{}:{}".format(*sockets[0].getsockname()[:2])
        async with httpx.AsyncClient(base_url=address, timeout=SECONDS) as client:
            for host in ("mine.example", "localhost", "127.0.0.1", "127.0.0.2", "evil.example"):
                for key in ("secret", "other"):
                    headers = {"Host": host, "Authorization": f"Bearer {key}"}
                    answers.append((await client.get("/v1/models", headers=headers)).status_code)
        self.should_exit = True

    monkeypatch.setattr(Server, "startup", startup)
    start = ("serve", "--model", folder, "--drafter", "none", "--port", 0, "--host", "127.0.0.2")
    start += ("--allowed-host", "mine.example")
    found = [200, 401] * 4 + [400] * 2
    succeed(*start, "--api-key", "secret")
    assert answers == found
    monkeypatch.setenv("SPECDEC_API_KEY", "secret")
    answers.clear()
    assert "secret" not in succeed(*start).output
    assert answers == found
    for wrong in ("", "two words", "schlüssel"):
        line = one_line_error("serve", "--model", folder, "--api-key", wrong)
        rule = "must be of printable ASCII characters without blanks, at least one"
        assert line == f"error: --api-key {rule}"


def test_the_defaults_are_those_of_the_page():
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
    stated = dict(re.findall(r"^\| `--([\w-]+)` \| (\d+) \|", page, re.M))
    assert len(stated) == 4
    parameters = inspect.signature(serve).parameters
    assert {name: str(parameters[name.replace("-", "_")].default) for name in stated} == stated


def test_the_command_serves_the_model_with_its_options(folder, monkeypatch):
    started, answers, warmed = Server.startup, [], BatchQueue.warm_up

    def warm_up(queue):
        assert threading.current_thread() is threading.main_thread()  # which Ctrl-C interrupts
        warmed(queue)
        answers.append("warm")

    async def startup(self, sockets=None):
        await started(self, sockets)
        host, port = sockets[0].getsockname()
        answers.append(self.service.queue.prefill_chunk_size)
        answers.append(self.service.queue.prefix_cache.max_bytes)
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}/v1", timeout=30) as client:
            answers.append((await client.get("/models")).json())
            for asked in ({"max_tokens": 3}, {"max_tokens": 4}, {"n": 3}):
                answer = await client.post("/completions", json={"prompt": "a", **asked})
                answers.append((answer.status_code, answer.json()))
        self.should_exit = True

    monkeypatch.setattr(Server, "startup", startup)
    monkeypatch.setattr(BatchQueue, "warm_up", warm_up)
    done = invoke(
        "serve", "--model", folder, "--drafter", "prompt_lookup", "--batch-size", 1, "--port", 0,
        "--max-waiting", 1, "--max-tokens", 3, "--dtype", "bfloat16", "--prefill-chunk-size", 9,
        "--prefix-cache", "1.5MiB", "--no-compile",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    warm, chunk, memory, models, whole, long, many = answers
    assert (warm, chunk, memory) == ("warm", 9, 1.5 * 2**20)
    assert [one["id"] for one in models["data"]] == [folder.name]
    assert whole[0] == 200
    assert whole[1]["usage"]["completion_tokens"] == 3
    assert (long[0], many[0]) == (400, 400)
    assert "max_tokens must be at most 3, got 4" in long[1]["error"]["message"]
    assert "n must make at most 2 texts" in many[1]["error"]["message"]
    unused, line = done.output.split("\n", 1)
    assert unused.startswith("--prefix-cache keeps nothing: the bits of a token depend on the for")
    assert line.startswith(f"{folder.name}, bfloat16, cpu: http://127.0.0.1:")


@pytest.mark.parametrize("wrong", ["-1", "much", "1XB", "1 GB", "1e9"])
def test_a_memory_that_is_no_size_is_one_line(folder, wrong):
    line = one_line_error("serve", "--model", folder, f"--prefix-cache={wrong}")
    rule = "a size such as 512MB or 2GiB, or 0 for none"
    assert line == f"error: --prefix-cache must be {rule}, got {wrong}"


def test_a_memory_has_units_of_1000_or_1024():
    sizes = {"0": 0, "7": 7, "2kb": 2000, "512MB": PREFIX_CACHE, "1.5GiB": 3 * 2**29, "1T": 10**12}
    assert {size: _bytes_of(size) for size in sizes} == sizes
    assert inspect.signature(serve).parameters["prefix_cache"].default == "512MB"


def test_a_port_that_is_taken_is_one_line_before_the_model_is_loaded(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "specdec_hf.cli.load", None)
    (taken,) = _listening("127.0.0.1", 0)  # by a server that loads its model, too
    with taken:
        port = taken.getsockname()[1]
        line = one_line_error("serve", "--model", folder, "--port", port, code=1)
    assert line == f"error: --port {port} of --host 127.0.0.1: {os.strerror(98)}"


def test_an_interruption_has_the_exit_code_of_all_commands(folder, monkeypatch):
    def interrupted(*_, **__):
        monkeypatch.setattr(InterruptState, "seen", True)  # as the handler of the command line does
        raise KeyboardInterrupt

    for owner, name in ((BatchQueue, "warm_up"), (Server, "run")):
        monkeypatch.setattr(owner, name, interrupted)
        done = invoke("serve", "--model", folder, "--drafter", "none", "--port", 0)
        assert done.exit_code == 130, done.output
        assert "http://" not in done.output
        monkeypatch.undo()


def test_an_encoder_decoder_and_a_missing_package_get_one_line(folder, tmp_path, monkeypatch):
    encoder = write_encoder_decoder(tmp_path / "t5")
    line = one_line_error("serve", "--model", encoder, "--port", 0)
    assert line == "error: --model: serve takes causal language models, got an encoder-decoder"
    for name in ("fastapi", "uvicorn"):
        monkeypatch.setitem(sys.modules, name, None)
    line = one_line_error("serve", "--model", folder, "--port", 0, code=1)
    assert line.endswith(" specdec-kernels[server]: pip install fastapi uvicorn")


OUR_KEY, SECRET = "Mine-1~", "do not tell"
AUTHORIZED = {"Authorization": f"Bearer {OUR_KEY}"}
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1:\d+ (.*?) \d+ ms(.*)"


def test_each_request_has_a_line_without_keys_and_prompts(capsys):
    asked = {"prompt": SECRET, "max_tokens": 3}
    with serving(access={"api_key": OUR_KEY}, log_level="debug") as (client, queue):
        client.get("/health")
        client.head("/v1/models", headers=AUTHORIZED)
        for more in ({"n": 2}, {"stream": True}, {"n": -1}):
            client.post("/v1/completions", json={**asked, **more}, headers=AUTHORIZED)
        client.post("/v1/completions", json=asked, headers={"Authorization": "Bearer Mine-2~"})
        client.get("/health", headers={"Host": SECRET})
        client.get(f"/a%0Ab?key={OUR_KEY}", headers=AUTHORIZED)
        queue.decoder.fails = True
        body = {"inputs": SECRET, "parameters": {"max_new_tokens": 200}}
        client.post("/generate", json=body, headers=AUTHORIZED)
        queue.decoder.fails, queue.decoder.seconds = False, 0.05
        with client.stream("POST", "/generate_stream", json=body, headers=AUTHORIZED) as answer:
            next(answer.iter_lines())
    logged = capsys.readouterr().err
    found = [re.fullmatch(LINE, line) for line in logged.splitlines() if " ms" in line]
    assert all(found), logged
    lines = [(one[1], one[2]) for one in found]
    assert lines[:9] == [
        ("GET /health 200", ""),
        ("HEAD /v1/models 200", ""),
        ("POST /v1/completions 200", " 6 tokens"),
        ("POST /v1/completions 200", " 3 tokens"),
        ("POST /v1/completions 400", ""),
        ("POST /v1/completions 401", ""),
        ("GET /health 400", ""),
        ("GET /a%0Ab 404", ""),
        ("POST /generate 500", " 0 tokens"),
    ]
    ((request, rest),) = lines[9:]
    assert request == "POST /generate_stream 200"
    assert re.fullmatch(r" \d+ tokens, the client left", rest)
    assert not any(secret in logged for secret in (OUR_KEY, SECRET, "Mine-2~", "planted"))


def test_metrics_count_what_the_answers_say():
    from prometheus_client.parser import text_string_to_metric_families as parsed  # noqa: PLC0415

    def read(client):
        answer = client.get("/metrics", headers=key)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        found = [one for family in parsed(answer.text) for one in family.samples]
        return {one.name + "".join(one.labels.values()): one.value for one in found}

    key = {"Authorization": "Bearer secret"}
    with serving(access={"api_key": "secret"}) as (client, queue):
        assert message_of(client.get("/metrics"), 401)
        assert read(client)["specdec_generation_tokens_total"] == 0
        asked = {"prompt": ["the cat", "a"], "max_tokens": 12, "n": 2, "seed": 1}
        answer = client.post(COMPLETE, json=asked, headers=key).json()
        assert message_of(client.post(COMPLETE, json={**asked, "n": 0}, headers=key), 400)
        queue.decoder.fails = True
        assert message_of(client.post(COMPLETE, json=asked, headers=key), 500)
        queue.decoder.fails = False
        found, counts = read(client), answer["speculation"]
    assert found["specdec_generation_tokens_total"] == answer["usage"]["completion_tokens"] == 48
    assert found["specdec_rounds_total"] == counts["rounds"]
    assert found["specdec_draft_tokens_total"] == counts["drafted_tokens"] > 0
    assert found["specdec_accepted_tokens_total"] == counts["accepted_tokens"] > 0
    assert found["specdec_prompt_tokens_total"] == 2 * 2 * (len("the cat") + 1)  # of both requests
    assert (found["specdec_texts_totallength"], found["specdec_texts_totalerror"]) == (4, 4)
    assert found["specdec_request_seconds_count"] == 4
    assert found["specdec_time_to_first_token_seconds_sum"] > 0
    assert found["specdec_texts_open"] == found["specdec_texts_waiting"] == 0
