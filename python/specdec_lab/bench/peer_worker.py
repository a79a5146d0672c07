"""A program that answers for a peer of ``bench`` in the Python where the peer is installed.

    python peer_worker.py llama.cpp FILE.gguf THREADS

It imports nothing of this library. Its output is lines of JSON: the name of the peer, then an
answer to each line of its input. What a peer prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy


class LlamaCpp:
    """llama.cpp's Python binding on a GGUF file."""

    def __init__(self, path: str, threads: int) -> None:
        binding: Any = importlib.import_module("llama_cpp")
        self.name = f"llama-cpp-python {binding.__version__}"
        self._llama = binding.Llama(
            path, n_ctx=0, n_threads=threads, n_threads_batch=threads, verbose=False
        )

    def generate(self, request: dict[str, Any], arrived: Callable[[int], None]) -> list[int]:
        """The new tokens; ``arrived`` is called with how many there are more of them."""
        self._llama.reset()  # so that it reads the prompt again
        self._llama.set_seed(request["seed"])
        sampling = {name: request[name] for name in ("top_k", "top_p")}
        stream = self._llama.generate(
            request["prompt"], temp=request["temperature"], **sampling,
            min_p=0.0, repeat_penalty=1.0,
        )  # fmt: skip
        token_ids: list[int] = []
        for token in stream:
            arrived(1)
            token_ids.append(token)
            if len(token_ids) == request["max_new_tokens"] or token in request["ends"]:
                break
        return token_ids


class OpenVino:
    """OpenVINO GenAI on a folder that optimum-intel has written, with its own prompt lookup or not.

    Weights, cache and products have the types that it chooses by default.
    """

    lookup = False

    def __init__(self, path: str, threads: int) -> None:
        self._genai: Any = importlib.import_module("openvino_genai")
        self._runtime: Any = importlib.import_module("openvino")
        precision = self._runtime.Core().get_property("CPU", "INFERENCE_PRECISION_HINT")
        version = self._genai.__version__.partition("-")[0]  # without its build
        self.name = f"{precision.to_string()}, openvino-genai {version}"
        # By default it keeps the keys and values of prompts, and would not read one again.
        scheduler = self._genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = 2**31  # so that a prompt is read at once, as by default
        chosen = {"prompt_lookup": True} if self.lookup else {}
        self._pipeline = self._genai.LLMPipeline(
            path, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=threads, **chosen
        )

    def generate(self, request: dict[str, Any], arrived: Callable[[int], None]) -> list[int]:
        """The new tokens; ``arrived`` is called with how many there are more of them."""
        genai = self._genai

        class Streamer(genai.StreamerBase):  # type: ignore[misc, name-defined]
            def write(self, tokens: int | list[int]) -> Any:
                arrived(1 if isinstance(tokens, int) else len(tokens))
                return genai.StreamingStatus.RUNNING

            def end(self) -> None:
                """Nothing is kept back."""

        config = genai.GenerationConfig(
            max_new_tokens=request["max_new_tokens"], stop_token_ids=set(request["ends"])
        )
        if self.lookup:
            config.num_assistant_tokens, config.max_ngram_size = request["num_assistant_tokens"], 3
        if request["temperature"]:
            config.do_sample, config.rng_seed = True, request["seed"]
            config.temperature, config.top_p = request["temperature"], request["top_p"]
            config.top_k = request["top_k"] or sys.maxsize
        prompt = self._runtime.Tensor(numpy.array([request["prompt"]]))
        token_ids: list[int] = self._pipeline.generate(prompt, config, Streamer()).tokens[0]
        return token_ids


class OpenVinoLookup(OpenVino):
    """The same with prompt lookup decoding."""

    lookup = True


PEERS: dict[str, Any] = {
    "llama.cpp": LlamaCpp,
    "openvino": OpenVino,
    "openvino, prompt lookup": OpenVinoLookup,
}


def answer(peer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """The new tokens, and how many came in which time after the first, when the prompt was read."""
    tokens: list[int] = []
    seconds: list[float] = []

    def arrived(count: int) -> None:
        seconds.append(time.perf_counter())
        tokens.append(count)

    token_ids = peer.generate(request, arrived)
    return {
        "token_ids": token_ids,
        "later_tokens": len(token_ids) - tokens[0] if tokens else 0,
        "later_seconds": seconds[-1] - seconds[0] if tokens else 0.0,
    }


def main(kind: str, path: str, threads: str) -> None:
    """Answer the requests of standard input until it ends."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    peer = PEERS[kind](path, int(threads))
    print(json.dumps(peer.name), file=output)
    for line in sys.stdin:
        print(json.dumps(answer(peer, json.loads(line))), file=output)


if __name__ == "__main__":
    main(*sys.argv[1:])
