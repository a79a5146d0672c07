"""Generates with a vLLM engine of several ranks that tell what each of them sampled.

`run(job, folder)` and the results are those of `vllm_engine`, with `ranks` in a job. A call has a
`rule`, and `apart`, whether each rank draws the seeds of requests from another generator. Its
result has `ranks`, for each rank the steps: names of the requests, drafts and sampled tokens.
"""

import json
import os
import sys
from pathlib import Path

from support import vllm_engine

# vLLM takes the CPUs of a rank from a NUMA node of its own, unless it is told which they are.
ANY_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def run(job, folder):
    path = os.pathsep.join(filter(None, sys.path))
    program = ("-m", "support.vllm_ranks")
    return vllm_engine.run(job, folder, program, PYTHONPATH=path, **ANY_CPU)


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


def main(source, target):
    job = json.loads(Path(source).read_text())
    engine = vllm_engine.start(
        job,
        tensor_parallel_size=job["ranks"],
        worker_extension_cls="support.vllm_ranks.Recorder",
        skip_tokenizer_init=True,
    )
    calls = []
    for call in job["calls"]:
        engine.collective_rpc("specdec_begin", args=(call["rule"], call["apart"]))
        found = vllm_engine.generate(engine, call["requests"])
        calls.append(found | {"ranks": engine.collective_rpc("specdec_recorded")})
    Path(target).write_text(json.dumps({"calls": calls}))


if __name__ == "__main__":
    main(*sys.argv[1:])
