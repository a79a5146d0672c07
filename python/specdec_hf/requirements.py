"""What an extra of specdec-kernels requires, and the command that installs what is missing of it.

It is read where an import has failed, so it imports nothing but Python's own modules.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib.metadata import PackageNotFoundError, requires

_REQUIREMENT = re.compile(r"""(?P<name>[\w-]+)[^;]*(;.*\bextra == ["'](?P<extra>\w+)["'])?""")


def explain(error: ImportError) -> str:
    """The message of an import error; where packages of the extra ``hf`` are missing, says so."""
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    command = install_command("hf", module)
    if not command:
        return str(error)
    return f"specdec_hf needs packages of specdec-kernels[hf] that are not installed: {command}"


def install_command(extra: str, module: str | None) -> str:
    """How to install the missing packages of an extra, of which ``module`` is one; "" if none is.

    The packages are named, not the extra: that works where this project is no package of an index.
    """
    missing = _missing(extra, module)
    return shlex.join(["pip", "install", *missing]) if missing else ""


def _missing(extra: str, module: str | None) -> list[str]:
    try:
        stated = requires("specdec-kernels") or []
    except PackageNotFoundError:  # run from a source tree, where only the module is known
        return [module.partition(".")[0]] if module else []
    required = (_REQUIREMENT.match(line) for line in stated)
    return [
        one.string.partition(";")[0].strip()
        for one in required
        if one and one["extra"] in (None, extra) and importlib.util.find_spec(one["name"]) is None
    ]
