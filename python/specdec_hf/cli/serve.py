"""The command ``serve``: a model over HTTP."""

# ruff: noqa: PLC0415  # torch and the server load at first use; see app.py
from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from specdec_hf.cli.checks import Settings, check, takes_settings
from specdec_hf.cli.interrupt import is_interruption
from specdec_hf.cli.options import LIMIT, at_least, must_be, option
from specdec_hf.cli.run import load_models, make_decoder, progress_bar
from specdec_hf.cli.terminal import FAILED, console, fail, visible
from specdec_hf.options import LOSSY_RULES
from specdec_hf.requirements import install_command

OF_REQUESTS = (
    "system", "chat_template", "max_new_tokens", "seed", "temperature", "top_k", "top_p", "min_p",
    # Rule match makes the text of a seed independent of the other requests.
    "rule", "ablate", *(name for names in LOSSY_RULES.values() for name in names),
)  # fmt: skip


@takes_settings(without=OF_REQUESTS)
def serve(
    settings: Settings,
    batch_size: Annotated[int, option("--batch-size N", "Texts decoded together.", LIMIT)] = 8,
    prefill_chunk_size: Annotated[
        int,
        option(
            "--prefill-chunk-size N", "Tokens of prompts read between two rounds of others.", LIMIT
        ),
    ] = 256,
    max_waiting: Annotated[
        int,
        option("--max-waiting N", "Texts beyond these that may be open; then 429.", at_least(0)),
    ] = 64,
    max_tokens: Annotated[int, option("--max-tokens N", "Most new tokens of a text.", LIMIT)] = 512,
    served_model_name: Annotated[
        str | None,
        option("--served-model-name NAME", "Name for clients.  [default: the end of --model]"),
    ] = None,
    host: Annotated[str, option("--host ADDRESS", "Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int,
        option(
            "--port N", "Port to listen on; 0 takes a free one.",
            must_be("in [0, 65535]", lambda value: 0 <= value < 2**16),
        ),
    ] = 8000,
) -> None:  # fmt: skip
    """Serve a model over HTTP, in the manner of OpenAI and of text-generation-inference.

    It has no authentication. Ctrl-C ends.
    """
    settings = replace(settings, rule="match", sampling={"temperature": 1.0})
    sources = check(settings)
    _check_packages()
    with _listening(host, port) as listener:
        with progress_bar() as say:
            loaded = load_models(settings, sources, say, _check_decoder_only)
            say("starting")
            from specdec_hf.batch_queue import BatchQueue
            from specdec_hf.server.app import Server, make_app
            from specdec_hf.server.service import Limits

            name = served_model_name or _name_of(sources.model.name)
            decoder = make_decoder(settings, loaded.drafter)
            queue = BatchQueue(loaded.model, decoder, batch_size, prefill_chunk_size)
            limits = Limits(max_waiting=max_waiting, max_new_tokens=max_tokens)
            say("warming up")
            queue.warm_up()
            app = make_app(queue, loaded.tokenizer, name=name, limits=limits)
        address, bound = listener.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        line = f"{name}, {loaded.dtype}, {loaded.model.device}: http://{shown}:{bound}/v1"
        server = Server(app, lambda: console.print(visible(line), soft_wrap=True))
        server.run(sockets=[listener])
        if is_interruption(None):
            raise KeyboardInterrupt  # ends every command with the same exit code


def _check_packages() -> None:
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        command = install_command("server", error.name) or str(error)
        fail(f"serve needs packages of specdec-kernels[server]: {command}", FAILED)


def _listening(host: str, port: int) -> socket.socket:
    """A socket that listens: another one could take its address until it does."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fail(f"--host {host}: {getattr(error, 'strerror', None) or error}")
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        fail(f"--port {port} of --host {host}: {error.strerror}", FAILED)
    return listener


def _check_decoder_only(tokenizer: Any, config: Any) -> None:
    if config.is_encoder_decoder:
        fail("--model: serve takes causal language models, got an encoder-decoder")


def _name_of(model: str) -> str:
    """What clients call a model: a path would say where it lies."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
