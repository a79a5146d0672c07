"""Verification of drafts in SGLang's CPU engine by the ops of specdec_kernels, as a plug-in.

SGLang finds `register` by the entry point `sglang.srt.plugins` and calls it in each of its
processes. There sampled requests get tokens of the model's distribution, where SGLang by itself
verifies them greedily. docs/sglang.md describes it.
"""

from specdec_sglang.plugin import register

__all__ = ["register"]
