"""The rooms of DESIGN section 1: who may include or import whom, and what the built file needs."""

import ast
import doctest
import importlib
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specdec_kernels

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
PACKAGE = Path(specdec_kernels.__file__).parent
NATIVE = sorted(p for p in CSRC.rglob("*") if p.suffix in (".h", ".cpp", ".cu", ".cuh"))
PYTHON = sorted(
    p for folder in ("specdec_kernels", "python", "tests", "bench", "examples")
    for p in (ROOT / folder).rglob("*.py")
)  # fmt: skip
LIMIT = 400
PUBLIC = [
    "_ops", "analysis", "chain", "enumeration", "estimates", "kv", "sample", "testing", "reference",
    "expand_tree", "tree_layout",
    "paged",
    "tree",
]  # fmt: skip

pytestmark = pytest.mark.skipif(not CSRC.is_dir(), reason="the sources are not beside the tests")


def relative(path):
    return str(path.relative_to(ROOT))


def includes(path):
    return re.findall(r'^\s*#\s*include\s+[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE)


def imports(path):
    """Top-level and nested imports, as dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found |= {f"{node.module}.{a.name}" for a in node.names}
    return found


def room(path):
    return path.relative_to(CSRC).parts[0]


def test_the_sources_are_where_the_rooms_are():
    assert {room(p) for p in NATIVE} >= {"include", "cpu", "torch"}
    assert len(NATIVE) > 15


ALLOWED = {  # room -> rooms of this project that it may include
    "include": {"specdec"},
    "cpu": {"specdec", "cpu"},
    "cuda": {"specdec", "cuda"},
    "torch": {"specdec", "torch", "cpu"},
    "host": {"specdec", "host", "cpu"},
}
OURS = {"specdec", "cpu", "cuda", "torch", "host"}


@pytest.mark.parametrize("path", NATIVE, ids=relative)
def test_native_rooms_include_only_what_they_may(path):
    for name in includes(path):
        first = name.split("/")[0]
        stable = re.match(r"torch/(csrc/stable|headeronly|csrc/inductor/aoti_torch/c)/", name)
        if room(path) != "torch":
            assert not re.match(r"(torch|ATen|c10|pybind11)/", name) or (
                room(path) == "host" and name.startswith("pybind11/")
            ), f"{relative(path)} includes {name}"
        if first in OURS and not stable:
            assert first in ALLOWED[room(path)], f"{relative(path)} includes {name}"
        assert not re.match(r"(ATen|c10|torch/(all|extension|library)\.h)", name)


def test_cuda_sources_name_nothing_of_torch():
    files = [p for p in NATIVE if room(p) == "cuda"]
    assert {p.name for p in files} >= {"sample.cu", "chain.cu", "kv.cu", "row.cuh", "team.cuh"}
    for path in files:
        found = re.search(r"\b(torch|at|c10|aten)::|\bTensor\b", path.read_text())
        assert not found, f"{relative(path)} names {found and found[0]}"


def test_the_instruction_set_is_the_only_thing_torch_knows_of_the_kernels_inside():
    """Beyond `specdec/*.h`, the torch room needs one name of the CPU room."""
    seen = {n for p in NATIVE if room(p) == "torch" for n in includes(p) if n.startswith("cpu/")}
    assert seen <= {"cpu/tile.h"}


FORBIDDEN = {  # folder -> what nothing in it may import
    "specdec_kernels": r"(transformers|specdec_hf|specdec_vllm|specdec_host|numpy|tests|bench)\b",
    "python/specdec_hf": r"(specdec_vllm|tests|bench|vllm)\b",
    "python/specdec_vllm": r"(specdec_hf|specdec_host|transformers|tests|bench)\b",
    "python/specdec_host": r"(torch|specdec_hf|specdec_vllm|specdec_kernels|transformers)\b",
}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_python_packages_import_only_what_they_may(folder):
    for path in PYTHON:
        if relative(path).startswith(folder + "/"):
            wrong = {n for n in imports(path) if re.match(FORBIDDEN[folder], n)}
            assert not wrong, f"{relative(path)} imports {wrong}"


def test_the_loop_uses_the_public_api_and_never_the_raw_ops():
    for path in PYTHON:
        if relative(path).startswith("python/specdec_hf/"):
            assert "torch.ops" not in path.read_text(), relative(path)
            private = {n for n in imports(path) if re.search(r"specdec_kernels\.(.*\.)?_", n)}
            assert not private, f"{relative(path)} imports {private}"


def test_importing_the_ops_loads_no_transformers():
    program = "import sys, specdec_kernels; print('transformers' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == "False"


def test_files_stay_short():
    lines = {relative(p): len(p.read_text().splitlines()) for p in (*NATIVE, *PYTHON)}
    assert not {name: n for name, n in lines.items() if n > LIMIT}


def test_one_op_has_the_same_base_name_in_each_room():
    for base in ("sample", "chain", "kv", "tree_layout", "expand_tree"):
        wanted = [f"include/specdec/{base}.h", f"cpu/{base}.cpp", f"torch/{base}.cpp"]
        missing = [w for w in wanted if not (CSRC / w).exists()]
        assert not missing
        assert (PACKAGE / f"{base}.py").exists()
        assert (ROOT / f"tests/test_{base}.py").exists()
    assert all((CSRC / f"cuda/{base}.cu").exists() for base in ("sample", "chain", "kv"))
    bases = ("sample", "chain", "kv", "tree_layout", "expand_tree")
    assert all((PACKAGE / f"triton/{base}.py").exists() for base in bases)


def test_every_schema_is_given_in_registration():
    """Those of `schemas.h` by their name, for the tests register them a second time."""
    for path in NATIVE:
        if path.name != "registration.cpp":
            assert "m.def(" not in path.read_text(), relative(path)
        if path.name != "schemas.h":
            assert not re.search(r"k\w+Schema\s*=", path.read_text()), relative(path)
    named = re.findall(r"\b(k\w+Schema)\s*=", (CSRC / "torch/schemas.h").read_text())
    given = re.findall(
        r"m\.def\(specdec::(k\w+Schema)\)", (CSRC / "torch/registration.cpp").read_text()
    )
    assert named
    assert sorted(given) == sorted(named)


# The built file.

LIBRARY = PACKAGE / "_C.so"
# nm and readelf are of binutils, which a wheel can be tested without; CI has them.
needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")


def nm(*flags):
    out = subprocess.run(["nm", "-D", *flags, LIBRARY], capture_output=True, text=True, check=True)
    return [
        line.split()[-1] if "--demangle" not in flags else line for line in out.stdout.splitlines()
    ]


# Shims of the stable ABI at the floor, torch 2.10 (torch/csrc/stable, aoti_torch/c/shim.h).
SHIM = re.compile(r"^(aoti_torch_|torch_|stable_torch_)\w+$")


@needs_nm
def test_the_library_needs_no_python_and_no_cpp_symbol_of_torch():
    needed = nm("--undefined-only", "--demangle")
    assert needed
    wrong = [s for s in needed if re.search(r"\b(_?Py[A-Z_]\w*|c10::|at::|torch::|caffe2::)", s)]
    assert not wrong, wrong


def shims():
    names = [s.split("@")[0] for s in nm("--undefined-only")]
    return {s for s in names if SHIM.match(s)}


@needs_nm
def test_the_library_needs_only_shims_that_the_floor_has():
    """Every torch symbol is declared in the headers of torch, for 2.10 or before."""
    assert shims()
    folder = Path(torch.__file__).parent / "include/torch/csrc"
    headers = [*(folder / "inductor/aoti_torch").rglob("*.h"), *(folder / "stable").rglob("*.h")]
    later = set()
    declared = set()
    for header in headers:
        inside = []  # versions of the #if blocks around a line
        for line in header.read_text().splitlines():
            if re.match(r"\s*#\s*if", line):
                version = re.search(
                    r"TORCH_FEATURE_VERSION\s*>=\s*TORCH_VERSION_(\d+)_(\d+)_", line
                )
                inside.append(tuple(map(int, version.groups())) if version else (0, 0))
            elif re.match(r"\s*#\s*endif", line):
                inside.pop()
            for name in re.findall(r"\b(?:aoti_torch_|torch_|stable_torch_)\w+", line):
                (later if any(v > (2, 10) for v in inside) else declared).add(name)
    assert later, "the headers of this torch name no version: the test has lost its footing"
    assert shims() <= declared, shims() - declared


@needs_nm
def test_the_library_exports_next_to_nothing():
    names = nm("--defined-only")
    ours = [s for s in names if "specdec" in s]
    assert not ours, ours
    assert len(names) < 200


def dynamic_section():
    out = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True)
    return out.stdout


# As needs_nm; macOS has nm alone.
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_library_remembers_no_folder_of_the_build_and_links_libtorch_cpu_only():
    section = dynamic_section()
    assert "RPATH" not in section
    assert "RUNPATH" not in section
    linked = set(re.findall(r"NEEDED.*\[(.+?)\]", section))
    assert {s for s in linked if "torch" in s or "c10" in s} == {"libtorch_cpu.so"}
    assert not {s for s in linked if re.search(r"cuda|python", s)}


def test_messages_in_the_library_carry_relative_paths():
    assert str(CSRC).encode() not in LIBRARY.read_bytes()


def device_code(data):
    """(kind, architecture) of everything in the fat binaries of a file; kind 2 is machine code."""
    found, at = set(), 0
    while (at := data.find(b"\x50\xed\x55\xba", at)) >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        if (version, header) == (1, 16):
            entry, end = at + header, at + header + size
            while entry < end:
                kind, _, skip, length = struct.unpack_from("<HHIQ", data, entry)
                found.add((kind, struct.unpack_from("<I", data, entry + 28)[0]))
                entry += skip + length
        at += 4
    return found


# A build without nvcc or with SPECDEC_CUDA=off holds no device code to look at.
@pytest.mark.skipif(not specdec_kernels.has_cuda_kernels(), reason="_C.so has no CUDA kernels")
def test_a_build_with_cuda_has_code_for_every_architecture_and_ptx_for_later_ones():
    wanted = {(2, 80), (2, 90), (2, 100), (2, 120), (1, 120)}
    assert device_code(LIBRARY.read_bytes()) >= wanted


# The public face.


def test_all_is_what_the_package_offers():
    for name in specdec_kernels.__all__:
        assert getattr(specdec_kernels, name) is not None
    assert list(specdec_kernels.__all__) == sorted(specdec_kernels.__all__)


def test_public_functions_have_docstrings_with_shapes_errors_and_an_example():
    for name in specdec_kernels._library.OPS:
        text = getattr(specdec_kernels, name).__doc__
        for part in ("Args:", "Raises:", ">>>", "[B" if name != "sample" else "[R"):
            assert part in text, f"{name} lacks {part}"


@pytest.mark.parametrize("name", PUBLIC)
def test_doctests_run(name):
    module = importlib.import_module(f"specdec_kernels.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.failed == 0
    if name in ("analysis", "chain", "kv", "sample", "tree"):
        assert result.attempted >= 3


def test_a_missing_library_is_an_import_error_with_the_reason(tmp_path):
    """Never a silent fallback: the package without `_C.so`, and with one that does not load."""
    package = tmp_path / "specdec_kernels"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("_C.so", "__pycache__"))
    for content, reason in ((None, "was not built"), (b"junk", "does not load under torch")):
        if content:
            (package / "_C.so").write_bytes(content)
        out = subprocess.run(
            [sys.executable, "-c", "import specdec_kernels"], cwd=tmp_path, capture_output=True,
            text=True, check=False, env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        )  # fmt: skip
        last = out.stderr.strip().splitlines()[-1]
        assert out.returncode == 1
        assert last.startswith("ImportError: _C.so")
        assert reason in last
