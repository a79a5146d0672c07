"""Texts of several rounds by the classes of vLLM's V2 runner, without a model.

    python -m vllm_plugin.vllm_v2_rounds JOB RESULTS

A text is a chain of Markov: the logits after a token are a row of a table, one of the target and
one of the draft. Drafts come from vLLM's own noise, whose functions run in Triton's interpreter,
and the plug-in verifies them in vLLM's `RejectionSampler` with its `Sampler`.

JOB is a list of (rule, noise), where the noise of drafts follows from their "position" alone or
also from their index in the "round". RESULTS has `texts`, the first tokens of `COPIES` texts for
each; `own`, the noise with which vLLM itself draws; `refused`, what the plug-in says to rule block
with probabilistic drafts; and `processed`, the tokens of a round that the plug-in verifies itself
and those that it verifies after vLLM's kernels have applied the sampling parameters.
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

V, GAMMA, LENGTH, COPIES = 3, 3, 4, 8000
TEMPERATURE, TOP_P, MIN_P = 0.9, 0.9, 0.1
BLOCK = tl.constexpr(8192)
CPU = torch.device("cpu")


def tables():
    """Logits [V, V] of the target and of the draft after each token."""
    generator = torch.Generator().manual_seed(0)
    return 1.2 * torch.randn(2, V, V, generator=generator)


@triton.jit
def _uniforms(seeds, positions, tokens, out, number, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < number
    given = [tl.load(at + index, mask=mask, other=0) for at in (seeds, positions, tokens)]
    tl.store(out + index, murmur3_uniform32(given[0], given[1], given[2]), mask=mask)


def drawn(rows, seeds, positions, noise, step):
    """Tokens [B] from logits [B, V], all at once what vLLM's kernel draws one after another."""
    if noise == "round":
        seeds = seeds ^ (step << 32)
    positions = positions + (1 << 30)  # keeps drafts from the noise of vLLM's verification
    tokens = torch.arange(V)
    flat = [x.contiguous().flatten() for x in torch.broadcast_tensors(
        seeds[:, None], positions[:, None], tokens
    )]  # fmt: skip
    out = torch.empty(rows.numel())
    _uniforms[(triton.cdiv(len(out), BLOCK.value),)](*flat, out, len(out), BLOCK.value)
    return (rows / TEMPERATURE - (-torch.log1p(-out.view_as(rows))).log()).argmax(-1)


def drawn_by_vllm(rows, seeds, positions, step):
    number, (cache, col) = len(rows), (torch.zeros(len(rows), GAMMA, V), torch.tensor(step))
    return gumbel_sample(
        rows, torch.arange(number), torch.full((number,), TEMPERATURE), seeds, positions,
        apply_temperature=True, is_drafting=True, logits_cache=cache, logits_cache_col=col,
    )  # fmt: skip


def noise_of_vllm():
    """With which noise its drafts are drawn."""
    rows, at = torch.randn(24, V, generator=torch.Generator().manual_seed(1)), torch.arange(24)
    theirs = drawn_by_vllm(rows, at + 2**40, at * 7, 2)
    return [n for n in ("position", "round") if drawn(rows, at + 2**40, at * 7, n, 2).equal(theirs)]


def samplers(number, rule, draft_sample_method="greedy"):
    """vLLM's, with the plug-in and a request in each of their places."""
    vllm_interface.restore()
    install(Settings(rule=rule))
    states = RequestState(number, 64, 64, GAMMA, V, CPU)
    config = SimpleNamespace(reasoning_config=None)
    sampler = Sampler(config, number, V, CPU, states, num_speculative_tokens=GAMMA)
    for slot in range(number):
        given = SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, min_p=MIN_P, seed=slot << 3)
        sampler.add_request(slot, given)
    sampler.apply_staged_writes()
    speculation = SimpleNamespace(
        method="draft_model", model="", num_speculative_tokens=GAMMA,
        rejection_sample_method="standard", draft_sample_method=draft_sample_method,
        enable_adaptive_verification=False, fly_entropy_threshold=0.3, fly_entropy_top_k=3,
    )  # fmt: skip
    return sampler, RejectionSampler(sampler, speculation, CPU)


class Texts:
    """The texts of requests, whose places in vLLM's arrays are not their order."""

    def __init__(self, number, noise):
        self.noise, self.number = noise, number
        self.index = torch.randperm(number, generator=torch.Generator().manual_seed(2))
        self.tokens = torch.zeros(number, 1 + LENGTH * (GAMMA + 1), dtype=torch.int64)
        self.lengths = torch.ones(number, dtype=torch.int64)  # the first token is given
        self.counts = GAMMA - (torch.arange(number) % 4 == 0).long()
        self.target, self.draft = tables()

    def drafts(self, seeds):
        """[B, GAMMA] tokens, and their logits in the places of the requests."""
        last, logits = [self.tokens.gather(1, self.lengths[:, None] - 1)[:, 0]], []
        for step in range(GAMMA):
            rows = self.draft[last[-1]]
            logits.append(rows)
            at = self.lengths - 1 + step
            last.append(drawn(rows, seeds[self.index], at, self.noise, step))
        stored = torch.empty(self.number, GAMMA, V)
        stored[self.index] = torch.stack(logits, 1)
        return torch.stack(last, 1), stored

    def verified(self, rejection, seeds):
        """Tokens [B, GAMMA+1] and their numbers, of one round."""
        inputs, draft_logits = self.drafts(seeds)
        local = torch.arange(GAMMA + 1)
        kept = local <= self.counts[:, None]
        rows = self.target[inputs][kept]
        positions = (self.lengths[:, None] - 1 + local)[kept]
        indptr = torch.nn.functional.pad((self.counts + 1).cumsum(0), (1, 0)).int()
        _, sampled, number = rejection._verify(
            rows, draft_logits, inputs[kept].int(), positions, indptr, self.index,
            self.index.numpy(), self.index[:, None].expand_as(kept)[kept],
            local.expand_as(kept)[kept].int(), self.lengths.numpy(), inputs[kept].int(),
        )  # fmt: skip
        return sampled, number

    def go_on(self, rejection, seeds):
        sampled, number = self.verified(rejection, seeds)
        columns = torch.arange(GAMMA + 1)
        for b in (self.lengths <= LENGTH).nonzero()[:, 0].tolist():
            count, at = int(number[b]), int(self.lengths[b])
            self.tokens[b, at : at + count] = sampled[b, columns[:count]]
            self.lengths[b] += count


def texts(rule, noise):
    """[COPIES, LENGTH] tokens after the given one."""
    sampler, rejection = samplers(COPIES, rule)
    made = Texts(COPIES, noise)
    while bool((made.lengths <= LENGTH).any()):
        made.go_on(rejection, sampler.sampling_states.seeds.gpu)
    return made.tokens[:, 1 : LENGTH + 1]


def both_ways():
    found = []
    for mode in ("raw_logprobs", "processed_logprobs"):
        sampler, rejection = samplers(48, "token")
        sampler.logprobs_mode = mode
        sampled, _ = Texts(48, "round").verified(rejection, sampler.sampling_states.seeds.gpu)
        found.append(sampled.tolist())
    return found


def refusal():
    try:
        samplers(1, "block", "probabilistic")
    except ValueError as error:
        return str(error)
    return None


def main(job, results):
    found = {"own": noise_of_vllm(), "refused": refusal(), "processed": both_ways()}
    found["texts"] = [texts(*case).tolist() for case in json.loads(Path(job).read_text())]
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
