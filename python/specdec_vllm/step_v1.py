"""What the plug-in takes from vLLM's V1 runner in each step: seeds, positions and min-p."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Rule
from specdec_vllm import vllm_interface
from specdec_vllm.drafting_v1 import DraftNoise
from specdec_vllm.settings import Settings


class Step(NamedTuple):
    """What the runner knows of a step and its samplers do not: see `Parameters`.

    draft_logits: whether the drafts came with logits, which vLLM calls probabilities too.
    """

    rule: Rule
    seeds: Tensor
    positions: Tensor
    min_p: Tensor | None
    draft_logits: bool = False


def runner_sample(original: Any, settings: Settings) -> Any:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        rejection_sampler = getattr(self, "rejection_sampler", None)
        if logits is None or not hasattr(rejection_sampler, "specdec_rule"):
            return original(self, logits, spec_decode_metadata)
        step = self.sampler.specdec_step = _step_of(self, spec_decode_metadata)
        try:
            output = original(self, logits, spec_decode_metadata)
        finally:
            self.sampler.specdec_step = None
        emitted = (output.sampled_token_ids >= 0).sum(-1)
        self.drafter.specdec_noise = DraftNoise(
            step.rule, step.seeds, step.positions + emitted,
            as_logits=vllm_interface.is_own_verification(rejection_sampler),
        )  # fmt: skip
        return output

    return _sample


def _step_of(runner: Any, metadata: Any) -> Step:
    batch = runner.input_batch
    number = batch.num_reqs
    if metadata is None:
        inputs = runner.query_start_loc.gpu[1 : number + 1] - 1
    else:
        inputs = metadata.logits_indices[indptr_of(metadata)[:-1]]
    states = [runner.requests[name] for name in batch.req_ids[:number]]
    min_p = [state.sampling_params.min_p for state in states]
    if any(min_p) and not vllm_interface.serves_min_p(runner.sampler):
        raise NotImplementedError(
            "min_p with drafts: the sampler must have the forward and apply_logits_processors of "
            f"vLLM's Sampler, got {type(runner.sampler).__name__}"
        )
    noise: DraftNoise | None = getattr(runner.drafter, "specdec_noise", None)
    seeds = _seeds_of(states, batch.generators, runner.rejection_sampler.specdec_generator)
    return Step(
        runner.rejection_sampler.specdec_rule,
        seeds.to(runner.device, non_blocking=True),
        runner.positions[inputs].long() + 1,
        torch.tensor(min_p, device=runner.device) if any(min_p) else None,
        draft_logits=noise is not None and noise.came_with_logits(),
    )


def _seeds_of(
    states: list[Any], generators: dict[int, torch.Generator], source: torch.Generator
) -> Tensor:
    """[B] int64: what a request's user gave, or what was drawn in the first step of the request.

    Rule match needs one seed in the step that drafts and in the next, which verifies. The runner's
    state of a request keeps it, through preemption too, and goes when the request ends.
    """
    seeds = []
    for i, state in enumerate(states):
        if i in generators:
            seeds.append((generators[i].initial_seed() + 2**63) % 2**64 - 2**63)
            continue
        if not hasattr(state, "specdec_seed"):
            state.specdec_seed = int(torch.randint(2**63 - 1, (), generator=source))
        seeds.append(state.specdec_seed)
    return torch.tensor(seeds, dtype=torch.int64)


def generator_of(spec_config: Any) -> torch.Generator:
    """The source of unseeded requests' seeds, from the engine's seed where it is known.

    Nothing else draws from it, so workers that run the same steps have the same seeds.
    """
    seed = getattr(getattr(spec_config, "target_model_config", None), "seed", None)
    if not isinstance(seed, int):
        seed = int(torch.randint(2**63 - 1, ()))
    return torch.Generator().manual_seed(seed)


def indptr_of(metadata: Any) -> Tensor:
    """[B+1] int32: the first row of each request."""
    return torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0)).int()
