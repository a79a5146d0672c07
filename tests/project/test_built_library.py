"""The built libraries: what they need, what they export, and what they remember of their build."""

import shutil
import struct
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
