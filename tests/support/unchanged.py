"""Which tests of what surrounds the loop `make test` leaves out: those that nothing changed.

A file marked with one of GUESTS is left out by `--skip-unchanged` where its tests passed in a whole
run of that lane, and since then neither it changed, nor a file that it reaches by imports, nor the
compiled kernels, the data of the packages, a conftest.py, or what is installed. `make test-all`
has no such option.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

from support import sources

GUESTS = ("training", "analysis", "server", "papers")
TESTS = sources.ROOT / "tests"
KEY = "specdec/unchanged"  # in pytest's cache: test file -> digest of what it passed with
_IMPORT = re.compile(r"^\s*import\s+([\w.]+)", re.M)
_FROM = re.compile(r"^\s*from\s+([\w.]+)\s+import\s+(\([^)]*\)|.*)", re.M)
# What is loaded late is named in a text, such as "specdec_hf.drafters.copying:PromptLookupDrafter".
_NAMED = re.compile(r"\bspecdec_\w+(?:\.\w+)+")
_MARKED = re.compile(rf"^pytestmark = .*\bpytest\.mark\.({'|'.join(GUESTS)})\b", re.M)


@functools.cache
def _module(name: str) -> Path | None:
    """The file of a module of the packages, or of one below tests."""
    if name in sources.MODULES:
        return sources.MODULES[name]
    path = TESTS.joinpath(*name.split("."))
    places = (path.with_suffix(".py"), path / "__init__.py")
    return next((place for place in places if place.is_file()), None)


@functools.cache
def _mentioned(path: Path) -> frozenset[Path]:
    """The files of ours that a file imports or names, also inside of functions and texts."""
    text = path.read_text()
    names = {*_IMPORT.findall(text), *_NAMED.findall(text)}
    if path == sources.MODULES["specdec_hf.plugins"]:  # what the entry points name
        names |= {*_NAMED.findall((sources.ROOT / "pyproject.toml").read_text())}
    for module, imported in _FROM.findall(text):
        source = sources.absolute(module, path)
        names |= {f"{source}.{name}" for name in re.findall(r"\w+", imported)}
    files = {path.with_suffix(".pyi")} if path.with_suffix(".pyi").is_file() else set()
    for name in names:
        parts = name.split(".")
        files |= {_module(".".join(parts[:n])) for n in range(1, len(parts) + 1)}
    return frozenset(files - {None, path})


def reached(path: Path) -> set[Path]:
    """A file, and those that it reaches by imports and names."""
    found, waiting = set(), [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found.add(file)
            waiting += _mentioned(file)
    return found


@functools.cache
def _surroundings() -> bytes:
    """A digest of what any test may depend on beside the modules that it names."""
    digest = hashlib.sha256()
    packages = [sources.PACKAGE, *(sources.ROOT / "python").iterdir()]
    data = [p for folder in packages for p in folder.rglob("*") if p.suffix not in (".py", ".pyc")]
    for path in sorted([*filter(Path.is_file, data), *TESTS.rglob("conftest.py")]):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    installed = {f"{d.metadata['Name']} {d.version}" for d in importlib.metadata.distributions()}
    digest.update(repr(sorted(installed)).encode())
    return digest.digest()


def digest_of(path: Path) -> str:
    """Changes whenever the outcome of a test file may change."""
    digest = hashlib.sha256(_surroundings())
    for file in sorted(reached(path)):
        digest.update(f"{file}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def marked_files() -> Iterator[Path]:
    """The test files with a marker of GUESTS."""
    return (p for p in sorted(TESTS.rglob("test_*.py")) if _MARKED.search(p.read_text()))


class Lane:
    """The plug-in of a run with `--skip-unchanged`: leaves files out, and notes what passed."""

    def __init__(self, config) -> None:
        self._cache, self._passed = config.cache, config.cache.get(KEY, {})
        self._digests = {sources.relative(path): digest_of(path) for path in marked_files()}
        self.left_out = {f for f, digest in self._digests.items() if self._passed.get(f) == digest}
        self._seen, self._failed = set(), set()

    def pytest_ignore_collect(self, collection_path, config):
        inside = collection_path.is_relative_to(sources.ROOT)
        return True if inside and sources.relative(collection_path) in self.left_out else None

    def pytest_report_header(self):
        if self.left_out:
            return (
                f"left out, as nothing that they import changed since they passed: "
                f"{', '.join(sorted(self.left_out))}; make test-all runs them"
            )
        return None

    def pytest_runtest_logreport(self, report):
        file = report.nodeid.partition("::")[0]
        self._seen.add(file)
        if report.failed:
            self._failed.add(file)

    def pytest_sessionfinish(self, session, exitstatus):
        config = session.config
        whole = config.args_source == config.ArgsSource.TESTPATHS and not config.option.keyword
        if hasattr(config, "workerinput") or not whole or exitstatus not in (0, 1):
            return
        passed = self._seen - self._failed | self.left_out
        self._cache.set(KEY, {f: d for f, d in self._digests.items() if f in passed})


def pytest_addoption(parser):
    parser.addoption(
        "--skip-unchanged", action="store_true",
        help=f"leave out files marked {', '.join(GUESTS)} that nothing changed since they passed",
    )  # fmt: skip


def configure(config):
    if config.option.skip_unchanged:
        config.pluginmanager.register(Lane(config), "unchanged")
