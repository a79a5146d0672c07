"""Random calls of every op, valid and invalid ones, on the library that a sanitizer watches.

    python tests/fuzz/run.py --library build/sanitize/_C.so --calls 20000 --seed 1
    python tests/fuzz/run.py --library build/sanitize/_C.so --seed 1 --only 1234

Call number i of a seed is always the same, under SETTINGS[i % 3]. It either returns what checks.py
allows or raises RuntimeError, TypeError or ValueError; anything else ends the run, and the command
that repeats the call alone is printed. Without --library the calls go to the library of the
installed package.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The environment of each process. A processor without an instruction set takes the next one that
# it has.
SETTINGS = (
    {"OMP_NUM_THREADS": "2", "SPECDEC_CPU_CAPABILITY": "avx512"},
    {"OMP_NUM_THREADS": "1", "SPECDEC_CPU_CAPABILITY": "avx2"},
    {"OMP_NUM_THREADS": "2", "SPECDEC_CPU_CAPABILITY": "plain"},
)
LONGEST_CALL = 60  # seconds, after which a call counts as hanging


def package_with(library: Path, original: Path = ROOT / "specdec_kernels") -> Path:
    """A folder with the package as it is, but for its native library."""
    folder = library.resolve().parent / "python"
    package = folder / original.name
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        old.unlink()
    for path in original.iterdir():
        if path.suffix != ".so":
            (package / path.name).symlink_to(path)
    (package / library.name).symlink_to(library.resolve())
    return folder


def environment(library: Path | None) -> dict[str, str]:
    path = [str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    if library is None:
        return os.environ | {"PYTHONPATH": os.pathsep.join([*path, str(ROOT)])}

    def runtime(name: str) -> str:
        command = [os.environ.get("CXX", "g++"), f"-print-file-name={name}"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return os.environ | {
        "PYTHONPATH": os.pathsep.join([str(package_with(library)), *path]),
        # The interpreter itself is not built with the sanitizer, so its runtime comes first.
        "LD_PRELOAD": f"{runtime('libasan.so')} {runtime('libstdc++.so.6')}",
        # Python and torch keep memory to the end, and a refused allocation raises as it does
        # without a sanitizer.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:abort_on_error=0",
        "UBSAN_OPTIONS": "print_stacktrace=0",  # the message names file and line
    }


def run_child(numbers: range, seed: int, progress: Path) -> None:
    """Make these calls of a seed, and keep in a file which one is under way."""
    from fuzz.one_call import run  # noqa: PLC0415  (with the environment of a child only)

    faulthandler.register(signal.SIGALRM, chain=True)
    with progress.open("wb", buffering=0) as file:
        outcomes = {"returned": 0, "raised": 0}
        for i in numbers:
            file.seek(0)
            file.write(b"%12d" % i)
            signal.alarm(LONGEST_CALL)
            outcomes[run(seed, i)] += 1
        signal.alarm(0)
    print(outcomes["returned"], outcomes["raised"], flush=True)


def numbers_of(job: int, a: argparse.Namespace) -> range:
    """The calls that a process makes."""
    return range(job, a.calls, a.jobs) if a.only is None else range(a.only, a.only + 1)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", type=Path)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", type=int, default=None, help="the number of a single call")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    a = parser.parse_args()
    seed = time.time_ns() % 2**32 if a.seed is None else a.seed
    if a.child is not None:
        job, progress = a.child.split(",")
        run_child(numbers_of(int(job), a), seed, Path(progress))
        return 0

    print(f"fuzz: {a.calls if a.only is None else 1} calls, seed {seed}", flush=True)
    begin, failed, returned, raised = time.perf_counter(), 0, 0, 0
    # A multiple of the settings, so that a process needs only one of them.
    a.jobs = -(-a.jobs // len(SETTINGS)) * len(SETTINGS)
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for job in range(a.jobs) if a.only is None else (a.only % a.jobs,):
            progress = Path(folder) / str(job)
            progress.touch()
            command = [
                sys.executable, __file__, f"--child={job},{progress}", f"--calls={a.calls}",
                f"--seed={seed}", f"--jobs={a.jobs}",
            ]  # fmt: skip
            command += [] if a.only is None else [f"--only={a.only}"]
            setting = SETTINGS[job % len(SETTINGS)]
            process = subprocess.Popen(
                command, env=environment(a.library) | setting, stdout=subprocess.PIPE, text=True
            )
            jobs.append((job, setting, process, progress))
        for job, setting, process, progress in jobs:
            words = process.communicate()[0].split()
            counts = [int(word) for word in words[-2:]] if process.returncode == 0 else []
            # A process that ends early may do so with status 0.
            if counts and sum(counts) == len(numbers_of(job, a)):
                returned, raised = returned + counts[0], raised + counts[1]
                continue
            failed += 1
            call = progress.read_text().strip() or "0"
            print(f"fuzz: call {call} of seed {seed} failed (exit status {process.returncode})")
            under = " ".join(f"{name}={value}" for name, value in setting.items())
            print(f"fuzz: repeat it with: make sanitize SEED={seed} ONLY={call}  # {under}")
    print(f"fuzz: {returned} calls returned, {raised} raised")
    took = time.perf_counter() - begin
    print(f"fuzz: {'FAILED' if failed else 'clean'}, {took:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
