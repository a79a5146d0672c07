"""The Pythons of this machine that a release serves, each with its headers."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.sources import ROOT

# As a file, because the package imports torch.
PYTHON = runpy.run_path(str(ROOT / "specdec_kernels/versions.py"))["SUPPORTED"]["python"]
FIRST, LAST = (int(version.partition(".")[2]) for version in (PYTHON.oldest, PYTHON.newest))
VERSIONS = [f"3.{minor}" for minor in range(FIRST, LAST + 1)]
# Beside those in PATH: the images of manylinux and pyenv.
FOLDERS = ("/opt/python/cp3*-cp3*/bin", "~/.pyenv/versions/3.*/bin")
ASK = """import sys, sysconfig as s
print(s.get_config_var("EXT_SUFFIX"), s.get_path("include"), sys.version_info.releaselevel)"""


def _programs() -> Iterator[Path]:
    yield Path(sys.executable)
    for folder in FOLDERS:
        path = Path(folder).expanduser()
        yield from sorted(Path(path.anchor).glob(f"{path.relative_to(path.anchor)}/python3"))
    for folder in os.environ["PATH"].split(os.pathsep):
        yield from (Path(folder) / f"python{version}" for version in VERSIONS)


def find_pythons() -> dict[str, Path]:
    """Version -> the program of a CPython with its headers; the one that runs this comes first.

    Builds without the GIL and versions that are not released yet are left out.
    """
    found: dict[str, Path] = {}
    for program in filter(Path.is_file, _programs()):
        done = subprocess.run([program, "-c", ASK], capture_output=True, text=True, check=False)
        match = re.match(r"\.cpython-3(\d+)-\S* (.*) final$", done.stdout)
        if match and (Path(match[2]) / "Python.h").is_file():
            found.setdefault(f"3.{match[1]}", program)
    return {version: found[version] for version in VERSIONS if version in found}
