"""Verification of drafts in vLLM by the ops of specdec_kernels, as a plug-in.

vLLM finds `register` by the entry point `vllm.general_plugins` and calls it in each of its
processes. It replaces the rejection sampler of both model runners, unless the environment variable
`SPECDEC_VLLM` is 0 or the version of vLLM is not supported. `Proposer` drafts for it. docs/vllm.md
describes both.
"""

from specdec_vllm.plugin import register
from specdec_vllm.proposer import Proposer
from specdec_vllm.settings import DRAFTERS, RULES, Settings

__all__ = ["DRAFTERS", "RULES", "Proposer", "Settings", "register"]
