"""Drives CMake. Metadata is in pyproject.toml; the build is in CMakeLists.txt."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
SETUPTOOLS = 77  # the first that can read the form of the license in pyproject.toml

# pip asks for what pyproject.toml requires of a build only where it isolates the build, and
# setuptools reads that file in setup(), after this line.
if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
    raise SystemExit(
        f"specdec-kernels needs setuptools >= {SETUPTOOLS} to build, found "
        f"{setuptools.__version__}: pip install 'setuptools>={SETUPTOOLS}'"
    )


def torch_root() -> Path:
    """Found, never imported: importing torch costs seconds and a build needs only its files."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("torch is not installed: install it, then build with --no-build-isolation")
    return Path(spec.origin).parent


class CMakeBuild(build_ext):
    def build_extensions(self) -> None:
        build = Path(self.build_temp).resolve()
        configure = [
            *("cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"),
            "-DCMAKE_BUILD_TYPE=Release",
            f"-DTORCH_ROOT={torch_root()}",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-DSPECDEC_CUDA={os.environ.get('SPECDEC_CUDA', 'auto')}",
            *shlex.split(os.environ.get("CMAKE_ARGS", "")),
        ]
        # cmake and ninja of this environment count even where it is not activated.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        cmake = shutil.which("cmake", path=path)
        if cmake is None:
            raise SystemExit("cmake is not installed: pip install cmake ninja")
        commands = [configure, ["cmake", "--build", str(build)]]
        for ext in self.extensions:
            out = Path(self.get_ext_fullpath(ext.name)).parent.resolve()
            install = ["cmake", "--install", str(build), "--prefix", str(out)]
            commands.append([*install, "--component", ext.name.rpartition(".")[2]])
        for command in commands:
            subprocess.run([cmake, *command[1:]], check=True, env={**os.environ, "PATH": path})

    def get_ext_filename(self, name: str) -> str:
        if name.endswith("_host"):  # it serves one version of CPython, and so does the wheel
            return super().get_ext_filename(name)  # type: ignore[no-any-return]
        return name.replace(".", "/") + ".so"  # no CPython tag: the library has no Python in it


setup(
    ext_modules=[
        Extension("specdec_kernels._C", sources=[]),
        Extension("specdec_host._host", sources=[]),
    ],
    cmdclass={"build_ext": CMakeBuild},
)
