"""A text server in the manner of text-generation-inference: `python examples/server.py MODEL`."""

import json
import random
import sys
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from specdec_hf import BatchQueue, SpeculativeDecoder
from transformers import AutoModelForCausalLM, AutoTokenizer


class Parameters(BaseModel, extra="forbid"):
    max_new_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)  # 0 is greedy
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(default_factory=lambda: random.getrandbits(63), ge=0, lt=2**63)


class Prompt(BaseModel, extra="forbid"):
    inputs: str
    parameters: Parameters = Field(default_factory=Parameters)


def make_app(model, tokenizer, drafter="prompt_lookup", batch_size=8):
    """The application, which decodes at most ``batch_size`` requests at once."""
    queue = BatchQueue(model, SpeculativeDecoder(drafter, rule="match"), batch_size)

    @asynccontextmanager
    async def lifespan(app):
        async with queue:
            yield

    def submit(prompt):
        try:
            ids = tokenizer(prompt.inputs)["input_ids"]
            return queue.submit(ids, **prompt.parameters.model_dump())
        except ValueError as error:
            raise HTTPException(422, str(error)) from error

    async def events_of(sequence, request):
        """What each round appends to the text; the last event also holds the whole text."""
        tokens, sent = [], ""
        try:
            async for step in sequence:
                tokens += step.tokens
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                # A character whose bytes are not complete waits for the rest of them.
                held = text.endswith("\N{REPLACEMENT CHARACTER}") and not step.finished
                piece = "" if held else text[len(sent) :]
                sent += piece
                event = {"text": piece, "tokens": step.tokens, "logprobs": step.logprobs}
                if step.finished:
                    reason = "eos_token" if step.finished == "eos" else step.finished
                    details = {"finish_reason": reason, "seed": sequence.sampling["seed"]}
                    event |= {"generated_text": text, "details": details}
                yield event
                if await request.is_disconnected():
                    break
        finally:
            sequence.cancelled = True

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(prompt: Prompt, request: Request):
        events = [event async for event in events_of(submit(prompt), request)]
        return {name: events[-1].get(name) for name in ("generated_text", "details")}

    @app.post("/generate_stream")
    async def generate_stream(prompt: Prompt, request: Request):
        events = events_of(submit(prompt), request)
        lines = (f"data:{json.dumps(event)}\n\n" async for event in events)
        return StreamingResponse(lines, media_type="text/event-stream")

    return app


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    app = make_app(model, AutoTokenizer.from_pretrained(sys.argv[1]))
    uvicorn.run(app, timeout_graceful_shutdown=5)  # seconds that running requests get on Ctrl-C
