"""Installs a wheel in clean environments, one for each pair of a Python and a torch, and runs it.

    make more TASK=test-wheels
    python tests/packages/environments.py dist/specdec_kernels-*.whl
    python tests/packages/environments.py dist/specdec_kernels-*.whl --pair 3.11 2.13 --extra hf

Each environment has only what pip installs there, no compiler in its PATH and no variable but pip's
and those of a network. It is removed before the next is made; the largest, with torch for CUDA,
takes 8 GB. PyPI has torch for CUDA: PIP_EXTRA_INDEX_URL may name an index of torch for CPUs. The
last thing printed is a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from packages.pythons import find_pythons

PAIRS = [
    ("3.10", "2.10"), ("3.11", "2.13"), ("3.12", "2.11"), ("3.13", "2.12"), ("3.14", "2.13"),
    ("3.12", "2.14"), ("3.13", "2.15"),
]  # fmt: skip
SMOKE = Path(__file__).with_name("smoke.py")
KEPT = ("PIP_", "SSL_", "HTTP", "NO_PROXY", "http", "no_proxy")  # beginnings of variables
SECONDS = 3000  # longest time of an installation


class Row(NamedTuple):
    """An environment: `megabytes` on the disk, and `seconds` of the installation and the check."""

    python: str
    torch: str
    megabytes: float
    seconds: float
    result: str

    def __str__(self) -> str:
        numbers = f"{self.megabytes:,.0f} | {self.seconds:.0f}"
        return f"| {self.python} | {self.torch} | {numbers} | {self.result} |"


HEADER = "| Python | torch | MB | s | result |\n|---|---|---|---|---|"


def size(folder: Path) -> float:
    """Megabytes of the files in a folder."""
    return sum(p.lstat().st_size for p in folder.rglob("*")) / 1e6


def install_and_run(
    folder: Path, program: Path, torch: str, wheel: Path, extra: str
) -> tuple[bool, str]:
    """Whether the wheel works in a new environment, and the last line that was printed."""
    subprocess.run([program, "-m", "venv", folder], check=True)
    python, empty = folder / "bin/python", folder / "empty"
    empty.mkdir()
    env = {name: value for name, value in os.environ.items() if name.startswith(KEPT)}
    env |= {"PATH": str(python.parent), "HOME": str(empty), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    pip = [python, "-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-compile"]
    commands = [
        [*pip, f"torch=={torch}.*"],
        [*pip, f"specdec-kernels[{extra}] @ {wheel.resolve().as_uri()}"],
        [python, "-I", SMOKE],
    ]
    if "hf" in extra:
        commands.append([python, "-I", "-m", "specdec_hf", "info"])
    lines = {}
    for command in commands:
        done = subprocess.run(
            command, cwd=empty, env=env, text=True, check=False, timeout=SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        lines[command[-1]] = (done.stdout.strip().splitlines() or [""])[-1]
        if done.returncode:
            print(done.stdout, flush=True)
            return False, lines[command[-1]]
    return True, lines[SMOKE]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--pair", nargs=2, action="append", metavar=("PYTHON", "TORCH"))
    parser.add_argument("--extra", default="host", help="host, or host,hf")
    parser.add_argument("--folder", type=Path, help="where the environments are made")
    args = parser.parse_args()
    pythons, rows = find_pythons(), []
    for version, torch in args.pair or PAIRS:
        row = Row(version, torch, 0, 0, "not tested: this Python is not here")
        if version in pythons:
            began = time.monotonic()
            folder = Path(tempfile.mkdtemp(prefix="environment-", dir=args.folder))
            try:
                worked, said = install_and_run(
                    folder, pythons[version], torch, args.wheel, args.extra
                )
                seconds = time.monotonic() - began
                row = Row(version, torch, size(folder), seconds, "passed" if worked else "FAILED")
            finally:
                shutil.rmtree(folder)
            print(f"{row.result}: {said}", flush=True)
        rows.append(row)
    print(HEADER, *rows, sep="\n")
    results = {row.result for row in rows}
    return int("FAILED" in results or "passed" not in results)


if __name__ == "__main__":
    sys.exit(main())
