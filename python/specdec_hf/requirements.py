"""What an extra of specdec-kernels requires, and the command that installs what is missing of it.

It is read where an import has failed, so it imports nothing but Python's own modules.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
from importlib.metadata import PackageNotFoundError, requires, version

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


def refuse_other_versions(extra: str = "hf") -> None:
    """Refuse installed packages of an extra whose version the metadata of this project excludes.

    A source tree without metadata states the versions of Transformers alone.

    Raises:
        ImportError: names the packages, their versions and the command that installs others.
    """
    from packaging.requirements import Requirement  # noqa: PLC0415  # Transformers requires it

    from specdec_kernels.versions import requirement  # noqa: PLC0415

    wrong, found = [], []
    for line in _stated() or [f"{requirement('transformers')}; extra == 'hf'"]:
        one = Requirement(line)
        if one.marker is not None and one.marker.evaluate({"extra": extra}):
            with contextlib.suppress(PackageNotFoundError):
                if not one.specifier.contains(version(one.name), prereleases=True):
                    wrong.append(f"{one.name}{one.specifier}")
                    found.append(f"{one.name} {version(one.name)}")
    if wrong:
        command = shlex.join(["pip", "install", *wrong])
        raise ImportError(f"specdec_hf does not run with {', '.join(found)}: {command}")


def _stated() -> list[str]:
    """What the project requires; nothing where it is run from a source tree."""
    try:
        return requires("specdec-kernels") or []
    except PackageNotFoundError:
        return []


def _missing(extra: str, module: str | None) -> list[str]:
    stated = _stated()
    if not stated:  # only the module is known
        return [module.partition(".")[0]] if module else []
    required = (_REQUIREMENT.match(line) for line in stated)
    return [
        one.string.partition(";")[0].strip()
        for one in required
        if one and one["extra"] in (None, extra) and importlib.util.find_spec(one["name"]) is None
    ]
