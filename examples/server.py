"""A text server in the manner of text-generation-inference: `python examples/server.py MODEL`.

The requests that wait when a batch ends are the next batch, each with its own length, sampling
parameters and seed. A request whose client has gone leaves its batch, and the others go on.
"""

import asyncio
import json
import random
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import torch
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field
from specdec_hf import SpeculativeDecoder
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


@dataclass
class Job:
    ids: list[int]
    parameters: Parameters
    steps: asyncio.Queue = field(default_factory=asyncio.Queue)
    cancelled: bool = False


def decode(model, decoder, jobs, loop):
    """Decode jobs as one batch and put each step into the queue of its job."""
    width = max(len(job.ids) for job in jobs)
    ids = torch.tensor([[0] * (width - len(job.ids)) + job.ids for job in jobs])
    mask = torch.arange(width) >= torch.tensor([[width - len(job.ids)] for job in jobs])
    each = {name: [getattr(j.parameters, name) for j in jobs] for name in Parameters.model_fields}
    each["max_new_tokens"] = max(each["max_new_tokens"])

    def ended(input_ids, scores):  # for each job: is its text long enough, or has its client gone?
        new = input_ids.shape[1] - width
        ends = [j.cancelled or new >= j.parameters.max_new_tokens for j in jobs]
        return torch.tensor(ends, device=input_ids.device)

    for step in decoder.stream(
        model, ids, attention_mask=mask.long(), do_sample=True, stopping_criteria=[ended], **each
    ):
        loop.call_soon_threadsafe(jobs[step.sequence].steps.put_nowait, step)


def make_app(model, tokenizer, drafter="prompt_lookup", batch_size=8):
    """The application, which decodes at most ``batch_size`` requests at once."""
    decoder = SpeculativeDecoder(drafter, rule="match")  # a seed gives one text in every batch
    context = model.config.get_text_config().max_position_embeddings
    waiting, jobs = asyncio.Queue(), []  # jobs: those of the batch

    async def work():
        while True:
            jobs.clear()
            while not jobs or (len(jobs) < batch_size and not waiting.empty()):
                job = await waiting.get()
                if not job.cancelled:
                    jobs.append(job)
            try:
                await asyncio.to_thread(decode, model, decoder, jobs, asyncio.get_running_loop())
            except Exception as error:
                for job in jobs:
                    job.steps.put_nowait(error)

    @asynccontextmanager
    async def lifespan(app):
        worker = asyncio.create_task(work())
        yield
        worker.cancel()
        for job in jobs:  # so that the thread that decodes ends too
            job.cancelled = True

    def submit(prompt):
        job = Job(tokenizer(prompt.inputs)["input_ids"], prompt.parameters)
        longest = context - job.parameters.max_new_tokens
        if not 1 <= len(job.ids) <= longest:
            raise HTTPException(422, f"inputs must have 1 to {longest} tokens, got {len(job.ids)}")
        waiting.put_nowait(job)
        return job

    async def events(job, request):
        """What each round appends to the text; the last event also holds the whole text."""
        tokens, sent, finished = [], "", ""
        try:
            while not finished and not await request.is_disconnected():
                step = await job.steps.get()
                if isinstance(step, Exception):
                    raise step
                tokens, finished = tokens + step.tokens, step.finished
                text = tokenizer.decode(tokens, skip_special_tokens=True)
                # A character whose bytes are not complete waits for the rest of them.
                held = text.endswith("\N{REPLACEMENT CHARACTER}") and not finished
                piece = "" if held else text[len(sent) :]
                sent += piece
                event = {"text": piece, "tokens": step.tokens, "logprobs": step.logprobs}
                if finished:
                    reason = "eos_token" if finished == "eos" else "length"
                    details = {"finish_reason": reason, "seed": job.parameters.seed}
                    event |= {"generated_text": text, "details": details}
                yield event
        finally:
            job.cancelled = True

    app = FastAPI(lifespan=lifespan)

    @app.post("/generate")
    async def generate(prompt: Prompt, request: Request):
        told = [event async for event in events(submit(prompt), request)]
        return {name: told[-1].get(name) for name in ("generated_text", "details")} if told else {}

    @app.post("/generate_stream")
    async def generate_stream(prompt: Prompt, request: Request):
        told = events(submit(prompt), request)
        lines = (f"data:{json.dumps(event)}\n\n" async for event in told)
        return StreamingResponse(lines, media_type="text/event-stream")

    return app


if __name__ == "__main__":
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
    app = make_app(model, AutoTokenizer.from_pretrained(sys.argv[1]))
    uvicorn.run(app, timeout_graceful_shutdown=5)  # seconds that running requests get on Ctrl-C
