"""The arguments of ``model.generate``: checked, read into a `Call`, or refused by name.

A logits processor changes a row of logits in view of a prefix. Those that only apply a sampling
parameter (temperature, top-k, top-p, min-p) are called warpers in transformers.
"""
