"""What a native library of Linux needs and exports, as readelf reads it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple


class Symbol(NamedTuple):
    """A dynamic symbol; `version` is empty where it has none, as those of torch and Python."""

    name: str
    version: str
    binding: str
    is_defined: bool


def _readelf(path: Path, *flags: str) -> str:
    env = {**os.environ, "LC_ALL": "C"}
    command = ["readelf", "-W", *flags, str(path)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def symbols(path: Path) -> list[Symbol]:
    """The dynamic symbols, without the local ones."""
    row = r"^ *\d+: \w+ +\w+ \w+ +(GLOBAL|WEAK|UNIQUE) +\w+ +(?:\[.*?\] +)?(\w+) (\S+)"
    return [
        Symbol(*name.replace("@@", "@").partition("@")[::2], binding, section != "UND")
        for binding, section, name in re.findall(row, _readelf(path, "--dyn-syms"), re.MULTILINE)
    ]


def dynamic(path: Path) -> set[tuple[str, str]]:
    """What the dynamic section names, such as ("NEEDED", "libc.so.6") or ("RPATH", "/usr/lib")."""
    return {*re.findall(r"\((\w+)\) .*\[(.*)\]$", _readelf(path, "--dynamic"), re.MULTILINE)}
