"""Compares a vLLM with what the plug-in was written for: ``python -m specdec_vllm.signatures``.

It reads wheels, source distributions and source trees, and imports nothing of them. For each
function that the plug-in replaces it prints whether its arguments are those of `vllm_interface`, in
a table with a column for each path, and then what differs.
"""

from __future__ import annotations

import argparse
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from specdec_kernels.versions import wrong_arguments
from specdec_vllm.vllm_interface import SUPPORTED, arguments_in_source, replaced_in

PATH = "a wheel, an sdist or a source tree of vLLM"


def sources(path: Path) -> dict[str, str]:
    """The Python files of a vLLM by their names below the folder that holds the package.

    Raises:
        ValueError: the path is not what `PATH` says.
    """
    found: dict[str, str] = {}
    if path.is_dir():
        for file in (path / "vllm").rglob("*.py"):
            found[file.relative_to(path).as_posix()] = file.read_text(encoding="utf-8")
    elif path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if name.startswith("vllm/") and name.endswith(".py"):
                    found[name] = wheel.read(name).decode()
    elif path.is_file() and tarfile.is_tarfile(path):
        with tarfile.open(path) as sdist:
            for member in sdist:
                name = member.name.partition("/")[2]  # below the one folder of an sdist
                if name.startswith("vllm/") and name.endswith(".py") and member.isfile():
                    found[name] = sdist.extractfile(member).read().decode()  # type: ignore[union-attr]
    if not found:
        raise ValueError(f"PATH must be {PATH}, got {path}")
    return found


def version_of(files: Mapping[str, str]) -> str | None:
    """The version that the sources state; those of a repository state none."""
    stated = re.search(r"\bversion = '(\d+\.\d+[^']*)'", files.get("vllm/_version.py", ""))
    return stated[1] if stated else None


def compare(files: Mapping[str, str]) -> dict[tuple[str, str], str | None]:
    """What is wrong with each function that is replaced in this version, or None.

    Sources that state no version are compared with the newest that is supported.
    """

    def read(module: str) -> str | None:
        return files.get(f"{module.replace('.', '/')}.py")

    return {
        place: wrong_arguments(place, takes, arguments_in_source(read, *place))
        for place, takes in replaced_in(version_of(files) or SUPPORTED[-1]).items()
    }


def main(arguments: list[str] | None = None) -> int:
    """Print the table. Returns 1 if a function differs, otherwise 0."""
    parser = argparse.ArgumentParser(prog="python -m specdec_vllm.signatures")
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help=PATH)
    columns = []
    for path in parser.parse_args(arguments).paths:
        try:
            files = sources(path)
        except (ValueError, OSError) as error:
            parser.error(str(error))
        version = version_of(files) or f"not stated, as {SUPPORTED[-1]}"
        columns.append((version, compare(files)))
    print("| function |", *(f"{version} |" for version, _ in columns))
    print("|---|", *("---|" for _ in columns), sep="")
    for place in dict.fromkeys(place for _, found in columns for place in found):
        cells = (_cell(place, found) for _, found in columns)
        print(f"| `{'.'.join(place)}` |", *(f"{cell} |" for cell in cells))
    reasons = [f"{v}: {why}" for v, found in columns for why in found.values() if why]
    print("", *reasons, sep="\n")
    return int(bool(reasons))


def _cell(place: tuple[str, str], found: Mapping[tuple[str, str], str | None]) -> str:
    if place not in found:
        return "not replaced"
    return "other" if found[place] else "same"


if __name__ == "__main__":
    raise SystemExit(main())
