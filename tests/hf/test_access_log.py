"""The access log of the server: a line for each request, and nothing that is a secret."""

import asyncio
import re

import pytest
from specdec_hf.server import access_log
from support.cli_models import one_line_error
from support.text_server import NAME, serving

KEY, SECRET = "Mine-1~", "do not tell"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
LINE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1:\d+ (.*?) \d+ ms(.*)"


def ask(client):
    """One request of each kind."""
    client.get("/health")
    client.head("/v1/models", headers=AUTHORIZED)
    asked = {"prompt": SECRET, "max_tokens": 3}
    client.post("/v1/completions", json={**asked, "n": 2}, headers=AUTHORIZED)
    client.post("/v1/completions", json={**asked, "stream": True}, headers=AUTHORIZED)
    client.post("/v1/completions", json={**asked, "n": -1}, headers=AUTHORIZED)
    client.post("/v1/completions", json=asked, headers={"Authorization": "Bearer Mine-2~"})
    client.get("/health", headers={"Host": SECRET})
    client.get(f"/a%0Ab?key={KEY}", headers=AUTHORIZED)


def test_each_request_has_a_line_without_keys_and_prompts(capsys):
    with serving(access={"api_key": KEY}, log_level="debug") as (client, queue):
        ask(client)
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


@pytest.mark.parametrize(("begun", "said"), [(True, "200 0 ms, failed"), (False, "500 0 ms")])
def test_a_stream_that_breaks_off_keeps_the_status_that_was_sent(monkeypatch, begun, said):
    async def app(scope, receive, send):
        if begun:
            await send({"type": "http.response.start", "status": 200})
        raise RuntimeError("planted")

    async def send(message):
        pass

    lines = []
    monkeypatch.setattr(access_log.time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(access_log.LOGGER, "info", lambda form, *more: lines.append(form % more))
    scope = {"type": "http", "method": "POST", "path": "/generate_stream"}
    with pytest.raises(RuntimeError, match="planted"):
        asyncio.run(access_log.AccessLog(app)(scope, None, send))
    assert lines == [f"-:0 POST /generate_stream {said}"]


@pytest.mark.parametrize("level", ["info", "warning"])
def test_levels_above_info_log_no_requests(capsys, level):
    with serving(log_level=level) as (client, _):
        client.get(f"/v1/models/{NAME}")
    logged = capsys.readouterr().err.splitlines()
    assert len(logged) == (level == "info"), logged


def test_a_level_of_another_name_is_refused():
    line = one_line_error("serve", "--log-level", "trace")
    assert line.startswith("error: --log-level must be one of debug, info, warning, error, critic")
