"""What bench/gpu.sh runs before the tests: plans, goals, stages, and FlashInfer's kernel."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import zipfile

import pytest
import torch

import specdec_kernels as sk
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
  return batch == 3 && gamma == 2 && vocab == 5 && deterministic && seeds == (uint64_t*)7 &&
                 offsets == (uint64_t*)8 && stream == (cudaStream_t)9
             ? cudaSuccess
             : cudaErrorInvalidValue;
}
}
"""
CALLER = """
import ctypes, sys
f = ctypes.CDLL(sys.argv[1]).flashinfer_chain
pointers, sizes = map(ctypes.c_void_p, range(1, 7)), map(ctypes.c_uint32, (3, 2, 5))
print(f(*pointers, *sizes, *map(ctypes.c_void_p, (7, 8, 9))))
"""


@pytest.fixture(autouse=True)
def bandwidth(monkeypatch):
    monkeypatch.setattr(measure, "read_bandwidth", lambda device: 1e10)


def timed(configs, **arguments):
    return list(
        goals.lines(configs, "cpu", ["cpp"], **{"seconds": 0.01, "budget": 60, **arguments})
    )


def test_a_line_is_in_the_file_before_the_next_config_begins(monkeypatch, tmp_path):
    seen = []

    def measured(config, work, run, *rest, **others):
        path = tmp_path / "cpu-goals.jsonl"
        seen.append(len(path.read_text().splitlines()))
        return real(config, work, run, *rest, **others)

    real = goals.sweep.measure_config
    monkeypatch.setattr(goals.sweep, "measure_config", measured)
    monkeypatch.setitem(goals.HEADLINE, "cpu", TINY)
    with pytest.raises(goals.typer.Exit) as done:
        goals.main("cpu", ["cpp"], tmp_path, 0.01, 60)
    assert done.value.exit_code == 0
    assert seen == [1, 2]


def test_a_config_that_fails_is_recorded_and_the_next_one_is_timed(monkeypatch, capsys):
    def measured(config, *rest, **others):
        if config.batch == 1:
            raise RuntimeError("an illegal memory access")
        return real(config, *rest, **others)

    real = goals.sweep.measure_config
    monkeypatch.setattr(goals.sweep, "measure_config", measured)
    _, failed, row = timed(TINY)
    reason = "RuntimeError: an illegal memory access"
    assert failed == {"failed": {"config": TINY[0].id, "reason": reason}}
    assert row["row"]["config"]["id"] == TINY[1].id
    assert capsys.readouterr().out.splitlines() == [f"timing {config.id}" for config in TINY]


def test_a_profiler_watches_the_second_call_of_each_config(monkeypatch, tmp_path, capsys):
    called = []
    monkeypatch.setitem(goals.HEADLINE, "cpu", TINY)
    counting = dataclasses.replace(
        next(peer for peer in goals.PEERS if peer.name == "cpp"),
        build=lambda inputs: lambda: called.append(inputs.config),
    )
    monkeypatch.setattr(goals, "PEERS", (counting,))
    goals.main("cpu", ["cpp"], tmp_path / "out", called=1)
    assert called == [TINY[0]] * 2
    assert capsys.readouterr().out == f"called {TINY[0].id}\n"
    assert not (tmp_path / "out").exists()


def test_every_kernel_that_plans_its_launches_is_called():
    """The device is asked about each of them by its own call."""
    for call in plans.calls(3, "cpu").values():
        assert call().status.tolist() == [0] * 3


@pytest.mark.skipif(sk.has_cuda_kernels(), reason="_C.so has CUDA kernels")
def test_without_cuda_kernels_no_plan_is_told():
    with pytest.raises(
        RuntimeError,
        match="last_cuda_schedule must come after a launch on a CUDA device in the same thread, "
        "but specdec_kernels was built without CUDA kernels",
    ):
        plans.last_plan()


def test_the_clocks_are_those_that_nvidia_smi_tells(monkeypatch):
    told = "1980 MHz, 1980 MHz, 3201 MHz, 75.1 W, 700.00 W, 30, 143771 MiB"
    monkeypatch.setattr(plans, "output", lambda *command: told)
    assert plans.clocks()["clocks.mem"] == "3201 MHz"
    assert plans.clocks()["memory.total"] == "143771 MiB"
    monkeypatch.setattr(plans, "output", lambda *command: None)
    assert plans.clocks() == {}


def test_launches_of_the_chain_kernel_are_found_in_a_trace():
    name = "void specdec::cuda::chain_kernel<(specdec::cuda::Variant)1>(specdec::cuda::ChainJob)"
    args = {"grid": [480, 1, 1], "block": [256, 1, 1], "stream": 7}
    events = [
        {"cat": "kernel", "name": name, "args": args},
        {"cat": "kernel", "name": "memset", "args": {}},
        {"cat": "cpu_op", "name": "chain_kernel", "args": {}},
    ]
    seen = {"grid": [480, 1, 1], "block": [256, 1, 1]}
    kernel = "chain_kernel<(specdec::cuda::Variant)1>"
    assert plans.launched(events) == [{"kernel": kernel, **seen}]


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
    kept = [(line["config"], line["cache"], line["us"]) for line in lines if "cache" in line]
    assert len(kept) == 4
    assert [(cache, us) for _, cache, us in kept] == [("emptied", 3.0), ("kept", 2.0)] * 2
    assert {config.split("-")[0] for config, _, _ in kept} == {"B1"}


def wheel_of(folder, names):
    folder.mkdir(exist_ok=True)
    path = folder / "flashinfer_python-0.7.2.post1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, f"// {name}")
    return path


def test_the_headers_of_flashinfers_wheel_are_prepared_to_be_carried(tmp_path, monkeypatch, capsys):
    """Headers and the license, and nothing else: what is carried has a limit."""
    made = wheel_of(
        tmp_path / "index",
        [
            "flashinfer/data/include/flashinfer/sampling.cuh",
            "flashinfer/data/include/flashinfer/attention/mask.cuh",
            "flashinfer/data/csrc/sampling.cu",
            "flashinfer/sampling.py",
            "flashinfer_python-0.7.2.post1.dist-info/licenses/LICENSE",
        ],
    )
    asked = []

    def pip(command, check):
        asked.append((command[1:4], command[-1]))
        shutil.copy(made, command[command.index("--dest") + 1])

    folder = tmp_path / "carry/include"
    monkeypatch.setenv("SPECDEC_FLASHINFER", str(folder))
    monkeypatch.setattr(flashinfer_headers.subprocess, "run", pip)
    flashinfer_headers.main(prepare_headers=True)
    assert asked == [(["-m", "pip", "download"], "flashinfer-python==0.7.2.post1")]
    files = (p for p in folder.parent.rglob("*") if p.is_file())
    assert sorted(p.relative_to(folder.parent).as_posix() for p in files) == [
        *("LICENSE", "include/flashinfer/attention/mask.cuh", "include/flashinfer/sampling.cuh"),
    ]
    assert f"2 headers of FlashInfer 0.7.2.post1 are in {folder}" in capsys.readouterr().out


def test_a_wheel_without_the_header_that_is_compiled_is_refused(tmp_path):
    wheel = wheel_of(tmp_path, ["flashinfer/include/flashinfer/sampling.cuh"])
    with pytest.raises(ValueError, match="must hold flashinfer/data/include/flashinfer/sampling"):
        flashinfer_headers.unpack(wheel, tmp_path / "include")


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
def test_the_wrapper_hands_all_arguments_to_flashinfer(tmp_path, monkeypatch):
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/sampling.cuh").write_text(STAND_IN)
    monkeypatch.setenv("SPECDEC_FLASHINFER", str(tmp_path))
    library = tmp_path / "flashinfer_chain.so"
    options = ("-arch=sm_90", "-Xcompiler=-Wno-int-to-pointer-cast")
    command = [*flashinfer_headers.command(NVCC, *options), "-o", library]
    subprocess.run(command, check=True)
    done = subprocess.run(
        ["python", "-c", CALLER, library], capture_output=True, text=True, check=True
    )
    assert done.stdout == "0\n"
