"""The built library `_C.so`: what it needs, what it exports, and what it remembers of its build."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import torch
from support.sources import CSRC

import specdec_kernels
from specdec_kernels.versions import SUPPORTED, release

LIBRARY = Path(specdec_kernels.__file__).with_name("_C.so")
# nm and readelf are part of binutils, which a machine that tests a wheel may lack.
needs_nm = pytest.mark.skipif(not shutil.which("nm"), reason="needs nm")


def nm(*flags):
    out = subprocess.run(["nm", "-D", *flags, LIBRARY], capture_output=True, text=True, check=True)
    return [
        line.split()[-1] if "--demangle" not in flags else line for line in out.stdout.splitlines()
    ]


# Functions of the stable ABI (torch/csrc/stable, aoti_torch/c/shim.h).
STABLE = re.compile(r"^(aoti_torch_|torch_|stable_torch_)\w+$")


@needs_nm
def test_the_library_needs_no_python_and_no_cpp_symbol_of_torch():
    needed = nm("--undefined-only", "--demangle")
    assert needed
    wrong = [s for s in needed if re.search(r"\b(_?Py[A-Z_]\w*|c10::|at::|torch::|caffe2::)", s)]
    assert not wrong, wrong


def stable_functions():
    names = [s.split("@")[0] for s in nm("--undefined-only")]
    return {s for s in names if STABLE.match(s)}


@needs_nm
def test_the_library_needs_no_function_that_the_oldest_torch_lacks():
    """The headers of torch declare every symbol it needs outside of blocks for later versions."""
    assert stable_functions()
    oldest = release(SUPPORTED["torch"].oldest)
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
                (later if any(v > oldest for v in inside) else declared).add(name)
    is_oldest = release(torch.__version__) == oldest  # and has no headers of later versions
    assert later or is_oldest, "the headers name no version, so this test proves nothing"
    assert stable_functions() <= declared, stable_functions() - declared


@needs_nm
def test_the_library_exports_no_symbol_of_ours():
    names = nm("--defined-only")
    ours = [s for s in names if "specdec" in s]
    assert not ours, ours
    assert len(names) < 200


def dynamic_section():
    out = subprocess.run(["readelf", "-d", LIBRARY], capture_output=True, text=True, check=True)
    return out.stdout


# macOS has nm without readelf.
@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_the_library_holds_no_path_of_the_build_and_links_libtorch_cpu_only():
    section = dynamic_section()
    assert "RPATH" not in section
    assert "RUNPATH" not in section
    linked = set(re.findall(r"NEEDED.*\[(.+?)\]", section))
    assert {s for s in linked if "torch" in s or "c10" in s} == {"libtorch_cpu.so"}
    assert not {s for s in linked if re.search(r"cuda|python", s)}


def test_messages_in_the_library_carry_relative_paths():
    assert str(CSRC).encode() not in LIBRARY.read_bytes()


def device_code(data):
    """(kind, architecture) of the code in the fat binaries of a file; kind 2 is machine code."""
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


@pytest.mark.skipif(not specdec_kernels.has_cuda_kernels(), reason="_C.so has no CUDA kernels")
def test_a_build_with_cuda_has_code_for_every_architecture_and_ptx_for_later_ones():
    wanted = {(2, 80), (2, 90), (2, 100), (2, 120), (1, 120)}
    assert device_code(LIBRARY.read_bytes()) >= wanted
