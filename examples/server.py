"""A text server: `python examples/server.py MODEL`.

It answers in the manner of text-generation-inference (/generate, /generate_stream) and of OpenAI
(/v1/completions, /v1/chat/completions).
"""

import json
import random
import sys
import time
import uuid
from contextlib import asynccontextmanager
from typing import Annotated

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from specdec_hf import BatchQueue, SpeculativeDecoder
from transformers import AutoModelForCausalLM, AutoTokenizer

Stop = Annotated[str, Field(min_length=1)]


class Sampling(BaseModel, extra="forbid"):
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)  # 0 is greedy
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)


class Parameters(Sampling):
    max_new_tokens: int = Field(64, ge=1)
    top_k: int = Field(0, ge=0)


class Prompt(BaseModel, extra="forbid"):
    inputs: str
    parameters: Parameters = Field(default_factory=Parameters)


class OpenAIRequest(Sampling):
    """The fields that both routes of OpenAI's API take; others are refused by name."""

    model: str = ""  # one model is served, whatever the name
    max_tokens: int = Field(64, ge=1)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False

    @property
    def parameters(self):
        sampling = self.model_dump(include=set(Sampling.model_fields))
        return Parameters(max_new_tokens=self.max_tokens, **sampling)

    @property
    def stop_strings(self):
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class CompletionRequest(OpenAIRequest):
    prompt: str


class Message(BaseModel, extra="forbid"):
    role: str
    content: str


class ChatRequest(OpenAIRequest):
    messages: list[Message] = Field(min_length=1)


def one_line(text):
    """A message that can be sent: a field's name or an error may hold what UTF-8 does not."""
    return " ".join(text.encode("utf-8", "backslashreplace").decode().split())[:300]


def make_app(model, tokenizer, drafter="prompt_lookup", batch_size=8):
    """The application, which decodes at most ``batch_size`` requests at once."""
    name = getattr(model.config, "_name_or_path", "") or "model"
    queue = BatchQueue(model, SpeculativeDecoder(drafter, rule="match"), batch_size)

    @asynccontextmanager
    async def lifespan(app):
        async with queue:
            yield

    def submit(parameters, field, text, encode):
        try:
            ids = encode(text)
        except Exception as error:  # whatever a tokenizer or a chat template raises
            raise HTTPException(422, one_line(f"{field} cannot be encoded: {error}")) from error
        settings = parameters.model_dump()
        if settings["seed"] is None:
            settings["seed"] = random.getrandbits(63)
        try:
            return queue.submit(ids, **settings)
        except ValueError as error:
            limit = "max_new_tokens" if field == "inputs" else "max_tokens"
            message = str(error).replace("input_ids", field).replace("max_new_tokens", limit)
            raise HTTPException(422, one_line(message)) from error

    def ids_of(text):
        return tokenizer(text)["input_ids"]

    def ids_of_chat(messages):
        turns = [message.model_dump() for message in messages]
        return tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    async def events_of(sequence, request, stop=()):
        """What each round appends to the text; the last event also holds the whole text."""
        tokens, sent = [], ""
        withheld = max((len(string) - 1 for string in stop), default=0)  # may begin a stop string
        try:
            async for step in sequence:
                tokens += step.tokens
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                ends = [text.index(string) for string in stop if string in text]
                finished = "stop" if ends else step.finished
                text = text[: min(ends)] if ends else text
                # A character whose bytes are not complete waits for the rest of them.
                if finished:
                    piece = text[len(sent) :]
                elif text.endswith("\N{REPLACEMENT CHARACTER}"):
                    piece = ""
                else:
                    piece = text[len(sent) : max(len(sent), len(text) - withheld)]
                sent += piece
                event = {"text": piece, "tokens": step.tokens, "logprobs": step.logprobs}
                if finished:
                    reason = "eos_token" if finished == "eos" else finished
                    details = {"finish_reason": reason, "seed": sequence.sampling["seed"]}
                    event |= {"generated_text": text, "details": details}
                yield event
                if finished or await request.is_disconnected():
                    break
        finally:
            sequence.cancelled = True

    app = FastAPI(lifespan=lifespan)

    @app.exception_handler(RequestValidationError)
    async def refuse(request, error):
        """One line that names the field; FastAPI's own answer repeats values JSON cannot hold."""
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"][1:])) or "body"
        return JSONResponse({"detail": one_line(f"{field}: {first['msg']}")}, 422)

    @app.get("/health")
    async def health():
        return {"status": "ok"}

    @app.post("/generate")
    async def generate(prompt: Prompt, request: Request):
        sequence = submit(prompt.parameters, "inputs", prompt.inputs, ids_of)
        events = [event async for event in events_of(sequence, request)]
        return {name: events[-1].get(name) for name in ("generated_text", "details")}

    @app.post("/generate_stream")
    async def generate_stream(prompt: Prompt, request: Request):
        events = events_of(submit(prompt.parameters, "inputs", prompt.inputs, ids_of), request)
        return streamed(f"data:{json.dumps(event)}\n\n" async for event in events)

    def streamed(lines):
        return StreamingResponse(lines, media_type="text/event-stream")

    async def openai(asked, request, sequence, kind, choice):
        """An answer of OpenAI's API; ``choice`` makes its part from a text."""
        events = events_of(sequence, request, asked.stop_strings)
        head = {"id": uuid.uuid4().hex, "created": int(time.time()), "model": name}

        def answer(event, text):
            reason = event.get("details", {}).get("finish_reason")
            reason = "stop" if reason == "eos_token" else reason
            return head | {
                "object": kind, "choices": [{"index": 0, "finish_reason": reason, **choice(text)}],
            }  # fmt: skip

        if not asked.stream:
            made = [event async for event in events]
            read, new = len(sequence.input_ids), sum(len(event["tokens"]) for event in made)
            usage = {"prompt_tokens": read, "completion_tokens": new, "total_tokens": read + new}
            return answer(made[-1], "".join(event["text"] for event in made)) | {"usage": usage}

        async def lines():
            async for event in events:
                yield f"data: {json.dumps(answer(event, event['text']))}\n\n"
            yield "data: [DONE]\n\n"

        return streamed(lines())

    @app.post("/v1/completions")
    async def completions(asked: CompletionRequest, request: Request):
        sequence = submit(asked.parameters, "prompt", asked.prompt, ids_of)
        return await openai(
            asked, request, sequence, "text_completion", lambda text: {"text": text}
        )

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatRequest, request: Request):
        sequence = submit(asked.parameters, "messages", asked.messages, ids_of_chat)
        part, kind = "message", "chat.completion"
        if asked.stream:
            part, kind = "delta", "chat.completion.chunk"

        def choice(text):
            return {part: {"role": "assistant", "content": text}}

        return await openai(asked, request, sequence, kind, choice)

    return app


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    app = make_app(model, AutoTokenizer.from_pretrained(sys.argv[1]))
    uvicorn.run(app, timeout_graceful_shutdown=5)  # seconds that running requests get on Ctrl-C
