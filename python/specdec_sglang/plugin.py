"""The entry point that SGLang calls when it loads its plug-ins, and the two hooks.

SGLang verifies a step in `eagle_sample`. It processes the logits [B*N, V] in place, by penalties,
biases and grammars, and on the CPU calls `verify_tree_greedy_func` with their argmax, whatever the
temperature. So the hook of the first keeps the step, and that of the second verifies it.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from specdec_sglang import sglang_interface
from specdec_sglang.verification import Step, verify_step_

VARIABLE = "SPECDEC_SGLANG"
log = logging.getLogger("specdec_sglang")
_step: ContextVar[Step | None] = ContextVar("specdec_sglang_step", default=None)
_said: set[str] = set()


def register() -> None:
    """Let `verify_tree` verify the sampled requests of this process's SGLang.

    With `SPECDEC_SGLANG=0` nothing is touched. On another platform than the CPU engine, where the
    version of SGLang is not supported, or where a function takes other arguments than it should, a
    line of the log says so and nothing is touched either.

    Raises:
        ValueError: the environment variable has a value that is not allowed.
    """
    enabled = os.environ.get(VARIABLE, "1")
    if enabled not in ("0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1, got {enabled!r}")
    if enabled == "0":
        return
    if platform := sglang_interface.other_platform():
        log.info("specdec_sglang serves the CPU engine alone: %s", platform)
        return
    if reason := sglang_interface.unsupported():
        log.warning("specdec_sglang leaves SGLang as it is: %s", reason)
        return
    sglang_interface.hook(sglang_interface.SAMPLE, sample)
    sglang_interface.hook(sglang_interface.DESCEND, descend)


def sample(
    original: Any, verify_input: Any, batch: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> Any:
    """Around `eagle_sample`: keeps a step that has sampled requests for `descend`."""
    if batch.forward_mode.is_idle() or batch.sampling_info.is_all_greedy:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    if reason := _unserved(batch.sampling_info, kwargs.get("watermark_state")):
        _say(logging.WARNING, f"leaves steps to SGLang, which is greedy here: {reason}")
        return original(verify_input, batch, logits_output, *args, **kwargs)
    # Not when it is loaded: then SGLang has not set up its log yet.
    _say(logging.INFO, "verifies the drafts of sampled requests")
    step = Step.of(logits_output.next_token_logits, batch.seq_lens, batch.sampling_info)
    token = _step.set(step)
    try:
        return original(verify_input, batch, logits_output, *args, **kwargs)
    finally:
        _step.reset(token)


def descend(
    original: Any,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    topk: int = -1,
) -> Any:
    """Around `verify_tree_greedy_func`: verifies a kept step from its logits."""
    outputs = (predicts, accept_index, accept_token_num)
    tree = (candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling)
    if (step := _step.get()) is None:
        return original(*outputs, *tree, target_predict, topk)
    if missing := verify_step_(step, *outputs, *tree):
        log.warning(
            "specdec_sglang: requests that get the token with the largest finite logit, by their "
            "index in the batch: %s",
            missing,
        )
    sglang_interface.broadcast(*outputs)
    return outputs


def _say(level: int, message: str) -> None:
    """One line of the log, once."""
    if message not in _said:
        _said.add(message)
        log.log(level, "specdec_sglang %s", message)


def _unserved(sampling: Any, watermark: Any) -> str | None:
    """Why a step is left to SGLang, or None."""
    if any(threshold != 1 for threshold in sglang_interface.thresholds()):
        return "an acceptance threshold below 1 is lossy"
    if watermark is not None and sampling.has_watermark_candidates:
        return "a request has a watermark"
    return None
