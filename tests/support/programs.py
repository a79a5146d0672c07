"""Programs of Python in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys


def output_of(*arguments, timeout: float | None = None, **variables: str) -> str:
    """What Python prints with these arguments; it fails unless it ends with status 0.

    Args:
        arguments: of the command line; the program may import the tests.
        timeout: seconds.
        variables: of the environment.
    """
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, check=False,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
