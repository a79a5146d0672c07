"""The threads of the CPU kernels do each part of a call once, whoever calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")
FIXED_ADDRESSES = ["setarch", "-R"] if shutil.which("setarch") else []


@pytest.mark.build
@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="no sources")
@pytest.mark.parametrize("sanitizer", ["thread", "undefined"])
def test_each_part_is_done_once(sanitizer, tmp_path):
    sources = [ROOT / "tests/forward/threads.cpp", ROOT / "csrc/cpu/threads.cpp"]
    flags = ["-std=c++17", "-O1", "-g1", "-pthread", f"-fsanitize={sanitizer}", f"-I{ROOT}/csrc"]
    program = tmp_path / "threads"
    command = [COMPILER, *flags, f"-I{ROOT}/csrc/include", *sources, "-o", program]
    subprocess.run(command, check=True)
    subprocess.run([*FIXED_ADDRESSES, program], check=True, timeout=300)
