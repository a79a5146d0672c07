"""Runs bench/gpu.sh with stand-ins for the programs that it starts and with a simulated clock."""

import os
import re
import subprocess

import pytest
from support.sources import ROOT

pytestmark = pytest.mark.build

SECONDS = 10  # what a config takes in bench.goals
# Every part but the goals takes all the time that it may take; the one that hangs never ends. At
# second $CUT the machine is taken away.
PROGRAMS = {
    "python": f"""
case "$*" in
  -|*find_spec*) exit 0 ;;
  *os.path.dirname*) echo torch; exit 0 ;;
  *has_cuda_kernels*) [[ -z $NO_KERNELS || -e $CLOCK.built ]]; exit ;;
  *bench.smoke) [[ -z $NO_LAUNCH || ($NO_LAUNCH == 1 && -e $CLOCK.built) ]] || exit 1 ;;
  *bench.goals\\ --only\\ cuda*)
    for n in 1 2 3 4 5 6; do advance {SECONDS} || exit; echo $n >> "$OUT/cuda-goals.jsonl"; done ;;
  *import\\ xdist*) [[ -n $XDIST ]] || exit 1 ;;
esac
echo "python $*" """,
    "compute-sanitizer": 'shift 4; exec "$@"',
    "ncu": "",
    "cmake": 'echo "cmake $*"',
    "ninja": "",
    "cp": 'touch "$CLOCK.built"',
    "nvidia-smi": 'echo "a GPU, $*"',
    "advance": """
now=$(($(cat "$CLOCK") + $1))
echo $now > "$CLOCK"
if ((now > CUT)); then kill -KILL $GPU_SCRIPT; exit 1; fi""",
    "date": 'cat "$CLOCK"',
    "timeout": """
limit=$2; shift 2
[[ "$*" == *"bench.goals --only cuda"* ]] || advance "$limit" || exit
[[ -z $HANGING || "$*" != *"$HANGING"* ]] || exit 124
exec "$@" """,
}
SWITCHES = ("XDIST", "HANGING", "NO_LAUNCH", "NO_KERNELS", "PARTS", "BUDGET")


@pytest.fixture
def gpu(tmp_path):
    """A function that runs bench/gpu.sh and returns (exit status, output)."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "clock").write_text("0")

    def run(**environment):
        paths = {
            "PYTHON": "python",
            "OUT": "out",
            "CLOCK": "clock",
            "SPECDEC_FLASHINFER": "include",
        }
        given = {name: str(tmp_path / path) for name, path in paths.items()} | environment
        done = subprocess.run(
            ["bash", "-c", f"GPU_SCRIPT=$$ exec bash {ROOT / 'bench/gpu.sh'}"],
            env={**os.environ, **dict.fromkeys(SWITCHES, ""), "CUT": "1000000", **given,
                 "PATH": f"{tmp_path}:{os.environ['PATH']}", "SPECDEC_COMMIT": "c0ffee"},
            capture_output=True, text=True, check=False, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run


def limits(said):
    """Name -> seconds, of the parts that were begun, in order."""
    found = re.findall(r"^== (.*): at most (\d+) s$", said, re.MULTILINE)
    return {name: int(limit) for name, limit in found}


HANGS = "a hang, or too slow: no end after"
LEFT_OUT = "FAILED   no CUDA kernels that run: parts A, B and C are left out"


@pytest.mark.parametrize(
    ("given", "status", "lines", "absent"),
    [
        ({"PARTS": "B", "XDIST": "1", "HANGING": "tests/device/on_device.py"}, 1,
         [f"FAILED   CUDA ops on the device: {HANGS} 90 s",
          "NOTE     later tests run in one process", "passed   CUDA trees on the device"], []),
        ({"NO_KERNELS": "1", "HANGING": "bash -c build", "PARTS": "AD", "BUDGET": "5000"}, 1,
         ["FAILED   build: a hang", LEFT_OUT, "passed   sweep of verify_chain"], ["goals"]),
        ({"NO_LAUNCH": "2"}, 1,
         ["passed   build", "FAILED   launch of the kernels built here: exit status 1"], ["goals"]),
    ],
    ids=["a-hang", "no-build", "no-launch-at-all"],
)  # fmt: skip
def test_what_fails_or_is_absent_is_reported_and_the_rest_goes_on(
    gpu, given, status, lines, absent
):
    found, said = gpu(**given)
    assert found == status
    summary = said[said.index("Summary after") :]
    assert not [line for line in lines if line not in summary]
    assert not {*absent} & limits(said).keys()
