"""What takes the place of the sampling of vLLM's V1 runner.

A *step* of vLLM runs the model once for a batch of requests, and samples for all of them. Each
function here takes the original, which serves what the plug-in does not, and returns a replacement.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import SampledDraft
from specdec_vllm import vllm_interface
from specdec_vllm.drafting_v1 import sample_from_logits
from specdec_vllm.parameters import Parameters, apply_min_p, divided, filtered, min_p_first
from specdec_vllm.proposer import check_drafter_is_used, warn_of_other_texts
from specdec_vllm.settings import Settings
from specdec_vllm.step_v1 import Step, generator_of, indptr_of, runner_sample
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


def _init(original: Any, settings: Settings) -> Any:
    def __init__(self: Any, sampler: Any, spec_config: Any = None, device: Any = None) -> None:
        original(self, sampler, spec_config, device)
        check_drafter_is_used(settings, spec_config)
        if vllm_interface.is_left_to_vllm(spec_config):
            return
        method = getattr(spec_config, "rejection_sample_method", None)
        self.specdec_rule = rule_of(settings, method == "block")
        warn_of_other_texts(spec_config, self.specdec_rule)
        self.specdec_generator = generator_of(spec_config)
        for place, make in (LATE | WITH_DRAFTS).items():
            vllm_interface.replace_if_loaded(place, make, settings)

    return __init__


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
        seeds = seeds_for(sampling.generators, number, rows.device, source=source)
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
        if not hasattr(self, "specdec_rule"):
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        number = len(metadata.num_draft_tokens)
        given = len(metadata.bonus_logits_indices) != number  # there are no rows to draw them from
        step = getattr(self.sampler, "specdec_step", None)
        counts = torch.diff(indptr_of(metadata))
        if given or not vllm_interface.is_own_sampler(self.sampler):
            if step is not None:  # that sampler draws the tokens after all drafts
                self.sampler.specdec_step = step._replace(positions=step.positions + counts - 1)
                if draft_probs is not None and step.draft_logits:
                    parameters = _parameters(step, sampling_metadata, number, logits)
                    draft_probs = divided(draft_probs, counts - 1, parameters).softmax(-1)
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        rows = _processed(self, metadata, logits, sampling_metadata)
        parameters = _parameters(step, sampling_metadata, number, logits, self.specdec_generator)
        draft: Tensor | SampledDraft | None = draft_probs
        if draft_probs is not None and (step is None or not step.draft_logits):
            draft = probabilities(draft_probs, (number, metadata.max_spec_len))
        if self.is_processed_logprobs_mode and sampling_metadata.max_num_logprobs is not None:
            if isinstance(draft, Tensor):
                draft = divided(draft, counts - 1, parameters)
            rows, parameters = filtered(rows, counts, parameters, vllm_interface.top_k_top_p)
        else:
            rows, parameters = min_p_first(rows, counts, parameters)
        tokens = _verify(self, settings, metadata, draft, rows, parameters)
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


def _apply_to_drafts(original: Any, settings: Settings) -> Any:
    """vLLM's processors of the drafts' rows, then min-p for another sampler than vLLM's."""

    def apply_logits_processors(
        self: Any, logits: Tensor, sampling_metadata: Any, metadata: Any
    ) -> Tensor:
        rows: Tensor = original(self, logits, sampling_metadata, metadata)
        counts = torch.diff(indptr_of(metadata)) - 1
        return _min_p_of_step(self.sampler, rows, counts, sampling_metadata)

    return apply_logits_processors


def _apply_to_requests(original: Any, settings: Settings) -> Any:
    """The same for rows of bonus tokens, and for those of a step in which nothing was drafted."""

    def apply_logits_processors(
        self: Any, logits: Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> Tensor:
        rows: Tensor = original(self, logits, sampling_metadata, predict_bonus_token)
        one = torch.ones(len(rows), dtype=torch.int64, device=rows.device)
        return _min_p_of_step(self, rows, one, sampling_metadata)

    return apply_logits_processors


def _min_p_of_step(sampler: Any, rows: Tensor, counts: Tensor, sampling: Any) -> Tensor:
    """Rows with min-p applied, or as they are: the ops apply that of vLLM's own sampler."""
    step = getattr(sampler, "specdec_step", None)
    if step is None or step.min_p is None or vllm_interface.is_own_sampler(sampler):
        return rows
    return apply_min_p(rows, counts, _parameters(step, sampling, len(counts), rows))


def _verify(
    sampler: Any,
    settings: Settings,
    metadata: Any,
    draft: Tensor | SampledDraft | None,
    rows: Tensor,
    parameters: Parameters,
) -> Tensor:
    indptr = indptr_of(metadata)
    lengths = torch.diff(indptr) - 1
    starts = metadata.cu_num_draft_tokens - lengths
    gamma = metadata.max_spec_len
    ids = dense_drafts(metadata.draft_token_ids, starts, lengths, gamma)
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
        fly_window_size: int | None = None,
        fly_entropy_threshold: float | None = None,
        fly_entropy_top_k: int = 3,
    ) -> Tensor:
        if fly_window_size is not None:
            return original(  # type: ignore[no-any-return]
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
                target_logits, bonus_token_ids, sampling_metadata, synthetic_mode,
                synthetic_conditional_rates, use_fp64_gumbel, fly_window_size,
                fly_entropy_threshold, fly_entropy_top_k,
            )  # fmt: skip
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
    """vLLM refuses min_p with drafts, which the plug-in serves, but still a bias on logits."""

    def validate(self: Any, speculative_config: Any) -> None:
        if self.logit_bias or vllm_interface.is_left_to_vllm(speculative_config):
            original(self, speculative_config)

    return validate


def _mixed_sample_eligible(original: Any, settings: Settings) -> Any:
    """On some AMD GPUs rows are sampled before `Sampler.sample`, with other noise and no min-p."""
    return lambda sm, predict_bonus_token: False


REPLACEMENTS: dict[tuple[str, str], Make] = {
    (REJECTION, "RejectionSampler.__init__"): _init,
    (REJECTION, "RejectionSampler.forward"): _forward,
    (REJECTION, "RejectionSampler.apply_logits_processors"): _apply_to_drafts,
    (REJECTION, "rejection_sample"): _rejection_sample,
    (REJECTION, "expand_batch_to_tokens"): _expand_batch_to_tokens,
    (SAMPLER, "Sampler.apply_logits_processors"): _apply_to_requests,
    (SAMPLER, "Sampler.sample"): _sample,
    (PARAMS, "SamplingParams._validate_spec_decode"): _validate_spec_decode,
}
LATE: dict[tuple[str, str], Make] = {
    (RUNNER, "GPUModelRunner._sample"): runner_sample,
    (PROPOSER, "SpecDecodeBaseProposer._sample_from_logits"): sample_from_logits,
}
# Left alone in an engine without drafts.
WITH_DRAFTS: dict[tuple[str, str], Make] = {
    (SAMPLER, "mixed_sample_eligible"): _mixed_sample_eligible,
}
