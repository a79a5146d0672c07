"""The built libraries: what they need, what they export, and what they remember of their build."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
import specdec_host
from packages.check import faults_of_library
from packages.elf import symbols

import specdec_kernels

LIBRARY = Path(specdec_kernels.__file__).with_name("_C.so")
MODULE = Path(specdec_host._host.__file__)
# Part of binutils, which a machine that tests a wheel may lack, and macOS does.
needs_readelf = pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")


@needs_readelf
@pytest.mark.parametrize("path", [LIBRARY, MODULE], ids=lambda path: path.name.split(".")[0])
def test_a_library_needs_and_exports_what_it_may(path):
    """Neither Python in the one nor torch in the other, no C++ symbol of torch, none of ours."""
    assert len(symbols(path)) > 100
    assert not list(faults_of_library(path, f"{path.parent.name}/{path.name}", "linux_x86_64"))


SOURCE = """
extern "C" int other_function();
extern "C" int specdec_visible() { return other_function(); }
namespace std { template <class T> void local() {} }
template void std::local<int>();
extern "C" const char* PyInit__host() { return "/home/builder/include/torch.h"; }
"""


@needs_readelf
@pytest.mark.skipif(not shutil.which("c++"), reason="needs a compiler")
def test_faults_of_a_library_are_named(tmp_path):
    ours = "specdec_kernels/_C.so"
    (tmp_path / "one.cpp").write_text(SOURCE)
    command = "c++ -shared -fPIC one.cpp -o one.so -Wl,-rpath,/opt/lib -Wl,--no-as-needed -lresolv"
    subprocess.run(command.split(), cwd=tmp_path, check=True)
    found = list(faults_of_library(tmp_path / "one.so", ours, "linux_x86_64"))
    for expected in (
        "must need only (aoti_torch_|torch_|stable_torch_)\\w+ beside the system, needs other_fun",
        "must export [], exports ['PyInit__host', '_ZSt5localIiEvv', 'specdec_visible']",
        "must have no RUNPATH, has /opt/lib",
        "must need only libraries of the system, needs libresolv.so.2",
        "must name no path of the build, names /home/builder/include/torch.h",
    ):
        assert any(fault.startswith(f"{ours} {expected}") for fault in found), (expected, found)
    host = list(faults_of_library(tmp_path / "one.so", "specdec_host/_host.so", "linux_x86_64"))
    assert any("must export ['PyInit__host'], exports" in fault for fault in host)


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
