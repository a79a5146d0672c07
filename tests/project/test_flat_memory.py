"""A call of an op leaves nothing behind in memory, whether it returns or raises."""

import json

import pytest
from support.programs import output_of

from specdec_kernels import _library

# If every call leaked the least that malloc gives, 32 bytes, it would be seen.
CALLS, MOST_GROWTH = 10_000, 2**18
# Every tenth call raises. In its own process, because other tests leave memory to be used again.
MEASURE = """
import json, sys
from pathlib import Path
import torch
from support.providers import tensors
from specdec_kernels import _library
import proofs

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def smallest(op):
    # Optional tensors are converted as well, so take a case with as many tensors as possible.
    every = [c.args() for c in proofs.cases(op)]
    return min((a for a in every if all(t.numel() for t in tensors(a))),
               key=lambda a: (-len(tensors(a)), sum(t.numel() for t in tensors(a))))

def call(op, n, good, bad):
    for i in range(n):
        if i % 10:
            op(*good)
        else:
            try:
                op(*bad)
            except RuntimeError:
                pass

torch.set_num_threads(1)
growth = {}
for name in _library.OPS:
    op, good = getattr(torch.ops.specdec_kernels, name).default, smallest(name)
    wrong = torch.zeros(1, 1, 1, 1, 1)
    bad = [[wrong] if isinstance(good[0], list) else wrong, *good[1:]]
    call(op, 2000, good, bad)
    before = resident()
    call(op, int(sys.argv[1]), good, bad)
    growth[name] = resident() - before
print(json.dumps(growth))
"""


@pytest.mark.build  # takes seconds
def test_the_resident_set_is_flat_over_many_calls_of_every_op():
    """With strings in the schemas it grew by 52 bytes for each string of a verifier's call."""
    growth = json.loads(output_of("-c", MEASURE, CALLS))
    assert growth.keys() == _library.OPS.keys()
    assert max(growth.values()) < MOST_GROWTH, growth
