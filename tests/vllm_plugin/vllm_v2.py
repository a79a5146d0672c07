"""vLLM's V2 runner on the CPU: its Triton kernels run in Triton's interpreter.

vLLM takes its V2 runner on the CPU where Triton has a backend for it. The usual wheel has none, so
`interpret` names one that nothing calls, because the interpreter compiles nothing.
"""

import types

# Of a process that calls `interpret`, from its start on.
ENVIRONMENT = {
    "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_CI_ENV": "1",  # no warm-up
    "CUDA_VISIBLE_DEVICES": "",  # that Triton finds no device is then no reason to do without it
}  # fmt: skip


def interpret():
    """Let this process have vLLM's Triton kernels, before it imports any of them."""
    from support.triton_interpreter import patch_once  # noqa: PLC0415
    from triton.backends import backends  # noqa: PLC0415

    patch_once()
    driver = types.SimpleNamespace(is_active=lambda: False)
    backends["cpu"] = types.SimpleNamespace(driver=driver, compiler=None)
    from vllm.v1.sample.ops import topk_topp_sampler  # noqa: PLC0415

    # In the interpreter the rows of this kernel's loop are no tensors; vLLM has it in PyTorch too.
    topk_topp_sampler.HAS_TRITON = False
