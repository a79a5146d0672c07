"""Generates with a real vLLM engine in its own process: `run(job, folder)`, or a program of itself.

A job is a dict that JSON can hold: `model` (a folder), `speculation` (the `speculative_config` or
None) and `calls`. A call has `requests`, each with `prompt` (token ids) and `params` (arguments of
SamplingParams, and `choice`, the only texts that structured output allows), and `plugin`, whether
the plug-in is installed while they run, with `rule`. The requests of a call are in the engine
together. The result of a call is a dict with `outputs`, one for each request: `tokens`, `text` and
`logprobs` (of the tokens, empty if not asked for); and `steps`, how often the model ran.

A job with `cases` is one of vllm_v2_rounds.py. A job with `v2` has the V2 runner (see vllm_v2.py),
and one with `engine` more arguments of the engine. The result names the module of the sampler. A
job with `ranks` has calls with a `rule` and `apart`, whether each rank draws seeds of requests from
another generator. Their results have `ranks` too, for each rank the steps: names of the requests,
drafts and sampled tokens.
"""

import json
import sys
from pathlib import Path

from support.programs import output_of
from vllm_plugin import vllm_v2

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that can undo the plug-in
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive",
}  # fmt: skip


# vLLM takes the CPUs of a rank from a NUMA node of its own, unless it is told which they are.
OF_RANKS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def run(job, folder):
    """The results of the calls, from a new process; its output goes to the error message."""
    source, target = Path(folder) / "job.json", Path(folder) / "results.json"
    source.write_text(json.dumps(job))
    given = ENVIRONMENT | (OF_RANKS if "ranks" in job else {})
    given |= vllm_v2.ENVIRONMENT if "v2" in job or "cases" in job else {}
    program = "vllm_plugin.vllm_v2_rounds" if "cases" in job else "vllm_plugin.vllm_engine"
    output_of("-m", program, source, target, timeout=540, **given)
    return json.loads(target.read_text())


class Recorder:
    """Methods that vLLM adds to those of a worker."""

    def specdec_begin(self, rule, apart):
        """Record the steps from now on."""
        runner = self.model_runner
        runner.rejection_sampler.specdec_rule = rule
        if apart:
            runner.rejection_sampler.specdec_generator.manual_seed(self.rank)
        self.specdec_steps, sample = [], type(runner)._sample

        def recorded(logits, metadata):
            output = sample(runner, logits, metadata)
            drafts = [] if metadata is None else metadata.draft_token_ids.tolist()
            names = runner.input_batch.req_ids[: runner.input_batch.num_reqs]
            self.specdec_steps.append([names, drafts, output.sampled_token_ids.tolist()])
            return output

        runner._sample = recorded

    def specdec_recorded(self):
        return self.specdec_steps


def of_ranks(job):
    """The results of calls of an engine of several ranks."""
    engine = start(
        job, tensor_parallel_size=job["ranks"], skip_tokenizer_init=True,
        worker_extension_cls="vllm_plugin.vllm_engine.Recorder",
    )  # fmt: skip
    for call in job["calls"]:
        engine.collective_rpc("specdec_begin", args=(call["rule"], call["apart"]))
        found = generate(engine, call["requests"])
        yield found | {"ranks": engine.collective_rpc("specdec_recorded")}


def main(source, target):
    job = json.loads(Path(source).read_text())
    if "v2" in job:
        vllm_v2.interpret()
    from specdec_vllm import Settings, vllm_interface  # noqa: PLC0415
    from specdec_vllm.plugin import install  # noqa: PLC0415
    from vllm.v1.sample.rejection_sampler import RejectionSampler  # noqa: PLC0415

    if "ranks" in job:
        Path(target).write_text(json.dumps({"calls": [*of_ranks(job)]}))
        return
    engine = start(job, **job.get("engine", {}))
    result = {
        # By the entry point alone, before anything here installs or undoes it.
        "installed": hasattr(RejectionSampler.forward, "__wrapped__"),
        "calls": [],
    }
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    runner = worker.model_runner
    result["sampler"] = type(runner.sampler).__module__
    for call in job["calls"]:
        vllm_interface.restore()
        if call["plugin"]:
            install(Settings())
            if job["speculation"]:  # as the constructor does for SPECDEC_VLLM_RULE
                runner.rejection_sampler.specdec_rule = call["rule"]
            if job["speculation"] and "v2" in job:
                runner.sampler.specdec_rule = call["rule"]
        result["calls"].append(generate(engine, call["requests"]))
    Path(target).write_text(json.dumps(result))


def start(job, **given):
    """The engine, with other arguments beside those of every test."""
    from vllm import LLM  # noqa: PLC0415

    return LLM(
        model=job["model"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=64,
        max_num_batched_tokens=2048, speculative_config=job["speculation"], seed=0, **given,
    )  # fmt: skip


def generate(engine, requests):
    from vllm import SamplingParams, TokensPrompt  # noqa: PLC0415
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415

    prompts = [TokensPrompt(prompt_token_ids=r["prompt"]) for r in requests]
    params = []
    for r in requests:
        given = dict(r["params"])
        if choice := given.pop("choice", None):
            given["structured_outputs"] = StructuredOutputsParams(choice=choice)
        params.append(SamplingParams(**given))
    step, steps = engine.llm_engine.step, []

    def counted():
        steps.append(0)
        return step()

    engine.llm_engine.step = counted
    outputs = engine.generate(prompts, params, use_tqdm=False)
    engine.llm_engine.step = step
    found = []
    for output in outputs:
        for sequence in output.outputs:
            tokens = list(sequence.token_ids)
            at = zip(tokens, sequence.logprobs or [], strict=False)
            logprobs = [known[token].logprob for token, known in at]
            found.append({"tokens": tokens, "text": sequence.text, "logprobs": logprobs})
    return {"outputs": found, "steps": len(steps)}


if __name__ == "__main__":
    main(*sys.argv[1:])
