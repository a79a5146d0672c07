"""Files that the processes of a test run build once and share."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = "SPECDEC_TEST_BUILDS"  # names the folder in the environment


def provide_folder(config: pytest.Config) -> None:
    """Make the folder in the process that starts the others, and remove it when that one ends."""
    if FOLDER in os.environ:
        return
    folder = tempfile.TemporaryDirectory()
    os.environ[FOLDER] = folder.name
    config.add_cleanup(lambda: os.environ.pop(FOLDER, None))
    config.add_cleanup(folder.cleanup)


def built_once(name: str, build: Callable[[Path], None]) -> Path:
    """The file `name`, which `build` makes at the path that it gets.

    Processes that ask for it in the meantime wait. A build that raises is tried by the next one.
    """
    path = Path(os.environ[FOLDER]) / name
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                made = Path(folder) / name
                build(made)
                made.rename(path)
    return path
