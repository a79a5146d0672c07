"""What takes the place of the sampling of vLLM's V2 runner.

It keeps the parameters of all requests in arrays, which `idx_mapping` [B] indexes, and gives the
positions of input tokens: the row of an input token at position p decides the token at p + 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec_kernels import Rule
from specdec_vllm import vllm_interface
from specdec_vllm.parameters import Parameters, min_p_first
from specdec_vllm.proposer import check_drafter_is_used, warn_of_other_texts
from specdec_vllm.settings import Settings
from specdec_vllm.tensors import as_wide_as, dense_drafts, scaled_logits, stored_rows
from specdec_vllm.verification import acceptance_of, rule_of, sample_rows, verify
from specdec_vllm.vllm_interface import REJECTION_V2, SAMPLER_V2, Make


def _init(original: Any, settings: Settings) -> Any:
    def __init__(self: Any, sampler: Any, spec_config: Any, device: Any, **others: Any) -> None:
        original(self, sampler, spec_config, device, **others)
        check_drafter_is_used(settings, spec_config)
        if vllm_interface.is_left_to_vllm(spec_config):
            return
        sampler.specdec_rule = rule_of(settings, spec_config.rejection_sample_method == "block")
        warn_of_other_texts(spec_config, sampler.specdec_rule)
        if self.synthetic_conditional_rates is None and others.get("watermark_key") is None:
            _refuse_biased(sampler.specdec_rule, spec_config)
            self.specdec_rule = sampler.specdec_rule

    return __init__


def _refuse_biased(rule: Rule, spec_config: Any) -> None:
    """Rule block reads drafts behind the one that it rejects, so their noise must not come again.

    vLLM draws the drafts here. Before 0.33 their noise follows from the seed and the position
    alone, and the next round draws with it again.
    """
    method = getattr(spec_config, "draft_sample_method", None)
    if rule != "block" or method != "probabilistic" or vllm_interface.drafts_have_own_noise():
        return
    raise ValueError(
        "rule block of the V2 runner must have drafts whose noise no later round draws with again, "
        f"or the text is biased, got draft_sample_method={method!r} of a vLLM before 0.33: take "
        "rule token or match, draft_sample_method='greedy' or VLLM_USE_V2_MODEL_RUNNER=0"
    )


def _verify(original: Any, settings: Settings) -> Any:
    """The processors of vLLM, then temperature and filters fused into the verification."""

    def _verify(self: Any, *arguments: Any) -> Any:
        sampler = self.sampler
        fused = hasattr(self, "specdec_rule") and not sampler.return_sampling_mask
        if not fused or sampler.logprobs_mode.startswith("processed"):
            return original(self, *arguments)
        logits, draft_logits, draft_sampled, pos, indptr, index, index_np = arguments[:7]
        expanded, local, lengths_np, verified = arguments[7:]
        rows = logits
        if sampler.needs_logits_processing[index_np].any():
            rows = _processed(
                sampler, logits, expanded, index, index_np, pos, draft_sampled, local, lengths_np
            )
        states, vocab = sampler.sampling_states, rows.shape[-1]
        # Kernels for CUDA take a slower way with a tensor of filters, whatever it holds.
        top_k: int | Tensor = 0
        if (states.top_k.np[index_np] < vocab).any():
            top_k = states.top_k.gpu[index]
            top_k = torch.where(top_k >= vocab, 0, top_k)
        parameters = Parameters(
            states.temperature.gpu[index],
            top_k,
            states.top_p.gpu[index] if (states.top_p.np[index_np] != 1).any() else 1.0,
            states.min_p.gpu[index] if (states.min_p.np[index_np] != 0).any() else 0.0,
            states.seeds.gpu[index],
            pos[indptr[:-1]].long() + 1,
        )
        rows, parameters = min_p_first(rows, torch.diff(indptr), parameters)
        ids = dense_drafts(
            verified, indptr[:-1] + 1, torch.diff(indptr) - 1, self.num_speculative_steps
        )
        draft, draft_rows = stored_rows(draft_logits, index, rows)
        tokens = verify(
            rows, ids, draft, indptr.int(), parameters,
            acceptance_of(settings, self.specdec_rule, None), draft_rows,
        )  # fmt: skip
        return rows, tokens.long(), (tokens >= 0).sum(-1, dtype=torch.int32)

    return _verify


def _processed(
    sampler: Any,
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    idx_mapping: Tensor,
    idx_mapping_np: Any,
    pos: Tensor,
    input_ids: Tensor,
    expanded_local_pos: Tensor,
    seq_lens_upper_bound_np: Any,
) -> Tensor:
    """A float32 copy of the logits after all processors but the sampling parameters."""
    context = vllm_interface.logits_context(
        expanded_idx_mapping=expanded_idx_mapping,
        idx_mapping=idx_mapping,
        idx_mapping_np=idx_mapping_np,
        expanded_local_pos=expanded_local_pos,
        input_ids=input_ids,
        pos=pos,
        seq_lens_upper_bound_np=seq_lens_upper_bound_np,
    )
    rows = logits.to(torch.float32, copy=True)
    for processor in sampler.logits_processors:
        rows = processor.apply(rows, context)
    sampler.thinking_budget_state.apply(rows, context)
    return rows


def _rejection_sample(original: Any, settings: Settings) -> Any:
    """Verification of logits that have been through the sampling parameters."""

    def rejection_sample(
        target_logits: Tensor,
        draft_logits: Tensor | None,
        draft_sampled: Tensor,
        cu_num_logits: Tensor,
        pos: Tensor,
        idx_mapping: Tensor,
        expanded_idx_mapping: Tensor,
        expanded_local_pos: Tensor,
        temperature: Tensor,
        seed: Tensor,
        num_speculative_steps: int,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False,
        use_block_verification: bool = False,
        contexts: Tensor | None = None,
        watermarking: Tensor | None = None,
        watermarking_skip_mask: Tensor | None = None,
        watermark_key: int | None = None,
        fly_window_size: int = 0,
        fly_entropy_threshold: float = 0.3,
        fly_entropy_top_k: int = 3,
    ) -> tuple[Tensor, Tensor]:
        if contexts is not None or fly_window_size:  # the ops draw no watermark
            fly = (fly_window_size, fly_entropy_threshold, fly_entropy_top_k)
            return original(  # type: ignore[no-any-return]
                target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping,
                expanded_idx_mapping, expanded_local_pos, temperature, seed, num_speculative_steps,
                synthetic_conditional_rates, use_fp64, use_block_verification, contexts,
                watermarking, watermarking_skip_mask, watermark_key,
                *(fly if fly_window_size else ()),
            )  # fmt: skip
        starts, lengths = cu_num_logits[:-1], torch.diff(cu_num_logits) - 1
        own = temperature[idx_mapping]
        ids = dense_drafts(draft_sampled, starts + 1, lengths, num_speculative_steps)
        draft = None
        if draft_logits is not None:
            draft = scaled_logits(as_wide_as(draft_logits[idx_mapping], target_logits), own)
        rule = rule_of(settings, use_block_verification)
        parameters = Parameters(
            (own != 0).float(), 0, 1.0, 0.0, seed[idx_mapping], pos[starts].long() + 1
        )
        tokens = verify(
            target_logits, ids, draft, cu_num_logits.int(), parameters,
            acceptance_of(settings, rule, synthetic_conditional_rates),
        )  # fmt: skip
        return tokens.long(), (tokens >= 0).sum(-1, dtype=torch.int32)

    return rejection_sample


def _sample_random_of(original: Any, settings: Settings) -> Any:
    """The tokens of a step in which no request has drafts, with the noise of the other steps."""

    def _sample_random(
        self: Any,
        processed_logits: Tensor,
        expanded_idx_mapping: Tensor,
        idx_mapping_np: Any,
        pos: Tensor,
        top_k: Tensor | None,
        top_p: Tensor | None,
        *others: bool,
    ) -> tuple[Tensor, Tensor]:
        rule = getattr(self, "specdec_rule", None)
        if rule is None:
            return original(  # type: ignore[no-any-return]
                self, processed_logits, expanded_idx_mapping, idx_mapping_np, pos, top_k, top_p,
                *others,
            )  # fmt: skip
        rows = vllm_interface.top_k_top_p(processed_logits, top_k, top_p)
        states = self.sampling_states
        temperature = (states.temperature.gpu[expanded_idx_mapping] != 0).float()
        seeds = states.seeds.gpu[expanded_idx_mapping]
        parameters = Parameters(temperature, 0, 1.0, 0.0, seeds, pos.long() + 1)
        return sample_rows(rows, parameters, rule), rows

    return _sample_random


REPLACEMENTS: dict[tuple[str, str], Make] = {
    (REJECTION_V2, "RejectionSampler.__init__"): _init,
    (REJECTION_V2, "RejectionSampler._verify"): _verify,
    (REJECTION_V2, "rejection_sample"): _rejection_sample,
    (SAMPLER_V2, "Sampler._sample_random"): _sample_random_of,
}
