"""Texts of several rounds by the classes of vLLM's V2 runner, without a model.

    python -m vllm_plugin.vllm_v2_rounds JOB RESULTS

A text is a chain of Markov: the logits after a token are a row of a table, one of the target and
one of the draft. Drafts come from vLLM's own noise, whose functions run in Triton's interpreter,
and the plug-in verifies them in vLLM's `RejectionSampler` with its `Sampler`.

JOB is a dict of `target` and `draft`, these tables [V, V]; `params`, arguments of SamplingParams;
`gamma`, the drafts of a round, of which every fourth text has one less; `length`, the number of
tokens of a text; and `cases`, each (copies, rule, noise), where the noise of drafts follows from
their "position" alone or also from their index in the "round". RESULTS has `texts`, the tokens of
each case; `own`, the noise with which vLLM draws by itself; `refused`, what the plug-in says to
rule block with probabilistic drafts; and `both_ways`, the tokens of a round that the plug-in
verifies by itself, and those after vLLM's kernels have applied the sampling parameters.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

from vllm_plugin import vllm_v2

vllm_v2.interpret()

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
import vllm.v1.worker.cpu.shm  # noqa: E402, F401  # vLLM's buffers of the CPU, as in its worker
from specdec_vllm import Settings, vllm_interface  # noqa: E402
from specdec_vllm.plugin import install  # noqa: E402
from vllm import SamplingParams  # noqa: E402
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample, murmur3_uniform32  # noqa: E402
from vllm.v1.worker.gpu.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

CPU = torch.device("cpu")
BLOCK = 8192


@triton.jit
def _uniforms(seeds, positions, tokens, out, number, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < number
    given = [tl.load(at + index, mask=mask, other=0) for at in (seeds, positions, tokens)]
    tl.store(out + index, murmur3_uniform32(given[0], given[1], given[2]), mask=mask)


def drawn(rows, temperature, seeds, positions, noise, step):
    """Tokens [B] from logits [B, V], all at once what vLLM's kernel draws one after another."""
    if noise == "round":
        seeds = seeds ^ (step << 32)
    positions = positions + (1 << 30)  # keeps drafts from the noise of vLLM's verification
    tokens = torch.arange(rows.shape[1])
    keys = torch.broadcast_tensors(seeds[:, None], positions[:, None], tokens)
    out = torch.empty(rows.shape)
    flat = [x.contiguous().flatten() for x in keys]
    _uniforms[(triton.cdiv(out.numel(), BLOCK),)](*flat, out, out.numel(), BLOCK)
    return (rows / temperature - (-torch.log1p(-out)).log()).argmax(-1)


def noise_of_vllm():
    """With which noise its kernel draws drafts."""
    rows, at = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)), torch.arange(24)
    seeds, positions, step, temperature = at + 2**40, at * 7, 2, torch.full((24,), 0.7)
    tokens = gumbel_sample(
        rows, at, temperature, seeds, positions, apply_temperature=True, is_drafting=True,
        logits_cache=torch.zeros(24, 3, 5), logits_cache_col=torch.tensor(step),
    )  # fmt: skip
    kinds = ("position", "round")
    return [k for k in kinds if drawn(rows, 0.7, seeds, positions, k, step).equal(tokens)]


class Texts:
    """Texts in vLLM's classes, whose places in its arrays are not their order."""

    def __init__(self, job, copies, rule, noise, draft_sample_method="greedy"):
        self.noise, self.gamma = noise, job["gamma"]
        self.target, self.draft = torch.tensor(job["target"]), torch.tensor(job["draft"])
        self.temperature, self.length = job["params"]["temperature"], job["length"]
        self.index = torch.randperm(copies, generator=torch.Generator().manual_seed(2))
        self.counts = self.gamma - (torch.arange(copies) % 4 == 0).long()
        self.tokens = torch.zeros(copies, self.length + self.gamma + 1, dtype=torch.int64)
        self.lengths = torch.ones(copies, dtype=torch.int64)  # token 0 is given
        vllm_interface.restore()
        install(Settings(rule=rule))
        vocab = len(self.target)
        self.sampler = Sampler(
            SimpleNamespace(reasoning_config=None), copies, vocab, CPU,
            RequestState(copies, 64, 64, self.gamma, vocab, CPU), num_speculative_tokens=self.gamma,
        )  # fmt: skip
        for place in range(copies):
            self.sampler.add_request(place, SamplingParams(**job["params"], seed=place << 3))
        self.sampler.apply_staged_writes()
        speculation = SimpleNamespace(
            method="draft_model", model="", num_speculative_tokens=self.gamma,
            rejection_sample_method="standard", draft_sample_method=draft_sample_method,
            enable_adaptive_verification=False, fly_entropy_threshold=0.3, fly_entropy_top_k=3,
        )  # fmt: skip
        self.rejection = RejectionSampler(self.sampler, speculation, CPU)

    def drafts(self):
        """Input tokens [B, gamma+1] of the target, and the drafts' logits in their places."""
        inputs, logits = [self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]], []
        seeds = self.sampler.sampling_states.seeds.gpu[self.index]
        for step in range(self.gamma):
            rows, at = self.draft[inputs[-1]], self.lengths - 1 + step
            inputs.append(drawn(rows, self.temperature, seeds, at, self.noise, step))
            logits.append(rows)
        stored = torch.stack(logits, 1)
        return torch.stack(inputs, 1), torch.empty_like(stored).index_copy_(0, self.index, stored)

    def verified(self):
        """Tokens [B, gamma+1] of one round and their numbers [B]."""
        inputs, draft_logits = self.drafts()
        local = torch.arange(self.gamma + 1).expand_as(inputs)
        kept = local <= self.counts[:, None]
        indptr = torch.nn.functional.pad((self.counts + 1).cumsum(0), (1, 0)).int()
        ids, at = inputs[kept].int(), (self.lengths[:, None] - 1 + local)[kept]
        expanded = self.index[:, None].expand_as(kept)[kept]
        _, sampled, number = self.rejection._verify(
            self.target[inputs][kept], draft_logits, ids, at, indptr, self.index,
            self.index.numpy(), expanded, local[kept].int(), self.lengths.int().numpy(), ids,
        )  # fmt: skip
        return sampled, number

    def written(self):
        """[copies, length] tokens, after as many rounds as they take."""
        while bool((self.lengths <= self.length).any()):
            sampled, number = self.verified()
            for place in range(sampled.shape[1]):
                to = (self.lengths + place).clamp_max(self.tokens.shape[1] - 1)
                emitted = (place < number) & (self.lengths + place <= self.length)
                b = emitted.nonzero()[:, 0]
                self.tokens[b, to[b]] = sampled[b, place]
            self.lengths += number
            self.lengths.clamp_(max=self.length + 1)
        return self.tokens[:, 1 : self.length + 1]


def both_ways(job):
    found = []
    for mode in ("raw_logprobs", "processed_logprobs"):
        made = Texts(job, 48, "token", "round")
        made.sampler.logprobs_mode = mode
        found.append(made.verified()[0].tolist())
    return found


def refusal(job):
    try:
        Texts(job, 1, "block", "round", "probabilistic")
    except ValueError as error:
        return str(error)
    return None


def main(job, results):
    job = json.loads(Path(job).read_text())
    found = {"own": noise_of_vllm(), "refused": refusal(job), "both_ways": both_ways(job)}
    found["texts"] = [Texts(job, *case).written().tolist() for case in job["cases"]]
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
