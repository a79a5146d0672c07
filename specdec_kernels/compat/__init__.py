"""The verification and sampling functions of other projects, computed by the ops of this package.

Each module has the functions of one project under their own names, with their arguments, outputs
and errors: `flashinfer`, `sglang`, `tensorrt_llm`, `transformers`. None of these projects is
imported. docs/compat.md lists every difference.
"""
