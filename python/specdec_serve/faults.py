"""Faults of requests as one line of JSON, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from specdec_hf.arguments import shown
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_MESSAGE = 300  # characters

# The rule of a field, by Pydantic's name of the error; {} are the values that come with it.
RULES = {
    "missing": "must be given",
    "extra_forbidden": "must not be given, since it is not served",
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be finite",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "string_unicode": "must be a string of Unicode characters",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "literal_error": "must be {expected}",
    "too_short": "must have a length of at least {min_length}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}


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
    """A message that can be sent: a field's name or an error may be long, or no UTF-8."""
    begin = text[: 10 * MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
    return " ".join(begin.split())[:MAX_MESSAGE]


def answer(fault: Fault) -> JSONResponse:
    """The answer in the place of a text."""
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(fault.status)
    return JSONResponse(fault.content(), fault.status, headers)


def answer_faults(app: FastAPI) -> None:
    """Let the application answer its faults, and those of FastAPI, in one line."""

    @app.exception_handler(Fault)
    async def of_this_server(request: Request, fault: Fault) -> JSONResponse:
        return answer(fault)

    @app.exception_handler(AnyHTTPException)
    async def of_http(request: Request, error: AnyHTTPException) -> JSONResponse:
        return answer(Fault(error.status_code, f"{request.url.path}: {error.detail}"))

    @app.exception_handler(RequestValidationError)
    async def of_a_field(request: Request, error: RequestValidationError) -> JSONResponse:
        """FastAPI's own answer repeats values, which JSON may be unable to hold."""
        # A field that is not served may be why another one is missing.
        errors = error.errors()
        first = next((one for one in errors if one["type"] != "missing"), errors[0])
        place = [one_line(str(part)) for part in first["loc"][1:]]
        if first["type"] == "json_invalid":
            return answer(Fault(400, f"the body must be JSON: {first['ctx']['error']}"))
        if isinstance(first["input"], bytes):  # a body that was not read as JSON
            return answer(Fault(400, "the body must be JSON, with Content-Type application/json"))
        name = ".".join(place)
        if first["type"] in RULES:
            rule = RULES[first["type"]].format(**first.get("ctx", {}))
        else:
            rule = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "value_error" and not name:  # of several fields; it names the first
            return answer(Fault(400, rule, param=rule.split()[0]))
        message = f"{name or 'the body'} {rule}"
        if first["type"] != "missing":
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
