"""The command `serve`: what it starts, and one line for what it cannot start."""

import os
import signal
import sys
import threading

import pytest
from specdec_hf import BatchQueue
from specdec_hf.cli.interrupt import State
from specdec_hf.cli.serve import _listening
from support.cli_models import folder, invoke, one_line_error, write_encoder_decoder  # noqa: F401

EXTRA = "needs the extra [server]"
httpx = pytest.importorskip("httpx", reason=EXTRA)
pytest.importorskip("fastapi", reason=EXTRA)
uvicorn = pytest.importorskip("uvicorn", reason=EXTRA)

from specdec_hf.server.app import Server, make_app  # noqa: E402


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


def test_the_server_ends_in_order_after_a_second_interruption():
    server = Server(make_app(BatchQueue(None, None), None))
    for _ in range(2):
        server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    assert not server.force_exit


@pytest.fixture
def _python_handles_interruptions():
    """As in a program; commands of other tests have left their handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_interruptions")
def test_an_interruption_ends_a_server_of_a_program_without_an_error():
    """Negative control: Uvicorn alone raises the signal again, which asyncio makes an error."""
    app = make_app(BatchQueue(None, None), None)
    server = Server(app, lambda: signal.raise_signal(signal.SIGINT))
    server.config.port = 0
    try:
        server.run()
    except KeyboardInterrupt:  # which would end the tests
        pytest.fail("Ctrl-C is an error")
    assert server.should_exit
    again = Server(app, lambda: signal.raise_signal(signal.SIGINT))
    again.config.port = 0
    with pytest.raises(KeyboardInterrupt):
        super(Server, again).run()


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


def test_other_faults_are_one_line(folder, tmp_path, monkeypatch):  # noqa: F811
    def wrong(*arguments, code=2):
        return one_line_error("serve", "--model", folder, "--port", 0, *arguments, code=code)

    host = "a" * 64  # longer than a name may be, so that no name server is asked
    assert f"--host {host}: " in wrong("--host", host)
    assert "--port must be in [0, 65535], got 65536" in wrong("--port", 65536)
    assert "--batch-size must be >= 1, got 0" in wrong("--batch-size", 0)
    assert "--max-waiting must be at least 0, got -1" in wrong("--max-waiting", -1)
    assert "config.json is missing" in one_line_error("serve", "--model", tmp_path)
    assert "did you mean 'prompt_lookup'" in wrong("--drafter", "prompt_lookups")
    assert "No such option: --rule" in wrong("--rule", "block")
    encoder = write_encoder_decoder(tmp_path / "t5")
    line = one_line_error("serve", "--model", encoder, "--port", 0)
    assert line == "error: --model: serve takes causal language models, got an encoder-decoder"
    for name in ("uvicorn", "fastapi"):
        monkeypatch.setitem(sys.modules, name, None)
        line = wrong(code=1)
        assert line.startswith("error: serve needs packages of specdec-kernels[server]: ")
        assert name in line
        monkeypatch.undo()
