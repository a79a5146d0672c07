"""Faults of requests as one line of JSON, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec_hf.arguments import shown

MAX_MESSAGE = 300  # characters


class Fault(Exception):
    """An answer in the place of a text.

    Args:
        status: of HTTP.
        message: names the field, the rule and the value.
        param: the field.
        code: a word for programs, as OpenAI's API has it.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def content(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        message = one_line(str(self))
        error = {"message": message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def one_line(text: str) -> str:
    """A message that can be sent: a field's name or an error may hold what UTF-8 does not."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())[:MAX_MESSAGE]


def answer_faults(app: FastAPI) -> None:
    """Let the application answer its faults, and those of FastAPI, in one line."""

    def answer(fault: Fault) -> JSONResponse:
        headers = {"Retry-After": "1"} if fault.status == 429 else None
        return JSONResponse(fault.content(), fault.status, headers)

    @app.exception_handler(Fault)
    async def of_this_server(request: Request, fault: Fault) -> JSONResponse:
        return answer(fault)

    @app.exception_handler(AnyHTTPException)
    async def of_http(request: Request, error: AnyHTTPException) -> JSONResponse:
        return answer(Fault(error.status_code, f"{request.url.path}: {error.detail}"))

    @app.exception_handler(RequestValidationError)
    async def of_a_field(request: Request, error: RequestValidationError) -> JSONResponse:
        """FastAPI's own answer repeats values, which JSON may be unable to hold."""
        first = error.errors()[0]
        place = [one_line(str(part)) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            return answer(Fault(400, f"the body must be JSON: {first['ctx']['error']}"))
        if isinstance(first["input"], bytes):  # a body that was not read as JSON
            return answer(Fault(400, "the body must be JSON, with Content-Type application/json"))
        message = str(first["msg"]).removeprefix("Value error, ")
        name = ".".join(place)
        names_itself = first["type"] == "value_error" and not name  # a rule for several fields
        if not names_itself:
            message = f"{name or 'the body'}: {message}"
            if first["type"] not in ("missing", "extra_forbidden"):
                message += f", got {shown(first['input'])}"
        return answer(Fault(400, message, param=name or None))


class BodyLimit:
    """Refuses a body of more bytes before it is in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.max_bytes:
                raise HTTPException(413, f"a body must be at most {self.max_bytes} bytes")
            return message

        await self.app(scope, counted, send)
