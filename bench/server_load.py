"""Latencies of the server under many clients at once.

    python -m bench.server_load [--questions FILE] [--clients N] [--seconds S] [--json FILE]
    python -m bench.server_load --joins TOKENS [--json FILE]
    python -m bench.server_load --hostile [--json FILE]

A server of each setting answers the same requests in a process of its own: one after the other with
and without drafts, as `serve` decodes, and in static batches, which those that wait begin when all
of a batch has ended. Prompts and lengths are mixed, every other answer is streamed, a third is
greedy, and every tenth client leaves after its third event. The settings have the same texts,
because the rule is `match`.

With ``--joins`` a prompt of so many tokens joins the streams of a few short ones, which then wait:
once for the whole prompt, then for chunks of it.

With ``--hostile`` a stream runs while a client sends bodies as large as the server takes, which end
as faults or whose client leaves: how long the stream stops, and how long a short request takes.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from rich.console import Console
from rich.table import Table
from specdec_hf import SpeculativeDecoder
from specdec_hf.cli.prompts import SHIPPED_PROMPTS, PromptError, read_prompts
from specdec_hf.cli.weights import embedded_folder, load_folder
from specdec_hf.extras.continuous_batching import PREFILL_CHUNK_SIZE
from specdec_hf.model_files import load_tokenizer
from specdec_serve.batch_queue import BatchQueue

from bench.results import machine

STATIC = "static batches"
SETTINGS = (("continuous", "auto"), ("continuous", "none"), (STATIC, "auto"), (STATIC, "none"))
WHOLE = 2**20  # a chunk that holds every prompt
CHUNKS = (1024, 512, 256, 128, 64)
STREAMS, STREAM_TOKENS = 4, 160  # that a long prompt joins
JOINS_AFTER = 2.0  # seconds
LENGTHS = (16, 32, 64, 96)  # new tokens of a text at most
PERCENTILES = (50, 90, 99)
EVENTS_OF_A_LEAVER = 3
HOSTILE_BYTES = 2**20 - 100  # of a list within a body
LEAVES_AFTER = 0.3  # seconds
console = Console(highlight=False, width=140)


class StaticBatches(SpeculativeDecoder):
    """Lets no sequence join a batch, so that those that wait are the next one."""

    def stream(self, *args: Any, source: Any = None, **kwargs: Any) -> Any:
        ended = False

        def those_that_wait(running: int) -> Any:
            nonlocal ended
            given = None if ended else source(running)
            ended = given is None
            return given

        return super().stream(*args, source=those_that_wait, **kwargs)


@dataclass(frozen=True)
class Request:
    """What a client asks.

    Attributes:
        prompt: the message of a user.
        max_tokens, temperature, seed: of the answer.
        streams: whether it comes in events.
        leaves: whether the client goes after `EVENTS_OF_A_LEAVER`.
        begins: seconds after the first client.
    """

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    streams: bool
    leaves: bool
    begins: float


@dataclass
class Outcome:
    """What a client got. Times are seconds after its request.

    Attributes:
        text: of the answer.
        tokens: new ones; 0 for a client that left.
        first, last: the first and the last piece of a streamed text; None for others.
        gap: the longest time between two pieces of it.
        whole: the end of the answer.
        left: whether the client went.
        failure: the kind of error, "" without one.
    """

    text: str = ""
    tokens: int = 0
    first: float | None = None
    last: float | None = None
    gap: float = 0.0
    whole: float | None = None
    left: bool = False
    failure: str = ""


def make_requests(
    prompts: Sequence[str], clients: int, spread: float, lengths: Sequence[int] = LENGTHS
) -> list[Request]:
    """The requests of so many clients, who come within ``spread`` seconds; the same ones always."""
    return [
        Request(
            prompts[i % len(prompts)],
            lengths[i // 2 % len(lengths)],
            temperature=0.0 if i % 3 == 0 else 0.8,
            seed=i,
            streams=i % 2 == 1,
            leaves=i % 10 == 9,
            begins=spread * i / clients,
        )
        for i in range(clients)
    ]


def make_joining(prompts: Sequence[str], long: str) -> list[Request]:
    """Streams of a few prompts, then a long prompt, which comes while they run."""
    like = Request("", STREAM_TOKENS, 0.0, seed=0, streams=True, leaves=False, begins=0.0)
    streams = [replace(like, prompt=prompts[i % len(prompts)]) for i in range(STREAMS)]
    return [*streams, replace(like, prompt=long, max_tokens=16, begins=JOINS_AFTER)]


def long_prompt(prompts: Sequence[str], tokenizer: Any, tokens: int) -> str:
    """About so many tokens of prompts, one after the other."""
    ids: list[int] = []
    while len(ids) < tokens:
        ids += [token for text in prompts for token in tokenizer(f"{text}\n")["input_ids"]]
    text: str = tokenizer.decode(ids[:tokens], skip_special_tokens=True)
    return text


async def run_clients(
    url: str, requests: Sequence[Request], seconds: float
) -> tuple[list[Outcome], float]:
    """Let a client ask each of the requests; returns what they got, and the time of all.

    Args:
        url: of the server, with "/v1".
        requests: one for each client.
        seconds: after which those that wait give up.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    began = time.perf_counter()
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=None) as client:

        async def one(request: Request) -> Outcome:
            await asyncio.sleep(request.begins)
            outcome = Outcome()
            left = seconds - (time.perf_counter() - began)
            try:
                await asyncio.wait_for(_ask(client, request, outcome), left)
            except asyncio.TimeoutError:
                outcome.failure = f"not answered within {seconds:g} s"
            except httpx.HTTPError as error:
                outcome.failure = type(error).__name__
            return outcome

        outcomes = await asyncio.gather(*map(one, requests))
    return outcomes, time.perf_counter() - began


async def _ask(client: httpx.AsyncClient, request: Request, outcome: Outcome) -> None:
    began = time.perf_counter()
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": request.prompt}], "seed": request.seed,
        "max_tokens": request.max_tokens, "temperature": request.temperature,
    }  # fmt: skip
    if not request.streams:
        answer = await client.post("/chat/completions", json=asked)
        read = answer.json()
        if answer.status_code == 200:
            outcome.text = read["choices"][0]["message"]["content"]
            outcome.tokens = read["usage"]["completion_tokens"]
            outcome.whole = time.perf_counter() - began
        else:
            outcome.failure = f"status {answer.status_code}"
        return
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    events = 0
    async with client.stream("POST", "/chat/completions", json=asked) as answer:
        if answer.status_code != 200:
            outcome.failure = f"status {answer.status_code}"
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.whole = time.perf_counter() - began
                return
            if not line:
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                outcome.failure = event["error"]["type"]
                return
            events += 1
            for choice in event["choices"]:
                outcome.text += choice["delta"]["content"]
                before, outcome.last = outcome.last, time.perf_counter() - began
                outcome.first = outcome.first or outcome.last
                outcome.gap = max(outcome.gap, outcome.last - (before or outcome.last))
            if event["usage"]:
                outcome.tokens = event["usage"]["completion_tokens"]
            if request.leaves and events == EVENTS_OF_A_LEAVER:
                outcome.left = True
                return
    outcome.failure = "the stream ended early"


def summarize(outcomes: Sequence[Outcome], wall: float) -> dict[str, Any]:
    """Percentiles of the latencies in seconds, tokens a second, and failures by their kind."""
    whole = [one for one in outcomes if one.whole is not None]
    timed = [one for one in whole if one.first is not None and one.tokens > 1]
    tokens = sum(one.tokens for one in whole)
    return {
        "first_token": _percentiles([one.first for one in outcomes if one.first is not None]),
        "next_tokens": _percentiles(
            [(one.last - one.first) / (one.tokens - 1) for one in timed]  # type: ignore[operator]
        ),
        "longest_gap": _percentiles([one.gap for one in timed]),
        "whole_text": _percentiles([one.whole for one in whole if one.whole is not None]),
        "seconds": wall,
        "tokens": tokens,
        "tokens_per_second": tokens / wall,
        "answered": len(whole),
        "left": sum(one.left for one in outcomes),
        "failures": dict(Counter(one.failure for one in outcomes if one.failure)),
    }


def _percentiles(values: Sequence[float]) -> list[float] | None:
    return np.percentile(values, PERCENTILES).tolist() if values else None


@dataclass(frozen=True)
class Hostile:
    """What a hostile client sends: ``copies`` of a body at once, whose answers it awaits or not."""

    path: str
    body: str
    copies: int = 1
    leaves: bool = False


def hostile_clients() -> dict[str, Hostile]:
    """Bodies of a megabyte by what they hold, and none at first."""

    def many(item: str) -> str:
        return ",".join([item] * (HOSTILE_BYTES // (len(item) + 1)))

    completions, chat = "/v1/completions", "/v1/chat/completions"
    keys = ",".join(f'"{number:x}":1' for number in range(100_000))
    words = "the quick brown fox " * (HOSTILE_BYTES // 20)
    message = '{"role":"user","content":""}'
    text = '{"type":"text","text":""}'
    user = '"messages":[{"role":"user","content":"a"}]'
    return {
        "nothing": Hostile(completions, "{}"),  # what the short request and the machine do alone
        "prompts": Hostile(completions, f'{{"prompt":[{many(chr(34) + "a" + chr(34))}]}}'),
        "lists of ids": Hostile(completions, f'{{"prompt":[{many("[0]")}]}}'),
        "ids": Hostile(completions, f'{{"prompt":[{many("0")}]}}'),
        "ids, 72 choices": Hostile(completions, f'{{"n":72,"prompt":[{many("0")}]}}'),
        "empty messages": Hostile(chat, f'{{"messages":[{many("{}")}]}}'),
        "messages": Hostile(chat, f'{{"messages":[{many(message)}]}}'),
        "parts": Hostile(chat, f'{{"messages":[{{"role":"user","content":[{many(text)}]}}]}}'),
        "unknown fields": Hostile(chat, f"{{{user},{keys}}}"),
        "metadata": Hostile(chat, f'{{{user},"metadata":{{{keys}}}}}'),
        "logit_bias": Hostile(chat, f'{{{user},"logit_bias":{{{keys}}}}}'),
        "stop": Hostile(chat, f'{{{user},"stop":[{many(chr(34) + "a" + chr(34))}]}}'),
        "lists in lists": Hostile(completions, f'{{"prompt":{"[" * 900}{"]" * 900}}}'),
        "a name of words": Hostile(completions, f'{{"prompt":"a","model":"{words}"}}'),
        "a text": Hostile(completions, f'{{"prompt":"{words}"}}'),
        "a chat": Hostile(chat, f'{{"messages":[{{"role":"user","content":"{words}"}}]}}'),
        "texts": Hostile("/generate", f'{{"inputs":"{words}"}}', copies=12),
        "texts left behind": Hostile("/generate", f'{{"inputs":"{words}"}}', 12, leaves=True),
    }  # fmt: skip


async def ask_beside_a_stream(url: str, hostile: Hostile) -> dict[str, Any]:
    """What a hostile client got, and how long it stopped a stream and a short request."""
    root, found, answered = url.removesuffix("/v1"), Outcome(), Outcome()
    short = Request("Say a.", 1, 0.0, seed=0, streams=False, leaves=False, begins=0.0)
    content, json_type = hostile.body.encode(), {"Content-Type": "application/json"}
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        long = replace(short, prompt="Count.", max_tokens=STREAM_TOKENS, streams=True)
        stream = asyncio.create_task(_ask(client, long, found))
        while found.first is None:
            await asyncio.sleep(0.01)
        found.gap, began = 0.0, time.perf_counter()

        async def send() -> str:
            timeout = LEAVES_AFTER if hostile.leaves else None
            try:
                answer = await client.post(
                    root + hostile.path, content=content, headers=json_type, timeout=timeout
                )
            except httpx.TimeoutException:
                return "left"
            return str(answer.status_code)

        sent = [asyncio.create_task(send()) for _ in range(hostile.copies)]
        await asyncio.sleep(LEAVES_AFTER)
        await _ask(client, short, answered)
        statuses = Counter([await one for one in sent])
        seconds = time.perf_counter() - began
        await stream
    return {
        "status": dict(statuses), "seconds": seconds, "gap": found.gap,
        "short_request": answered.whole, "failure": found.failure or answered.failure,
    }  # fmt: skip


class ServerProcess:
    """A server in a process of its own, which ends with the standard input that it reads."""

    def __init__(self, **settings: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.server_load", "--serve", json.dumps(settings)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.url: str = self._read()["url"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server ended with code {self.process.wait()}")
        read: dict[str, Any] = json.loads(line)
        return read

    def close(self) -> dict[str, Any]:
        """End the server; returns what it measured of itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            measured = self._read()
            self.process.wait(timeout=30)
        finally:
            self.process.kill()
        return measured


def _serve(settings: dict[str, Any]) -> None:
    """The program of `ServerProcess`: says where it serves, and at its end what it took."""
    import torch  # noqa: PLC0415
    from specdec_serve.app import Server, make_app  # noqa: PLC0415
    from specdec_serve.service import Limits  # noqa: PLC0415

    model, tokenizer = load_folder(settings["model"], dtype=getattr(torch, settings["dtype"]))
    kind = StaticBatches if settings["batches"] == STATIC else SpeculativeDecoder
    drafter = None if settings["drafter"] == "none" else settings["drafter"]
    queue = BatchQueue(
        model, kind(drafter, rule="match"), settings["batch_size"], settings["chunk"],
        prefix_cache=0,  # every prompt is read
    )  # fmt: skip
    limits = Limits(max_waiting=settings["clients"])

    def ready() -> None:
        port = server.servers[0].sockets[0].getsockname()[1]
        print(json.dumps({"url": f"http://127.0.0.1:{port}/v1"}), flush=True)

    server = Server(make_app(queue, tokenizer, limits=limits), ready)
    server.config.port = 0
    loaded = _peak_mib()

    def end() -> None:
        sys.stdin.read()
        server.should_exit = True

    threading.Thread(target=end, daemon=True).start()
    server.run()
    print(json.dumps({"peak_mib": _peak_mib(), "loaded_mib": loaded}), flush=True)


def _peak_mib() -> float:
    """The largest resident size of this process, in MiB; Linux counts in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def choose_prompts(path: Path, tokenizer: Any, clients: int, longest: int) -> list[str]:
    """Prompts of at most so many tokens, spread over the file."""
    try:
        texts = [prompt.turns[0] for prompt in read_prompts(path)]
    except PromptError as error:
        raise typer.BadParameter(str(error)) from error
    fitting = [text for text in texts if len(tokenizer(text)["input_ids"]) <= longest]
    if not fitting:
        raise typer.BadParameter(f"{path} has no prompt of at most {longest} tokens")
    places = np.linspace(0, len(fitting) - 1, min(clients, len(fitting)))
    return [fitting[i] for i in places.astype(int)]


def main(
    questions: Annotated[
        Path, typer.Option(help="prompts as JSON lines (Spec-Bench)")
    ] = SHIPPED_PROMPTS,
    model: Annotated[str, typer.Option(help="embedded, or a model folder")] = "embedded",
    dtype: Annotated[str, typer.Option(help="of the weights")] = "float32",
    clients: Annotated[int, typer.Option(help="clients, one request each")] = 50,
    spread: Annotated[float, typer.Option(help="seconds within which they come")] = 5.0,
    batch_size: Annotated[int, typer.Option(help="texts decoded together")] = 8,
    prompt_tokens: Annotated[int, typer.Option(help="tokens of a prompt at most")] = 200,
    seconds: Annotated[float, typer.Option(help="longest time of a setting")] = 60.0,
    joins: Annotated[int, typer.Option(help="tokens of a prompt that joins a few streams")] = 0,
    hostile: Annotated[bool, typer.Option("--hostile", help="bodies that end as faults")] = False,
    drafter: Annotated[str, typer.Option(help="of the streams of the latter two")] = "none",
    json_file: Annotated[Path | None, typer.Option("--json", help="file for the results")] = None,
) -> None:
    """Print a line for each setting."""
    folder = str(embedded_folder() if model == "embedded" else model)
    tokenizer = load_tokenizer(Path(folder))
    if hostile:
        _measure_hostile(folder, dtype, drafter, batch_size, json_file)
        return
    prompts = choose_prompts(questions, tokenizer, clients, prompt_tokens)
    if joins:
        requests = make_joining(prompts, long_prompt(prompts, tokenizer, joins))
        chunks = (WHOLE, *(chunk for chunk in CHUNKS if chunk < joins))
        settings = [("continuous", drafter, chunk) for chunk in chunks]
    else:
        requests = make_requests(prompts, clients, spread)
        settings = [(*setting, PREFILL_CHUNK_SIZE) for setting in SETTINGS]
    rows: list[dict[str, Any]] = []
    texts = [""] * len(requests)  # as the first setting that answered had them
    for batches, drafts, chunk in settings:
        server = ServerProcess(
            model=folder, dtype=dtype, batches=batches, drafter=drafts, batch_size=batch_size,
            clients=clients, chunk=chunk,
        )  # fmt: skip
        try:
            warm = make_requests(prompts, 2, 0.0)
            asyncio.run(run_clients(server.url, warm, seconds))
            outcomes, wall = asyncio.run(run_clients(server.url, requests, seconds))
        finally:
            measured = server.close()
        row = {"batches": batches, "drafter": drafts, "chunk": chunk}
        row |= {**summarize(outcomes, wall), **measured}
        found = [one.text if one.whole else "" for one in outcomes]
        texts = [text or new for text, new in zip(texts, found, strict=True)]
        row["equal"] = sum(text == new != "" for text, new in zip(texts, found, strict=True))
        row["outcomes"] = [
            {name: value for name, value in asdict(one).items() if name != "text"}
            for one in outcomes
        ]
        rows.append(row)
    content = {
        "machine": machine("cpu"), "model": model, "dtype": dtype, "clients": len(requests),
        "spread": spread, "batch_size": batch_size, "questions": questions.name, "joins": joins,
        "settings": rows,
        "requests": [
            {name: value for name, value in asdict(one).items() if name != "prompt"}
            for one in requests
        ],
    }  # fmt: skip
    if json_file is not None:
        json_file.write_text(json.dumps(content, indent=1) + "\n")
    console.print(_table_of_chunks(rows) if joins else _table(rows))


def _measure_hostile(
    model: str, dtype: str, drafter: str, batch_size: int, json_file: Path | None
) -> None:
    server = ServerProcess(
        model=model, dtype=dtype, batches="continuous", drafter=drafter, batch_size=batch_size,
        clients=64, chunk=PREFILL_CHUNK_SIZE,
    )  # fmt: skip
    table = Table("sent", "status", "longest gap of a stream, s", "a short request, s")
    rows = {}
    try:
        asyncio.run(run_clients(server.url, make_requests(["Count."], 2, 0.0), 60.0))  # warms up
        for name, hostile in hostile_clients().items():
            row = rows[name] = asyncio.run(ask_beside_a_stream(server.url, hostile))
            status = ", ".join(f"{count} x {word}" for word, count in row["status"].items())
            short = row["short_request"]
            shown = row["failure"] if short is None else f"{short:.2f}"
            table.add_row(name, status, f"{row['gap']:.2f}", shown)
    finally:
        server.close()
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine("cpu"), "rows": rows}, indent=1) + "\n")
    console.print(table)


def _table_of_chunks(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "chunk, tokens", "longest gap of a stream, s", "first token of the long prompt, s",
        "tokens/s", "texts equal",
    )  # fmt: skip
    for row in rows:
        *streams, long = row["outcomes"]
        gap, first = max(one["gap"] for one in streams), long["first"]
        table.add_row(
            "whole" if row["chunk"] == WHOLE else str(row["chunk"]), f"{gap:.2f}",
            "" if first is None else f"{first:.2f}", f"{row['tokens_per_second']:.1f}",
            f"{row['equal']} of {row['answered']}",
        )  # fmt: skip
    return table


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(
        "batches", "drafter", "first token, s", "next tokens, ms", "whole text, s", "tokens/s",
        "answered", "left", "failures", "texts equal", "peak MiB",
        title="median / 90 % / 99 %",
    )  # fmt: skip
    for row in rows:
        failures = ", ".join(f"{n} {kind}" for kind, n in row["failures"].items()) or "0"
        table.add_row(
            row["batches"], row["drafter"], _shown(row["first_token"]),
            _shown(row["next_tokens"], 1000), _shown(row["whole_text"]),
            f"{row['tokens_per_second']:.1f}", str(row["answered"]), str(row["left"]), failures,
            f"{row['equal']} of {row['answered']}", f"{row['peak_mib']:.0f}",
        )  # fmt: skip
    return table


def _shown(values: Sequence[float] | None, times: float = 1) -> str:
    if values is None:
        return ""
    return " / ".join(f"{times * value:.0f}" if times > 1 else f"{value:.1f}" for value in values)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(json.loads(sys.argv[2]))
    else:
        typer.run(main)
