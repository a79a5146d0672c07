"""The load test of the server, with a tiny model and 50 clients at once."""

import asyncio
import json

import pytest
from support.cli_models import folder  # noqa: F401
from support.text_server import SECONDS, alone, serving, until

from bench import server_load
from bench.server_load import STATIC, make_requests, run_clients, summarize

pytestmark = pytest.mark.build

CLIENTS = 50
PROMPTS = [f"{word} {n} {word}" for n in range(25) for word in ("cat", "dog")]


def expected(request):
    prompt = f"<user>{request.prompt}</s><assistant>"
    return alone(
        prompt, max_new_tokens=request.max_tokens, seed=request.seed,
        temperature=request.temperature,
    )[0]  # fmt: skip


def test_fifty_clients_get_each_its_own_text():
    requests = make_requests(PROMPTS, CLIENTS, spread=0.2, lengths=(16, 3, 24, 9))
    assert requests == make_requests(PROMPTS, CLIENTS, spread=0.2, lengths=(16, 3, 24, 9))
    with serving(batch_size=8, drafter="prompt_lookup", max_waiting=CLIENTS) as (client, queue):
        url = f"{client.base_url}/v1"
        outcomes, wall = asyncio.run(run_clients(url, requests, SECONDS))
        until(lambda: all(sequence.cancelled for sequence in queue.submitted))
        assert len(queue.submitted) == CLIENTS
    summary = summarize(outcomes, wall)
    assert summary["failures"] == {}
    # A client that leaves may have read the end of its text before.
    assert summary["left"] + summary["answered"] == CLIENTS
    assert summary["left"] >= 2
    assert queue.decoder.most_running <= 8
    for request, outcome in zip(requests, outcomes, strict=True):
        assert not outcome.left or request.leaves
        text = expected(request)
        assert text.startswith(outcome.text)
        if not outcome.left:
            assert outcome.text == text
            assert 0 < outcome.tokens <= request.max_tokens
            assert (outcome.first is not None) == request.streams
    assert len({outcome.text for outcome in outcomes}) > CLIENTS // 2


def test_the_program_measures_a_server_in_a_process_of_its_own(
    folder,  # noqa: F811
    tmp_path,
    capsys,
    monkeypatch,
):
    report, questions = tmp_path / "load.json", tmp_path / "questions.jsonl"
    lines = [{"turns": [text]} for text in (*PROMPTS[:9], "long " * 100)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(server_load, "SETTINGS", ((STATIC, "none"),))
    given = {"spread": 0.0, "prompt_tokens": 99, "clients": 6, "json_file": report}
    server_load.main(questions, model=str(folder), **given)
    (row,) = json.loads(report.read_text())["settings"]
    assert (row["batches"], row["drafter"], row["failures"]) == (STATIC, "none", {})
    assert row["equal"] == row["answered"] == 6
    assert row["peak_mib"] >= row["loaded_mib"] > 0
    assert not any(text in report.read_text() for text in PROMPTS)
    assert "6 of 6" in capsys.readouterr().out
