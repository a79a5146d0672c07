"""The command ``serve``: a model over HTTP."""

# ruff: noqa: PLC0415  # torch and the server load at first use; see app.py
from __future__ import annotations

import errno
import gc
import importlib.util
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any

from specdec_hf.cli.checks import Settings, check, takes_settings
from specdec_hf.cli.interrupt import is_interruption
from specdec_hf.cli.options import LIMIT, at_least, must_be, one_of, option
from specdec_hf.cli.run import load_models, make_decoder, progress_bar
from specdec_hf.cli.terminal import FAILED, console, fail, visible
from specdec_hf.rules import LOSSY_RULES

OF_REQUESTS = (
    "system", "chat_template", "max_new_tokens", "seed", "temperature", "top_k", "top_p", "min_p",
    # Rule match makes the text of a seed independent of the other requests.
    "rule", "ablate", *(name for names in LOSSY_RULES.values() for name in names),
)  # fmt: skip

# Of the extra "server", beside those of "hf", without which no command begins.
PACKAGES = ("fastapi", "prometheus_client", "pydantic", "uvicorn")
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")  # of Uvicorn, but for trace
FREE_PORTS = 9  # that are tried for one that all addresses have free
MEMORY = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)(?:([KMGT])(i?))?B?", re.IGNORECASE)
ABSENT = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}  # an address that the machine does not have


def _check_key(name: str, value: str) -> None:
    if not re.fullmatch("[!-~]+", value):  # it is not shown
        fail(f"{name} must be of printable ASCII characters without blanks, at least one")


def _bytes_of(memory: str) -> int:
    """The bytes of a size that `MEMORY` describes."""
    found = MEMORY.fullmatch(memory)
    assert found is not None
    number, unit, binary = found.groups("")
    return int(Decimal(number) * (1024 if binary else 1000) ** " KMGT".index(unit.upper() or " "))


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
    prefix_cache: Annotated[
        str,
        option(
            "--prefix-cache MEMORY",
            "Memory for keys and values of earlier texts, from which prompts begin: 2GB, 512MiB; "
            "0 for none.",
            must_be("a size such as 512MB or 2GiB, or 0 for none", MEMORY.fullmatch),
        ),
    ] = "512MB",
    max_waiting: Annotated[
        int,
        option("--max-waiting N", "Texts beyond these that may be open; then 429.", at_least(0)),
    ] = 64,
    max_tokens: Annotated[int, option("--max-tokens N", "Most new tokens of a text.", LIMIT)] = 512,
    served_model_name: Annotated[
        str | None,
        option("--served-model-name NAME", "Name for clients.  [default: the end of --model]"),
    ] = None,
    host: Annotated[
        str, option("--host ADDRESS", "Address to listen on, or a name, for all that it has.")
    ] = "127.0.0.1",
    port: Annotated[
        int,
        option(
            "--port N", "Port to listen on; 0 takes a free one.",
            must_be("in [0, 65535]", lambda value: 0 <= value < 2**16),
        ),
    ] = 8000,
    allowed_host: Annotated[
        list[str] | None,
        option(
            "--allowed-host NAME",
            "Name by which clients reach it, beside --host and localhost; * for any.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        option(
            "--api-key KEY", "Key that clients must bring.  [default: none is wanted]", _check_key,
            envvar="SPECDEC_API_KEY",
        ),
    ] = None,
    log_level: Annotated[
        str,
        option(
            "--log-level LEVEL",
            "info: a line for each request on standard error. warning, error, critical: none. "
            "debug: also how the server starts and ends.",
            one_of(*LOG_LEVELS),
        ),
    ] = "info",
) -> None:  # fmt: skip
    """Serve a model over HTTP, in the manner of OpenAI and of text-generation-inference.

    Ctrl-C ends.
    """
    settings, sources = check(replace(settings, rule="match", sampling={"temperature": 1.0}))
    _check_packages()
    with ExitStack() as stack:
        listeners = [stack.enter_context(one) for one in _listening(host, port)]
        addresses = [one.getsockname() for one in listeners]
        with progress_bar() as say:
            loaded = load_models(settings, sources, say, _check_decoder_only)
            say("starting")
            from specdec_serve.access import LOCAL_HOSTS
            from specdec_serve.app import Server, make_app
            from specdec_serve.batch_queue import BatchQueue
            from specdec_serve.service import Limits

            name = served_model_name or _name_of(sources.model.name)
            decoder = make_decoder(settings, loaded.drafter, loaded.tokenizer)
            memory = _bytes_of(prefix_cache)
            queue = BatchQueue(loaded.model, decoder, batch_size, prefill_chunk_size, memory)
            limits = Limits(max_waiting=max_waiting, max_new_tokens=max_tokens)
            say("warming up")
            queue.warm_up()
            if queue.prefix_cache.reason:
                unused = f"--prefix-cache keeps nothing: {queue.prefix_cache.reason}"
                console.print(visible(unused), soft_wrap=True)
            gc.collect()  # the server freezes what is there
            listens = (host, *(address for address, *_ in addresses))
            app = make_app(
                queue, loaded.tokenizer, name=name, limits=limits, api_key=api_key,
                allowed_hosts=(*LOCAL_HOSTS, *listens, *(allowed_host or ())),
            )  # fmt: skip
        shown = host if len(addresses) > 1 else addresses[0][0]
        shown = f"[{shown}]" if ":" in shown else shown
        line = f"{name}, {loaded.dtype}, {loaded.model.device}: http://{shown}:{addresses[0][1]}/v1"
        server = Server(app, lambda: console.print(visible(line), soft_wrap=True), log_level)
        server.run(sockets=listeners)
        if is_interruption(None):
            raise KeyboardInterrupt  # ends every command with the same exit code


def _check_packages() -> None:
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        command = f"pip install {' '.join(missing)}"
        fail(f"serve needs packages of specdec-kernels[server]: {command}", FAILED)


def _listening(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of a host, with one port.

    They listen at once: another one could take their address until they do.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        fail(f"--host {host}: {getattr(error, 'strerror', None) or error}")
    addresses = list(dict.fromkeys((family, address) for family, *_, address in found))
    for attempt in range(FREE_PORTS):
        try:
            return _listen(addresses)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE or attempt == FREE_PORTS - 1:
                fail(f"--port {port} of --host {host}: {error.strerror}", FAILED)
    raise AssertionError


def _listen(addresses: Sequence[tuple[int, Any]]) -> list[socket.socket]:
    """Sockets that listen on those addresses that the machine has; port 0 is the first's for all.

    Raises:
        OSError: the machine has none of them, or one is taken.
    """
    listeners: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as opened:
        for family, (address, asked, *rest) in addresses:
            port = listeners[0].getsockname()[1] if listeners else asked
            try:
                listeners.append(opened.enter_context(_listener(family, (address, port, *rest))))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
        if absent is not None and not listeners:
            raise absent
        opened.pop_all()
    return listeners


def _listener(family: int, address: Any) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def _check_decoder_only(tokenizer: Any, config: Any) -> None:
    if config.is_encoder_decoder:
        fail("--model: serve takes causal language models, got an encoder-decoder")


def _name_of(model: str) -> str:
    """What clients call a model: a path would say where it lies."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model
