"""Other processes: docs/ops.md says which start methods work, and why fork does not."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, sys, torch
from specdec_kernels import verify_chain

def accepted(seed):
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randn(4, 4, 9001, generator=generator)
    drafts = target.argmax(-1)[:, :3]
    seeds = positions = torch.arange(4)
    verdict = verify_chain(target, drafts, rule="greedy", seeds=seeds, positions=positions)
    return verdict.tokens.tolist()

if __name__ == "__main__":
    here = accepted(1)  # its threads exist before the other processes begin
    with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
        assert pool.map_async(accepted, [1]).get(timeout=120) == [here]
    print("equal")
"""


@pytest.mark.full
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_ops_run_in_processes_that_do_not_inherit_threads(tmp_path, method):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, script, method], capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == "equal\n", done.stderr
