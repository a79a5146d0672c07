"""Runs tests in forks of a process that has imported what takes seconds to import.

A line of standard input is a JSON list: a folder, the arguments of pytest there, a file for what it
prints, and the longest time in seconds. The answer is a line with the exit code of pytest. A
negative one is the signal that ended it, and -9 also says that the time was over.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time

# Triton and OpenMP read these when they are imported; tests/conftest.py sets them too.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

for name in ("scipy.special", "torch", "transformers", "triton.language"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401  # loaded lazily


def run(folder, arguments, output, seconds):
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)  # with all processes that the tests start
        printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor, source in enumerate((os.open(os.devnull, os.O_RDONLY), printed, printed)):
            os.dup2(source, descriptor)
        os.chdir(folder)
        sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
        code = pytest.main(arguments)
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + seconds
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)
