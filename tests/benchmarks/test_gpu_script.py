"""bench/gpu.sh: a rehearsal on the CPU, and runs with stand-ins for its programs and its clock."""

import json
import os
import re
import shutil
import subprocess

import pytest
from support.sources import ROOT

pytestmark = pytest.mark.build

# Every part takes all the time that it may take; the one that hangs never ends.
PROGRAMS = {
    "python": '[[ "$*" != *has_cuda_kernels* || -z $NO_KERNELS ]] || exit 3\necho "python $*"',
    "ncu": "",
    "nvidia-smi": 'echo "a GPU, $*"',
    "date": 'cat "$CLOCK"',
    "timeout": """
limit=$2; shift 2
[[ "$*" == *has_cuda_kernels* ]] || echo $(($(cat "$CLOCK") + limit)) > "$CLOCK"
[[ -z $HANGING || "$*" != *"$HANGING"* ]] || exit 124
exec "$@" """,
}


def run(folder, **environment):
    """(exit status, output, lines of JSON) of the script."""
    unset = dict.fromkeys(("PARTS", "HANGING", "NO_KERNELS", "SPECDEC_SECOND"), "")
    own = {"OUT": str(folder / "out"), "CLOCK": str(folder / "clock"), "SPECDEC_COMMIT": "c0ffee"}
    done = subprocess.run(
        ["bash", str(ROOT / "bench/gpu.sh")], env={**os.environ, **unset, **own, **environment},
        capture_output=True, text=True, check=False, timeout=400,
    )  # fmt: skip
    texts = [p.read_text() for p in (folder / "out").glob("*.jsonl")]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    return done.returncode, done.stdout + done.stderr, lines


def outcomes(lines):
    return {line["part"]["name"]: line["part"]["outcome"] for line in lines if "part" in line}


@pytest.fixture
def gpu(tmp_path):
    """A function that runs the script with the stand-ins."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "clock").write_text("0")
    path = f"{tmp_path}:{os.environ['PATH']}"
    return lambda **given: run(tmp_path, PATH=path, PYTHON=str(tmp_path / "python"), **given)


def test_all_parts_run_on_the_cpu_in_small_sizes(tmp_path):
    second = shutil.copy(ROOT / "specdec_kernels/_C.so", tmp_path)
    status, said, lines = run(tmp_path, DEVICE="cpu", BUDGET="380", SPECDEC_SECOND=second)
    assert status == 0, said
    found = outcomes(lines)
    assert found.pop("profile") == "ABSENT"
    assert [*found] == ["smoke", "cases", "tests", "goals", "stages", "peers", "turns", "loop"]
    assert {*found.values()} == {"passed"}
    kinds = [next(iter(line)) for line in lines]
    assert not {"failed", "left_out"} & {*kinds}
    assert {"machine", "row", "stage", "turns"} < {*kinds}
    assert {line["row"]["provider"] for line in lines if "row" in line} == {"cpp", "eager"}
    assert all(line["turns"]["second_over_first"] > 0 for line in lines if "turns" in line)


def test_a_part_that_hangs_takes_the_time_of_no_other(gpu):
    given = {"HANGING": "bench.stages", "SPECDEC_SECOND": "other.so"}
    status, said, lines = gpu(**given)
    limits = re.findall(r"^== .*: at most (\d+) s$", said, re.MULTILINE)
    found = outcomes(lines)
    assert status == 1
    assert found.pop("stages") == "FAILED"
    assert {*found.values()} == {"passed"}
    assert len(limits) == 1 + len(found) == 10
    assert sum(map(int, limits)) <= 480
    assert "exit status" not in said


def test_nothing_is_measured_without_cuda_kernels_or_with_an_unknown_part(gpu):
    status, said, lines = gpu(NO_KERNELS="1")
    assert (status, outcomes(lines)) == (1, {"library": "FAILED"})
    assert "at most" not in said
    status, said, _ = gpu(PARTS="goal")
    assert status == 2
    assert "PARTS must be among smoke cases" in said
