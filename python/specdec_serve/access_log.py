"""One line of the log for each request: who asked for what, and how it ended."""

from __future__ import annotations

import copy
import logging
import time
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

MAX_PATH = 200  # characters
LOGGER = logging.getLogger(__name__)


class AccessLog:
    """Logs requests at level info once they are answered.

    The path is all that is logged of what a client wrote: no query, header or body, which hold keys
    and prompts. The number of tokens is `num_tokens` of the request's state, if that is set.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = time.perf_counter()
        status: int | str = "-"
        whole = left = failed = False

        async def watched(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                whole = not message.get("more_body", False)
            await send(message)

        async def heard() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not whole)
            return message

        state = scope.setdefault("state", {})
        try:
            await self.app(scope, heard, watched)
        except Exception:
            failed = status != "-"
            status = status if failed else 500  # which is sent from outside
            raise
        finally:
            host, port = scope.get("client") or ("-", 0)
            path = quote(scope["path"])[:MAX_PATH]
            spent = 1000 * (time.perf_counter() - began)
            line = f"{host}:{port} {scope['method']} {path} {status} {spent:.0f} ms"
            if "num_tokens" in state:
                line += f" {state['num_tokens']} tokens"
            LOGGER.info("%s%s", line, ", failed" if failed else ", the client left" if left else "")


def log_config(level: str) -> dict[str, Any]:
    """Uvicorn's configuration of logging, which also writes the lines of `AccessLog` to stderr."""
    config: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    dated = {"format": "%(asctime)s %(message)s", "datefmt": "%Y-%m-%d %H:%M:%S"}
    config["formatters"]["requests"] = dated
    stderr = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr"}
    config["handlers"]["requests"] = {**stderr, "formatter": "requests"}
    config["loggers"][__name__] = {
        "handlers": ["requests"], "level": level.upper(), "propagate": False
    }  # fmt: skip
    return config
