"""The device of ``--device``, refused as early as can be known."""

from __future__ import annotations

import ctypes
import glob
import sys
from importlib.metadata import PackageNotFoundError, version

from specdec_hf.cli.terminal import fail

# Of NVIDIA's driver, on boards and under Windows too, and of AMD's, whose devices torch calls cuda.
DEVICE_FILES = ("/dev/nvidia*", "/dev/nvhost*", "/dev/dxg", "/dev/kfd")
DRIVER = "libcuda.so.1"


def why_no_gpu() -> str | None:
    """Why there is surely no CUDA device, found without torch; None where there may be one."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return None
    if installed.endswith("+cpu"):
        return f"this torch has no CUDA (torch {installed})"
    if sys.platform != "linux" or any(map(glob.glob, DEVICE_FILES)):
        return None
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"no CUDA device is visible: there is no driver ({DRIVER}) and no device file"
    return None


def find_device(name: str | None) -> str:
    """The device of ``--device``, which must be there, or the best one for None."""
    import torch  # noqa: PLC0415  # loads at first use; see app.py

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return "cuda" if gpus else "cpu"
    if name.startswith("cuda") and not gpus:
        why = "no CUDA device is visible" if torch.version.cuda else "this torch has no CUDA"
        fail(f"--device {name} is not available: {why} (torch {torch.__version__})")
    if name.startswith("cuda:") and int(name[5:]) >= gpus:
        fail(f"--device {name} is not available: CUDA devices are 0 to {gpus - 1}")
    if name == "mps" and not torch.backends.mps.is_available():
        fail(f"--device mps is not available: no Apple GPU is visible (torch {torch.__version__})")
    return name
