"""Tokens a second and accepted drafts of vLLM without speculation, with it, and with the plug-in.

    python -m bench.vllm_throughput --model FOLDER [--batch B] [--tokens N] [--passes P]
                                     [--json FILE]

It needs the environment of `make more TASK=setup-vllm`, and `make more TASK=bench-vllm` runs it
there. Each engine has a process of its own, and the engines take turns pass by pass. The texts are
sampled at temperature .8. Those of vLLM by itself are no model's text on the CPU, so that drafts
from the prompt seldom fit them: its line says what its users have, not what a right sampler would
reach.

The plug-in verifies by rule match: so all its engines write the same texts. It accepts drafts that
have no distribution, as all of these, as often as rule token does.

vLLM's method "suffix" needs the package arctic-inference and is measured where that is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
}  # fmt: skip
SUFFIX = {  # which copies from earlier requests by default, and they have the same prompts here
    "method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 0,
}  # fmt: skip
PROPOSER = {
    "method": "custom_class", "model": "specdec_vllm.Proposer", "num_speculative_tokens": 4,
}  # fmt: skip
PLUGIN = {"SPECDEC_VLLM": "1", "SPECDEC_VLLM_RULE": "match"}
# Name -> (speculation, environment variables).
ENGINES = {
    "no speculation": (None, {"SPECDEC_VLLM": "0"}),
    "n-gram, vLLM by itself": (NGRAM, {"SPECDEC_VLLM": "0"}),
    "n-gram, plug-in": (NGRAM, PLUGIN),
    "suffix, plug-in": (SUFFIX, PLUGIN),
    **{
        f"{name}, proposer": (PROPOSER, PLUGIN | {"SPECDEC_VLLM_DRAFTER": name})
        for name in ("prompt_lookup", "suffix_automaton")
    },
}
if importlib.util.find_spec("arctic_inference") is None:
    del ENGINES["suffix, plug-in"]
TEMPERATURE = 0.8
PROMPTS = (
    "Repeat this list twice. red, green, blue, yellow, red, green, blue, yellow, red, green,",
    "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n    return w * h * d\n\ndef",
    "Rewrite: The cat sat on the mat and looked at the dog.\nThe cat sat on the mat and looked",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)


def main() -> None:
    """Print a line for each engine."""
    given = _arguments()
    servers = {name: _Server(given, *engine) for name, engine in ENGINES.items()}
    rates: dict[str, list[float]] = {name: [] for name in ENGINES}
    tokens, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    texts = {}
    for number in range(given.passes + 1):  # the first pass warms up
        for name, server in servers.items():
            reply = server.ask({"seed": number})
            texts[name] = reply["text"]
            if number:
                rates[name].append(reply["tokens"] / reply["seconds"])
                tokens[name] += reply["tokens"]
                drafted[name] += reply["drafted"]
                accepted[name] += reply["accepted"]
    for server in servers.values():
        server.close()
    print(f"{given.batch} requests of {given.tokens} tokens, temperature {TEMPERATURE}")
    # A round of a request emits one token more than it accepts.
    rounds = {name: tokens[name] - accepted[name] for name in rates}
    by_round = {name: (drafted[name] / n, accepted[name] / n) for name, n in rounds.items()}
    for name, values in rates.items():
        low, high = min(values), max(values)
        print(
            f"{name:27} {statistics.median(values):7.1f} tokens/s ({low:.1f} to {high:.1f}), "
            "{:.2f} drafted and {:.2f} accepted a round".format(*by_round[name])
        )
    for name, text in texts.items():
        print(f"{name}: {text[:100]!r}")
    if given.json:
        found = {"tokens_per_second": rates, "drafted_and_accepted_a_round": by_round}
        Path(given.json).write_text(json.dumps(found | vars(given)))


class _Server:
    """An engine in a process that answers lines of JSON."""

    def __init__(self, given: Any, speculation: Any, variables: dict[str, str]) -> None:
        settings = vars(given) | {"speculation": speculation}
        self.messages = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bench.vllm_throughput", "--serve", json.dumps(settings)],
            env={
                **os.environ, **variables, "VLLM_PLUGINS": "specdec",
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR",
                "OMP_WAIT_POLICY": "passive",  # threads that spin would take time from the others
            },
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.messages, text=True,
        )  # fmt: skip

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"tokens"'):  # other lines are vLLM's
                reply: dict[str, Any] = json.loads(line)
                return reply
        code = self.process.wait()
        self.messages.seek(0)
        raise RuntimeError(f"the engine ended with code {code}: {self.messages.read()[-3000:]}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def _serve(settings: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams  # noqa: PLC0415

    engine = LLM(
        model=settings["model"], speculative_config=settings["speculation"], dtype="float32",
        enforce_eager=True, max_model_len=1024, seed=0, disable_log_stats=False,
    )  # fmt: skip
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(settings["batch"])]
    for line in sys.stdin:
        seed = json.loads(line)["seed"]
        params = [
            SamplingParams(
                temperature=TEMPERATURE, seed=100 * seed + i, max_tokens=settings["tokens"],
                ignore_eos=True,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        before = _drafts(engine)
        started = time.perf_counter()
        outputs = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
        reply = {"tokens": tokens, "seconds": seconds, "text": outputs[0].outputs[0].text}
        reply |= {name: count - before[name] for name, count in _drafts(engine).items()}
        print("\n" + json.dumps(reply), flush=True)


def _drafts(engine: Any) -> dict[str, int]:
    """Tokens that an engine has drafted and accepted so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    names = {"drafted": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    return {key: int(values.get(f"vllm:spec_decode_{n}", 0)) for key, n in names.items()}


def _arguments() -> Any:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_throughput")
    parser.add_argument("--model", required=True, help="model folder")
    parser.add_argument("--batch", type=int, default=1, help="requests at a time")
    parser.add_argument("--tokens", type=int, default=64, help="of each request")
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(json.loads(sys.argv[2]))
    else:
        main()
