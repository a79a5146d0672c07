"""Runs bench/gpu.sh with stand-ins for the programs that it starts, most with a simulated clock."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "bench/gpu.sh"
# What a config is said to take in bench.goals.
SECONDS = 10
PYTHON = f"""#!/bin/bash
case "$*" in
  -) exit 0 ;;
  *find_spec*) exit 0 ;;
  *os.path.dirname*) echo torch; exit 0 ;;
  *has_cuda_kernels*) [[ -z $NO_KERNELS || -e $CLOCK.built ]]; exit ;;
  *bench.smoke) [[ -z $NO_LAUNCH || ($NO_LAUNCH == 1 && -e $CLOCK.built) ]] || exit 1 ;;
  *bench.goals\\ --only\\ cuda*)
    for n in 1 2 3 4 5 6; do
      advance {SECONDS} || exit
      echo "{{\\"row\\": $n}}" >> "$OUT/cuda-goals.jsonl"
    done ;;
  *sanitize*) exit 3 ;;
  *compiled_on_device*) [[ -z $OLD ]] || exit 5 ;;
  *import\\ xdist*) [[ -n $XDIST ]] || exit 1 ;;
esac
echo "python $*"
"""
SANITIZER = """#!/bin/bash
[[ -z $REFUSED ]] || exit 1
shift 4
[[ -n $CLEAN ]] || exec "$@"
"""
PROFILER = """#!/bin/bash
[[ -n $UNPRIVILEGED ]] || { echo "ncu $*"; exit 0; }
echo "==ERROR== ERR_NVGPUCTRPERM" > "$OUT/ncu.log"
exit 1
"""
# The build writes nothing here: its last program is a stand-in too.
CMAKE = '#!/bin/bash\necho "cmake $*"\n'
COPY = '#!/bin/bash\necho "cp $*"\ntouch "$CLOCK.built"\n'
# Adds seconds to a simulated clock. At second $CUT the machine is taken away.
ADVANCE = """#!/bin/bash
now=$(($(cat "$CLOCK") + $1))
echo $now > "$CLOCK"
if ((now > CUT)); then
  kill -KILL $GPU_SCRIPT
  exit 1
fi
"""
DATE = '#!/bin/bash\ncat "$CLOCK"\n'
# Every part but the goals takes all the time that it may take; one of them never ends.
TIMEOUT = """#!/bin/bash
limit=$2
shift 2
[[ "$*" == *"bench.goals --only cuda"* ]] || advance "$limit" || exit
[[ -z $HANGING || "$*" != *"$HANGING"* ]] || exit 124
exec "$@"
"""
SWITCHES = (
    *("CLEAN", "REFUSED", "XDIST", "HANGING", "NO_LAUNCH", "NO_KERNELS", "OLD", "UNPRIVILEGED"),
    *("PARTS", "BUDGET"),
)
A = ("plans", "brief cases", "goals", "stages", "Nsight Compute on three goals")
B = (
    *("CUDA tests", "CUDA ops on the device", "CUDA trees on the device"),
    "CUDA graphs of forwards",
)
C = ("memcheck", "racecheck", "synccheck")
D = (
    *("sweep of verify_chain", "sweep of verify_tree", "sweep of kv_compact_"),
    *("Triton ops on the device", "Triton trees on the device", "Triton cache ops on the device"),
    "layout of trees on the device",
)
FLASHINFER = ("FlashInfer's kernel", "goals by FlashInfer")
LETTERS = {"A": A, "B": B, "C": C, "D": D}


@pytest.fixture
def gpu(tmp_path):
    """A function that runs bench/gpu.sh and returns (exit status, output)."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")

    def write(name, text):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)

    programs = {
        "python": PYTHON,
        "compute-sanitizer": SANITIZER,
        "ncu": PROFILER,
        "cmake": CMAKE,
        "ninja": CMAKE,
        "cp": COPY,
        "nvidia-smi": '#!/bin/bash\necho "a GPU, $*"\n',
        "advance": ADVANCE,
    }
    for name, text in programs.items():
        write(name, text)
    (tmp_path / "clock").write_text("0")

    def run(*, simulated=True, **environment):
        if simulated:
            write("timeout", TIMEOUT)
            write("date", DATE)
        done = subprocess.run(
            ["bash", "-c", f"GPU_SCRIPT=$$ exec bash {GPU}"],
            env={
                **os.environ,
                **dict.fromkeys(SWITCHES, ""),
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
        if (log := tmp_path / "out/gpu.log").exists():
            assert log.read_text() == done.stdout
        return done.returncode, done.stdout + done.stderr

    return run


@pytest.fixture
def clock(tmp_path):
    """A function that returns the seconds on the simulated clock."""
    return lambda: int((tmp_path / "clock").read_text())


def make_flashinfer_headers(folder):
    """The file by which the script finds FlashInfer's headers, empty."""
    headers = folder / "include/flashinfer"
    headers.mkdir(parents=True)
    (headers / "sampling.cuh").touch()


def limits(said):
    """Name -> seconds, of the parts that were begun, in order."""
    found = re.findall(r"^== (.*): at most (\d+) s$", said, re.MULTILINE)
    return {name: int(limit) for name, limit in found}


@pytest.mark.parametrize("switch", ["NO_KERNELS", "NO_LAUNCH"])
def test_the_limits_of_the_default_parts_add_up_to_the_budget_at_most(gpu, clock, switch):
    """Whatever else fails, and though the library is built: no part takes the time of another."""
    status, said = gpu(**{switch: "1"}, HANGING="tests/device", UNPRIVILEGED="1")
    assert status == 1
    asked = limits(said)
    assert list(asked)[-len(A) :] == list(A)
    assert "build" in asked
    assert "no time left" not in said
    # Two questions of 15 s are no parts.
    assert sum(asked.values()) + 2 * 15 <= 480
    # The goals end before their limit here.
    assert clock() == sum(asked.values()) + 2 * 15 - asked["goals"] + 6 * SECONDS


def test_the_parts_have_the_limits_that_the_documents_name(gpu, tmp_path):
    make_flashinfer_headers(tmp_path)
    _, said = gpu(PARTS="ABCD", BUDGET="5000", CLEAN="1")
    asked = limits(said)
    probe = 20  # whether compute-sanitizer runs at all
    totals = {letter: sum(asked[name] for name in names) for letter, names in LETTERS.items()}
    totals["C"] += probe
    totals["D"] += sum(asked[name] for name in FLASHINFER)
    assert totals["C"] <= 240
    page = (ROOT / "docs/benchmarks.md").read_text()
    for letter, seconds in totals.items():
        assert re.search(rf"^\| {letter} \| .*\| {seconds} \|$", page, re.MULTILINE), totals
    # A question, a launch, and the rest of what a build takes.
    asking, building = 15 + asked["launch of the kernels of _C.so"], 165 + 15 + 20
    calls = {letter: seconds + asking for letter, seconds in totals.items()}
    assert max(calls.values()) <= 590
    assert max(calls[letter] + building for letter in "ABC") <= 590
    lent = calls["A"] + building + calls["B"], calls["C"] + calls["D"]
    assert max(lent) <= 900
    text = " ".join(page.split())
    said = text[text.index("fit calls of 590 s each") : text.index("D times FlashInfer")]
    assert [int(n) for n in re.findall(r"\b\d{3}\b", said)] == [
        590, calls["A"], 590, calls["B"], calls["C"], 590, calls["D"], building, 900, *lent,
    ]  # fmt: skip


@pytest.mark.parametrize("letters", [*LETTERS, "CA", "DCBA"])
def test_the_parts_that_were_asked_for_run_in_their_order(gpu, letters):
    status, said = gpu(PARTS=letters, BUDGET="5000", CLEAN="1")
    assert status == 0
    assert list(limits(said)) == [
        "launch of the kernels of _C.so",
        *(name for letter in sorted(letters) for name in LETTERS[letter]),
    ]


@pytest.mark.parametrize(("letters", "unknown"), [("AX", "X"), ("ab", "ab"), ("A,B", ",")])
def test_an_unknown_part_is_refused_by_name(gpu, tmp_path, letters, unknown):
    status, said = gpu(PARTS=letters)
    assert status == 2
    assert said == f"bench/gpu.sh: PARTS must be letters of ABCD, got {unknown} in {letters}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("budget", ["8m", "0", "-60", "1.5", "080"])
def test_a_budget_that_is_no_number_of_seconds_is_refused(gpu, tmp_path, budget):
    status, said = gpu(BUDGET=budget)
    assert status == 2
    assert said == f"bench/gpu.sh: BUDGET must be a whole number of seconds, got {budget}\n"
    assert not (tmp_path / "out").exists()


def test_no_part_begins_after_the_budget(gpu, clock):
    status, said = gpu(PARTS="ABCD", CLEAN="1")
    assert status == 1
    assert 475 <= clock() <= 480
    begun = limits(said)
    assert list(begun)[: 1 + len(A + B)] == ["launch of the kernels of _C.so", *A, *B]
    for name in ("compute-sanitizer", *D):
        assert f"FAILED   {name}: no time left" in said
    _, said = gpu(BUDGET="90")
    assert set(limits(said)) < {"launch of the kernels of _C.so", *A}


def test_a_part_with_less_time_than_its_limit_is_told_so(gpu):
    """Else it is ended from outside, and taken for one that hangs."""
    _, said = gpu(PARTS="D", BUDGET="70")
    begun = limits(said)
    assert 20 < begun["sweep of verify_chain"] < 80
    given = re.search(r"bench\.sweep --op verify_chain .*--budget (\d+)", said)
    assert int(given[1]) == begun["sweep of verify_chain"] - 20
    _, said = gpu(PARTS="D", BUDGET="5000")
    assert "--op verify_chain --device cuda --quick --budget 60" in said


@pytest.mark.parametrize(("cut", "rows"), [(60, 0), (125, 3), (150, 6)])
def test_a_run_that_is_cut_off_has_left_the_goals_that_it_timed(gpu, tmp_path, cut, rows):
    """However long the other parts take."""
    status, said = gpu(CUT=str(cut))
    assert status == -9
    assert "Summary" not in said
    file = tmp_path / "out/cuda-goals.jsonl"
    written = file.read_text().splitlines() if file.exists() else []
    assert written == [f'{{"row": {n + 1}}}' for n in range(rows)]
    assert "commit c0ffee" in said
    assert "clocks.sm" in said


def test_a_part_that_hangs_is_reported_and_ends_the_runs_of_several_processes(gpu):
    status, said = gpu(PARTS="B", XDIST="1", HANGING="tests/device/on_device.py")
    assert status == 1
    assert "FAILED   CUDA ops on the device: a hang, or too slow: no end after 90 s" in said
    assert "NOTE     later tests run in one process" in said
    ran = [line for line in said.splitlines() if line.startswith("python -m pytest")]
    assert "trees_on_device" in ran[1]
    assert "-n 8" not in ran[1]
    assert "passed   CUDA trees on the device" in said
    status, said = gpu(PARTS="B", XDIST="1")
    assert status == 0
    assert said.count("-n 8") == 3


def test_a_library_without_cuda_kernels_is_built_before_anything_runs(gpu):
    """Triton would serve its ops, and compile until the time is over."""
    status, said = gpu(NO_KERNELS="1")
    assert status == 0
    assert list(limits(said)) == ["build", "launch of the kernels built here", *A]
    configured = re.search(r"cmake -S \. -B build/gpu (-G Ninja )?.*-DTORCH_ROOT=torch", said)
    # A folder that was configured keeps its generator.
    assert bool(configured[1]) != (ROOT / "build/gpu/CMakeCache.txt").exists()
    assert "cp --remove-destination build/gpu/_C.so specdec_kernels/_C.so" in said


def test_without_cuda_kernels_only_the_part_that_needs_none_runs(gpu):
    status, said = gpu(NO_KERNELS="1", HANGING="bash -c build", PARTS="AD", BUDGET="5000")
    assert status == 1
    assert "FAILED   build: a hang" in said
    assert "FAILED   no CUDA kernels that run: parts A, B and C are left out" in said
    assert list(limits(said)) == ["build", *D]


def test_a_library_that_does_not_launch_is_built_again(gpu):
    status, said = gpu(NO_LAUNCH="1", HANGING="bash -c build")
    assert status == 1
    assert "FAILED   build: a hang" in said
    assert "FAILED   no CUDA kernels that run: parts A, B and C are left out" in said
    assert list(limits(said)) == ["launch of the kernels of _C.so", "build"]
    status, said = gpu(NO_LAUNCH="2")
    assert status == 1
    assert "passed   build" in said
    assert "FAILED   launch of the kernels built here: exit status 1" in said
    assert "goals" not in limits(said)
    status, said = gpu(HANGING="bench.smoke")
    assert status == 1
    assert "FAILED   launch of the kernels of _C.so: a hang" in said
    assert "build" not in limits(said)


def test_the_kernel_of_flashinfer_is_compiled_and_timed_where_its_headers_are(gpu, tmp_path):
    absent = gpu(PARTS="D", BUDGET="5000")[1]
    assert "ABSENT   FlashInfer's headers" in absent
    assert "python -m bench.peers.flashinfer_headers --prepare puts them there" in absent
    make_flashinfer_headers(tmp_path)
    _, said = gpu(PARTS="D", BUDGET="5000")
    assert "passed   FlashInfer's kernel" in said
    assert "passed   goals by FlashInfer" in said
    _, said = gpu(PARTS="D", BUDGET="5000", HANGING="flashinfer_headers")
    assert "FAILED   FlashInfer's kernel: a hang" in said
    assert "goals by FlashInfer" not in said
    assert "passed   sweep of verify_chain" in said


def test_goals_are_profiled_where_the_driver_lets_their_counters_be_read(gpu, tmp_path):
    _, said = gpu()
    folder = tmp_path / "out"
    assert re.search(
        rf"ncu --set full --clock-control none .*--export {folder}/goals .*bench.goals --called 3",
        said,
    )
    status, said = gpu(UNPRIVILEGED="1")
    assert status == 1
    assert "FAILED   Nsight Compute on three goals: exit status 1" in said
    assert "NOTE     the driver lets only administrators count: ERR_NVGPUCTRPERM" in said


def test_a_sanitizer_that_refuses_the_device_is_absent(gpu):
    status, said = gpu(PARTS="C", REFUSED="1")
    assert status == 0
    assert "ABSENT   compute-sanitizer does not run on this device" in said


def test_the_gpu_script_goes_on_after_a_failure_and_reports_it(gpu):
    """By the clock of this machine, and by its own timeout."""
    status, said = gpu(simulated=False, PARTS="ABCD", BUDGET="5000")
    assert status == 1
    summary = said[said.index("Summary after") :]
    assert summary.count("FAILED") == 3
    names = ("launch of the kernels of _C.so", *A, *B)
    places = [summary.index(f"passed   {name}") for name in names]
    places += [summary.index(f"FAILED   {tool}: exit status 3") for tool in C]
    places += [summary.index(f"passed   {name}") for name in D]
    assert places == sorted(places)


def test_tests_that_were_all_skipped_count_as_absent(gpu):
    status, said = gpu(PARTS="B", OLD="1")
    assert status == 0
    assert "ABSENT   CUDA graphs of forwards: pytest ran nothing, for the reason above" in said


def test_a_transformers_older_than_ours_is_skipped_with_its_reason(tmp_path):
    (tmp_path / "transformers.py").write_text('__version__ = "4.57.1"\n')
    # The process of a pytest worker ends with 0 whatever it ran (tests/conftest.py).
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-rs", "-p", "no:randomly"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "tests/device/compiled_on_device.py"],
        env={**environment, "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT / 'python'}:{ROOT / 'tests'}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 5  # by which the script tells that nothing ran
    assert "module 'transformers' has __version__ '4.57.1', required is: '5.20'" in done.stdout
