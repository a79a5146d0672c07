"""The wheel builds, holds what it should, and works outside of the repository."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import setuptools

pytestmark = pytest.mark.build

ROOT = Path(__file__).resolve().parents[2]
HEADS = "specdec_hf/heads/shipped"  # in the folder of the packages
PROMPTS = "specdec_hf/cli/prompts.jsonl"


def run(*command: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The content of a wheel, built without CUDA and optimisation, which saves most of the time.

    The library that all other tests run is built as it is released.
    """
    folder = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"),
        *("--wheel-dir", str(folder), str(ROOT)),
        cwd=folder,
        SPECDEC_CUDA="off",
        CMAKE_ARGS="-DCMAKE_CXX_FLAGS_RELEASE=-O0",
    )
    wheels = list(folder.glob("*.whl"))
    assert len(wheels) == 1
    assert wheels[0].name.startswith("specdec_kernels-")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{tag}-{tag}-" in wheels[0].name, "specdec_host serves the Python it was built for"
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def setup_of(version: str, monkeypatch) -> list[dict]:
    """What setup.py hands to `setup` where this version of setuptools is installed."""
    calls: list[dict] = []
    monkeypatch.setattr(setuptools, "__version__", version)
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: calls.append(arguments))
    runpy.run_path(str(ROOT / "setup.py"))
    return calls


def test_setuptools_that_cannot_build_is_refused_in_one_line(monkeypatch):
    (needed,) = re.findall(r'"setuptools>=(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert f'"setuptools>={needed}"' in (ROOT / "Makefile").read_text()
    assert f"setuptools >= {needed}," in (ROOT / "README.md").read_text()
    message = (
        f"specdec-kernels needs setuptools >= {needed} to build, found 65.5.0: "
        f"pip install 'setuptools>={needed}'"
    )
    with pytest.raises(SystemExit, match=f"^{re.escape(message)}$"):
        setup_of("65.5.0", monkeypatch)
    with pytest.raises(SystemExit):
        setup_of(f"{int(needed) - 1}.0.3", monkeypatch)
    assert len(setup_of(f"{needed}.0.1.post20250321", monkeypatch)) == 1


def test_the_wheel_holds_the_packages_and_no_tests_or_sources(unpacked):
    files = {str(p.relative_to(unpacked)) for p in unpacked.rglob("*") if p.is_file()}
    for needed in (
        "specdec_kernels/_C.so",
        "specdec_kernels/py.typed",
        "specdec_kernels/triton/chain/verify_chain.py",
        "specdec_hf/__main__.py",
        "specdec_hf/drafters/model.py",
        PROMPTS,
        f"specdec_host/_host{EXTENSION_SUFFIXES[0]}",
        "specdec_host/_host.pyi",
        "specdec_host/ops/verify_chain.py",
        "specdec_sglang/sglang_interface.py",
        "specdec_vllm/vllm_interface.py",
    ):
        assert needed in files
    assert not [f for f in files if f.startswith(("tests/", "bench/", "csrc/"))]
    shipped = (ROOT / "python" / HEADS).glob("*/*.*")
    assert {f for f in files if f.startswith(HEADS + "/")} == {
        str(p.relative_to(ROOT / "python")) for p in shipped
    }
    (entry_points,) = unpacked.glob("*.dist-info/entry_points.txt")
    for found in (
        "[vllm.general_plugins]\nspecdec = specdec_vllm:register",
        "[sglang.srt.plugins]\nspecdec = specdec_sglang:register",
    ):
        assert found in entry_points.read_text()


def test_the_wheel_runs_outside_of_the_repository(unpacked, tmp_path):
    code = (
        "import torch, specdec_kernels as s\n"
        "print(s.__file__)\n"
        "print(torch.ops.specdec_kernels.verify_chain)\n"
        "one = torch.zeros(1, dtype=torch.int64)\n"
        "print(s.sample(torch.eye(3)[:1], temperature=0.0, seeds=one, positions=one).tokens)\n"
        "print(s.has_cuda_kernels())\n"
        "import specdec_host as h\n"
        "print(h.__file__, len(h.SuffixAutomaton()))\n"
        "from specdec_hf.cli.prompts import SHIPPED_PROMPTS, read_prompts\n"
        "print(SHIPPED_PROMPTS, len(read_prompts(SHIPPED_PROMPTS)))\n"
    )
    out = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(unpacked)).splitlines()
    assert out[0].startswith(str(unpacked))
    assert out[1:4] == ["specdec_kernels.verify_chain", "tensor([0])", "False"]
    assert out[4].startswith(str(unpacked))
    assert out[5] == f"{unpacked / PROMPTS} 4"


def test_wheel_and_source_archive_hold_the_shipped_prompts_and_heads(tmp_path):
    """Without what the training of a head left behind."""
    tree = tmp_path / "tree"
    names = ("config.json", "model.safetensors", "README.md", "training.svg")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (tree / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    head = tree / "python" / HEADS / "A-model"
    (head / "work").mkdir(parents=True)
    for name in (*names, "work/run.json"):
        (head / name).write_text("x")
    hf = "python/specdec_hf"
    for package in ("specdec_kernels", hf, f"{hf}/cli", f"{hf}/heads"):
        (tree / package).mkdir(parents=True, exist_ok=True)
        (tree / package / "__init__.py").write_text('__version__ = "0.1.0"\n')
    shutil.copy(ROOT / "python" / PROMPTS, tree / "python" / PROMPTS)
    run(
        *(sys.executable, "setup.py", "--quiet", "build_py"),
        *("--build-lib", str(tmp_path / "wheel")),
        *("sdist", "--dist-dir", str(tmp_path)),
        cwd=tree,
    )
    wanted = {f"{HEADS}/A-model/{name}" for name in names}
    wheel = {str(p.relative_to(tmp_path / "wheel")) for p in (tmp_path / "wheel").rglob("*.*")}
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        packed = {name.partition("/python/")[2] for name in files.getnames()}
    for held in (wheel, packed):
        assert PROMPTS in held
        assert {name for name in held if name.startswith(HEADS) and "." in name} == wanted
