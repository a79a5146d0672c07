"""The library of the C interface, built and called through ctypes.

The structs are read from the header, and their fields have the names of the ops' schemas.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from support.shared_build import built_once
from support.sources import ROOT

MARKS = [
    pytest.mark.build,
    pytest.mark.skipif(not (ROOT / "CMakeLists.txt").is_file(), reason="the sources are not here"),
]
BUILD = ROOT / "build/c"  # kept, because the kernels take minutes
HEADER = ROOT / "csrc/include/specdec/specdec.h"
PLAIN = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
NUMBERS = {name: int(n) for name, n in re.findall(r"\bSPECDEC_(\w+) = (\d+)", PLAIN)}
DTYPES = {  # of one byte: any
    getattr(torch, name.lower()): NUMBERS[name]
    for name in ("FLOAT32", "FLOAT64", "FLOAT16", "BFLOAT16", "INT32", "INT64")
}
WORKSPACE = ("sample", "verify_chain", "verify_tree")  # ops whose CUDA kernels need one
PAGED = ("paged_append_", "paged_truncate_", "paged_compact_")
OPS = (*WORKSPACE, "apply_penalties_", "kv_append_", "kv_truncate_", "kv_compact_", *PAGED)
POISON = 0x5A
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def run(*command, **how):
    """What a program prints; it fails unless it ends with status 0."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False,
        env=os.environ | {"PATH": PATH}, **how,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _install(prefix: Path, *cuda: str):
    options = ("-DSPECDEC_C=ON", "-DSPECDEC_C_STATIC=" + ("OFF" if cuda else "ON"))
    options += cuda or ("-DSPECDEC_CUDA=off",)
    run("cmake", "--fresh", "-S", ROOT, "-B", BUILD, "-G", "Ninja", *options)
    run("cmake", "--build", BUILD)
    run("cmake", "--install", BUILD, "--prefix", prefix)


def installed() -> Path:
    """The folder that the library is installed in; SPECDEC_C_PREFIX names one that exists."""
    given = os.environ.get("SPECDEC_C_PREFIX")
    return Path(given) if given else built_once("c_interface", _install)


def installed_with_cuda() -> Path:
    """The same with CUDA kernels for one architecture."""
    given = os.environ.get("SPECDEC_C_CUDA_PREFIX")
    options = ("-DSPECDEC_CUDA=on", "-DCMAKE_CUDA_ARCHITECTURES=90")
    return Path(given) if given else built_once("c_cuda", lambda path: _install(path, *options))


class CTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("dtype", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * 4), ("strides", ctypes.c_int64 * 4),
    )  # fmt: skip


def c_tensor(t: torch.Tensor) -> CTensor:
    four = ctypes.c_int64 * 4
    dtype = DTYPES[t.dtype] if t.dtype in DTYPES else NUMBERS["BYTE"]
    return CTensor(t.data_ptr(), dtype, t.dim(), four(*t.shape[:4]), four(*t.stride()[:4]))


def plain(op: str) -> str:
    """The name of an op in C."""
    return op.removesuffix("_")


def fields_of(op: str) -> dict[str, str]:
    """Name -> type of the fields of the struct of an op."""
    (body,) = re.findall(rf"typedef struct specdec_{plain(op)}_args {{(.*?)}}", PLAIN, re.DOTALL)
    found = re.findall(r"([\w ]+\*?) (\w+);", body)
    return {name: kind.strip() for kind, name in found}


@functools.cache
def struct_of(op: str) -> type[ctypes.Structure]:
    kinds = {
        "specdec_tensor": CTensor, "double": ctypes.c_double, "int64_t": ctypes.c_int64,
        "size_t": ctypes.c_size_t, "const specdec_tensor*": ctypes.POINTER(CTensor),
    }  # fmt: skip
    fields = [(name, kinds.get(kind, ctypes.c_void_p)) for name, kind in fields_of(op).items()]
    return type(op, (ctypes.Structure,), {"_fields_": fields})


@functools.cache
def library(cuda: bool = False) -> ctypes.CDLL:
    folder = installed_with_cuda() if cuda else installed()
    (path,) = folder.glob("lib*/libspecdec_kernels.so")
    loaded = ctypes.CDLL(str(path))
    loaded.specdec_last_error.restype = loaded.specdec_cpu_capability.restype = ctypes.c_char_p
    return loaded


def last_error(cuda: bool = False) -> str:
    return library(cuda).specdec_last_error().decode()


def init(op: str, size: int | None = None) -> ctypes.Structure:
    args = struct_of(op)()
    size = ctypes.sizeof(args) if size is None else size
    code = getattr(library(), f"specdec_{plain(op)}_init")(
        ctypes.byref(args), ctypes.c_size_t(size)
    )
    assert code == 0, last_error()
    return args


def filled(op: str, given: dict, outputs: dict) -> ctypes.Structure:
    """The struct with these arguments of the op's schema, and with these outputs."""
    args = init(op)
    args.kept = (given, outputs)
    for name, value in given.items():
        if name.startswith("with_") or value is None:
            continue
        if isinstance(value, list):
            setattr(args, name, (CTensor * len(value))(*map(c_tensor, value)))
            setattr(args, f"num_{name}", len(value))
        else:
            setattr(args, name, c_tensor(value) if isinstance(value, torch.Tensor) else value)
    for name, value in outputs.items():
        setattr(args, name, value.data_ptr() if given.get(f"with_{name}", True) else None)
    return args


def call(op: str, args: ctypes.Structure | None, suffix: str = "", *more, cuda=False) -> str:
    """The message of the error, or an empty string; the code of a wrong argument is 1."""
    function = getattr(library(cuda), f"specdec_{plain(op)}{suffix}")
    code = function(None if args is None else ctypes.byref(args), *more)
    return "" if code == 0 else f"{code}: {last_error(cuda)}"


def program(folder: Path, source: Path, *options: str) -> Path:
    """The program that a compiler makes of a source with what pkg-config says."""
    made = folder / source.name.replace(".", "_")
    compiler = ("cc", "-std=c11") if source.suffix == ".c" else ("c++", "-std=c++17")
    (pc,) = installed().glob("lib*/pkgconfig")
    with tempfile.TemporaryDirectory():
        flags = run("env", f"PKG_CONFIG_PATH={pc}", "pkg-config", "--cflags", "--libs",
                    "specdec-kernels").split()  # fmt: skip
    run(*compiler, "-Wall", "-Wextra", "-pedantic", "-Werror", source, "-o", made, *flags,
        f"-Wl,-rpath,{pc.parent}", *options)  # fmt: skip
    return made


def arguments_of(op: str) -> list[str]:
    return [one.name for one in torch_op(op)._schema.arguments]


def torch_op(op: str):
    return getattr(torch.ops.specdec_kernels, op).default


def returned(op: str, args: list) -> dict[str, torch.Tensor]:
    """Name -> what the torch op returns."""
    out = torch_op(op)(*args)
    out = () if out is None else out
    return dict(zip((one.name for one in torch_op(op)._schema.returns), out, strict=True))


def poisoned(expected: dict) -> tuple[dict, list[torch.Tensor]]:
    """Outputs as these, and the poisoned memory before and after each."""
    made, guards = {}, []
    for name, like in expected.items():
        n = like.numel() * like.element_size()
        buffer = torch.full((n + 128,), POISON, dtype=torch.uint8)
        made[name] = buffer[64 : 64 + n].view(like.dtype).view(like.shape)
        guards += [buffer[:64], buffer[64 + n :]]
    return made, guards


def check_outputs(given: dict, outputs: dict, expected: dict):
    """Equal bit for bit, but for outputs that were not wanted."""
    for name, want in expected.items():
        if given.get(f"with_{name}", True):
            assert outputs[name].numpy().tobytes() == want.numpy().tobytes(), name
