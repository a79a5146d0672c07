"""Runs a file of vLLM's own tests: `run(file, calls, folder)`, or a program of itself.

The wheel of vLLM holds no tests. They are read where the environment variable `VLLM_SOURCE` names a
source tree, or where vLLM itself is installed from one, and are never copied. The vLLM that they
test is the installed one.

A call is a dict with `plugin`, whether the plug-in is installed meanwhile, and `only`, a `-k`
expression or "". Its result maps the name of each test, without the file, to its outcome.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from support.vllm_engine import ENVIRONMENT

EXCEPTED = Path(__file__).parents[1] / "vllm_plugin" / "excepted.txt"


def source():
    """The folder that holds vLLM's `tests`, or None."""
    named = os.environ.get("VLLM_SOURCE")
    installed = importlib.util.find_spec("vllm")
    places = [named] if named else [Path(installed.origin).parents[1]] if installed else []
    return next((Path(p).resolve() for p in places if (Path(p) / "tests" / "v1").is_dir()), None)


def excepted(file):
    """The names of the tests of a file that do not test the plug-in -> the reason."""
    lines = [line for line in EXCEPTED.read_text().splitlines() if line and line[0] != "#"]
    entries = (line.split(maxsplit=1) for line in lines)
    return {n.partition("::")[2]: why for n, why in entries if n.startswith(f"{file}::")}


def run(file, calls, folder):
    """The results of the calls, from a new process; its output goes to the error message."""
    job, results = Path(folder) / "job.json", Path(folder) / "results.json"
    job.write_text(json.dumps({"source": str(source()), "file": file, "calls": calls}))
    done = subprocess.run(
        [sys.executable, "-m", "support.vllm_suite", str(job), str(results)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert results.is_file(), f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return json.loads(results.read_text()), done.stdout


class Outcomes:
    """What pytest does with the tests of one call, for `pytest.main`."""

    def __init__(self, leave_out):
        self.leave_out, self.found = leave_out, {}

    def pytest_collection_modifyitems(self, config, items):
        out = [item for item in items if item.originalname in self.leave_out]
        items[:] = [item for item in items if item.originalname not in self.leave_out]
        config.hook.pytest_deselected(items=out)
        self.found |= dict.fromkeys((item.name for item in out), "excepted")

    def pytest_runtest_setup(self, item):
        import torch  # noqa: PLC0415

        torch.manual_seed(0)  # theirs draw from it, and judge what they draw

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.found[report.nodeid.rpartition("::")[2]] = report.outcome


def main(job, results):
    import pytest  # noqa: PLC0415
    from specdec_vllm import Settings, vllm_interface  # noqa: PLC0415
    from specdec_vllm.plugin import install  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    given = json.loads(Path(job).read_text())
    sys.path.append(given["source"])  # the last place, because it may hold a vLLM too
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    found = []
    for call in given["calls"]:
        if call["plugin"]:
            install(Settings())
        outcomes = Outcomes(excepted(given["file"]))
        path = Path(given["source"]) / given["file"]
        options = ["--noconftest", f"-c{os.devnull}", f"--rootdir={given['source']}", "-q"]
        options += ["--tb=short", "-pno:cacheprovider", "-pno:randomly", "-k", call["only"]]
        pytest.main([*options, str(path)], plugins=[outcomes])
        vllm_interface.restore()
        found.append(outcomes.found)
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
