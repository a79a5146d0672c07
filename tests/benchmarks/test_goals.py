"""What bench/gpu.sh runs before the tests: goals, plans, stages, and FlashInfer's kernel."""

from __future__ import annotations

import shutil
import subprocess
import zipfile

import pytest
import torch

from bench import goals, measure, plans, stages
from bench.configs import Config
from bench.peers import flashinfer_headers

pytestmark = pytest.mark.build

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
TINY = [Config(batch=b, gamma=2, vocabulary=521) for b in (1, 3)]
# The public function of FlashInfer's header, with the types of its arguments.
STAND_IN = """
#include <cstdint>
#include <cuda_runtime.h>
namespace flashinfer::sampling {
template <typename DType, typename IdType>
cudaError_t ChainSpeculativeSampling(
    DType* draft_probs, IdType* draft_ids, DType* target_probs, IdType* tokens, IdType* accepted,
    IdType* emitted, uint32_t batch, uint32_t gamma, uint32_t vocab, bool deterministic,
    uint64_t* seeds, uint64_t seed, uint64_t* offsets, uint64_t offset, cudaStream_t stream = 0) {
  bool right = batch == 3 && gamma == 2 && vocab == 5 && deterministic && seeds == (uint64_t*)7 &&
               offsets == (uint64_t*)8 && stream == (cudaStream_t)9;
  return right ? cudaSuccess : cudaErrorInvalidValue;
}
}
"""
CALLER = """
import ctypes, sys
f = ctypes.CDLL(sys.argv[1]).flashinfer_chain
pointers, sizes = map(ctypes.c_void_p, range(1, 7)), map(ctypes.c_uint32, (3, 2, 5))
print(f(*pointers, *sizes, *map(ctypes.c_void_p, (7, 8, 9))))
"""


def test_each_config_is_in_the_file_before_the_next_begins_and_a_failure_is_recorded(
    monkeypatch, tmp_path
):
    path, seen, real = tmp_path / "cpu-goals.jsonl", [], goals.sweep.measure_config

    def measured(config, *rest, **others):
        seen.append(len(path.read_text().splitlines()))
        if config.batch == 1:
            raise RuntimeError("an illegal memory access")
        return real(config, *rest, **others)

    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)
    monkeypatch.setattr(goals.sweep, "measure_config", measured)
    monkeypatch.setitem(goals.HEADLINE, "cpu", TINY)
    with pytest.raises(goals.typer.Exit):
        goals.main("cpu", ["cpp"], tmp_path, 0.01, 60)
    assert seen == [1, 2]
    failed, row = path.read_text().splitlines()[1:]
    assert TINY[0].id in failed
    assert "RuntimeError: an illegal memory access" in failed
    assert TINY[1].id in row


def test_every_kernel_that_plans_its_launches_is_called():
    """The device is asked about each of them by its own call."""
    for call in plans.calls(3, "cpu").values():
        assert call().status.tolist() == [0] * 3


@pytest.mark.parametrize(
    ("flushed", "happened"), [(True, ["flush", "call"]), (False, ["call"])], ids=["emptied", "kept"]
)
def test_the_cache_is_emptied_before_a_call_unless_it_is_to_be_kept(monkeypatch, flushed, happened):
    class Event:
        def __init__(self, enable_timing):
            pass

        def record(self):
            pass

        def elapsed_time(self, end):
            return 0.004

    seen = []
    monkeypatch.setattr(measure, "flush", lambda: seen.append("flush"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = {"f": lambda: seen.append("call")}
    times = measure.rounds(calls, "cuda", budget=0, least=1, flushed=flushed)
    assert times == {"f": [4.0]}
    assert seen == happened


def test_stages_are_timed_under_the_schedules_that_they_name(monkeypatch):
    forced = []
    monkeypatch.setattr(stages, "force", lambda *choice: forced.append(choice))
    monkeypatch.setattr(stages, "timed", lambda f, *_, flushed=True: (f(), 2.0 + flushed)[1])
    monkeypatch.setattr(stages, "VOCABULARY", 521)
    monkeypatch.setitem(stages.BASE, "cuda", TINY[0])
    lines = [line["stage"] for line in stages.stages("cpu", "cpp", 0.1, (1, 3))]
    assert [line["bytes_per_s"] for line in lines[:2]] == [521e6 / 1.5, 521e6 * 2]
    named = [(line["schedule"], line["group"]) for line in lines[2:] if "schedule" in line]
    assert named == forced[::2]
    assert set(forced[1::2]) == {("auto", 0)}
    kept = [(line["cache"], line["us"]) for line in lines if "cache" in line]
    assert kept == [("emptied", 3.0), ("kept", 2.0)] * 2


INCLUDE = "flashinfer/data/include/flashinfer"


@pytest.mark.parametrize("held", [f"{INCLUDE}/sampling.cuh", "flashinfer/include/sampling.cuh"])
def test_flashinfers_headers_and_license_are_carried_unless_the_kernel_is_missing(tmp_path, held):
    wheel, folder = tmp_path / "flashinfer_python-0.7.2-py3-none-any.whl", tmp_path / "to/include"
    others = (f"{INCLUDE}/attention/mask.cuh", "flashinfer/data/csrc/sampling.cu", "x/LICENSE")
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (held, *others):
            archive.writestr(name, "")
    if held.startswith(INCLUDE):
        flashinfer_headers.unpack(wheel, folder)
        files = {p.relative_to(folder).as_posix() for p in folder.rglob("*.*")}
        assert files == {"flashinfer/sampling.cuh", "flashinfer/attention/mask.cuh"}
    else:
        with pytest.raises(ValueError, match=f"must hold {INCLUDE}/sampling"):
            flashinfer_headers.unpack(wheel, folder)


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_the_wrapper_hands_all_arguments_to_flashinfer(tmp_path, monkeypatch):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/sampling.cuh").write_text(STAND_IN)
    monkeypatch.setenv("SPECDEC_FLASHINFER", str(tmp_path))
    library = tmp_path / "flashinfer_chain.so"
    options = ("-arch=sm_90", "-Xcompiler=-Wno-int-to-pointer-cast")
    command = [*flashinfer_headers.command(NVCC, *options), "-o", library]
    subprocess.run(command, check=True)
    called = ["python", "-c", CALLER, library]
    assert subprocess.run(called, capture_output=True, text=True, check=True).stdout == "0\n"
