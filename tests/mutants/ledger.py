"""The planted faults of tests/mutants/*.toml, and the trees in which they are planted.

A fault is a text of one file, another one in its place, and the tests that must fail then:

    [[mutant]]
    name = "residual-not-clamped"
    fault = "The residual keeps the sign of P - Q."
    file = "csrc/cpu/chain/residual.h"
    before = "std::max(p - q, 0.f)"
    after = "p - q"
    killed_by = ["tests/chain/test_rules.py::test_emitted_tokens_have_the_targets_distribution"]

Long texts are whole lines between three quotation marks.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from setuptools.compat.py310 import tomllib

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"
# What a build of the CPU kernels compiles. The tests compile csrc/cuda for themselves.
COMPILED = re.compile(r"csrc/(arguments|cpu|host|include|torch)/|CMakeLists")
LANES = "not full"
# Tests of these folders run in another environment, whose Python this variable names.
ENVIRONMENTS = {"tests/vllm_plugin/": "VLLM_PYTHON"}


class Mutant(NamedTuple):
    """A planted fault.

    Attributes:
        room: the file of the ledger, without its suffix.
        name: unique in the ledger.
        fault: what is wrong, in a sentence.
        file: relative to the root.
        before: occurs once in the file.
        after: replaces it.
        killed_by: ids of tests, each of which must fail; without parameters, any of them.
    """

    room: str
    name: str
    fault: str
    file: str
    before: str
    after: str
    killed_by: Sequence[str]

    def planted(self, text: str) -> str:
        """The text of the file, with the fault.

        Raises:
            ValueError: `before` does not occur in it, or more than once.
        """
        if text.count(self.before) != 1:
            raise ValueError(
                f"before of mutant {self.name} must occur once in {self.file}, "
                f"occurs {text.count(self.before)} times"
            )
        return text.replace(self.before, self.after)

    def plant(self, root: Path) -> None:
        """Write the fault into the file.

        Raises:
            ValueError: the text does not occur, or more than once.
        """
        path = root / self.file
        path.write_text(self.planted(path.read_text() if path.is_file() else ""))


def read(path: Path) -> list[Mutant]:
    """The faults of one file.

    Raises:
        TypeError: a key that is missing or unknown.
    """
    given: list[dict[str, Any]] = tomllib.loads(path.read_text())["mutant"]
    return [Mutant(path.stem, **one) for one in given]


def read_all() -> list[Mutant]:
    """The whole ledger."""
    folder = Path(__file__).parent
    return [mutant for path in sorted(folder.glob("*.toml")) for mutant in read(path)]


@functools.cache
def tests_in(path: Path) -> frozenset[str]:
    """The names of the test functions in a file."""
    return frozenset(re.findall(r"^(?: {4})?def (test_\w+)\(", path.read_text(), re.M))


def exists(test: str) -> bool:
    """Whether there is a test of this id, its parameters aside."""
    file, _, name = test.partition("[")[0].partition("::")
    path = ROOT / file
    return path.is_file() and name in tests_in(path)


def outside_of_lanes(mutants: Sequence[Mutant]) -> list[str]:
    """The named tests that neither `make test` nor `make more TASK=test-build` runs.

    A test that runs alone has no other combinations of its parameters beside it.
    """
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:randomly", "-m", LANES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    done = subprocess.run(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    ran = set(re.findall(r"^tests/\S+::.*$", done.stdout, re.M))
    ran |= {one.partition("[")[0] for one in ran}
    named = {test for mutant in mutants for test in mutant.killed_by}
    return sorted(t for t in named - ran if not t.startswith(tuple(ENVIRONMENTS)))


class Tree:
    """A copy of the files of a repository, with the libraries that are built in place."""

    def __init__(self, folder: Path, source: Path = ROOT) -> None:
        self.root, self._source = folder / "tree", source
        self._build, self._configured = folder / "build", False
        self._python = Path(sys.executable)
        self._servers: dict[str, subprocess.Popen[str]] = {}
        shutil.rmtree(self.root, ignore_errors=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=source, stdout=subprocess.PIPE, text=True, check=True)
        self._libraries = [
            *source.glob("specdec_kernels/_C.so"),
            *source.glob("python/specdec_host/_host*.so"),
        ]
        copied = [source / name for name in names.stdout.split("\0") if name]
        for path in [*filter(Path.is_file, copied), *self._libraries]:
            copy = self.root / path.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
        shared = folder / "shared"  # some tests read documents there
        if (source.parent / "shared").is_dir() and not shared.exists():
            shared.symlink_to(source.parent / "shared")

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """The tree with a fault, built where that is needed.

        Raises:
            ValueError: the fault cannot be planted.
            RuntimeError: it does not compile.
        """
        path, compiled = self.root / mutant.file, COMPILED.match(mutant.file)
        try:
            mutant.plant(self.root)
            if compiled:
                self._compile()
            yield
        finally:
            if (self._source / mutant.file).is_file():
                shutil.copy(self._source / mutant.file, path)  # its time is new, for the next build
            for library in self._libraries if compiled else ():
                shutil.copy2(library, self.root / library.relative_to(self._source))

    def _compile(self) -> None:
        """Build the CPU kernels and put the libraries in place."""
        path = os.pathsep.join([str(self._python.parent), os.environ["PATH"]])
        env = {**os.environ, "PATH": path}
        if not self._configured:
            import torch  # noqa: PLC0415  # takes seconds

            options = {
                "CMAKE_BUILD_TYPE": "None",
                "CMAKE_CXX_FLAGS": "-O1",  # the cases are small, and the builds many
                "SPECDEC_CUDA": "off",
                "TORCH_ROOT": Path(torch.__file__).parent,
                "Python_EXECUTABLE": self._python,
            }
            given = [f"-D{name}={value}" for name, value in options.items()]
            _run(["cmake", "-S", self.root, "-B", self._build, "-G", "Ninja", *given], env)
            self._configured = True
        _run(["ninja", "-C", self._build], env)
        for library in self._libraries:
            place = self.root / library.relative_to(self._source)
            (built,) = self._build.glob(f"{library.name.partition('.')[0]}*.so")
            # A process that has loaded the old file keeps it.
            place.unlink()
            shutil.copy2(built, place)

    def outcome(
        self, mutant: Mutant, by: Sequence[str] = (), seconds: float = 120
    ) -> tuple[str, str]:
        """What became of a mutant, and by which tests or why.

        Args:
            mutant: is planted and taken out again.
            by: tests of which one must fail, in place of those that the mutant names.
            seconds: longest time of a test.
        """
        killers = []
        try:
            with self.planted(mutant):
                for tests in [by] if by else [[one] for one in mutant.killed_by]:
                    failed, which = self.fails(tests, seconds)
                    if not failed:
                        return SURVIVED, f"{' '.join(tests)} passed"
                    killers.append(which)
        except (ValueError, RuntimeError) as error:
            return BROKEN, str(error)
        return KILLED, "; ".join(killers)

    def fails(self, tests: Sequence[str], seconds: float) -> tuple[bool, str]:
        """Whether one of some tests fails, and the one, or what was printed.

        Raises:
            RuntimeError: no test ran.
        """
        quiet = ["-x", "-p", "no:cacheprovider", "-p", "no:randomly", "--tb=line", "-rfE"]
        arguments = [*quiet, "-m", LANES, f"--timeout={seconds:.0f}", *tests]
        output = self.root.parent / "output"
        task = [str(self.root), arguments, str(output), 60 + len(tests) * seconds]
        server = self._server(tests[0])
        print(json.dumps(task), file=server.stdin, flush=True)
        code, printed = int(server.stdout.readline()), output.read_text(errors="replace")
        failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", printed, re.M)
        if code < 0:  # native code does not listen to pytest's own limit of time
            return True, f"ended by signal {-code}"
        if code == 1 and failed:
            return True, failed[1]
        if code == 0 and re.search(r"\b[1-9]\d* passed\b", printed):
            return False, ""
        raise RuntimeError(f"no test ran: {printed[-800:]}")

    def _server(self, test: str) -> subprocess.Popen[str]:
        """The process that forks for a test; see forks.py."""
        python, env = sys.executable, {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
        for folder, variable in ENVIRONMENTS.items():
            if test.startswith(folder):
                python = env.get(variable, "")
                if not python:
                    raise RuntimeError(f"{folder} needs {variable}, which make mutants sets")
        if python not in self._servers:
            metadata = self._source / ".venv-vllm/metadata"  # the entry point of the plug-in
            places = [self.root, self.root / "python", metadata]
            env["PYTHONPATH"] = os.pathsep.join(map(str, places))
            env.setdefault("OMP_NUM_THREADS", "1")
            self._servers[python] = subprocess.Popen(
                [python, Path(__file__).with_name("forks.py")], env=env, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        return self._servers[python]

    def close(self) -> None:
        """End the processes that run its tests."""
        for server in self._servers.values():
            server.communicate()


def _run(command: Sequence[Any], env: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-2000:]}")
