"""All that the plug-in names of vLLM: versions, modules, functions and their arguments.

runner_v1.py, step_v1.py, drafting_v1.py and runner_v2.py hold what takes the place of these
functions. proposer.py has the methods that `custom_class_proposer` of vLLM asks for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec_vllm.settings import Settings

# Versions whose functions have been compared with what is replaced and called here.
SUPPORTED = ("0.32",)
GREEDY_BELOW = 1e-5  # temperatures below it are 0 to vLLM
SAMPLER = "vllm.v1.sample.sampler"
REJECTION = "vllm.v1.sample.rejection_sampler"
PARAMS = "vllm.sampling_params"
RUNNER = "vllm.v1.worker.gpu_model_runner"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler"
REJECTION_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
# (module, function) -> the arguments of what is replaced.
REPLACED = {
    (REJECTION, "RejectionSampler.__init__"): "self sampler spec_config device",
    (REJECTION, "RejectionSampler.forward"): "self metadata draft_probs logits sampling_metadata",
    (REJECTION, "RejectionSampler.apply_logits_processors"): (
        "self logits sampling_metadata metadata"
    ),
    (REJECTION, "rejection_sample"): (
        "draft_token_ids num_draft_tokens max_spec_len cu_num_draft_tokens draft_probs "
        "target_logits bonus_token_ids sampling_metadata synthetic_mode "
        "synthetic_conditional_rates use_fp64_gumbel"
    ),
    (REJECTION, "expand_batch_to_tokens"): "x cu_num_tokens num_tokens replace_from replace_to",
    (SAMPLER, "Sampler.apply_logits_processors"): (
        "self logits sampling_metadata predict_bonus_token"
    ),
    (SAMPLER, "Sampler.sample"): "self logits sampling_metadata logprobs_mode_override",
    (PARAMS, "SamplingParams._validate_spec_decode"): "self speculative_config",
}
# Of the V1 runner, whose modules are large: their arguments are read from the source. Whoever makes
# a rejection sampler for the runner has imported them.
REPLACED_LATE = {
    (RUNNER, "GPUModelRunner._sample"): "self logits spec_decode_metadata",
    (PROPOSER, "SpecDecodeBaseProposer._sample_from_logits"): "self logits sampling_metadata",
}
# Of the V2 runner, which needs Triton.
REPLACED_V2 = {
    (REJECTION_V2, "RejectionSampler.__init__"): "self sampler spec_config device watermark_key",
    (REJECTION_V2, "RejectionSampler._verify"): (
        "self logits draft_logits draft_sampled pos cu_num_logits idx_mapping idx_mapping_np "
        "expanded_idx_mapping expanded_local_pos seq_lens_upper_bound_np verify_draft_sampled"
    ),
    (REJECTION_V2, "rejection_sample"): (
        "target_logits draft_logits draft_sampled cu_num_logits pos idx_mapping "
        "expanded_idx_mapping expanded_local_pos temperature seed num_speculative_steps "
        "synthetic_conditional_rates use_fp64 use_block_verification contexts watermarking "
        "watermarking_skip_mask watermark_key"
    ),
    (SAMPLER_V2, "Sampler._sample_random"): (
        "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p "
        "use_fused_sampler"
    ),
}

# Returns what takes the place of the original.
Make = Callable[[Any, Settings], Any]
_originals: dict[tuple[str, str], Any] = {}


def unsupported() -> str | None:
    """Why this vLLM is left as it is, or None if it is supported."""
    version: str = importlib.import_module("vllm").__version__
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        return f"version {version} is not one of {', '.join(SUPPORTED)}"
    reasons = (_difference(place, takes) for place, takes in REPLACED.items())
    reasons_v2 = (_difference(place, takes) for place, takes in REPLACED_V2.items() if has_v2())
    late = (_difference(place, takes, _source_arguments) for place, takes in REPLACED_LATE.items())
    return next(filter(None, (*reasons, *reasons_v2, *late)), None)


def _arguments(module: str, name: str) -> str | None:
    """The arguments of a function, or None if there is no such function."""
    owner, attribute = _owner(module, name)
    function = getattr(owner, attribute, None)
    return " ".join(inspect.signature(function).parameters) if function else None


def _source_arguments(module: str, name: str) -> str | None:
    """The same without importing the module, for a function that its source defines."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    node: Any = ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
    for part in name.split("."):
        found = (child for child in node.body if getattr(child, "name", None) == part)
        if (node := next(found, None)) is None:
            return None
    given = node.args
    places = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
    return " ".join(place.arg for place in places if place)


def _difference(
    place: tuple[str, str],
    expected: str,
    arguments: Callable[[str, str], str | None] = _arguments,
) -> str | None:
    """What is wrong with the arguments of a function, or None."""
    got = arguments(*place) or "nothing"
    return None if got == expected else f"{'.'.join(place)} must take {expected}, got {got}"


def has_v2() -> bool:
    """Whether the V2 runner can be used."""
    return bool(importlib.import_module("vllm.triton_utils").HAS_TRITON)


def replace(place: tuple[str, str], make: Make, settings: Settings) -> None:
    """Put what `make` returns for a function in its place, once."""
    if place in _originals:
        return
    owner, attribute = _owner(*place)
    original = getattr(owner, attribute)
    _originals[place] = original
    setattr(owner, attribute, functools.wraps(original)(make(original, settings)))


def replace_if_loaded(place: tuple[str, str], make: Make, settings: Settings) -> None:
    """`replace` a function of `REPLACED_LATE`, unless nobody has imported the module."""
    if place[0] in sys.modules:
        replace(place, make, settings)


def restore() -> None:
    """Undo every `replace`, for tests."""
    for place, original in _originals.items():
        owner, attribute = _owner(*place)
        setattr(owner, attribute, original)
    _originals.clear()


def _owner(module: str, name: str) -> tuple[Any, str]:
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part, None)
    return owner, attribute


def is_own_sampler(sampler: Any) -> bool:
    """Whether bonus tokens are drawn as vLLM draws them: other samplers may do it in their way."""
    return type(sampler) is importlib.import_module(SAMPLER).Sampler


def serves_min_p(sampler: Any) -> bool:
    """Whether a sampler calls the functions in which the plug-in applies min-p."""
    own = importlib.import_module(SAMPLER).Sampler
    names = ("forward", "apply_logits_processors")
    return all(getattr(type(sampler), name, None) is getattr(own, name) for name in names)


def top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """vLLM's filters, for the logprobs of processed logits."""
    ops = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    masked: Tensor = ops.apply_top_k_top_p(logits, top_k, top_p)
    return masked


def sampler_output(tokens: Tensor, logprobs: Any) -> Any:
    """What `RejectionSampler.forward` returns."""
    outputs = importlib.import_module("vllm.v1.outputs")
    return outputs.SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)


def tokenizer_of(model_config: Any) -> Any:
    """The tokenizer of a model, or None where vLLM is to do without it."""
    return importlib.import_module("vllm.tokenizers").cached_tokenizer_from_config(model_config)


def logits_context(**values: Any) -> Any:
    """What the processors of the V2 runner take beside the logits."""
    interface = importlib.import_module("vllm.v1.worker.gpu.sample.logits_processor.interface")
    return interface.LogitsContext(**values)
