"""What a build says before it compiles: which tools are missing, and what its kernels are for."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.sources import ROOT

ALL = "80-real;90;100-real;120"
SAID = re.compile(r"^-- specdec-kernels: (.*)$", re.MULTILINE)
WITH = re.compile(r"compiling with CUDA kernels for (\S*): about \d+ min on \d+")
# CMake knows no compiler for CUDA, and configures all but its compilation.
STUB = "macro(enable_language)\nendmacro()\n"
BIN = Path(sys.executable).parent
GPU = "GPU 0: NVIDIA H100 (UUID: GPU-1)"

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="the sources are not here"),
]


def program(path, output, code=0):
    path.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    path.chmod(0o755)


def cmake(folder, path, *arguments, **variables):
    return subprocess.run(
        [
            shutil.which("cmake", path=path), "-S", ROOT, "-B", folder / "build", "-G", "Ninja",
            "-DCMAKE_CXX_COMPILER_WORKS=1", f"-DTORCH_ROOT={Path(torch.__file__).parent}",
            *arguments,
        ],
        capture_output=True, text=True, check=False, env=os.environ | {"PATH": path} | variables,
    )  # fmt: skip


def configure(folder, *arguments, devices, release="13.0"):
    """What a build says of its kernels, or why it ends; nvcc and nvidia-smi are stand-ins."""
    (folder / "stub.cmake").write_text(STUB)
    program(folder / "nvidia-smi", *devices)
    nvcc = folder / "nvcc"
    if release:
        program(nvcc, f"Cuda compilation tools, release {release}, V1")
    done = cmake(
        folder, f"{folder}:{BIN}:{os.environ['PATH']}",
        f"-DCMAKE_PROJECT_INCLUDE={folder / 'stub.cmake'}", "-DSPECDEC_HOST=off",
        f"-DCMAKE_CUDA_COMPILER={nvcc if release else 'NOTFOUND'}", *arguments, CUDAARCHS="",
    )  # fmt: skip
    if done.returncode:
        return " ".join(done.stderr.split())
    (said,) = SAID.findall(done.stdout)
    return said


NONE, ABSENT = ("No devices were found", 6), ("", 127)
NO_GPU = (
    "compiling WITHOUT CUDA kernels: nvcc was found, but no GPU; SPECDEC_CUDA=all builds them for "
    "every architecture, CUDAARCHS=90 for one"
)


@pytest.mark.parametrize(
    ("devices", "release", "options", "said"),
    [
        ((GPU,), "13.0", "", "native"), (NONE, "13.0", "CMAKE_CUDA_ARCHITECTURES=75", "75"),
        (NONE, "13.0", "SPECDEC_CUDA=all", ALL), (ABSENT, "12.4", "SPECDEC_CUDA=all", "80-real;90"),
        (NONE, "13.0", "", NO_GPU),
        ((GPU,), None, "", "compiling WITHOUT CUDA kernels: no nvcc was found"),
        ((GPU,), None, "SPECDEC_CUDA=on", "SPECDEC_CUDA is on and no nvcc was found"),
    ],
)  # fmt: skip
def test_cuda_kernels_are_built_for_the_gpu_or_on_request_and_one_line_says_so(
    tmp_path, devices, release, options, said
):
    arguments = [f"-D{options}"] if options else []
    found = configure(tmp_path, *arguments, devices=devices, release=release)
    if match := WITH.match(found):
        assert match[1] == said
    else:
        assert said == found or (said in found and "CMake Error" in found)


def build(folder, program, **variables):
    """A build by setup.py, of which pip would show nothing."""
    return subprocess.run(
        [sys.executable, "-c", program, "build_ext", "--build-temp", str(folder / "build"),
         "--build-lib", str(folder / "lib")],
        cwd=ROOT, capture_output=True, text=True, check=False, env=os.environ | variables,
    )  # fmt: skip


RUN = "import runpy; runpy.run_path('setup.py', run_name='__main__')"
HIDE = "import sys; sys.executable = '/nowhere/python'; sys.modules.update({'pybind11': None%s})\n"


def test_missing_tools_are_named_in_one_line_before_anything_is_compiled(tmp_path):
    done = build(tmp_path, HIDE % ", 'torch': None" + RUN, PATH="/nowhere", CXX="")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "specdec-kernels cannot be built, install first: pip install 'cmake>=3.24' ninja "
        "'pybind11>=3' 'torch>=2.10' and a C++ compiler (none of c++, g++, clang++ was found)"
    )
    done = build(tmp_path, HIDE % "" + RUN, PATH=f"{BIN}:{os.environ['PATH']}", CXX="no-g++ -m64")
    assert done.stderr.splitlines()[-1] == (
        "specdec-kernels cannot be built, install first: pip install 'pybind11>=3' and a C++ "
        "compiler (none of no-g++ was found)"
    )
    assert not list(tmp_path.iterdir())


def test_a_wheel_holds_nothing_of_an_earlier_build(tmp_path):
    """setuptools builds every wheel in one folder, and takes all that is there."""
    lib = tmp_path / "lib"
    names = ("specdec_host/_host.cpython-399-other.so", "specdec_hf/cli/gone.py", "other/mine.py")
    for name in names:
        (lib / name).parent.mkdir(parents=True)
        (lib / name).touch()
    command = ["setup.py", "--quiet", "egg_info", "--egg-base", tmp_path]
    subprocess.run([sys.executable, *command, "build_py", "--build-lib", lib], cwd=ROOT, check=True)
    assert [(lib / name).exists() for name in names] == [False, False, True]
    assert (lib / "specdec_hf/cli/app.py").is_file()
