"""`specdec_kernels/versions.py` alone states versions, and lists no difference that is gone."""

import re
import runpy

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from specdec_vllm.vllm_interface import SUPPORTED as VLLM
from support.sources import ROOT, pyproject

import specdec_kernels
from specdec_kernels.versions import DIFFERENCES, SUPPORTED, refuse_other, release, requirement

pytestmark = pytest.mark.skipif(
    not (ROOT / "pyproject.toml").is_file(), reason="the sources are not beside the tests"
)


# What pip and the linters read.


def test_pyproject_states_the_same_ranges():
    project = pyproject()
    extras = project["project"]["optional-dependencies"]
    assert project["project"]["dependencies"] == [requirement("torch")]
    assert requirement("torch") in project["build-system"]["requires"]
    assert requirement("transformers") in extras["hf"]
    assert [Requirement(one).specifier for one in extras["test"] if one.startswith("triton")] == [
        Requirement(requirement("triton")).specifier
    ]
    oldest = SUPPORTED["python"].oldest
    assert f"python{project['project']['requires-python']}" == requirement("python")
    assert project["tool"]["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    (_, first), (_, last) = release(oldest), release(SUPPORTED["python"].newest)
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", str(project["project"]))
    assert named == [f"3.{minor}" for minor in range(first, last + 1)]
    (of_vllm,) = extras["vllm"]
    (major, oldest), *_, (_, newest) = stated = [release(one) for one in (*VLLM, VLLM[-1])]
    assert stated[:-1] == [(major, minor) for minor in range(oldest, newest + 1)]
    assert of_vllm == f"vllm>={major}.{oldest},<{major}.{newest + 1}"


# What people read, and what other languages say.


def test_the_build_and_the_gpu_script_ask_for_the_oldest():
    major, minor = release(SUPPORTED["torch"].oldest)
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert f"(SPECDEC_TORCH_FLOOR 0x{major:02x}{minor:02x}{0:012x})" in cmake
    assert f"find_package(Python {SUPPORTED['python'].oldest} REQUIRED" in cmake
    assert f"version < ({major}, {minor})" in (ROOT / "bench/gpu.sh").read_text()
    hub = (ROOT / "examples/hub/custom_generate/requirements.txt").read_text().splitlines()
    ours, of_transformers = map(Requirement, hub)
    assert ours.specifier.contains(specdec_kernels.__version__)
    assert of_transformers.specifier == Requirement(requirement("transformers")).specifier


def test_the_page_of_versions_has_their_table():
    page = (ROOT / "docs/versions.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) \| (\S+ \| \S+ \| .+?) \|", page, re.MULTILINE))
    for name, one in SUPPORTED.items():
        shown = {"python": "Python", "triton": "Triton", "transformers": "Transformers"}
        assert rows[shown.get(name, name)] == (
            f"{one.oldest} | {one.newest} | {one.refused_from or 'none'}"
        )


# What programs are told.


@pytest.mark.parametrize(
    ("package", "version", "command"),
    [
        ("torch", "2.9.1+cpu", "'torch>=2.10'"), ("triton", "3.5.1", "'triton>=3.6'"),
        ("transformers", "5.19.0", "'transformers>=5.20,<5.25'"),
        ("transformers", "5.25.0.dev0", "'transformers>=5.20,<5.25'"),
    ],
)  # fmt: skip
def test_another_version_is_refused_by_name(package, version, command):
    message = f"specdec-kernels does not run with {package} {version}: pip install {command}"
    with pytest.raises(ImportError, match=f"^{re.escape(message)}$"):
        refuse_other(package, version)
    for taken in ("torch 2.10.0", "torch 3.0.0a0+git1", "triton 3.6.0", "transformers 5.24.9"):
        name, found = taken.split()
        refuse_other(name, found)
        assert Requirement(requirement(name)).specifier.contains(Version(found), prereleases=True)


@pytest.mark.filterwarnings("ignore:'specdec_kernels")  # they are in sys.modules already
@pytest.mark.parametrize(
    ("package", "version", "module"),
    [
        ("torch", "2.9.1", "specdec_kernels._ops"),
        ("triton", "3.5.1", "specdec_kernels.triton.launch"),
    ],
)
def test_an_older_package_is_refused_before_it_is_used(monkeypatch, package, version, module):
    monkeypatch.setattr(pytest.importorskip(package), "__version__", version)
    with pytest.raises(ImportError, match=f"does not run with {package} {re.escape(version)}"):
        runpy.run_module(module)


@pytest.mark.parametrize("one", DIFFERENCES, ids=lambda one: f"{one.package}-{one.file}")
def test_no_difference_is_kept_for_versions_that_are_not_stated(one):
    """Where this fails, the named code goes, and its line in the table."""
    supported = SUPPORTED[one.package]
    assert release(supported.oldest) <= release(one.until) <= release(supported.newest)
