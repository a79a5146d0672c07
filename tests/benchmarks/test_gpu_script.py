"""Runs bench/gpu.sh with stand-ins for the programs that it starts, some with a simulated clock."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

GPU = Path(__file__).resolve().parents[2] / "bench/gpu.sh"
# What a config is said to take in bench.goals.
SECONDS = 12
PYTHON = f"""#!/bin/bash
case "$*" in
  -) exit 0 ;;
  *find_spec*) exit 0 ;;
  *bench.smoke) [[ -z $NO_LAUNCH ]] || exit 1 ;;
  *bench.goals\\ --only\\ cuda*)
    for n in 1 2 3 4 5 6; do
      advance {SECONDS} || exit
      echo "{{\\"row\\": $n}}" >> "$OUT/cuda-goals.jsonl"
    done ;;
  *sanitize*) exit 3 ;;
  *import\\ xdist*) [[ -n $XDIST ]] || exit 1 ;;
esac
echo "python $*"
"""
SANITIZER = """#!/bin/bash
[[ -z $REFUSED ]] || exit 1
shift 4
[[ -n $CLEAN ]] || exec "$@"
"""
# Adds seconds to a simulated clock. At second $CUT the machine is taken away.
ADVANCE = """#!/bin/bash
now=$(($(cat "$CLOCK") + $1))
echo $now > "$CLOCK"
if ((now > CUT)); then
  kill -KILL $GPU_SCRIPT
  exit 1
fi
"""
# Every part but the goals takes all the time that it may take; one of them never ends.
TIMEOUT = """#!/bin/bash
limit=$2
shift 2
[[ "$*" == *"bench.goals --only cuda"* ]] || advance "$limit" || exit
[[ -z $HANGING || "$*" != *"$HANGING"* ]] || exit 124
exec "$@"
"""


@pytest.fixture
def gpu(tmp_path):
    """A function that runs bench/gpu.sh and returns (exit status, output)."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")

    def write(name, text):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)

    write("python", PYTHON)
    write("compute-sanitizer", SANITIZER)
    write("nvidia-smi", '#!/bin/bash\necho "a GPU, $*"\n')
    write("advance", ADVANCE)
    (tmp_path / "clock").write_text("0")

    def run(*, simulated=False, **environment):
        if simulated:
            write("timeout", TIMEOUT)
        unset = ("CLEAN", "REFUSED", "XDIST", "HANGING", "NO_LAUNCH")
        done = subprocess.run(
            ["bash", "-c", f"GPU_SCRIPT=$$ exec bash {GPU}"],
            env={
                **os.environ,
                **dict.fromkeys(unset, ""),
                "PATH": f"{tmp_path}:{os.environ['PATH']}",
                "PYTHON": str(tmp_path / "python"),
                "OUT": str(tmp_path / "out"),
                "CLOCK": str(tmp_path / "clock"),
                "CUT": "1000000",
                "SPECDEC_COMMIT": "c0ffee",
                "SPECDEC_FLASHINFER": str(tmp_path / "include"),
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


def make_flashinfer_headers(folder):
    """The file by which the script finds FlashInfer's headers, empty."""
    headers = folder / "include/flashinfer"
    headers.mkdir(parents=True)
    (headers / "sampling.cuh").touch()


@pytest.mark.parametrize(("cut", "rows"), [(60, 0), (100, 3), (150, 6)])
def test_a_run_that_is_cut_off_has_left_the_goals_that_it_timed(gpu, tmp_path, cut, rows):
    """However long the other parts take."""
    make_flashinfer_headers(tmp_path)
    status, said = gpu(simulated=True, CUT=str(cut))
    assert status == -9
    assert "Summary" not in said
    file = tmp_path / "out/cuda-goals.jsonl"
    written = file.read_text().splitlines() if file.exists() else []
    assert written == [f'{{"row": {n + 1}}}' for n in range(rows)]
    assert "commit c0ffee" in said
    assert "clocks.sm" in said


def test_a_part_that_hangs_is_reported_and_ends_the_runs_of_several_processes(gpu):
    status, said = gpu(simulated=True, CLEAN="1", XDIST="1", HANGING="tests/device/test_cuda.py")
    assert status == 1
    assert "FAILED   CUDA tests: a hang, or too slow: no end after 90 s" in said
    assert "NOTE     later tests run in one process" in said
    assert "-n 8" not in said
    assert "passed   CUDA ops on the device" in said
    status, said = gpu(simulated=True, CLEAN="1", XDIST="1")
    assert status == 0
    assert "-n 8" in said


def test_a_library_that_does_not_launch_is_built_again(gpu):
    status, said = gpu(simulated=True, CLEAN="1", NO_LAUNCH="1", HANGING="bash -c build")
    assert status == 1
    assert "FAILED   build: a hang" in said
    assert "FAILED   launch of the kernels built here: exit status 1" in said
    assert "passed   goals" in said
    status, said = gpu(simulated=True, CLEAN="1", HANGING="bench.smoke")
    assert status == 1
    assert "FAILED   launch of the kernels of _C.so: a hang" in said
    assert "build" not in said


def test_the_kernel_of_flashinfer_is_compiled_and_timed_where_its_headers_are(gpu, tmp_path):
    absent = gpu(simulated=True, CLEAN="1")[1]
    assert "ABSENT   FlashInfer's headers" in absent
    make_flashinfer_headers(tmp_path)
    _, said = gpu(simulated=True, CLEAN="1")
    assert "passed   FlashInfer's kernel" in said
    assert "passed   goals by FlashInfer" in said
    _, said = gpu(simulated=True, CLEAN="1", HANGING="flashinfer_headers")
    assert "FAILED   FlashInfer's kernel: a hang" in said
    assert "goals by FlashInfer" not in said
    assert "passed   stages" in said


def test_the_gpu_script_goes_on_after_a_failure_and_reports_it(gpu):
    status, said = gpu()
    assert status == 1
    summary = said[said.index("Summary after") :]
    assert summary.count("FAILED") == 2  # memcheck and racecheck
    names = (
        "launch of the kernels of _C.so",
        "brief cases",
        "goals",
        "stages",
        "grids",
        "CUDA tests",
        "CUDA ops on the device",
        "CUDA trees on the device",
        "sweep of verify_chain",
        "sweep of verify_tree",
        "sweep of kv_compact_",
        "Triton ops on the device",
        "Triton trees on the device",
        "Triton cache ops on the device",
        "layout of trees on the device",
        "CUDA graphs of forwards",
    )
    places = [summary.index(f"passed   {name}") for name in names]
    assert places == sorted(places)
    assert "memcheck: exit status 3" in summary
