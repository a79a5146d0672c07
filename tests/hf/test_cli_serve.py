"""The command `serve`: what it starts, how it ends, and its log of requests."""

import inspect
import os
import re
import sys
import threading

import pytest
from specdec_hf import BatchQueue
from specdec_hf.cli.interrupt import State
from specdec_hf.cli.serve import _listening, serve
from support.cli_models import folder, invoke, one_line_error, write_encoder_decoder  # noqa: F401

EXTRA = "needs the extra [server]"
httpx = pytest.importorskip("httpx", reason=EXTRA)
pytest.importorskip("fastapi", reason=EXTRA)
uvicorn = pytest.importorskip("uvicorn", reason=EXTRA)

from specdec_hf.server.app import Server  # noqa: E402
from support.sources import ROOT  # noqa: E402
from support.text_server import serving  # noqa: E402

pytestmark = pytest.mark.server


def test_the_defaults_are_those_of_the_page():
    page = (ROOT / "docs" / "server.md").read_text()
    stated = dict(re.findall(r"^\| `--([\w-]+)` \| (\d+) \|", page, re.M))
    assert len(stated) == 4
    parameters = inspect.signature(serve).parameters
    assert {name: str(parameters[name.replace("-", "_")].default) for name in stated} == stated


def test_the_command_serves_the_model_with_its_options(folder, monkeypatch):  # noqa: F811
    """The server answers from within its start, and then ends."""
    started, answers, warmed = Server.startup, [], BatchQueue.warm_up

    def warm_up(queue):
        assert threading.current_thread() is threading.main_thread()  # which Ctrl-C interrupts
        warmed(queue)
        answers.append("warm")

    async def startup(self, sockets=None):
        await started(self, sockets)
        host, port = sockets[0].getsockname()
        answers.append(self.service.queue.prefill_chunk_size)
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
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    warm, chunk, models, whole, long, many = answers
    assert (warm, chunk) == ("warm", 9)
    assert [one["id"] for one in models["data"]] == [folder.name]
    assert whole[0] == 200
    assert whole[1]["usage"]["completion_tokens"] == 3
    assert (long[0], many[0]) == (400, 400)
    assert "max_tokens must be at most 3, got 4" in long[1]["error"]["message"]
    assert "n must make at most 2 texts" in many[1]["error"]["message"]
    assert done.output.startswith(f"{folder.name}, bfloat16, cpu: http://127.0.0.1:")


def test_a_port_that_is_taken_is_one_line_before_the_model_is_loaded(folder, monkeypatch):  # noqa: F811
    monkeypatch.setitem(sys.modules, "specdec_hf.cli.load", None)
    (taken,) = _listening("127.0.0.1", 0)  # by a server that loads its model, too
    with taken:
        port = taken.getsockname()[1]
        line = one_line_error("serve", "--model", folder, "--port", port, code=1)
    assert line == f"error: --port {port} of --host 127.0.0.1: {os.strerror(98)}"


def test_an_interruption_has_the_exit_code_of_all_commands(folder, monkeypatch):  # noqa: F811
    """While the server warms up, and while it serves."""

    def interrupted(*_, **__):
        monkeypatch.setattr(State, "seen", True)  # as the handler of the command line does
        raise KeyboardInterrupt

    for owner, name in ((BatchQueue, "warm_up"), (uvicorn.Server, "run")):
        monkeypatch.setattr(owner, name, interrupted)
        done = invoke("serve", "--model", folder, "--drafter", "none", "--port", 0)
        assert done.exit_code == 130, done.output
        assert "http://" not in done.output
        monkeypatch.undo()


def test_an_encoder_decoder_and_a_missing_package_get_one_line(folder, tmp_path, monkeypatch):  # noqa: F811
    encoder = write_encoder_decoder(tmp_path / "t5")
    line = one_line_error("serve", "--model", encoder, "--port", 0)
    assert line == "error: --model: serve takes causal language models, got an encoder-decoder"
    for name in ("uvicorn", "fastapi"):
        with monkeypatch.context() as patched:
            patched.setitem(sys.modules, name, None)
            line = one_line_error("serve", "--model", folder, "--port", 0, code=1)
        assert line.startswith("error: serve needs packages of specdec-kernels[server]: ")
        assert name in line


# The access log: a line for each request, and nothing that is a secret.

KEY, SECRET = "Mine-1~", "do not tell"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1:\d+ (.*?) \d+ ms(.*)"


def test_each_request_has_a_line_without_keys_and_prompts(capsys):
    asked = {"prompt": SECRET, "max_tokens": 3}
    with serving(access={"api_key": KEY}, log_level="debug") as (client, queue):
        client.get("/health")
        client.head("/v1/models", headers=AUTHORIZED)
        for more in ({"n": 2}, {"stream": True}, {"n": -1}):
            client.post("/v1/completions", json={**asked, **more}, headers=AUTHORIZED)
        client.post("/v1/completions", json=asked, headers={"Authorization": "Bearer Mine-2~"})
        client.get("/health", headers={"Host": SECRET})
        client.get(f"/a%0Ab?key={KEY}", headers=AUTHORIZED)
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
    assert not any(secret in logged for secret in (KEY, SECRET, "Mine-2~", "planted"))
