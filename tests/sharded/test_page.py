"""The code of docs/vocabulary-parallel.md runs as it is printed."""

import os
import re
import subprocess
import sys

import pytest
import torch
from support.sources import ROOT

from specdec_kernels import verify_chain

PAGE = ROOT / "docs" / "vocabulary-parallel.md"

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="the documents are not here")


def torchrun(script, *arguments):
    """What two processes print, in any order."""
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         script, *arguments],
        capture_output=True, text=True, check=False, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_printed_program_gives_the_verdict_of_the_whole_rows(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "verify.py").write_text(block)
    printed = sorted(torchrun(tmp_path / "verify.py").splitlines())
    logits = torch.randn(4, 6, 32000, generator=torch.Generator().manual_seed(0))
    steps = torch.arange(4)
    want = verify_chain(
        logits, logits[:, :5].argmax(-1), temperature=0.8, top_p=0.9, seeds=steps, positions=steps
    )
    assert printed == [f"{rank} {want.tokens.tolist()}" for rank in (0, 1)]
