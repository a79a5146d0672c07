"""Peak extra memory of a call: nothing that grows with rows times vocabulary.

A process of its own for each call, its first of that size, so that no buffer kept from an earlier
call can hide what it needs. The high-water mark of the resident set counts PyTorch's allocations
and those of C++ alike.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import measure

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
ROWS, V = 256, 262144  # 128 MiB of bfloat16
LIMIT = 4 * MIB
FILTERED = "temperature=0.8, top_k=50, top_p=0.9, min_p=0.01"

# The small call first brings in code and tables that every process needs once.
PROGRAM = """
import torch
import specdec_kernels as sk
from bench import eager, measure

torch.set_num_threads(2)

def rows(n, v):
    x = torch.empty(n, v, dtype=torch.bfloat16)
    x.copy_(torch.linspace(8, -8, v).to(torch.bfloat16)[torch.arange(v) * 7919 % v])
    return x

def sample(logits, **options):
    zeros = torch.zeros(len(logits), dtype=torch.int64)
    return lambda: sk.sample(logits, seeds=zeros, positions=zeros, **options)

def chain(logits, **options):
    v, gamma = logits.shape[1], 7
    target = logits.view(-1, gamma + 1, v)
    seeds = torch.arange(len(target))
    tokens = target[:, :gamma].argmax(-1)
    # overconfident: drafts are accepted and rejected
    draft = target[:, :gamma] * 1.3 if options.pop("full", False) else None
    if options.pop("eager", False):
        return lambda: eager.verify_chain(target, tokens, target[:, :gamma])
    return lambda: sk.verify_chain(target, tokens, draft, seeds=seeds, positions=seeds, **options)

CALL(rows(8, 4096 * 3))()
call = CALL(rows(ROWS, VOCABULARY))
print(measure.peak_extra(call, "cpu"))
"""

CALLS = {
    "sample": "sample(x)",
    "sample-filtered": f"sample(x, {FILTERED})",
    "sample-race": 'sample(x, method="race")',
    "chain": "chain(x, full=True)",
    "chain-point-mass": "chain(x)",
    "chain-filtered": f"chain(x, full=True, {FILTERED})",
    "chain-match-filtered": f'chain(x, rule="match", {FILTERED})',
}


def peak(call, rows=ROWS, v=V):
    program = PROGRAM.replace("CALL(", f"(lambda x: {call})(")
    program = program.replace("ROWS", str(rows)).replace("VOCABULARY", str(v))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    if done.stdout.strip() == "None":
        pytest.skip("the system does not reset the resident set's high-water mark")
    return int(done.stdout)


@pytest.mark.parametrize("call", CALLS)
def test_no_term_in_rows_times_vocabulary(call):
    extra = peak(CALLS[call])
    assert extra < LIMIT, f"{extra / MIB:.1f} MiB beside {ROWS * V * 2 / MIB:.0f} MiB of logits"


def test_the_eager_rule_is_seen_to_copy_every_row():
    rows = ROWS // 4
    assert peak("chain(x, eager=True)", rows) > 2 * rows * V * 4


def test_a_buffer_the_call_frees_is_seen():
    """The measure itself, on allocations of C++ that PyTorch does not know of."""
    size = 32 * MIB
    for _ in range(2):  # the second time the allocator may hold on to the first one's pages
        extra = measure.peak_extra(lambda: bytearray(b"x") * size, "cpu")
        if extra is None:
            pytest.skip("the system does not reset the resident set's high-water mark")
        assert 0.95 * size < extra < 1.5 * size
    kept = torch.ones(size // 4)
    kept.sum()
    assert measure.peak_extra(kept.sum, "cpu") < MIB
