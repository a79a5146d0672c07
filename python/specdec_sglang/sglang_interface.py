"""All that the plug-in names of SGLang: its version, modules, functions and their arguments.

plugin.py holds what is hooked to these functions.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec_kernels.versions import wrong_arguments

# The versions whose functions have been compared with what is hooked and called here.
SUPPORTED = ("0.5.23",)
SAMPLE = ("sglang.srt.speculative.eagle_utils", "eagle_sample")
DESCEND = ("sglang.kernels.ops.speculative.spec_tree", "verify_tree_greedy_func")
CHOOSE = ("sglang.srt.speculative.eagle_utils", "_verify_uses_greedy")
# (module, function) -> its arguments. The last one is not hooked: that it sends every step of the
# CPU to `DESCEND` is what the plug-in relies on.
USED = {
    SAMPLE: (
        "verify_input batch logits_output grammar_mask uno_target_max_top_k watermark_state "
        "watermark_full_mask"
    ),
    DESCEND: (
        "predicts accept_index accept_token_num candidates retrieve_index retrieve_next_token "
        "retrieve_next_sibling target_predict topk"
    ),
    CHOOSE: "is_all_greedy is_cpu is_hip is_xpu use_rejection_sampling",
}


def other_platform() -> str | None:
    """What SGLang runs on if it is not its CPU engine, which needs an environment variable."""
    if importlib.import_module("sglang.srt.utils").is_cpu():
        return None
    return "SGLANG_USE_CPU_ENGINE is not 1, or this is no x86 or Arm CPU"


def unsupported() -> str | None:
    """Why this SGLang is left as it is, or None if it is supported."""
    version: str = importlib.import_module("sglang.version").__version__
    if version not in SUPPORTED:
        return f"version {version} is not one of {', '.join(SUPPORTED)}"
    for place, expected in USED.items():
        function = getattr(importlib.import_module(place[0]), place[1], None)
        if reason := wrong_arguments(place, expected, function):
            return reason
    return None


def hook(place: tuple[str, str], around: Callable[..., Any]) -> None:
    """Have SGLang call `around(original, ...)`; it applies its hooks after all plug-ins."""
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(".".join(place), around, hooks.HookType.AROUND)


def thresholds() -> tuple[float, float]:
    """`--speculative-accept-threshold-single` and `-acc`; lossy below 1."""
    spec = importlib.import_module("sglang.srt.runtime_context").get_spec()
    return spec.speculative_accept_threshold_single, spec.speculative_accept_threshold_acc


def broadcast(*results: Tensor) -> None:
    """The results of rank 0 in place of those of the other ranks of tensor parallelism."""
    parallel = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    attention = importlib.import_module("sglang.srt.layers.dp_attention")
    group = parallel.attn_tp_group if attention.is_dp_attention_enabled() else parallel.tp_group
    if group.world_size > 1:
        for result in results:
            group.broadcast(result, src=0)
