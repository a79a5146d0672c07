"""Writes the ops as a kernel for the package `kernels`, in sources for its builder and built.

Usage: `python hub_kernel.py FOLDER`, or `make more TASK=hub-kernel`. CMake says which
sources are compiled with which options, so nothing is listed a second time. docs/hub-kernels.md
describes the folder.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib.util
import json
import os
import platform
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.resolve()
PACKAGE = ROOT / "specdec_kernels"
CSRC = ROOT / "csrc"
NAME, LICENSE, BACKEND = "specdec-kernels", "Apache-2.0", "cpu"
MODULE = NAME.replace("-", "_")
# Since this version of torch, one library serves all later ones.
STABLE_ABI = runpy.run_path(str(PACKAGE / "versions.py"))["SUPPORTED"]["torch"].oldest
# The hub's version of a kernel is a number, which changes with what callers may rely on.
VERSION = int(re.findall(r'^__version__ = "(\d+)', (PACKAGE / "__init__.py").read_text(), re.M)[0])
INCLUDE = ["csrc/include", "csrc"]

# Target of CMake -> its sources, relative to the root, and its options that change the code.
Targets = dict[str, tuple[list[str], list[str]]]
CHANGES_CODE = re.compile(r"-[Om]|-f(?!PIC|macro-prefix-map)|-DSPECDEC_")

BINDING = """// The builder imports the library as a module of Python, to load it.
#include "registration.h"

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
"""
FLAKE = """{
  description = "Verification of speculative decoding";
  inputs.kernel-builder.url = "github:huggingface/kernels";
  outputs = { self, kernel-builder }:
    kernel-builder.lib.genKernelFlakeOutputs { inherit self; path = ./.; };
}
"""
CARD = f"""---
library_name: kernels
license: {LICENSE.lower()}
---

The verification step of speculative decoding as PyTorch ops: `sample`, `verify_chain`,
`verify_tree`, and the ops that change KV caches. On GPUs Triton kernels serve the first two and the
layouts of trees, and PyTorch's indexing the caches; `verify_tree` runs on the CPU.
"""


def python_files() -> list[Path]:
    """The modules of the package, relative to it."""
    return sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def identifier() -> str:
    """The namespace of the ops, which no other sources share."""
    files = [*map(PACKAGE.joinpath, python_files()), *CSRC.rglob("*.*"), ROOT / "CMakeLists.txt"]
    digest = hashlib.sha256()
    for path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)} {len(content)} ".encode() + content)
    return f"_{MODULE}_{BACKEND}_{digest.hexdigest()[:7]}"


def cmake(*arguments: object) -> None:
    # cmake and ninja of this environment count even where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("cmake", path=path)
    if program is None:
        raise SystemExit("hub_kernel.py needs cmake and ninja: pip install cmake ninja")
    subprocess.run([program, *map(str, arguments)], check=True, env=os.environ | {"PATH": path})


def configure(build: Path, *options: str) -> None:
    """Prepare a build of `_C` alone, without CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        raise SystemExit("hub_kernel.py needs torch: pip install torch")
    fixed = ["-DCMAKE_BUILD_TYPE=Release", "-DSPECDEC_CUDA=off", "-DSPECDEC_HOST=OFF"]
    fixed.append(f"-DTORCH_ROOT={Path(torch.origin).parent}")
    cmake("-S", ROOT, "-B", build, "-G", "Ninja", "--log-level=ERROR", *fixed, *options)


def compiled(build: Path) -> Targets:
    """What CMake compiles, file by file."""
    # The builder defines the namespace, by a name of its own.
    own = ("-DSPECDEC_UNITY=OFF", "-DSPECDEC_LIBRARY=TORCH_EXTENSION_NAME")
    configure(build, "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *own)
    sources: dict[str, list[str]] = defaultdict(list)
    options: dict[str, list[str]] = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        (target,) = {w.split("/")[1].removesuffix(".dir") for w in words if w.endswith(".o")}
        sources[target].append(Path(entry["file"]).relative_to(ROOT).as_posix())
        options[target] = [*dict.fromkeys(filter(CHANGES_CODE.match, words))]
    return {target: (sorted(sources[target]), options[target]) for target in sorted(sources)}


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def table(name: str, entries: dict[str, Any]) -> str:
    """A table of TOML, whose strings, numbers and arrays are those of JSON."""
    lines = [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
    return "\n".join([f"[{name}]", *lines, ""])


def write_sources(folder: Path, targets: Targets, repo_id: str | None = None) -> None:
    """What the builder compiles, in the layout that it asks for."""
    for path in python_files():
        if path.name != "_ops.py":  # the builder writes its own
            write(folder / "torch-ext" / MODULE / path, (PACKAGE / path).read_bytes())
    headers = [path.relative_to(ROOT).as_posix() for path in sorted(CSRC.rglob("*.h"))]
    for name in headers:
        write(folder / name, (ROOT / name).read_bytes())
    shutil.copy(ROOT / "LICENSE", folder)
    files = {"flake.nix": FLAKE, "CARD.md": CARD, "torch-ext/torch_binding.cpp": BINDING}
    for name, text in files.items():
        write(folder / name, text)

    general = {"name": NAME, "version": VERSION, "edition": 5, "license": LICENSE}
    toml = [table("general", general | {"backends": [BACKEND]})]
    if repo_id:
        toml.append(table("general.hub", {"repo-id": repo_id}))
    times = Counter(source for sources, _ in targets.values() for source in sources)
    for target, (sources, options) in targets.items():
        names = []
        for source in sources:
            # The builder compiles a file once: for each instruction set it gets a copy.
            names.append(source if times[source] == 1 else f"{target}/{Path(source).name}")
            write(folder / names[-1], (ROOT / source).read_bytes())
        if target == "_C":
            src = ["torch-ext/torch_binding.cpp", *names, *headers]
            toml.append(table("torch", {"include": INCLUDE, "cxx-flags": options, "src": src}))
            toml.append(table("torch.stable-abi", {BACKEND: STABLE_ABI}))
        else:
            own = {"backend": BACKEND, "depends": ["torch"], "include": INCLUDE}
            toml.append(table(f"kernel.{target}", own | {"cxx-flags": options, "src": names}))
    write(folder / "build.toml", "\n".join(toml))


def build_library(build: Path, namespace: str) -> Path:
    """`_C.so` with its ops in a namespace of their own."""
    given = shlex.split(os.environ.get("CMAKE_ARGS", ""))
    configure(build, f"-DSPECDEC_LIBRARY={namespace}", *given)
    cmake("--build", build, "--target", "_C")
    return build / "_C.so"


def write_variant(folder: Path, library: Path, namespace: str) -> Path:
    """What `kernels` loads on this machine under torch >= STABLE_ABI. Returns its folder."""
    abi = f"torch-stable-abi{STABLE_ABI.replace('.', '')}"
    variant = folder / "build" / f"{abi}-{BACKEND}-{platform.machine()}-linux"
    contents = {path.as_posix(): (PACKAGE / path).read_bytes() for path in python_files()}
    contents[library.name] = library.read_bytes()
    for name, content in contents.items():
        write(variant / name, content)
    hashes = {
        name: base64.b64encode(hashlib.sha256(content).digest()).decode()
        for name, content in sorted(contents.items())
    }
    metadata = {
        "name": NAME,
        "id": namespace,
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": BACKEND},
        "digest": {"algorithm": "sha256", "files": hashes},
    }
    write(variant / "metadata.json", json.dumps(metadata, indent=2) + "\n")
    return variant


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where to write; it must not exist")
    parser.add_argument("--repo-id", help="the repository on the hub that the builder uploads to")
    args = parser.parse_args()
    if platform.system() != "Linux":
        parser.error(f"the kernel is built on Linux, not on {platform.system()}")
    if args.folder.exists():
        parser.error(f"folder must not exist, got {args.folder}")
    with tempfile.TemporaryDirectory() as build:
        namespace = identifier()
        targets = compiled(Path(build, "sources"))
        library = build_library(Path(build, "library"), namespace)
        write_sources(args.folder, targets, args.repo_id)
        print(write_variant(args.folder, library, namespace))


if __name__ == "__main__":
    main()
