"""The versions of Python, torch, Triton and Transformers that this project runs with.

This is the only statement of them: errors read it, and pyproject.toml, the build, the documents and
the tests are compared with it. `DIFFERENCES` lists every place whose code depends on a version. The
module imports nothing but Python's own modules, so that the Makefile can run it as a file.

>>> from specdec_kernels.versions import SUPPORTED
>>> SUPPORTED["torch"].oldest
'2.10'
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["DIFFERENCES", "SUPPORTED", "Difference", "Supported", "refuse_other", "requirement"]


class Supported(NamedTuple):
    """The versions of one package, each as ``"major.minor"``.

    Attributes:
        oldest: the first that is taken; earlier ones are refused by name.
        newest: the last that tests have run with.
        refused_from: the first later one that is refused, or None where later ones are taken, too.
        reason: why the range begins and ends there.
        installed: what `make test` and the workflows install, where that is not the newest.
    """

    oldest: str
    newest: str
    refused_from: str | None
    reason: str
    installed: str | None = None


SUPPORTED = {
    "python": Supported("3.10", "3.14", None, "torch 2.10 is built for Python 3.10 and later"),
    "torch": Supported("2.10", "2.15", None, "`_C.so` uses the stable ABI of torch 2.10", "2.13"),
    "triton": Supported("3.6", "3.9", None, "torch 2.10 brings Triton 3.6"),
    "transformers": Supported(
        "5.20", "5.24", "5.25", "a minor version renames arguments, as 5.24 has renamed the cache"
    ),
}


class Difference(NamedTuple):
    """A place in the sources that depends on the version of a package.

    Attributes:
        package: a key of `SUPPORTED`.
        until: the last version that needs it. Once `SUPPORTED` begins later, the code is to go, and
            a test fails until it has gone.
        file: relative to the root of the repository.
        effect: what that version does, in a sentence.
    """

    package: str
    until: str
    file: str
    effect: str


DIFFERENCES = (
    Difference("python", "3.10", "setup.py", "Python has no module tomllib; setuptools brings it."),
    Difference("python", "3.10", "Makefile", "Python has no module tomllib."),
    Difference("triton", "3.6", "more.mk", "The interpreter does not run under NumPy 2.4."),
    Difference("python", "3.10", "tests/mutants/ledger.py", "Python has no module tomllib."),
    Difference("python", "3.10", "tests/support/sources.py", "Python has no module tomllib."),
    Difference(
        "torch",
        "2.13",
        "python/specdec_hf/runner/spec_runner.py",
        "Attention without a mask reads keys that heads share once for each head.",
    ),
    Difference(
        "triton",
        "3.6",
        "specdec_kernels/triton/row/tile.py",
        "A device function cannot return a record with a member that may be None.",
    ),
    Difference(
        "triton",
        "3.9",
        "tests/support/triton_interpreter.py",
        "The interpreter replaces the functions of triton.language in every call.",
    ),
    Difference(
        "transformers",
        "5.22",
        "tests/support/hf_models.py",
        "There are no Lfm3 and no Dots3Note.",
    ),
    Difference(
        "transformers",
        "5.23",
        "python/specdec_hf/runner/protocol.py",
        "The cache is called `past_key_values`, and not `cache`.",
    ),
    Difference(
        "transformers",
        "5.24",
        "specdec_kernels/compat/transformers.py",
        "These are the arguments of `_speculative_sampling`.",
    ),
)


def requirement(package: str) -> str:
    """The range of a package as pip reads it.

    >>> requirement("transformers")
    'transformers>=5.20,<5.25'
    """
    oldest, _, refused_from, *_ = SUPPORTED[package]
    return f"{package}>={oldest}" + (f",<{refused_from}" if refused_from else "")


def refuse_other(package: str, version: str) -> None:
    """Refuse an installed version that lies outside of the range.

    Args:
        package: a key of `SUPPORTED`.
        version: as the package gives it, such as ``"2.13.0+cpu"``.

    Raises:
        ImportError: names the package, its version and the command that installs another.
    """
    oldest, _, refused_from, *_ = SUPPORTED[package]
    found = release(version)
    if found < release(oldest) or (refused_from and found >= release(refused_from)):
        command = shlex.join(["pip", "install", requirement(package)])
        raise ImportError(f"specdec-kernels does not run with {package} {version}: {command}")


def release(version: str) -> tuple[int, int]:
    """Major and minor number of a version.

    >>> release("2.13.0+cpu")
    (2, 13)
    """
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()  # type: ignore[union-attr]
    return int(major), int(minor)


def wrong_arguments(
    place: tuple[str, str], expected: str, found: Callable[..., Any] | str | None
) -> str | None:
    """What is wrong with the arguments of a function of another project, or None.

    Args:
        place: its module and its name.
        expected: the names of its arguments.
        found: the function, the names of its arguments, or None where there is none.

    >>> wrong_arguments(("math", "hypot"), "x y", "x y z")
    'math.hypot must take x y, got x y z'
    """
    if callable(found):
        found = " ".join(inspect.signature(found).parameters)
    if found == expected:
        return None
    return f"{'.'.join(place)} must take {expected}, got {found or 'nothing'}"


def pins(end: str) -> list[str]:
    """What pip installs for an environment of the oldest or newest versions, for the Makefile.

    >>> pins("oldest")[0]
    'torch==2.10.*'
    """
    return [
        f"{name}=={(end == 'newest' and one.installed) or getattr(one, end)}.*"
        for name, one in SUPPORTED.items()
        if name != "python"
    ]
