"""Drives CMake. Metadata is in pyproject.toml; the build is in CMakeLists.txt."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()
SAID = "-- specdec-kernels: "  # begins a message of CMakeLists.txt
SILENCE = 10  # seconds
SETUPTOOLS = 77  # the first that can read the form of the license in pyproject.toml

# pip asks for what pyproject.toml requires of a build only where it isolates the build, and
# setuptools reads that file in setup(), after this line.
if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
    raise SystemExit(
        f"specdec-kernels needs setuptools >= {SETUPTOOLS} to build, found "
        f"{setuptools.__version__}: pip install 'setuptools>={SETUPTOOLS}'"
    )

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402  # an old one has none

# specdec_host serves the Pythons that it is built for: the one that builds, or those of a release.
PYTHONS = list(filter(None, os.environ.get("SPECDEC_HOST_PYTHONS", "").split(os.pathsep)))
if len(PYTHONS) == 1:  # of which one? its wheel would be installed for others
    raise SystemExit(
        f"SPECDEC_HOST_PYTHONS must list two Pythons or more, got '{PYTHONS[0]}': "
        "build with that Python itself"
    )


def check_tools(path: str) -> None:
    """Name all that is missing, before anything is compiled."""
    from setuptools.compat.py310 import tomllib  # noqa: PLC0415  # SETUPTOOLS or later has it

    found = {
        "cmake": shutil.which("cmake", path=path),
        "ninja": shutil.which("ninja", path=path),
        "pybind11": importlib.util.find_spec("pybind11"),
        "torch": getattr(importlib.util.find_spec("torch"), "origin", None),
    }
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    missing = [one for one in requires if found.get(re.split("[<>=]", one)[0], True) is None]
    hints = [shlex.join(["pip", "install", *missing])] if missing else []
    compilers = os.environ.get("CXX", "").split()[:1] or ["c++", "g++", "clang++"]
    if not any(shutil.which(compiler, path=path) for compiler in compilers):
        hints.append(f"a C++ compiler (none of {', '.join(compilers)} was found)")
    if hints:
        raise SystemExit(f"specdec-kernels cannot be built, install first: {' and '.join(hints)}")


def run(command: list[str], env: dict[str, str]) -> None:
    """Run CMake and hand on what it prints, which `pip install -v` shows.

    Of a build that succeeds pip shows nothing else, so what CMake says of this project goes to the
    terminal, too. While a compiler is silent, a line every SILENCE seconds says that it runs.
    """
    began, progress, begun = time.monotonic(), "--", ""
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE) as process:
        output = process.stdout
        while output:
            if not select.select([output], [], [], SILENCE)[0]:
                print(f"{progress} {time.monotonic() - began:.0f} s, still running", flush=True)
                continue
            text = os.read(output.fileno(), 65536).decode(errors="replace")
            print(text, end="", flush=True)
            *lines, begun = (begun + text).split("\n")
            for line in lines:
                counted = re.match(r"\[\d+/\d+\]", line)  # ninja's count of files
                progress = counted[0] if counted else progress
                if line.startswith(SAID) and not sys.stdout.isatty():
                    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
                        terminal.write("\n" + line.removeprefix("-- ") + "\n")
            if not text:
                break
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


class CMakeBuild(build_ext):
    def build_extensions(self) -> None:
        # cmake and ninja of this environment count even where it is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        check_tools(path)
        # Found, never imported: importing torch costs seconds and a build needs only its files.
        torch = Path(importlib.util.find_spec("torch").origin).resolve().parent
        build = Path(self.build_temp).resolve()
        arguments = [
            *("-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            "--fresh",  # CMake would keep the arguments of an earlier build
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTORCH_ROOT={torch}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DSPECDEC_HOST_PYTHONS={';'.join(PYTHONS or [sys.executable])}",
            f"-DSPECDEC_CUDA={os.environ.get('SPECDEC_CUDA', 'auto')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        cmake, env = str(shutil.which("cmake", path=path)), {**os.environ, "PATH": path}
        commands = [arguments, ["--build", str(build)]]
        for ext in self.extensions:
            out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
            install = ["--install", str(build), "--prefix", str(out)]
            commands.append([*install, "--component", ext.name.rpartition(".")[2]])
        for command in commands:
            run([cmake, *command], env)

    def get_ext_filename(self, name: str) -> str:
        if name.endswith("_host"):  # it serves one version of CPython
            return super().get_ext_filename(name)  # type: ignore[no-any-return]
        return name.replace(".", "/") + ".so"  # no CPython tag: the library has no Python in it


class BuildPy(build_py):
    def run(self) -> None:
        # Every wheel is built in one folder, and holds all that is there.
        for package in {name.partition(".")[0] for name in self.packages or ()}:
            if not self.editable_mode:
                shutil.rmtree(Path(self.build_lib, package), ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """_C.so holds no Python, so a wheel serves the Pythons that specdec_host was built for."""
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if PYTHONS else (python, abi, platform)


label = os.environ.get("SPECDEC_LOCAL_VERSION", "")  # such as cu130, of a wheel with CUDA kernels
setup(
    options={"egg_info": {"tag_build": f"+{label}"}} if label else {},
    ext_modules=[
        Extension("specdec_kernels._C", sources=[]),
        Extension("specdec_host._host", sources=[]),
    ],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy, "bdist_wheel": Wheel},
)
