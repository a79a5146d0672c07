"""The CUDA kernels in the emulator under ThreadSanitizer and under AddressSanitizer.

    python tests/simt/sanitize.py --build build/sanitize/simt

Each lane is one executable, which calls the kernels on arrays of exactly the right size
(sanitized.cpp). For ThreadSanitizer every CUDA thread is a thread, see watch.h. Then faults are
planted in copies of the source, one at a time: the lane must report each of them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SIMT = ROOT / "tests/simt"
SAMPLE = "csrc/cuda/row/sample.cu"
KERNELS = (
    SAMPLE,
    "csrc/cuda/row/apply_penalties.cu",
    "csrc/cuda/row/kept_tokens.cu",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc/cuda/chain").glob("*.cu")),
    "csrc/cuda/tree/verify_tree.cu",
    "csrc/cuda/history/ngram_propose.cu",
    "csrc/cuda/error.cu",
)
SOURCES = ("tests/simt/sanitized.cpp", *KERNELS)
COMPILE = (
    *(os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-g1", "-ffp-contract=off"),
    *("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"),
)  # fmt: skip
REPORTED = 66  # exit status after a report
LONGEST_RUN = 600  # seconds
# Without it the sanitizers' memory may be where the system puts a program.
FIXED_ADDRESSES = ("setarch", "-R") if shutil.which("setarch") else ()


@dataclass(frozen=True)
class Lane:
    """A sanitizer.

    unwatched: sources that are compiled without it, and linked first.
    """

    name: str
    flags: tuple[str, ...]
    options: str
    unwatched: tuple[str, ...] = ()

    @property
    def objects(self) -> list[str]:
        return [Path(s).name + ".o" for s in (*self.unwatched, *SOURCES)]


THREAD = Lane(
    "thread",
    ("-fsanitize=thread", "-DSIMT_WATCHED"),
    f"halt_on_error=1:exitcode={REPORTED}",
    ("tests/simt/watched.cpp",),
)
ADDRESS = Lane("address", ("-fsanitize=address",), f"detect_leaks=0:exitcode={REPORTED}")


@dataclass(frozen=True)
class Control:
    """A fault: `before` becomes `after` in `path`, and `case` must then be reported."""

    name: str
    lane: Lane
    path: str
    before: str
    after: str
    case: str


ARRIVAL = '#define SPECDEC_ARRIVAL "acq_rel"'
SPLIT_ROW = "sample B1 V16001 f32 split"  # among four blocks
CONTROLS = (
    Control("no fence before the ticket", THREAD, "csrc/cuda/ticket.cuh", ARRIVAL,
            ARRIVAL.replace("acq_rel", "acquire"), SPLIT_ROW),
    Control("an arrival that acquires nothing", THREAD, "csrc/cuda/ticket.cuh", ARRIVAL,
            ARRIVAL.replace("acq_rel", "release"), SPLIT_ROW),
    Control("an arrival before the whole block is done", THREAD, "csrc/cuda/ticket.cuh",
            "  __syncthreads();\n  if (thread_id() == 0) shared = arrive(",
            "  if (thread_id() == 0) shared = arrive(", SPLIT_ROW),
    Control("a row at an odd address that is read beyond its end", ADDRESS,
            "csrc/cuda/row/fill.cuh", " - (row.aligned() ? 0 : kBeyondTile)", "",
            "sample B1 V4097 bf16 odd split"),
)  # fmt: skip


def run(command: list[str | Path], **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **settings,
    )


def compile_object(lane: Lane, source: str, out: Path, csrc: Path) -> None:
    """Compile a source with the headers of `csrc`, unless the object is newer than all of them."""
    inputs = [p for folder in (csrc / "cuda", csrc / "include", SIMT) for p in folder.rglob("*.*")]
    if out.exists() and out.stat().st_mtime > max(p.stat().st_mtime for p in inputs):
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    flags = [f for f in lane.flags if source not in lane.unwatched or not f.startswith("-fs")]
    includes = [f"-I{folder}" for folder in (SIMT, csrc / "include", csrc)]
    path = csrc.parent / source if source.startswith("csrc") else ROOT / source
    done = run([*COMPILE, *flags, *includes, "-c", "-x", "c++", path, "-o", out])
    if done.returncode != 0:
        raise SystemExit(f"simt: {source} does not compile\n{done.stdout}")


def link(lane: Lane, objects: list[Path], out: Path) -> None:
    done = run([COMPILE[0], lane.flags[0], "-o", out, *objects])
    if done.returncode != 0:
        raise SystemExit(f"simt: the lane {lane.name} does not link\n{done.stdout}")


def call(lane: Lane, program: Path, *names: str) -> subprocess.CompletedProcess[str]:
    options = {f"{lane.name[0].upper()}SAN_OPTIONS": lane.options}
    try:
        return run(
            [*FIXED_ADDRESSES, program, *names], env=os.environ | options, timeout=LONGEST_RUN
        )
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(error.cmd, 124, f"longer than {LONGEST_RUN} s")


def run_cases(lane: Lane, build: Path, pool: ThreadPoolExecutor, jobs: int) -> bool:
    begin = time.perf_counter()
    program = build / lane.name / "sanitized"
    names = call(lane, program, "list").stdout.splitlines()
    good = bool(names)
    for done in pool.map(
        lambda part: call(lane, program, *part), [names[j::jobs] for j in range(jobs)]
    ):
        if done.returncode != 0:
            good = False
            print(done.stdout, f"simt: exit status {done.returncode}", flush=True)
    took = time.perf_counter() - begin
    verdict = "clean" if good else "FAILED"
    print(f"simt {lane.name}: {verdict}, {len(names)} cases, {took:.0f} s", flush=True)
    return good


def caught(control: Control, build: Path) -> bool:
    """Plant the fault in a copy of the source, and say whether the lane reports it."""
    lane, folder = control.lane, build / control.lane.name
    with tempfile.TemporaryDirectory() as name:
        csrc = Path(name) / "csrc"
        for part in ("cuda", "include"):
            shutil.copytree(ROOT / "csrc" / part, csrc / part)
        path = Path(name) / control.path
        text = path.read_text()
        if text.count(control.before) != 1:
            raise SystemExit(f"simt: {control.path} has no place for: {control.name}")
        path.write_text(text.replace(control.before, control.after))
        planted = Path(name) / "planted.o"
        compile_object(lane, SAMPLE, planted, csrc)
        replaced = Path(SAMPLE).name + ".o"
        objects = [planted if o == replaced else folder / o for o in lane.objects]
        link(lane, objects, Path(name) / "sanitized")
        done = call(lane, Path(name) / "sanitized", control.case)
    if done.returncode == REPORTED:
        return True
    print(f"simt: NOT CAUGHT: {control.name} (exit status {done.returncode})\n{done.stdout}")
    return False


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    build = a.build.resolve()
    begin = time.perf_counter()
    jobs = max(1, a.jobs)
    with ThreadPoolExecutor(jobs) as pool:
        work = [
            (lane, source, build / lane.name / (Path(source).name + ".o"), ROOT / "csrc")
            for lane in (THREAD, ADDRESS)
            for source in (*lane.unwatched, *SOURCES)
        ]
        list(pool.map(lambda arguments: compile_object(*arguments), work))
        for lane in (THREAD, ADDRESS):
            folder = build / lane.name
            link(lane, [folder / o for o in lane.objects], folder / "sanitized")
        print(f"simt: built in {time.perf_counter() - begin:.0f} s", flush=True)
        clean = [run_cases(lane, build, pool, jobs) for lane in (THREAD, ADDRESS)]
        controls_begin = time.perf_counter()
        found = list(pool.map(lambda control: caught(control, build), CONTROLS))
    took = time.perf_counter() - controls_begin
    print(f"simt controls: {sum(found)} of {len(CONTROLS)} caught, {took:.0f} s", flush=True)
    return 0 if all(clean) and all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
