"""Runs a file of vLLM's own tests: `run(file, calls, folder)`, or a program of itself.

The wheel of vLLM holds no tests. They are read where the environment variable `VLLM_SOURCE` names a
source tree, or where vLLM itself is installed from one, and are never copied. The vLLM that they
test is the installed one.

A call is a dict with `plugin`, whether the plug-in is installed meanwhile (for `V2`: whether it is
right, see `ReplacementOfV2`), and `only`, a `-k` expression or "". Its result maps the name of each
test, without the file, to its outcome.

Tests of the V2 runner (`V2`) need a GPU and Triton. What they pass to `rejection_sample` goes to
the plug-in's on the CPU instead, with a smaller vocabulary, to which they fit their number of
samples. Those that call Triton kernels of vLLM cannot pass.
"""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
from vllm_plugin.vllm_engine import ENVIRONMENT

from specdec_kernels.versions import release

V1 = "tests/v1/sample/test_rejection_sampler.py"
V2 = "tests/v1/spec_decode/test_rejection_sampler_utils.py"
SMALL_VOCABULARY = 256  # of V2; with its own 4096, a test takes up to 16 GB
EXCEPTED = Path(__file__).with_name("excepted.txt")


def source():
    """The folder that holds vLLM's `tests`, or None."""
    named = os.environ.get("VLLM_SOURCE")
    installed = importlib.util.find_spec("vllm")
    places = [named] if named else [Path(installed.origin).parents[1]] if installed else []
    return next((Path(p).resolve() for p in places if (Path(p) / "tests" / "v1").is_dir()), None)


def excepted(file):
    """The names of the tests of a file that do not test the plug-in -> the reason."""
    version = release(importlib.import_module("vllm").__version__)
    found = {}
    for line in EXCEPTED.read_text().splitlines():
        where, _, why = line.partition(" ")
        since = re.match(r"since (\S+): ", why)
        if where.startswith(f"{file}::") and (not since or version >= release(since[1])):
            found[where.partition("::")[2]] = why.removeprefix(since[0] if since else "")
    return found


def run(file, calls, folder):
    """The results of the calls, from a new process; its output goes to the error message."""
    job, results = Path(folder) / "job.json", Path(folder) / "results.json"
    job.write_text(json.dumps({"source": str(source()), "file": file, "calls": calls}))
    done = subprocess.run(
        [sys.executable, "-m", "vllm_plugin.vllm_suite", str(job), str(results)],
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        cwd=folder, capture_output=True, text=True, check=False, timeout=540,
    )  # fmt: skip
    assert results.is_file(), f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return json.loads(results.read_text()), done.stdout


class Outcomes:
    """What pytest does with the tests of one call, for `pytest.main`."""

    def __init__(self, leave_out):
        self.leave_out, self.found = leave_out, {}

    def pytest_collection_modifyitems(self, config, items):
        for module in {item.module for item in items}:
            if hasattr(module, "VOCAB_SIZE"):
                module.VOCAB_SIZE = SMALL_VOCABULARY
        out = [item for item in items if item.originalname in self.leave_out]
        items[:] = [item for item in items if item.originalname not in self.leave_out]
        config.hook.pytest_deselected(items=out)
        self.found |= dict.fromkeys((item.name for item in out), "excepted")

    def pytest_runtest_setup(self, item):
        torch.manual_seed(0)  # theirs draw from it, and test what they draw

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or not report.passed:
            self.found[report.nodeid.rpartition("::")[2]] = report.outcome


class OnCpu(TorchFunctionMode):
    """Makes the tensors that are asked for on a GPU on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class ReplacementOfV2:
    """The plug-in's `rejection_sample` of the V2 runner; a wrong one negates the draft's logits."""

    def __init__(self):
        from specdec_vllm import Settings, runner_v2, vllm_interface  # noqa: PLC0415

        utils = importlib.import_module(f"{vllm_interface.REJECTION_V2}_utils")
        make = runner_v2.REPLACEMENTS[vllm_interface.REJECTION_V2, "rejection_sample"]
        self.function, self.wrong = make(utils.rejection_sample, Settings()), False
        utils.rejection_sample = self

    def __call__(self, **given):
        if self.wrong:
            given["draft_logits"] = -given["draft_logits"]
        return self.function(**given)


def take_v2_to_the_cpu():
    """Lets the file `V2` be imported without a GPU, and find the plug-in's `rejection_sample`."""
    replacement = ReplacementOfV2()
    sys.modules["triton"] = importlib.import_module("vllm.triton_utils").triton
    torch.cuda.is_available = lambda: True
    OnCpu().__enter__()
    return replacement


def main(job, results):
    import pytest  # noqa: PLC0415
    from specdec_vllm import Settings, vllm_interface  # noqa: PLC0415
    from specdec_vllm.plugin import install  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    given = json.loads(Path(job).read_text())
    sys.path.append(given["source"])  # the last place, because it may hold a vLLM too
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()
    replacement = take_v2_to_the_cpu() if given["file"] == V2 else None
    found = []
    for call in given["calls"]:
        if replacement is not None:
            replacement.wrong = not call["plugin"]
        elif call["plugin"]:
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
