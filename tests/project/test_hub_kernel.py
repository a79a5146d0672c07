"""The ops as a kernel that the package `kernels` loads: hub_kernel.py and docs/hub-kernels.md."""

import json
import sys
from pathlib import Path

import pytest
from support.programs import output_of
from support.sources import CSRC, ROOT, includes, pyproject, toml

pytestmark = [
    pytest.mark.build,
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel is built on Linux"),
]

HUB = "an-organisation/specdec-kernels"


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The folder, whose library is built with less optimisation, which saves most of the time."""
    pytest.importorskip("kernels", reason="pip install '.[kernels]'")
    folder = tmp_path_factory.mktemp("hub") / "build/hub-kernel"
    output_of(
        ROOT / "hub_kernel.py", folder, "--repo-id", HUB, CMAKE_ARGS="-DCMAKE_CXX_FLAGS_RELEASE=-O0"
    )
    return folder


def test_the_kernel_gives_the_bits_of_the_package_beside_it(kernel):
    """What a process finds that has the package and, by the program of the page, the kernel."""
    (requirement,) = pyproject()["project"]["optional-dependencies"]["kernels"]
    assert f'pip install "{requirement}"' in (ROOT / "docs/hub-kernels.md").read_text()
    printed = output_of("-m", "project.loaded_kernel", kernel.parents[1])
    loaded = json.loads(printed.splitlines()[-1])
    assert loaded["equal"], "ops"
    assert all(loaded["equal"].values()), loaded["equal"]
    assert loaded["rounds"] == [True, True], "a round has the same bits, compiled as one graph too"


def test_the_builder_gets_every_source_once_and_all_that_they_include(kernel):
    from kernels._rust import Build  # noqa: PLC0415

    assert [str(backend) for backend in Build.open(kernel).general.backends] == ["cpu"]
    build = toml(kernel / "build.toml")
    assert build["general"]["hub"] == {"repo-id": HUB}
    assert build["torch"]["stable-abi"] == {"cpu": "2.10"}
    sections = [build["torch"], *build["kernel"].values()]
    listed = [name for section in sections for name in section["src"]]
    assert len(set(listed)) == len(listed)
    for name in listed:
        for header in includes(kernel / name):
            if (CSRC / header).exists() or (CSRC / "include" / header).exists():
                assert {f"csrc/{header}", f"csrc/include/{header}"} & {*listed}, (name, header)
    names = {Path(name).name for name in listed}
    others = ("host", "cuda", "c")
    cpu = [p for p in CSRC.rglob("*.cpp") if p.relative_to(CSRC).parts[0] not in others]
    assert {p.name for p in cpu} <= names
