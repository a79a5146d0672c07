"""The load test of the server, with a tiny model and 50 clients at once."""

import asyncio
import json

import pytest
from specdec_hf import BatchQueue
from support.cli_models import folder  # noqa: F401
from support.text_server import MODEL, SECONDS, alone, serving, until

from bench import server_load
from bench.server_load import (
    STATIC,
    STREAMS,
    WHOLE,
    Outcome,
    StaticBatches,
    make_requests,
    run_clients,
    summarize,
)  # fmt: skip

pytestmark = pytest.mark.build

CLIENTS = 50
PROMPTS = [f"{word} {n} {word}" for n in range(25) for word in ("cat", "dog")]


def expected(request):
    prompt = f"<user>{request.prompt}</s><assistant>"
    return alone(
        prompt, max_new_tokens=request.max_tokens, seed=request.seed,
        temperature=request.temperature,
    )[0]  # fmt: skip


@pytest.mark.parametrize("drafter", ["prompt_lookup", pytest.param(None, marks=pytest.mark.full)])
def test_fifty_clients_get_each_its_own_text(drafter):
    requests = make_requests(PROMPTS, CLIENTS, spread=0.2, lengths=(16, 3, 24, 9))
    assert requests == make_requests(PROMPTS, CLIENTS, spread=0.2, lengths=(16, 3, 24, 9))
    with serving(batch_size=8, drafter=drafter, max_waiting=CLIENTS) as (client, queue):
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


def test_a_summary_by_hand():
    found = [
        Outcome("ab", 3, first=1.0, last=3.0, gap=1.5, whole=3.5),
        Outcome("ab", 9, whole=4.5),
        Outcome("a", 0, first=2.0, last=2.0, left=True),
        Outcome(failure="status 429"),
    ]
    summary = summarize(found, wall=6.0)
    assert summary["first_token"] == pytest.approx([1.5, 1.9, 1.99])
    assert summary["next_tokens"] == pytest.approx([1.0, 1.0, 1.0])
    assert summary["longest_gap"] == [1.5, 1.5, 1.5]
    assert summary["whole_text"] == pytest.approx([4.0, 4.4, 4.49])
    assert (summary["tokens"], summary["tokens_per_second"]) == (12, 2.0)
    assert (summary["answered"], summary["left"]) == (2, 1)
    assert summary["failures"] == {"status 429": 1}


WAYS = {
    "batches": {"spread": 0.0, "prompt_tokens": 99, "clients": 6},
    "joins": {"joins": 60},
    "hostile": {"hostile": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_program_measures_a_server_in_a_process_of_its_own(
    request, tmp_path, capsys, monkeypatch, way
):
    model, report = request.getfixturevalue("folder"), tmp_path / "load.json"
    questions = tmp_path / "questions.jsonl"
    lines = [{"turns": [text]} for text in (*PROMPTS[:9], "long " * 100)]
    questions.write_text("\n".join(map(json.dumps, lines)))
    given = [questions] if way == "batches" else []
    for name, small in (
        ("SETTINGS", ((STATIC, "none"),)), ("CHUNKS", (64, 8)), ("STREAM_TOKENS", 40),
        ("JOINS_AFTER", 0.01), ("LEAVES_AFTER", 0.01), ("HOSTILE_BYTES", 3000),
    ):  # fmt: skip
        monkeypatch.setattr(server_load, name, small)
    server_load.main(*given, model=str(model), **WAYS[way], json_file=report)
    content, printed = json.loads(report.read_text()), capsys.readouterr().out
    if way == "batches":
        (row,) = content["settings"]
        assert (row["batches"], row["drafter"], row["failures"]) == (STATIC, "none", {})
        assert row["equal"] == row["answered"] == len(content["requests"]) == 6
        assert row["peak_mib"] >= row["loaded_mib"] > 0
        assert not any(text in report.read_text() for text in PROMPTS)
        assert "6 of 6" in printed
    elif way == "joins":
        assert [row["chunk"] for row in content["settings"]] == [WHOLE, 8]
        for row in content["settings"]:
            *streams, long = row["outcomes"]
            assert len(streams) == STREAMS
            assert all(one["gap"] > 0 and one["tokens"] == 40 for one in streams)
            assert 0 < long["first"] < long["whole"]
            assert row["equal"] == row["answered"] == STREAMS + 1
    else:
        clients = server_load.hostile_clients()
        assert content["rows"].keys() == clients.keys()
        for name, row in content["rows"].items():
            assert not row["failure"]
            assert min(row["gap"], row["short_request"]) > 0
            assert sum(row["status"].values()) == clients[name].copies
        assert content["rows"]["empty messages"]["status"] == {"400": 1}


def test_in_static_batches_a_sequence_waits_for_the_end_of_all():
    """Also where the queue lets sequences join its batches."""
    order = []

    async def read(name, sequence):
        async for _ in sequence:
            order.append(name)

    async def decode():
        async with BatchQueue(MODEL, StaticBatches(None, rule="match"), 2) as queue:
            first = [queue.submit([5], max_new_tokens=n, seed=1) for n in (9, 2)]
            readers = [asyncio.create_task(read(str(n), one)) for n, one in enumerate(first)]
            while order.count("1") < 2:  # its place is free
                await asyncio.sleep(0)
            late = queue.submit([6], max_new_tokens=3, seed=1)
            await asyncio.gather(*readers, read("late", late))

    asyncio.run(asyncio.wait_for(decode(), SECONDS))
    assert order.count("0") == 9
    assert order[-3:] == ["late"] * 3
