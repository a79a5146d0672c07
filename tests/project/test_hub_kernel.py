"""The ops as a kernel that the package `kernels` loads: hub_kernel.py and docs/hub-kernels.md."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest
from support.programs import output_of
from support.sources import CSRC, ROOT, includes, pyproject, toml

import specdec_kernels

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


@pytest.fixture(scope="module")
def variant(kernel):
    (folder,) = (kernel / "build").iterdir()
    return folder


def test_the_kernel_gives_the_bits_of_the_package_beside_it(kernel, variant):
    """What a process finds that has the package and, by the program of the page, the kernel."""
    (requirement,) = pyproject()["project"]["optional-dependencies"]["kernels"]
    assert f'pip install "{requirement}"' in (ROOT / "docs/hub-kernels.md").read_text()
    printed = output_of("-m", "support.loaded_kernel", kernel.parents[1])
    loaded = json.loads(printed.splitlines()[-1])
    assert loaded["equal"], "ops"
    assert all(loaded["equal"].values()), loaded["equal"]
    # Neither calls an op of the other.
    ours, theirs = loaded["called"].values()
    own = json.loads((variant / "metadata.json").read_text())["id"]
    assert {name.split("::")[0] for name in ours} == {"specdec_kernels"}
    assert theirs == [name.replace("specdec_kernels", own) for name in ours]
    assert loaded["rounds"] == [True, True], "a round has the same bits, compiled as one graph too"
    assert loaded["names"]
    assert loaded["files"] == [specdec_kernels.__file__, str(variant / "__init__.py")]
    assert loaded["again"], "a second load has the functions of the first"
    assert loaded["by another path"] == [False, True]


def test_kernels_reads_the_metadata_and_the_hash_of_every_file(variant):
    from kernels._rust import Digest, DigestAlgorithm, Metadata  # noqa: PLC0415

    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert re.fullmatch(r"_specdec_kernels_cpu_[0-9a-f]{7}", metadata.id)
    metadata.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
    assert set(metadata.digest.files) == {
        p.relative_to(variant).as_posix() for p in variant.rglob("*.*")
    } - {"metadata.json"}


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
    cpu = [p for p in CSRC.rglob("*.cpp") if p.relative_to(CSRC).parts[0] not in ("host", "cuda")]
    assert {p.name for p in cpu} <= names


def test_what_has_instruction_sets_is_compiled_with_the_options_of_each(kernel):
    sections = {
        name.removeprefix("tile_"): section
        for name, section in toml(kernel / "build.toml")["kernel"].items()
        if name.startswith("tile_")
    }
    assert {"plain"} <= sections.keys()
    text = (ROOT / "CMakeLists.txt").read_text()
    for isa, section in sections.items():
        flags, given = section["cxx-flags"], re.findall(rf"set\(tile_flags_{isa} (.+)\)", text)
        assert {f"-DSPECDEC_ISA={isa}", "-ffp-contract=fast", "-fvisibility=hidden"} <= {*flags}
        own = {flag for line in given for flag in line.split() if flag.startswith("-m")}
        assert own <= {*flags}
        assert bool(own) == (isa != "plain") == any(flag.startswith("-m") for flag in flags)
        for name in section["src"]:
            (original,) = CSRC.rglob(Path(name).name)
            assert name.startswith(f"tile_{isa}/")
            assert (kernel / name).read_bytes() == original.read_bytes()


def test_the_sources_pass_the_checks_of_the_builder(kernel):
    """Decorators of torch.library take names that `_ops.py` made, which only the builder writes."""
    package = kernel / "torch-ext/specdec_kernels"
    assert (package / "__init__.py").exists()
    assert not (package / "_ops.py").exists()
    assert not (package / "specdec_kernels").exists()
    registering = {"custom_op", "register_fake", "register_kernel", "register_vmap", "triton_op"}
    for path in package.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call):
                    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
                    assert name not in registering, f"{path} registers {ast.unparse(call)}"
