"""The entry point that vLLM calls when it loads its plug-ins."""

from __future__ import annotations

from specdec_vllm import runner_v1, runner_v2, vllm_interface
from specdec_vllm.messages import log
from specdec_vllm.settings import Settings


def register() -> None:
    """Let the ops of specdec_kernels verify the drafts of this process's vLLM.

    With `SPECDEC_VLLM=0` nothing is touched. Where the version of vLLM is not supported, or a
    function that would be replaced takes other arguments than it should, a warning says so and
    nothing is touched either. A second call changes nothing.

    Raises:
        ValueError: an environment variable has a value that is not allowed.
    """
    settings = Settings.from_environment()
    if not settings.enabled:
        return
    if reason := vllm_interface.unsupported():
        log.warning("specdec_vllm leaves vLLM as it is: %s", reason)
        return
    install(settings)
    log.info("specdec_vllm verifies drafts; rule: %s", settings.rule or "as configured")


def install(settings: Settings) -> None:
    """Replace the functions of a supported vLLM; `vllm_interface.restore` undoes it."""
    replacements = runner_v1.REPLACEMENTS
    if vllm_interface.has_v2():
        replacements = replacements | runner_v2.REPLACEMENTS
    for place, make in replacements.items():
        vllm_interface.replace(place, make, settings)
    for place, make in runner_v1.LATE.items():
        vllm_interface.replace_if_loaded(place, make, settings)
