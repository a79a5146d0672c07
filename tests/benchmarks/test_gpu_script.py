"""Runs bench/gpu.sh with stand-ins for python and compute-sanitizer that only succeed or fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

GPU = Path(__file__).resolve().parents[2] / "bench/gpu.sh"
PYTHON = """#!/bin/bash
case "$*" in
  -) exit 0 ;;
  *sanitize*) exit 3 ;;
  *bench.sweep*) echo '{}' > "$OUT/cuda-${4%_}-now.json" ;;
  *test_cuda.py*) [[ -z $SLOW ]] || sleep 60 ;;
  *import\\ xdist*) exit 1 ;;
esac
echo "python $*"
"""
SANITIZER = """#!/bin/bash
[[ -z $REFUSED ]] || exit 1
shift 4
[[ -n $CLEAN ]] || exec "$@"
"""


@pytest.fixture
def gpu(tmp_path):
    """A function that runs bench/gpu.sh and returns (exit status, output)."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    programs = {"python": PYTHON, "compute-sanitizer": SANITIZER, "nvidia-smi": "#!/bin/bash\n"}
    for name, text in programs.items():
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)

    def run(**environment):
        done = subprocess.run(
            ["bash", GPU],
            env={
                **os.environ,
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PYTHON": str(tmp_path / "python"),
                "OUT": str(tmp_path / "out"),
                "SLOW": "",
                "CLEAN": "",
                "REFUSED": "",
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert (tmp_path / "out/gpu.log").read_text() == done.stdout
        return done.returncode, done.stdout

    return run


def test_the_gpu_script_goes_on_after_a_failure_and_reports_it(gpu):
    status, said = gpu()
    assert status == 1
    summary = said[said.index("Summary after") :]
    assert summary.count("FAILED") == 2  # memcheck and racecheck
    for name in (
        "CUDA tests",
        "CUDA ops on the device",
        "CUDA trees on the device",
        "Triton ops on the device",
        "Triton trees on the device",
        "Triton cache ops on the device",
        "layout of trees on the device",
        "CUDA graphs of forwards",
        "sweep of verify_chain",
        "sweep of verify_tree",
        "sweep of kv_compact_",
        "plots of cuda-verify_chain-now.json",
        "plots of cuda-kv_compact-now.json",
    ):
        assert f"passed   {name}" in summary
    assert "memcheck: exit status 3" in summary


def test_the_gpu_script_passes_when_every_part_does(gpu):
    status, said = gpu(CLEAN="1")
    assert status == 0, said
    assert "FAILED" not in said


def test_the_gpu_script_reports_that_the_sanitizer_does_not_support_the_device(gpu):
    status, said = gpu(CLEAN="1", REFUSED="1")
    assert status == 0, said
    assert said.count("ABSENT   compute-sanitizer does not run on this device") == 2
    assert "memcheck (" not in said


def test_the_gpu_script_keeps_to_its_budget(gpu):
    status, said = gpu(CLEAN="1", SLOW="1", BUDGET="278")
    assert status == 1
    # On a very slow machine no time is left to start the tests at all.
    assert "CUDA tests: stopped after" in said or "CUDA tests: no time left" in said
    assert said.count("passed   sweep of") == 6  # three sweeps, each also in the summary


def test_the_gpu_script_needs_a_device(tmp_path):
    none = tmp_path / "python3"
    none.write_text("#!/bin/bash\nexit 1\n")
    none.chmod(0o755)
    done = subprocess.run(
        ["bash", GPU],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(none), "OUT": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 2:
        pytest.skip("another Python here sees a CUDA device")
    assert "sees a CUDA device" in done.stderr


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="needs shellcheck")
def test_shellcheck_finds_nothing_in_the_gpu_script():
    done = subprocess.run(["shellcheck", GPU], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
