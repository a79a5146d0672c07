"""Loads a kernel beside the installed package, as docs/hub-kernels.md does, and compares the two.

`python -m project.loaded_kernel FOLDER` prints as JSON what tests/project/test_hub_kernel.py reads.
"""

from __future__ import annotations

import json
import os
import re
import sys

import proofs
import torch
from support.sources import ROOT
from torch.utils._pytree import tree_leaves

import specdec_kernels

PAGE = ROOT / "docs/hub-kernels.md"


def bits(values):
    """The bytes of all tensors in nested values."""
    found = [x for x in tree_leaves(values) if torch.is_tensor(x)]
    return [bytes(x.flatten().contiguous().view(torch.uint8).numpy()) for x in found]


def result(namespace, case):
    """What an op gives for a case, and what it leaves of its arguments."""
    args = case.args()
    return bits([getattr(getattr(torch.ops, namespace), case.op).default(*args), args])


def of_every_op(kernel):
    """Op -> whether the kernel has the bits of the package in its three smallest cases."""
    equal = {}
    for op in specdec_kernels._library.OPS:
        cases = sorted(proofs.cases(op), key=lambda case: case.rows * case.vocabulary)[:3]
        equal[op] = bool(cases) and all(
            result("specdec_kernels", case) == result(kernel.__name__, case) for case in cases
        )
    return equal


def round_of(package):
    """Verification, truncation of the cache and a sample, as a function of tensors."""
    torch.manual_seed(0)
    ids = torch.randint(1031, (3, 4))
    noise = {"seeds": torch.arange(3), "positions": torch.tensor([7, 8, 9])}

    def call(target, draft, caches, lengths):
        verdict = package.verify_chain(target, ids, draft, temperature=0.7, top_p=0.9, **noise)
        package.kv_truncate_(caches, lengths, lengths - verdict.num_accepted, zero_fill=True)
        return verdict, package.sample(target[:, 0], min_p=0.05, **noise)

    return call


def bits_of_round(call):
    torch.manual_seed(1)
    caches = [torch.randn(3, 2, 8, 4) for _ in range(2)]
    args = torch.randn(3, 5, 1031), torch.randn(3, 4, 1031), caches, torch.tensor([5, 6, 7])
    return bits([call(*args), args])


def main():
    os.chdir(sys.argv[1])
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names = {}
    exec(program, names)
    kernel = names["kernel"]
    compiled = torch.compile(round_of(kernel), fullgraph=True, backend="aot_eager")
    want = bits_of_round(round_of(specdec_kernels))
    found = {
        "equal": of_every_op(kernel),
        "rounds": [bits_of_round(call) == want for call in (round_of(kernel), compiled)],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
