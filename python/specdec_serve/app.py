"""The routes of the server, in the manner of OpenAI and of text-generation-inference."""

# FastAPI reads the annotations of the routes when the application is made.
import asyncio
import gc
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from specdec_hf.arguments import shown
from starlette.types import Receive, Scope, Send

from specdec_serve.access import LOCAL_HOSTS, Access
from specdec_serve.access_log import AccessLog, log_config
from specdec_serve.batch_queue import BatchQueue
from specdec_serve.choices import ChatForm, CompletionForm, Form, GenerateForm, ToolForm
from specdec_serve.encoder import Chat, Prompt
from specdec_serve.faults import BodyLimit, Fault, answer_faults
from specdec_serve.fields import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenAIRequest,
)
from specdec_serve.growing_text import Piece
from specdec_serve.service import Limits, Service
from specdec_serve.usage import Usage

SECONDS_TO_END = 5  # that open requests get after Ctrl-C, and clients to read how they ended


class EventStream(StreamingResponse):
    """Events of a request, whose sequences are left however it ends."""

    def __init__(self, events: AsyncIterator[str], held: AsyncExitStack) -> None:
        super().__init__(_with_faults(events), media_type="text/event-stream")
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            await super().__call__(scope, receive, send)


async def _with_faults(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events; a fault after the first is an event, too."""
    try:
        async for event in events:
            yield event
    except Fault as fault:
        yield f"data: {json.dumps(fault.content())}\n\n"


def make_app(
    queue: BatchQueue,
    tokenizer: Any,
    *,
    name: str = "model",
    limits: Limits | None = None,
    allowed_hosts: Collection[str] = LOCAL_HOSTS,
    api_key: str | None = None,
) -> FastAPI:
    """The application, which opens the queue.

    Args:
        queue: rule "match" of its decoder makes the text of a seed independent of other requests.
        tokenizer: of the queue's model. Chats need its chat template.
        name: of the model, for clients.
        limits: None takes the defaults.
        allowed_hosts: what the header Host of a request may name, as `Access` has it.
        api_key: which all requests but those to /health must bring as a bearer token; None wants
            none.

    Raises:
        ValueError: an empty key.
    """
    if api_key == "":
        raise ValueError("api_key must have at least one character, got ''; None wants no key")
    limits = limits or Limits()
    service = Service(queue, tokenizer, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        encoding = asyncio.create_task(service.encoder.run())
        async with queue:
            yield
        encoding.cancel()

    app = FastAPI(lifespan=lifespan, title="specdec_hf")
    app.state.service = service
    app.add_middleware(BodyLimit, max_bytes=limits.max_body)
    app.add_middleware(Access, allowed_hosts=allowed_hosts, api_key=api_key)
    app.add_middleware(AccessLog)  # the outermost, so that it sees what others refuse
    answer_faults(app)
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "specdec_hf"}

    def get(path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A route that also answers HEAD."""
        head = app.head(path, include_in_schema=False)
        return lambda route: head(app.get(path)(route))

    @get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @get("/v1/models")
    @get("/v1/models/")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> dict[str, Any]:
        check_model(asked)
        return model

    def check_model(asked: str) -> None:
        # "dummy" is what huggingface_hub sends where its user names none.
        if asked not in ("", "dummy", name):
            line = f"model must be {name}, which is served here, got {shown(asked)}"
            raise Fault(404, line, param="model", code="model_not_found")

    async def openai(
        request: Request, asked: OpenAIRequest, form: Form, prompts: Sequence[Prompt],
        fields: tuple[str, str], length: tuple[int | None, int],
    ) -> Any:  # fmt: skip
        """An answer of OpenAI's API to prompts, each with ``n`` choices."""
        async with AsyncExitStack() as stack:
            sequences = await stack.enter_async_context(
                service.submitted(
                    request, fields, prompts, length, asked, form.num_top_logprobs, asked.stop
                )
            )
            pieces = service.pieces(request, sequences, asked.stop)
            head = {"id": form.prefix + uuid.uuid4().hex, "created": int(time.time())}
            head |= {"model": name, "object": form.kind}
            usage = Usage(sequences, asked.n)

            async def chunks() -> AsyncIterator[str]:
                each = {"usage": None} if asked.stream_options.include_usage else {}
                async for index, piece in pieces:
                    usage.add(piece.step)
                    if (choice := form.chunk(index, piece)) is not None:
                        yield _event(head | {"choices": [choice]} | each)
                if each:
                    yield _event(head | {"choices": []} | usage.fields())
                yield "data: [DONE]\n\n"

            if asked.stream:
                return EventStream(chunks(), stack.pop_all())
            collected: list[list[Piece]] = [[] for _ in sequences]
            async for index, piece in pieces:
                usage.add(piece.step)
                collected[index].append(piece)
            choices = [form.choice(*one) for one in enumerate(collected)]
            return head | {"choices": choices} | usage.fields()

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        check_model(asked.model)
        form = CompletionForm(asked.logprobs, asked.stream)
        fields = ("prompt", "max_tokens")
        return await openai(request, asked, form, asked.prompt, fields, (asked.max_tokens, 16))

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Any:
        check_model(asked.model)
        listed = (asked.top_logprobs or 0) if asked.logprobs else None
        form: Form = ChatForm(listed, asked.stream)
        if asked.tool_choice.forces:
            form = ToolForm(listed, asked.stream, asked.tool_choice)
        name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        length = getattr(asked, name), limits.max_new_tokens
        chat = Chat(asked.messages, asked.tools)
        return await openai(request, asked, form, [chat], ("messages", name), length)

    async def generated(asked: GenerateRequest, request: Request, streams: bool) -> Any:
        """An answer of text-generation-inference."""
        given, fields = asked.parameters, ("inputs", "max_new_tokens")
        async with AsyncExitStack() as stack:
            listed = 0 if streams or given.details else None
            (sequence,) = await stack.enter_async_context(
                service.submitted(
                    request, fields, [asked.inputs], (given.max_new_tokens, 100), given, listed
                )
            )
            seed = sequence.sampling["seed"] if given.samples else None
            special = set(tokenizer.all_special_ids)
            form = GenerateForm(asked, seed, len(sequence.input_ids), special)
            pieces = service.pieces(request, [sequence])

            async def events() -> AsyncIterator[str]:
                async for _, piece in pieces:
                    for event in form.events(piece):
                        yield _event(event)

            if streams:
                return EventStream(events(), stack.pop_all())
            return form.answer([piece async for _, piece in pieces])

    @app.post("/")
    async def compatible(asked: GenerateRequest, request: Request) -> Any:
        """The route of huggingface_hub; a whole answer is a list there."""
        answer = await generated(asked, request, asked.stream)
        return answer if asked.stream else [answer]

    @app.post("/generate")
    async def generate(asked: GenerateRequest, request: Request) -> Any:
        return await generated(asked, request, asked.stream)

    @app.post("/generate_stream")
    async def generate_stream(asked: GenerateRequest, request: Request) -> Any:
        return await generated(asked, request, streams=True)

    return app


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class Server(uvicorn.Server):
    """Serves an application of `make_app`, and calls ``ready`` once it answers.

    Args:
        app: the application.
        ready: called without arguments.
        log_level: "info" logs requests, "debug" also how Uvicorn starts and ends, and those above
            log no requests.
    """

    def __init__(
        self, app: FastAPI, ready: Callable[[], None] = lambda: None, log_level: str = "info"
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=log_config(log_level),
                log_level="warning" if log_level == "info" else log_level,
                access_log=False,
                timeout_graceful_shutdown=2 * SECONDS_TO_END,
            )
        )
        self.service: Service = app.state.service
        self.ready = ready

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second Ctrl-C changes nothing: the batch ends with the round that runs anyway."""
        super().handle_exit(sig, frame)
        self.force_exit = False

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until Ctrl-C, which is the end of a server and no error."""
        with suppress(KeyboardInterrupt):  # Uvicorn raises the signal again when it has ended
            super().run(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        # A body of many lists lets the collector run often, each time over the libraries, too.
        gc.freeze()
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End those that are open with what they have, or in a stream with a fault."""
        loop = asyncio.get_running_loop()
        ending = loop.call_later(SECONDS_TO_END, self.service.end_all)
        await super().shutdown(sockets)
        ending.cancel()
        gc.unfreeze()
