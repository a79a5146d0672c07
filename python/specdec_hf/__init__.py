"""Speculative decoding over Hugging Face models, verified by the fused ops of specdec_kernels.

>>> from specdec_hf import generate  # doctest: +SKIP
>>> out = generate(model, **inputs, max_new_tokens=64)  # doctest: +SKIP
"""

from specdec_hf.exports import lazily

# No submodule may be called ``generate``: importing it would replace the function.
__all__, __getattr__, __dir__ = lazily(__file__, __name__)
