"""A server of `specdec_serve` in a thread, and the texts that its requests must have."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
from specdec_hf import SpeculativeDecoder, generate
from specdec_serve.batch_queue import BatchQueue
from support import cli_models, hf_models

EXTRA = "needs the extra [server]"
httpx = pytest.importorskip("httpx", reason=EXTRA)
pytest.importorskip("fastapi", reason=EXTRA)
pytest.importorskip("uvicorn", reason=EXTRA)

from specdec_serve.app import Server, make_app  # noqa: E402
from specdec_serve.service import Limits  # noqa: E402

MODEL = hf_models.build("llama", vocab_size=cli_models.END + 1)
DRAFTER = hf_models.with_noise(MODEL, 0.02)
TOKENIZER = cli_models.tokenizer()
NAME = "tiny"
SECONDS = 30  # that anything here may take at most


class Watched(SpeculativeDecoder):
    """Counts new tokens and sequences, and can be made to wait or to fail."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.new, self.most_running, self.longest_step = 0, 0, 0
        self.seconds, self.fails, self.gate = 0.0, False, threading.Event()
        self.gate.set()

    def stream(self, *args, **kwargs):
        if self.fails:
            raise RuntimeError("planted")
        running = set()
        for step in super().stream(*args, **kwargs):
            running.add(step.sequence)
            self.most_running = max(self.most_running, len(running))
            if step.finished:
                running.remove(step.sequence)
            assert self.gate.wait(SECONDS)
            time.sleep(self.seconds)
            self.new += len(step.tokens)
            self.longest_step = max(self.longest_step, len(step.tokens))
            yield step


class WatchedQueue(BatchQueue):
    """Remembers what was submitted."""

    def __init__(self, *args):
        super().__init__(*args)
        self.submitted = []

    def submit(self, *args, **kwargs):
        self.submitted.append(super().submit(*args, **kwargs))
        return self.submitted[-1]


@contextmanager
def serving(
    batch_size=4, drafter=DRAFTER, tokenizer=TOKENIZER, name=NAME, access=None, *, model=MODEL,
    options=None, log_level="critical", **limits,
):  # fmt: skip
    """A client, and the queue of the server that it is connected to; nothing may be left open."""
    decoder = Watched(drafter, rule="match", **(options or {}))
    queue = WatchedQueue(model, decoder, batch_size)
    made = make_app(queue, tokenizer, name=name, limits=Limits(**limits), **(access or {}))
    started = threading.Event()
    server = queue.server = Server(made, started.set, log_level)
    server.config.port = 0
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(SECONDS)
        port = server.servers[0].sockets[0].getsockname()[1]
        address = f"http://127.0.0.1:{port}"
        # To read the certificates, which nothing needs here, takes long.
        with httpx.Client(base_url=address, timeout=SECONDS, verify=False) as client:
            yield client, queue
        queue.decoder.gate.set()
        until(lambda: not made.state.service.open and not made.state.service.places)
    finally:
        queue.decoder.gate.set()
        server.should_exit = True
        thread.join(SECONDS)
        assert not thread.is_alive()


def until(holds):
    """Wait for a condition, for a bounded time."""
    for _ in range(SECONDS * 100):
        if holds():
            return
        time.sleep(0.01)
    pytest.fail("timed out")


def alone(text, *, max_new_tokens, seed, **sampling):
    """The text and the tokens that a call of its own gives, without drafts."""
    inputs = TOKENIZER(text, return_tensors="pt")
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **sampling}
    out = generate(
        MODEL, **inputs, **settings, drafter=None, rule="match", seed=seed,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip
    new = out[0, inputs["input_ids"].shape[1] :]
    return TOKENIZER.decode(new, skip_special_tokens=True), new.tolist()
