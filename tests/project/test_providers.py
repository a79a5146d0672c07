"""The environment variables that choose a provider and an instruction set."""

import functools
import importlib.util
import json
import os

import pytest
from support.programs import output_of

import specdec_kernels as sk
from specdec_kernels import _library

pytestmark = [
    pytest.mark.build,  # a process that loads torch
    pytest.mark.skipif(not hasattr(os, "fork"), reason="starts processes by fork"),
]

HAS = {"cuda": sk.has_cuda_kernels(), "triton": importlib.util.find_spec("triton") is not None}
PRESENT = [name for name, there in HAS.items() if there]
# Provider and instruction set that a process begins with. The variables are read at import.
STARTS = [("", ""), ("", "plain"), *((name, "") for name in HAS), ("fast", ""), ("", "avx-2")]
# PyTorch is loaded once, because that takes seconds, and each start is a copy of this process.
PROGRAM = """
import json, os, sys, torch

def start(provider, capability):
    os.environ.update(SPECDEC_CUDA_PROVIDER=provider, SPECDEC_CPU_CAPABILITY=capability)
    try:
        import specdec_kernels as sk
    except ImportError as error:
        return {"error": str(error)}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    served = {op: (by["cuda"], has(f"specdec_kernels::{op}", "CUDA"))
              for op, by in sk.providers().items()}
    return {"capability": sk.cpu_capability(), "served": served}

found = []
for given in json.loads(sys.argv[1]):
    reads, writes = os.pipe()
    if not os.fork():
        os.write(writes, json.dumps(start(*given)).encode())
        os._exit(0)
    os.close(writes)
    found.append(json.load(os.fdopen(reads)))
print(json.dumps(found))
"""


@functools.cache
def every_start():
    found = json.loads(output_of("-c", PROGRAM, json.dumps(STARTS)))
    return dict(zip(STARTS, found, strict=True))


@pytest.mark.parametrize("asked", ["", *HAS])
def test_the_provider_that_is_reported_is_registered_for_every_op(asked):
    """By default CUDA comes first; one that is asked for and missing is an error."""
    found = every_start()[asked, ""]
    if asked and not HAS[asked]:
        assert found["error"].startswith(f"SPECDEC_CUDA_PROVIDER is {asked}, but")
        return
    assert found["served"].keys() == sk.providers().keys()
    # What no provider serves is refused by a kernel of its own.
    assert all(has == (op not in _library.CPU_OPS) for op, (_, has) in found["served"].items())
    assert found["served"]["verify_chain"][0] == (asked or next(iter(PRESENT), "none"))
    if asked == "triton":
        by = {op: name for op, (name, _) in found["served"].items()}
        assert {by[op] for op in _library.TRITON_OPS} == {"triton"}
        assert {by[op] for op in _library.INDEXED_OPS} == {"indexing"}
        assert by["verify_tree"] == "none"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (("fast", ""), "SPECDEC_CUDA_PROVIDER must be one of cuda, triton, got fast"),
        (
            ("", "avx-2"),
            "SPECDEC_CPU_CAPABILITY must be one of amx_bf16, avx512_bf16, avx512, avx2, "
            "plain, got avx-2",
        ),
    ],
)
def test_unknown_values_are_refused(start, message):
    assert every_start()[start] == {"error": message}


def test_a_known_instruction_set_is_used():
    assert every_start()["", "plain"]["capability"] == "plain"
    assert every_start()["", ""]["capability"] in ("avx512", "avx2", "plain")
