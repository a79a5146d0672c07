"""The routes of the server, in the manner of OpenAI and of text-generation-inference."""

# FastAPI reads the annotations of the routes when the application is made.
import asyncio
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specdec_hf.batch_queue import BatchQueue
from specdec_hf.server.choices import FINISH_REASONS, ChatForm, CompletionForm, Form
from specdec_hf.server.faults import BodyLimit, Fault, answer_faults
from specdec_hf.server.fields import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    OpenAIRequest,
)
from specdec_hf.server.growing_text import Piece
from specdec_hf.server.service import Limits, Service

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
    queue: BatchQueue, tokenizer: Any, *, name: str = "model", limits: Limits | None = None
) -> FastAPI:
    """The application, which opens the queue.

    Args:
        queue: rule "match" of its decoder makes the text of a seed independent of other requests.
        tokenizer: of the queue's model. Chats need its chat template.
        name: of the model, for clients.
        limits: None takes the defaults.
    """
    limits = limits or Limits()
    service = Service(queue, tokenizer, limits)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with queue:
            yield

    app = FastAPI(lifespan=lifespan, title="specdec_hf")
    app.state.service = service
    app.add_middleware(BodyLimit, max_bytes=limits.max_body)
    answer_faults(app)
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "specdec_hf"}

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{asked:path}")
    async def one_model(asked: str) -> dict[str, Any]:
        check_model(asked)
        return model

    def check_model(asked: str) -> None:
        if asked not in ("", name):
            line = f"model must be {name}, which is served here, got {asked!r}"
            raise Fault(404, line, param="model", code="model_not_found")

    async def openai(
        request: Request, asked: OpenAIRequest, form: Form, prompts: list[list[int]],
        fields: tuple[str, str], length: tuple[int | None, int],
    ) -> Any:  # fmt: skip
        """An answer of OpenAI's API to prompts, each with ``n`` choices."""
        repeated = [prompt for prompt in prompts for _ in range(asked.n)]
        lengths = [service.num_new_tokens(fields[1], *length, len(one)) for one in repeated]
        async with AsyncExitStack() as stack:
            sequences = await stack.enter_async_context(
                service.submitted(
                    request, fields, repeated, lengths, asked, form.num_top_logprobs, asked.stop
                )
            )
            pieces = service.pieces(sequences, asked.stop)
            head = {"id": form.prefix + uuid.uuid4().hex, "created": int(time.time())}
            head |= {"model": name, "object": form.kind}
            read, new = sum(map(len, prompts)), 0

            def usage() -> dict[str, int]:
                return {
                    "prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new
                }  # fmt: skip

            async def chunks() -> AsyncIterator[str]:
                nonlocal new
                each = {"usage": None} if asked.stream_options.include_usage else {}
                async for index, piece, _ in pieces:
                    new += len(piece.step.tokens)
                    if (choice := form.chunk(index, piece)) is not None:
                        yield _event(head | {"choices": [choice]} | each)
                if each:
                    yield _event(head | {"choices": [], "usage": usage()})
                yield "data: [DONE]\n\n"

            if asked.stream:
                return EventStream(chunks(), stack.pop_all())
            collected: list[list[Piece]] = [[] for _ in sequences]
            async for index, piece, _ in pieces:
                new += len(piece.step.tokens)
                collected[index].append(piece)
            choices = [form.choice(*one) for one in enumerate(collected)]
            return head | {"choices": choices, "usage": usage()}

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request) -> Any:
        check_model(asked.model)
        prompts = await service.encode("prompt", asked.prompt)
        form = CompletionForm(asked.logprobs, asked.stream)
        fields = ("prompt", "max_tokens")
        return await openai(request, asked, form, prompts, fields, (asked.max_tokens, 16))

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request) -> Any:
        check_model(asked.model)
        prompts = await service.encode("messages", [asked.messages])
        form = ChatForm((asked.top_logprobs or 0) if asked.logprobs else None, asked.stream)
        name = "max_tokens" if asked.max_completion_tokens is None else "max_completion_tokens"
        length = getattr(asked, name), limits.max_new_tokens
        return await openai(request, asked, form, prompts, ("messages", name), length)

    async def generated(asked: GenerateRequest, request: Request) -> tuple[Any, AsyncExitStack]:
        """The events of text-generation-inference, and what ends with them."""
        (prompt,) = await service.encode("inputs", [asked.inputs])
        given, fields = asked.parameters, ("inputs", "max_new_tokens")
        length = service.num_new_tokens(fields[1], given.max_new_tokens, 64, len(prompt))
        held = AsyncExitStack()
        sequences = await held.enter_async_context(
            service.submitted(request, fields, [prompt], [length], given)
        )

        async def events() -> AsyncIterator[dict[str, Any]]:
            async for _, piece, text in service.pieces(sequences):
                step = piece.step
                event: dict[str, Any] = {
                    "text": piece.text, "tokens": step.tokens, "logprobs": step.logprobs
                }  # fmt: skip
                if piece.finished:
                    reason = piece.finished
                    if reason != "cancelled":
                        reason = FINISH_REASONS[reason][1]
                    details = {"finish_reason": reason, "seed": sequences[0].sampling["seed"]}
                    event |= {"generated_text": text.text, "details": details}
                yield event

        return events(), held

    @app.post("/generate")
    async def generate(asked: GenerateRequest, request: Request) -> dict[str, Any]:
        events, held = await generated(asked, request)
        async with held:
            last = [event async for event in events][-1]
        return {name: last[name] for name in ("generated_text", "details")}

    @app.post("/generate_stream")
    async def generate_stream(asked: GenerateRequest, request: Request) -> EventStream:
        events, held = await generated(asked, request)
        return EventStream((_event(event) async for event in events), held)

    return app


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


class Server(uvicorn.Server):
    """Serves an application of `make_app`, and calls ``ready`` once it answers."""

    def __init__(self, app: FastAPI, ready: Callable[[], None] = lambda: None) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2 * SECONDS_TO_END)
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
        await super().startup(sockets)
        if self.started:
            self.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End those that are open with what they have, or in a stream with a fault."""
        loop = asyncio.get_running_loop()
        ending = loop.call_later(SECONDS_TO_END, self.service.end_all)
        await super().shutdown(sockets)
        ending.cancel()
