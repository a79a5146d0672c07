"""The wheel and the source archive: what they hold, for which Pythons, and that they work."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from packages.check import expected_files, faults
from support.sources import CSRC, ROOT

import specdec_kernels

pytestmark = pytest.mark.build


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel for this Python, built without CUDA and optimisation, which saves most of the time.

    The library that all other tests run is built as it is released.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", str(folder), str(ROOT)),
        cwd=folder,
        SPECDEC_CUDA="off",
        SPECDEC_HOST_PYTHONS="",
        CMAKE_ARGS="-DCMAKE_CXX_FLAGS_RELEASE='-O0 -DNDEBUG'",
    )
    (built,) = folder.glob("*.whl")
    return built


def test_a_wheel_with_cuda_kernels_has_a_version_of_its_own(tmp_path):
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    for label, local in (("", ""), ("cu130", "+cu130")):
        run(*command, cwd=ROOT, SPECDEC_LOCAL_VERSION=label)
        version = f"{specdec_kernels.__version__}{local}"
        assert f"\nVersion: {version}\n" in next(tmp_path.glob("*/PKG-INFO")).read_text()


def test_the_wheel_is_one_that_can_be_released(wheel):
    assert not list(faults(wheel))
    with zipfile.ZipFile(wheel) as files:
        (entry_points,) = (name for name in files.namelist() if name.endswith("/entry_points.txt"))
        text = files.read(entry_points).decode()
    for found in (
        "[vllm.general_plugins]\nspecdec = specdec_vllm:register",
        "[sglang.srt.plugins]\nspecdec = specdec_sglang:register",
    ):
        assert found in text


def test_the_wheel_runs_in_an_environment_of_its_own(wheel, tmp_path):
    """The packages that it needs are those of this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "own"), cwd=tmp_path)
    python = str(tmp_path / "own/bin/python")
    (site,) = (tmp_path / "own").glob("lib/python3*/site-packages")
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet"),
        *("--no-deps", "--no-index", str(wheel)),
        cwd=tmp_path,
        PYTHONPATH="",  # pip would find the metadata of the sources there
    )
    (site / "packages.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    out = run(python, "-I", str(ROOT / "tests/packages/smoke.py"), cwd=tmp_path)
    assert out.startswith(f"Python {platform.python_version()}, torch {torch.__version__}, ")
    code = "from specdec_hf.cli import prompts as p; print(len(p.read_prompts(p.SHIPPED_PROMPTS)))"
    assert run(python, "-I", "-c", code, cwd=tmp_path) == "4\n"


def test_the_source_archive_builds_the_same_wheel(tmp_path):
    """All that a build reads is there, and so are the files that a wheel holds."""
    run(
        *(sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)),
        *("sdist", "--dist-dir", str(tmp_path)),
        cwd=ROOT,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path)  # it is ours
    source = Path(str(archive).removesuffix(".tar.gz"))
    run(
        *(sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", str(tmp_path / "lib")),
        cwd=source,
    )
    built = (tmp_path / "lib").rglob("*")
    held = {path.relative_to(tmp_path / "lib").as_posix() for path in built if path.is_file()}
    assert held == expected_files()
    read = filter(Path.is_file, CSRC.rglob("*"))
    for path in (ROOT / "CMakeLists.txt", ROOT / "LICENSE", *read):
        assert (source / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    assert not [*source.rglob("*.so"), *source.glob("tests"), *source.glob("bench")]
