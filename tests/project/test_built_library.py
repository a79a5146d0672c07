"""The built libraries: what they need, what they export, and what they remember of their build."""

import re
import shutil
import struct
from pathlib import Path

import pytest
import specdec_host
import torch
from packages.check import STABLE, faults_of_library
from support.elf import symbols

import specdec_kernels
from specdec_kernels.versions import SUPPORTED, release

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


def stable_functions():
    names = [symbol.name for symbol in symbols(LIBRARY) if not symbol.is_defined]
    return {name for name in names if STABLE.fullmatch(name)}


@needs_readelf
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


def test_messages_in_the_library_carry_relative_paths():
    sources = Path(__file__).parents[2] / "csrc"
    assert str(sources).encode() not in LIBRARY.read_bytes()


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
