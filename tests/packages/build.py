"""Builds one wheel for this machine and all of its Pythons, as releases have them.

    make wheels
    python tests/packages/build.py --folder dist

The kernels are compiled once, and the module of specdec_host for each Python that is found.
auditwheel names the oldest systems that the wheel serves. A wheel that check.py finds wrong is
refused. SPECDEC_CUDA=all builds CUDA kernels, and SPECDEC_LOCAL_VERSION=cu130 then names them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from packages.check import describe, faults
from packages.pythons import find_pythons
from support.sources import ROOT


def build(folder: Path, pythons: dict[str, Path]) -> Path:
    """The wheel as setuptools makes it."""
    env = {**os.environ}
    if len(pythons) > 1:
        env["SPECDEC_HOST_PYTHONS"] = os.pathsep.join(map(str, pythons.values()))
    command = [
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"),
        *("--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(ROOT)),
    ]
    subprocess.run(command, env=env, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, folder: Path) -> Path:
    """The same with the tags of the systems that it serves.

    The library finds libtorch_cpu in the torch that loads it.
    """
    auditwheel = [sys.executable, "-m", "auditwheel"]
    subprocess.run([*auditwheel, "show", str(wheel)], check=True)
    options = ["--strip", "--exclude", "libtorch_cpu.so", "--wheel-dir", str(folder)]
    subprocess.run([*auditwheel, "repair", *options, str(wheel)], check=True)
    (repaired,) = folder.glob("*.whl")
    return repaired


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("dist"))
    args = parser.parse_args()
    pythons = find_pythons()
    if not sys.platform.startswith("linux"):
        parser.error("auditwheel serves Linux alone; elsewhere: pip wheel --no-deps .")
    with tempfile.TemporaryDirectory() as built, tempfile.TemporaryDirectory() as repaired:
        wheel = repair(build(Path(built), pythons), Path(repaired))
        found = list(faults(wheel, [*pythons]))
        if found:
            print("\n".join(f"{wheel.name}: {fault}" for fault in found))
            return 1
        args.folder.mkdir(parents=True, exist_ok=True)
        print(describe(Path(shutil.copy(wheel, args.folder))))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as error:  # it has said why
        sys.exit(error.returncode)
