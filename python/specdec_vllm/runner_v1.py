"""What takes the place of the sampling of vLLM's V1 runner.

A *step* of vLLM runs the model once for a batch of requests, and samples for all of them. Each
function here takes the original, which serves what the plug-in does not, and returns a replacement.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels import Rule
from specdec_vllm import vllm_interface
from specdec_vllm.drafting_v1 import DraftNoise, sample_from_logits
from specdec_vllm.parameters import Parameters, filtered, min_p_first
from specdec_vllm.settings import Settings
from specdec_vllm.tensors import (
    dense_drafts,
    expand,
    probabilities,
    seeds_for,
    with_bonus_rows,
)
from specdec_vllm.verification import acceptance_of, rule_of, sample_rows, verify
from specdec_vllm.vllm_interface import (
    GREEDY_BELOW,
    PARAMS,
    PROPOSER,
    REJECTION,
    RUNNER,
    SAMPLER,
    Make,
)


class Step(NamedTuple):
    """What the runner knows of a step and its samplers do not: see `Parameters`."""

    rule: Rule
    seeds: Tensor
    positions: Tensor
    min_p: Tensor | None


def _init(original: Any, settings: Settings) -> Any:
    def __init__(self: Any, sampler: Any, spec_config: Any = None, device: Any = None) -> None:
        original(self, sampler, spec_config, device)
        method = getattr(spec_config, "rejection_sample_method", None)
        self.specdec_rule = rule_of(settings, method == "block")
        self.specdec_generator = _generator_of(spec_config)
        for place, make in LATE.items():
            vllm_interface.replace_if_loaded(place, make, settings)

    return __init__


def _generator_of(spec_config: Any) -> torch.Generator:
    """The source of unseeded requests' seeds, from the engine's seed where it is known.

    Nothing else draws from it, so workers that run the same steps have the same seeds.
    """
    seed = getattr(getattr(spec_config, "target_model_config", None), "seed", None)
    if not isinstance(seed, int):
        seed = int(torch.randint(2**63 - 1, ()))
    return torch.Generator().manual_seed(seed)


def _runner_sample(original: Any, settings: Settings) -> Any:
    def _sample(self: Any, logits: Tensor | None, spec_decode_metadata: Any) -> Any:
        if logits is None or not hasattr(self, "rejection_sampler"):
            return original(self, logits, spec_decode_metadata)
        step = self.sampler.specdec_step = _step_of(self, spec_decode_metadata)
        try:
            output = original(self, logits, spec_decode_metadata)
        finally:
            self.sampler.specdec_step = None
        emitted = (output.sampled_token_ids >= 0).sum(-1)
        self.drafter.specdec_noise = DraftNoise(step.rule, step.seeds, step.positions + emitted)
        return output

    return _sample


def _step_of(runner: Any, metadata: Any) -> Step:
    batch = runner.input_batch
    number = batch.num_reqs
    if metadata is None:
        inputs = runner.query_start_loc.gpu[1 : number + 1] - 1
    else:
        inputs = metadata.logits_indices[_indptr(metadata)[:-1]]
    min_p = [runner.requests[name].sampling_params.min_p for name in batch.req_ids[:number]]
    source = runner.rejection_sampler.specdec_generator
    return Step(
        runner.rejection_sampler.specdec_rule,
        seeds_for(batch.generators, number, runner.device, of_requests=True, source=source),
        runner.positions[inputs].long() + 1,
        torch.tensor(min_p, device=runner.device) if any(min_p) else None,
    )


def _indptr(metadata: Any) -> Tensor:
    """[B+1] int32: the first row of each request."""
    return torch.nn.functional.pad(metadata.cu_num_sampled_tokens, (1, 0)).int()


def _parameters(
    step: Step | None,
    sampling: Any,
    number: int,
    rows: Tensor,
    source: torch.Generator | None = None,
) -> Parameters:
    """Those of a batch. Where the step is not known, seeds are drawn for this call alone."""
    temperature, top_k, top_p = sampling.temperature, sampling.top_k, sampling.top_p
    seeds = None if step is None else step.seeds
    if seeds is None:
        seeds = seeds_for(
            sampling.generators, number, rows.device, of_requests=False, source=source
        )
    if temperature is not None:
        temperature = torch.where(temperature < GREEDY_BELOW, 0.0, temperature)
    return Parameters(
        0.0 if sampling.all_greedy or temperature is None else temperature,
        0 if top_k is None else torch.where(top_k >= rows.shape[-1], 0, top_k),
        1.0 if top_p is None else top_p,
        0.0 if step is None or step.min_p is None else step.min_p,
        seeds,
        torch.zeros_like(seeds) if step is None else step.positions,
    )


def _forward(original: Any, settings: Settings) -> Any:
    def forward(
        self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        number = len(metadata.num_draft_tokens)
        given = len(metadata.bonus_logits_indices) != number  # there are no rows to draw them from
        if given or not vllm_interface.is_own_sampler(self.sampler):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        step = getattr(self.sampler, "specdec_step", None)
        rows = _processed(self, metadata, logits, sampling_metadata)
        parameters = _parameters(step, sampling_metadata, number, logits, self.specdec_generator)
        counts = torch.diff(_indptr(metadata))
        if self.is_processed_logprobs_mode and sampling_metadata.max_num_logprobs is not None:
            rows, parameters = filtered(rows, counts, parameters, vllm_interface.top_k_top_p)
        else:
            rows, parameters = min_p_first(rows, counts, parameters)
        tokens = _verify(self, settings, metadata, draft_probs, rows, parameters)
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            served = rows if self.is_processed_logprobs_mode else logits
            logprobs = self._get_logprobs_tensors(
                sampling_metadata.max_num_logprobs,
                metadata,
                logits,
                served[metadata.target_logits_indices],
                served[metadata.bonus_logits_indices],
                tokens,
            )
        return vllm_interface.sampler_output(tokens, logprobs)

    return forward


def _processed(sampler: Any, metadata: Any, logits: Tensor, sampling: Any) -> Tensor:
    """The logits after vLLM's own processors, in a float32 copy if any of them has to do."""
    holder = sampling.thinking_budget_state_holder
    if not (
        not sampling.no_penalties
        or sampling.bad_words_token_ids
        or sampling.allowed_token_ids_mask is not None
        or any(getattr(p, "min_toks", True) for p in sampling.logitsprocs.non_argmax_invariant)
        or (holder is not None and holder.has_tracked_requests())
    ):
        return logits
    rows = logits.to(torch.float32, copy=True)
    bonus, targets = metadata.bonus_logits_indices, metadata.target_logits_indices
    rows[bonus] = sampler.sampler.apply_logits_processors(rows[bonus], sampling, True)
    rows[targets] = sampler.apply_logits_processors(rows[targets], sampling, metadata)
    return rows


def _verify(
    sampler: Any,
    settings: Settings,
    metadata: Any,
    draft_probs: Tensor | None,
    rows: Tensor,
    parameters: Parameters,
) -> Tensor:
    indptr = _indptr(metadata)
    lengths = torch.diff(indptr) - 1
    starts = metadata.cu_num_draft_tokens - lengths
    gamma = metadata.max_spec_len
    ids = dense_drafts(metadata.draft_token_ids, starts, lengths, gamma)
    draft = None if draft_probs is None else probabilities(draft_probs, (len(lengths), gamma))
    rates = sampler.synthetic_conditional_rates
    acceptance = acceptance_of(settings, sampler.specdec_rule, rates)
    return verify(rows, ids, draft, indptr, parameters, acceptance).int()


def _rejection_sample(original: Any, settings: Settings) -> Any:
    """Verification from processed logits [N, V] and given bonus tokens.

    A bonus token becomes a row in which no other token has a probability.
    """

    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
    ) -> Tensor:
        number = len(num_draft_tokens)
        lengths = torch.tensor(num_draft_tokens, dtype=torch.int32, device=target_logits.device)
        rows, indptr = with_bonus_rows(target_logits, lengths, bonus_token_ids)
        gamma = max_spec_len
        ids = dense_drafts(draft_token_ids, lengths.cumsum(0) - lengths, lengths, gamma)
        draft = None if draft_probs is None else probabilities(draft_probs, (number, gamma))
        parameters = _parameters(None, sampling_metadata, number, rows).without_filters()
        rates = synthetic_conditional_rates if synthetic_mode else None
        acceptance = acceptance_of(settings, rule_of(settings, False), rates)
        return verify(rows, ids, draft, indptr, parameters, acceptance).int()

    return rejection_sample


def _expand_batch_to_tokens(original: Any, settings: Settings) -> Any:
    """vLLM's kernel for CPUs writes into a temporary copy, and its caller reads what lay there."""
    return expand


def _sample(original: Any, settings: Settings) -> Any:
    """The tokens of a step in which no request has drafts, with the noise of the other steps."""

    def sample(
        self: Any, logits: Tensor, sampling_metadata: Any, logprobs_mode_override: Any = None
    ) -> Any:
        step = getattr(self, "specdec_step", None)
        if step is None:
            return original(self, logits, sampling_metadata, logprobs_mode_override)
        given = _parameters(step, sampling_metadata, len(logits), logits)
        one = torch.ones(len(logits), dtype=torch.int64, device=logits.device)
        tokens = sample_rows(*min_p_first(logits, one, given), step.rule)
        mode = logprobs_mode_override or self.logprobs_mode
        wanted = sampling_metadata.max_num_logprobs is not None
        if not (wanted or sampling_metadata.logprob_token_ids) or not mode.startswith("processed"):
            return tokens, None
        rows, _ = filtered(logits, one, given, vllm_interface.top_k_top_p)
        return tokens, rows if mode == "processed_logits" else self.compute_logprobs(rows)

    return sample


def _validate_spec_decode(original: Any, settings: Settings) -> Any:
    """vLLM refuses min_p with drafts, which the ops serve. It still refuses a bias on logits."""

    def validate(self: Any, speculative_config: Any) -> None:
        if self.logit_bias:
            original(self, speculative_config)

    return validate


REPLACEMENTS: dict[tuple[str, str], Make] = {
    (REJECTION, "RejectionSampler.__init__"): _init,
    (REJECTION, "RejectionSampler.forward"): _forward,
    (REJECTION, "rejection_sample"): _rejection_sample,
    (REJECTION, "expand_batch_to_tokens"): _expand_batch_to_tokens,
    (SAMPLER, "Sampler.sample"): _sample,
    (PARAMS, "SamplingParams._validate_spec_decode"): _validate_spec_decode,
}
LATE: dict[tuple[str, str], Make] = {
    (RUNNER, "GPUModelRunner._sample"): _runner_sample,
    (PROPOSER, "SpecDecodeBaseProposer._sample_from_logits"): sample_from_logits,
}
