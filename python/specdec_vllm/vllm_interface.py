"""All that the plug-in names of vLLM: versions, modules, functions and their arguments.

runner_v1.py, step_v1.py, drafting_v1.py and runner_v2.py hold what takes the place of these
functions. proposer.py has the methods that `custom_class_proposer` of vLLM asks for.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec_kernels.versions import release, wrong_arguments
from specdec_vllm.messages import warn_once
from specdec_vllm.settings import Settings

# Versions whose functions have been compared with what is replaced and called here.
SUPPORTED = ("0.32", "0.33")
GREEDY_BELOW = 1e-5  # temperatures below it are 0 to vLLM
SAMPLER = "vllm.v1.sample.sampler"
REJECTION = "vllm.v1.sample.rejection_sampler"
PARAMS = "vllm.sampling_params"
RUNNER = "vllm.v1.worker.gpu_model_runner"
PROPOSER = "vllm.v1.spec_decode.llm_base_proposer"
SAMPLER_V2 = "vllm.v1.worker.gpu.sample.sampler"
GUMBEL_V2 = "vllm.v1.worker.gpu.sample.gumbel"
REJECTION_V2 = "vllm.v1.worker.gpu.spec_decode.rejection_sampler"
# (module, function) -> the arguments of what is replaced in the first of these versions.
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
_FLY = "fly_window_size fly_entropy_threshold fly_entropy_top_k"
# What other arguments a later version has, and functions that only it has.
CHANGED = {
    "0.33": {
        (REJECTION, "rejection_sample"): f"{REPLACED[REJECTION, 'rejection_sample']} {_FLY}",
        (SAMPLER, "mixed_sample_eligible"): "sm predict_bonus_token",
        (REJECTION_V2, "rejection_sample"): (
            f"{REPLACED_V2[REJECTION_V2, 'rejection_sample']} {_FLY}"
        ),
        (SAMPLER_V2, "Sampler._sample_random"): (
            "self processed_logits expanded_idx_mapping idx_mapping_np pos top_k top_p "
            "has_topp_only_rows use_fused_sampler"
        ),
    }
}

# Returns what takes the place of the original.
Make = Callable[[Any, Settings], Any]
_originals: dict[tuple[str, str], Any] = {}


def unsupported() -> str | None:
    """Why this vLLM is left as it is, or None if it is supported."""
    version: str = importlib.import_module("vllm").__version__
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        return f"version {version} is not one of {', '.join(SUPPORTED)}"
    for place, takes in replaced_in(version).items():
        if place not in REPLACED_V2 or has_v2():
            late = place in REPLACED_LATE
            found = arguments_in_source(_source, *place) if late else _function(*place)
            if reason := wrong_arguments(place, takes, found):
                return reason
    return None


def replaced_in(version: str) -> dict[tuple[str, str], str]:
    """What is replaced in a version, with its arguments: one of `SUPPORTED` or another near it."""
    replaced = REPLACED | REPLACED_V2 | REPLACED_LATE
    for since, changed in CHANGED.items():
        if release(version) >= release(since):
            replaced |= changed
    return replaced


def _function(module: str, name: str) -> Any:
    """A function, or None if there is no such function."""
    owner, attribute = _owner(module, name)
    return getattr(owner, attribute, None)


def arguments_in_source(read: Callable[[str], str | None], module: str, name: str) -> str | None:
    """The arguments of a function that sources define or import, without importing them.

    read: returns the source of a module, or None if there is none.
    """
    node: Any = ast.parse(read(module) or "")
    for child in node.body:
        for one in child.names if isinstance(child, ast.ImportFrom) else ():
            if name == (one.asname or one.name) and not child.level:
                return arguments_in_source(read, child.module, one.name)
    for part in name.split("."):
        found = (child for child in node.body if getattr(child, "name", None) == part)
        if (node := next(found, None)) is None:
            return None
    given = node.args
    places = (*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg)
    return " ".join(place.arg for place in places if place)


def _source(module: str) -> str | None:
    """The source of an installed module, which is not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.has_location or not str(spec.origin).endswith(".py"):
        return None
    return Path(str(spec.origin)).read_text(encoding="utf-8")


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
    """`replace` a function, unless nobody has imported the module or this version has none."""
    if place[0] in sys.modules and hasattr(*_owner(*place)):
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


def is_left_to_vllm(spec_config: Any) -> bool:
    """Whether vLLM verifies with its lossy method fly, of which the ops have no rule."""
    if getattr(spec_config, "rejection_sample_method", None) != "fly":
        return False
    warn_once("specdec_vllm leaves the drafts to vLLM: rejection_sample_method is fly")
    return True


def drafts_have_own_noise() -> bool:
    """Whether no two drafts of V2's runner are drawn with the same noise.

    Since 0.33 the seed of a draft depends on its index in the round too.
    """
    return hasattr(importlib.import_module(GUMBEL_V2), "spec_step_seed")


def is_own_sampler(sampler: Any) -> bool:
    """Whether bonus tokens are drawn as vLLM draws them: other samplers may do it in their way."""
    return type(sampler) is importlib.import_module(SAMPLER).Sampler


def is_own_verification(rejection_sampler: Any) -> bool:
    """Whether the plug-in's function verifies: a class of others may have its own."""
    own = importlib.import_module(REJECTION).RejectionSampler
    return type(rejection_sampler).forward is own.forward


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
