"""Checks wheels before they are published: what they hold, and what their libraries need.

    python tests/packages/check.py dist/*.whl
    python tests/packages/check.py --pythons 3.10 3.11 3.12 3.13 3.14 -- dist/*.whl

It prints a line for each wheel, or a line for each fault and ends with 1. The files that a wheel is
to hold are those of this source tree. It needs readelf, and neither torch nor this project.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from email.parser import Parser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from packages.elf import dynamic, symbols
from support.sources import ROOT, pyproject

INFO = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
LIBRARY = "specdec_kernels/_C.so"
MODULE = re.compile(r"specdec_host/_host\.cpython-3(\d+)-(\w+)-linux-gnu\.so")
# Bytes of a wheel, by whether its local version names a CUDA. The shipped head takes 8 MB of them.
LARGEST = {False: 16_000_000, True: 24_000_000}
# Functions of the stable ABI (torch/csrc/stable, aoti_torch/c/shim.h).
STABLE = re.compile(r"(aoti_torch_|torch_|stable_torch_)\w+")
PYTHON = re.compile(r"_?Py[A-Z_]\w*")
SYSTEM = re.compile(r"lib(stdc\+\+|m|gcc_s|c|pthread|dl|rt)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
LINKER = {"__bss_start", "_edata", "_end", "_init", "_fini"}  # some linkers export them
# The newest symbols of C++ that a system of manylinux_2_28 has. glibc's follow from a tag.
CPP_OF_2_28 = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# A path of the machine that built, as those in messages of assertions. Systems have the others.
PATH = re.compile(rb"[\0 '\"=:](/(?!proc/|sys/|dev/)\w[\w.+-]{2,}(?:/[\w.+-]{3,})+)")


def expected_files() -> set[str]:
    """The files of the packages that every wheel holds, as the source tree has them."""
    settings = pyproject()["tool"]["setuptools"]
    everywhere = settings["package-data"].pop("*")
    found = set()
    for where in map(ROOT.joinpath, settings["packages"]["find"]["where"]):
        for init in where.glob("specdec_*/**/__init__.py"):
            paths = [p for glob in ("*.py", *everywhere) for p in init.parent.glob(glob)]
            found |= {p.relative_to(where).as_posix() for p in paths}
        for package, globs in settings["package-data"].items():
            paths = [p for glob in globs for p in (where / package).glob(glob) if p.is_file()]
            found |= {p.relative_to(where).as_posix() for p in paths}
    return found


def limits(platform: str) -> dict[str, tuple[int, ...]]:
    """The newest versions of symbols that a system of these platform tags has."""
    versions = [tuple(map(int, v)) for v in re.findall(r"manylinux_(\d+)_(\d+)_", platform)]
    if not versions:
        return {}  # a wheel for the system that built it
    cpp = CPP_OF_2_28 if min(versions) <= (2, 28) else {}
    return {"GLIBC": min(versions), **cpp}


def faults_of_library(path: Path, name: str, platform: str) -> Iterator[str]:
    """What a native library needs or exports that it must not.

    Args:
        path: the library.
        name: its name in the wheel.
        platform: the platform tags of the wheel.
    """
    newest = limits(platform)
    ours, exported = (STABLE, set()) if name == LIBRARY else (PYTHON, {"PyInit__host"})
    for symbol in symbols(path):
        if symbol.is_defined or symbol.binding == "WEAK":
            continue
        elif not symbol.version and not ours.fullmatch(symbol.name):
            yield f"{name} must need only {ours.pattern} beside the system, needs {symbol.name}"
        elif symbol.version:
            library, _, version = symbol.version.partition("_")
            if tuple(map(int, version.split("."))) > newest.get(library, (99,)):
                most = ".".join(map(str, newest[library]))
                yield f"{name} must need {library} <= {most}, needs {symbol.version}"
    found = {symbol.name for symbol in symbols(path) if symbol.is_defined} - LINKER
    if found != exported:
        yield f"{name} must export {sorted(exported)}, exports {sorted(found)[:9]}"
    for tag, value in sorted(dynamic(path)):
        if tag in ("RPATH", "RUNPATH"):
            yield f"{name} must have no {tag}, has {value}"
        is_torch = (value, name) == ("libtorch_cpu.so", LIBRARY)
        if tag == "NEEDED" and not is_torch and not SYSTEM.fullmatch(value):
            yield f"{name} must need only libraries of the system, needs {value}"
    for built_in in sorted({*PATH.findall(path.read_bytes())}):
        yield f"{name} must name no path of the build, names {built_in.decode()}"


def faults_of_record(wheel: zipfile.ZipFile, record: str) -> Iterator[str]:
    """Files whose hash or size is not that of the record."""
    for name, digest, size in csv.reader(wheel.read(record).decode().splitlines()):
        if name != record:
            data = wheel.read(name)
            wanted = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            if (digest, size) != (f"sha256={wanted}", str(len(data))):
                yield f"{name} must have the hash and the size of RECORD"


def pythons(names: Sequence[str]) -> list[str]:
    """The versions of CPython that specdec_host is built for, such as "3.11"."""
    return [f"3.{n}" for n in sorted(int(m[1]) for m in map(MODULE.fullmatch, names) if m)]


def faults(path: Path, served: Sequence[str] = ()) -> Iterator[str]:
    """What is wrong with a wheel.

    Args:
        path: the file, named as pip reads it.
        served: the versions of Python that specdec_host must be built for, such as "3.11"; by
            default one or more, and of a wheel for one CPython that one.
    """
    _, version, python, abi, platform = path.stem.split("-")
    public, _, local = version.partition("+")
    architecture = platform.partition(".")[0].removeprefix("linux_")
    architecture = re.sub(r"^manylinux_\d+_\d+_", "", architecture)
    if path.stat().st_size > LARGEST["cu" in local]:
        yield f"it must have at most {LARGEST['cu' in local]} bytes, has {path.stat().st_size}"
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
        found = pythons(names)
        wanted = list(served) or found
        if (python, abi) != ("py3", "none"):  # a wheel for one CPython
            wanted = [f"3.{python.removeprefix('cp3')}"]
            if abi != python:
                yield f"its tags must be py3-none or those of one CPython, are {python}-{abi}"
        if not found or found != wanted:
            yield f"specdec_host must be built for {' '.join(wanted) or 'a Python'}, is for {found}"
        info = f"specdec_kernels-{version}.dist-info"
        suffixes = [f"{v.replace('.', '')}-{architecture}-linux-gnu.so" for v in wanted]
        expected = expected_files() | {f"{info}/{name}" for name in INFO} | {LIBRARY}
        expected |= {f"specdec_host/_host.cpython-{suffix}" for suffix in suffixes}
        yield from (f"{name} is missing" for name in sorted(expected - {*names}))
        yield from (f"{name} must not be there" for name in sorted({*names} - expected))
        yield from faults_of_record(wheel, f"{info}/RECORD")
        stated = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())["Version"]
        source = wheel.read("specdec_kernels/__init__.py").decode()
        (package,) = re.findall(r'^__version__ = "(.*)"$', source, re.MULTILINE)
        if version != stated or public != package:
            yield f"its versions must agree: file {version}, METADATA {stated}, package {package}"
        tags = Parser().parsestr(wheel.read(f"{info}/WHEEL").decode()).get_all("Tag")
        if {*tags} != {f"{python}-{abi}-{one}" for one in platform.split(".")}:
            yield f"its name must hold the tags of WHEEL, which are {' '.join(tags)}"
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                if name.endswith(".so"):
                    library = Path(wheel.extract(name, folder))
                    yield from faults_of_library(library, name, platform)


def describe(path: Path) -> str:
    """A wheel in one line."""
    with zipfile.ZipFile(path) as wheel:
        names = [name for name in wheel.namelist() if not name.endswith("/")]
    size = f"{path.stat().st_size / 1e6:.1f} MB, {len(names)} files"
    return f"{path.name}: {size}, for Python {' '.join(pythons(names))}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("wheels", type=Path, nargs="+")
    parser.add_argument("--pythons", nargs="+", default=[], help="those that must be served")
    args = parser.parse_args()
    broken = 0
    for path in args.wheels:
        found = list(faults(path, args.pythons))
        broken += bool(found)
        print("\n".join(f"{path.name}: {fault}" for fault in found) or describe(path))
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main())
