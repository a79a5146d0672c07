"""The planted faults of tests/mutants/*.toml, and the trees in which they are planted.

A fault names a function, the change in it, and the tests that must fail then:

    [residual-not-clamped]
    fault = "The residual keeps the sign of P - Q."
    at = "csrc/cpu::residual"
    swap = ["std::max(p - q, 0.f)", "p - q"]
    by = "test_emitted_tokens_have_the_targets_distribution[cpp-token]"

`at` is a folder, and what is defined somewhere below it: a function, a class or struct, a constant
of a module, in Python `Class.method` too. The text must occur once in all that have the name; it is
compared token by token, so white space and comments do not matter. Where it belongs to nothing that
has a name, `at` is a file. `drop` takes a text away in place of `swap`. `by` is a test or a list of
tests, each of which must fail, wherever they lie: `test_x`, `test_x[cpp-3]` if the parameters
matter, `tree::test_x` if another folder or file than `tree` or test_tree.py has its name too.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from mutants import places
from setuptools.compat.py310 import tomllib

T, R = TypeVar("T"), TypeVar("R")
ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, BROKEN = "killed", "SURVIVED", "BROKEN"
# What a build of the CPU kernels compiles. The tests compile csrc/cuda for themselves.
COMPILED = re.compile(r"csrc/(arguments|cpu|host|include|torch)\b")
LANES = "not full"
# Tests of these folders run in another environment, whose Python this variable names.
ENVIRONMENTS = {"tests/vllm_plugin/": "VLLM_PYTHON"}


class Mutant(NamedTuple):
    """An entry of the ledger, whose room is its file without the suffix."""

    room: str
    name: str
    fault: str
    at: str
    by: Sequence[str]
    swap: Sequence[str] = ()
    drop: str = ""

    def place(self, root: Path = ROOT) -> tuple[Path, places.Span]:
        """The file and the text in it that the fault replaces, or a ValueError by name."""
        folder, _, name = self.at.partition("::")
        defined, found = 0, set()
        for path in places.files(root / folder):
            spans = places.definitions(path, name)
            defined += len(spans)
            for span in spans:
                wanted = self.drop or self.swap[0]
                found |= {(path, one) for one in places.occurrences(path, span, wanted)}
        if not defined:
            raise ValueError(f"{self.name}: nothing is defined as {self.at}")
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: {self.drop or self.swap[0]!r} occurs {len(found)} times in {self.at}"
                + f", of which there are {defined}" * (defined > 1)
            )
        return found.pop()

    def planted(self, root: Path = ROOT) -> tuple[Path, str]:
        """The file of the fault, and its text with the fault."""
        path, (begin, end) = self.place(root)
        text = places.read(path)
        begins, ends, new = text[:begin], text[end:], self.swap[1] if self.swap else ""
        if self.drop and path.suffix == ".py":
            try:
                ast.parse(begins + ends)
            except SyntaxError:  # a block needs a statement
                new = "pass"
        return path, begins + new + ends


def read(path: Path) -> list[Mutant]:
    """The faults of one file; a TypeError names a key that is missing or unknown."""
    found = []
    for name, one in tomllib.loads(path.read_text()).items():
        by = one.pop("by", ())
        mutant = Mutant(path.stem, name, by=[by] if isinstance(by, str) else by, **one)
        old, new = mutant.swap or (mutant.drop, "")
        if old == new or bool(mutant.swap) == bool(mutant.drop) or not mutant.by:
            raise ValueError(f"{name} needs a test, and one of swap and drop, which changes a text")
        found.append(mutant)
    return found


def read_all() -> list[Mutant]:
    """The whole ledger."""
    folder = Path(__file__).parent
    return [mutant for path in sorted(folder.glob("*.toml")) for mutant in read(path)]


@functools.cache
def tests_below(root: Path) -> dict[str, list[str]]:
    """Name of a test function -> where the suite has it, relative to the root."""
    found: dict[str, list[str]] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.M):
            found.setdefault(name, []).append(path.relative_to(root).as_posix())
    return found


def id_of(test: str, root: Path = ROOT) -> str:
    """The id by which pytest knows a test that a fault names."""
    room, _, name = test.partition("::") if "::" in test.partition("[")[0] else ("", "", test)
    files = [
        file
        for file in tests_below(root).get(name.partition("[")[0], [])
        if not room or room in (*Path(file).parts, Path(file).stem.removeprefix("test_"))
    ]
    if len(files) != 1:
        raise ValueError(f"{test} is {f'in {len(files)} files' if files else 'no test'}")
    return f"{files[0]}::{name}"


def outside_of_lanes(mutants: Sequence[Mutant]) -> list[str]:
    """The named tests that neither `make test` nor `make more TASK=test-build` runs.

    A test that runs alone has no other combinations of its parameters beside it.
    """
    named = {id_of(test) for mutant in mutants for test in mutant.by}
    named = {test for test in named if not test.startswith(tuple(ENVIRONMENTS))}
    files = sorted({test.partition("::")[0] for test in named}) or ["tests/mutants"]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:randomly", "-m", LANES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")])}
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False
    )
    ran = set(re.findall(r"^tests/\S+::.*$", done.stdout, re.M))
    ran |= {one.partition("[")[0] for one in ran}
    return sorted(named - ran)


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
        """The tree with a fault, built where that is needed, or a RuntimeError."""
        path, text = mutant.planted(self.root)
        file = path.relative_to(self.root)
        compiled = COMPILED.match(file.as_posix())
        try:
            path.write_text(text)
            if compiled:
                self._compile()
            yield
        finally:
            shutil.copy(self._source / file, path)  # its time is new, for the next build
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

        Of the tests in `by` one must fail, in place of all that the mutant names.
        """
        killers = []
        try:
            named = [by] if by else [[id_of(test, self.root)] for test in mutant.by]
            with self.planted(mutant):
                for tests in named:
                    failed, which = self.fails(tests, seconds)
                    if not failed:
                        return SURVIVED, f"{' '.join(tests)} passed"
                    killers.append(which)
        except (ValueError, RuntimeError) as error:
            return BROKEN, str(error)
        return KILLED, "; ".join(killers)

    def fails(self, tests: Sequence[str], seconds: float) -> tuple[bool, str]:
        """Whether one of some tests fails, and the one; a RuntimeError if none ran."""
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


def over_trees(work: Callable[[Tree, T], R], items: Sequence[T], jobs: int) -> Iterator[R]:
    """What `work` returns for each item, as they are done; each process has a tree of its own."""
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()

    def one(item: T) -> R:
        tree = trees.get()
        try:
            return work(tree, item)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(max(1, min(jobs, len(items)))):
            place = Path(folder) / str(number)
            place.mkdir()
            trees.put(Tree(place))
        with ThreadPoolExecutor(trees.qsize()) as pool:
            for done in as_completed([pool.submit(one, item) for item in items]):
                yield done.result()
        while not trees.empty():
            trees.get().close()


def _run(command: Sequence[Any], env: dict[str, str]) -> None:
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stdout[-2000:]}")
