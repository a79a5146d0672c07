"""Times two libraries in turns on the goals, so that both see the same state of the device.

    python -m bench.turns SECOND [--device cuda] [--out FOLDER] [--budget 35]

SECOND is another `_C.so`. It runs under the package of its own folder if it lies in one, and else
under this one. Each library has a process of its own; they call by turns, never both at once. Each
config adds a line {"turns": ...} to DEVICE-goals.jsonl, with microseconds of each turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.configs import build
from bench.goals import goals, keep
from bench.peers import PEERS
from bench.stages import timed

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "specdec_kernels"
TURNS = 4


def overlay(library: Path, folder: Path) -> None:
    """Make a folder from which the package is imported with another library."""
    package = folder / PACKAGE.name
    if (library.parent / "__init__.py").exists():
        package.symlink_to(library.parent.resolve())
        return
    package.mkdir()
    for entry in PACKAGE.iterdir():
        (package / entry.name).symlink_to(library if entry.name == "_C.so" else entry)


def worker(device: str, small: bool, seconds: float) -> None:
    """Answer each number of a goal that comes in with the microseconds of a call, or its error."""
    peer = next(peer for peer in PEERS if peer.ours and not peer.available(device))
    print(json.dumps(sys.modules["specdec_kernels"].__file__), flush=True)
    calls: dict[int, Any] = {}
    for line in sys.stdin:
        number = int(line)
        try:
            if number not in calls:
                calls = {number: peer.build(build(goals(device, small=small)[number], device))}
            found: Any = timed(calls[number], device, seconds)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        print(json.dumps(found), flush=True)


def start(folder: Path, device: str, small: bool, seconds: float) -> subprocess.Popen[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "python", ROOT / "tests")))
    options = ["--device", device, "--seconds", str(seconds), *(["--small"] if small else [])]
    return subprocess.Popen(
        [sys.executable, "-m", "bench.turns", "", "--worker", *options],
        cwd=folder, env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _answer(process: subprocess.Popen[str], question: int | None = None) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    if question is not None:
        process.stdin.write(f"{question}\n")
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a process ended; its error is above")
    return json.loads(line)


def main(
    second: Annotated[str, typer.Argument(help="The other _C.so.")],
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cuda",
    out: Annotated[Path, typer.Option(help="Folder of the file.")] = Path("bench/results"),
    seconds: Annotated[float, typer.Option(help="For each turn.")] = 0.4,
    budget: Annotated[float, typer.Option(help="Seconds after which no config begins.")] = 35.0,
    small: Annotated[bool, typer.Option(help="Sizes of a rehearsal.")] = False,
    asked: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
) -> None:
    """Time the goals by turns."""
    if asked:
        worker(device, small, seconds)
        return
    begin, failed = time.monotonic(), 0
    out.mkdir(parents=True, exist_ok=True)
    libraries = {"first": PACKAGE / "_C.so", "second": Path(second).resolve(strict=True)}
    with ExitStack() as stack:
        running = {}
        for name, library in libraries.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            overlay(library, folder)
            running[name] = start(folder, device, small, seconds)
            stack.callback(running[name].kill)
        for process in running.values():
            print(f"a process imports {_answer(process)}", flush=True)
        for number, config in enumerate(goals(device, small=small)):
            if time.monotonic() - begin > budget:
                break
            found: dict[str, list[Any]] = {name: [] for name in running}
            for _ in range(TURNS):
                for name, process in running.items():
                    found[name].append(_answer(process, number))
            line: dict[str, Any] = {"config": config.id, **found}
            if any(isinstance(us, str) for turn in found.values() for us in turn):
                failed += 1
            else:
                first, other = (statistics.median(turns) for turns in found.values())
                line["second_over_first"] = other / first
            keep(out / f"{device}-goals.jsonl", {"turns": line})
    raise typer.Exit(code=int(failed > 0))


if __name__ == "__main__":
    typer.run(main)
