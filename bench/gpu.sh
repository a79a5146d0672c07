#!/usr/bin/env bash
# Measures, tests and sanitizes the GPU kernels on a machine with an NVIDIA GPU and torch >= 2.10.
#
#   bench/gpu.sh            # PYTHON= another interpreter, OUT= a folder
#   PARTS=D BUDGET=590 bench/gpu.sh
#
# PARTS are letters, run in this order whatever theirs is; without it, A within a BUDGET of 480 s:
#   A  plans, brief cases, goals, stages, Nsight Compute on three goals
#   B  tests of the CUDA kernels, of trees and of forwards as CUDA graphs
#   C  compute-sanitizer: memcheck, racecheck, synccheck
#   D  FlashInfer's kernel, sweeps, Triton
# Needs no network. Before any part it makes sure of specdec_kernels/_C.so: uses it if its CUDA
# kernels run on the device, else builds it. The limits of A, with a build, add up to less than 480
# s, so that no part of it can take the time of another. What tells most comes first: the goals have
# been timed 130 s after the library runs, and $OUT/cuda-goals.jsonl holds them even if the
# machine is taken away. Without git, SPECDEC_COMMIT names the commit. Every part runs even if others
# fail; the exit status is 0 only if all of them passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly ALL_PARTS=ABCD
readonly PARTS="${PARTS:-A}"
readonly OUT="${OUT:-bench/results}"
readonly BUDGET="${BUDGET:-480}"
readonly PACKAGES=(numpy pytest scipy typer rich networkx)
export PYTHONPATH="$PWD:$PWD/python:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
summary=()
several=()
failures=0

unknown=${PARTS//[$ALL_PARTS]/}
if [[ -n $unknown ]]; then
  echo "bench/gpu.sh: PARTS must be letters of $ALL_PARTS, got $unknown in $PARTS" >&2
  exit 2
fi
if [[ ! $BUDGET =~ ^[1-9][0-9]*$ ]]; then
  echo "bench/gpu.sh: BUDGET must be a whole number of seconds, got $BUDGET" >&2
  exit 2
fi
mkdir -p "$OUT"

now() {
  date +%s
}

END=$(($(now) + BUDGET))
readonly END

note() {
  summary+=("$1")
  echo "== $1"
}

fail() {
  failures=$((failures + 1))
  note "FAILED   $1"
}

# part NAME LIMIT COMMAND...: runs COMMAND for at most LIMIT seconds, or what is left of the budget.
part() {
  local name=$1 limit=$2 left status begin
  shift 2
  begin=$(now)
  left=$((END - begin))
  if ((left < limit)); then limit=$left; fi
  if ((limit < 5)); then
    fail "$name: no time left"
    return 1
  fi
  echo "== $name: at most $limit s"
  timeout --kill-after=10 "$limit" "$@"
  status=$?
  if ((status == 0)); then
    note "passed   $name ($(($(now) - begin)) s)"
  elif ((status == 5)) && [[ "$*" == *" -m pytest "* ]]; then
    note "ABSENT   $name: pytest ran nothing, for the reason above"
  elif ((status == 124 || status == 137)); then
    fail "$name: a hang, or too slow: no end after $limit s"
    if ((${#several[@]})); then
      several=() # of several processes on one device, one that hangs makes the others fail
      note "NOTE     later tests run in one process"
    fi
  else
    fail "$name: exit status $status ($(($(now) - begin)) s)"
  fi
  return "$status"
}

usable() {
  "$1" - <<'PYTHON' 2>/dev/null
import sys
import torch

version = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])
sys.exit(version < (2, 10) or not torch.cuda.is_available())
PYTHON
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python; do
    if command -v "$candidate" >/dev/null && usable "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# shellcheck disable=SC2329  # run by bash -c, so that timeout can stop it
build() {
  local torch generator=()
  torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))') || return 1
  # A folder that was configured before keeps its generator.
  if [[ ! -e build/gpu/CMakeCache.txt ]] && command -v ninja >/dev/null; then
    generator=(-G Ninja)
  fi
  cmake -S . -B build/gpu "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DTORCH_ROOT="$torch" \
    -DSPECDEC_CUDA=on -DSPECDEC_HOST=off -DCMAKE_CUDA_ARCHITECTURES=native &&
    cmake --build build/gpu --parallel &&
    cp --remove-destination build/gpu/_C.so specdec_kernels/_C.so
}

python=$(find_python) || {
  echo "bench/gpu.sh: no Python here has torch >= 2.10 that sees a CUDA device" >&2
  exit 2
}
exec > >(tee "$OUT/gpu.log") 2>&1
readonly log=$!
readonly python
export python
export -f build
PATH="$(dirname "$python"):$PATH"

clocks() {
  nvidia-smi --format=csv,noheader --query-gpu=name,driver_version,memory.total,clocks.sm,\
clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu
}

clocks
echo "commit ${SPECDEC_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
echo "parts $PARTS in $BUDGET s"
missing=$("$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if not find_spec(name)))' "${PACKAGES[@]}")
if [[ -n $missing ]]; then fail "packages missing, and with them some parts: $missing"; fi

# Status 0 if specdec_kernels/_C.so loads and has CUDA kernels, 3 if it has none. Without this
# question Triton would serve the ops of such a library, and compile until the time is over.
has_cuda_kernels() {
  timeout --kill-after=5 15 "$python" -c \
    'import specdec_kernels as s; raise SystemExit(0 if s.has_cuda_kernels() else 3)'
}

# A library that only loads has not shown that the driver can run its kernels.
launches() {
  part "$1" 20 "$python" -m bench.smoke
}

builds=true
if has_cuda_kernels; then
  launches "launch of the kernels of _C.so"
  status=$?
  # It would hang again.
  if ((status == 0 || status == 124 || status == 137)); then builds=false; fi
else
  note "NOTE     _C.so has no CUDA kernels or does not load: they are built"
fi
kernels=true
if $builds; then
  if ! { part build 165 bash -c build && has_cuda_kernels &&
    launches "launch of the kernels built here"; }; then
    kernels=false
    fail "no CUDA kernels that run: parts A, B and C are left out"
  fi
fi

# asked LETTER: whether a part is to run, which needs CUDA kernels unless it is D.
asked() {
  [[ $PARTS == *"$1"* ]] && { $kernels || [[ $1 == D ]]; }
}

# No plug-in may be installed here, so that options which need one are cleared.
pytest=("$python" -m pytest -q -o addopts= -o faulthandler_timeout=25 -p no:randomly
  -p no:cacheprovider -rs)
on_device=(env TRITON_INTERPRET=0)

# tests NAME LIMIT ARGUMENTS...
tests() {
  part "$1" "$2" "${on_device[@]}" "${pytest[@]}" "${several[@]}" "${@:3}"
}

# own LIMIT RESERVE: the budget that a command is given which may run for LIMIT seconds, or for what
# is left, and takes RESERVE to start and to finish what it has begun.
own() {
  local left=$((END - $(now)))
  if ((left > $1)); then left=$1; fi
  echo $((left > $2 ? left - $2 : 1))
}

# goals NAME LIMIT PEER
goals() {
  part "$1" "$2" "$python" -m bench.goals --only "$3" --budget "$(own "$2" $(($2 / 5)))" \
    --out "$OUT"
}

# found PROGRAM: the path of a program of the CUDA toolkit.
found() {
  command -v "$1" || command -v "/usr/local/cuda/bin/$1"
}

if asked A; then
  part "plans" 25 "$python" -m bench.plans --out "$OUT"
  tests "brief cases" 30 tests/device/brief_on_device.py
  goals "goals" 75 cuda
  clocks
  part "stages" 35 "$python" -m bench.stages --out "$OUT"
  if ! profiler=$(found ncu); then
    note "ABSENT   ncu: no goal was profiled"
  elif ! part "Nsight Compute on three goals" 60 "$profiler" --set full --clock-control none \
    --kernel-name regex:chain_kernel --log-file "$OUT/ncu.log" --export "$OUT/goals" \
    --force-overwrite "$python" -m bench.goals --called 3 &&
    grep -q ERR_NVGPUCTRPERM "$OUT/ncu.log"; then
    note "NOTE     the driver lets only administrators count: ERR_NVGPUCTRPERM"
  fi
fi

if [[ $PARTS == *[BD]* ]] && "$python" -c 'import xdist' 2>/dev/null; then
  on_device+=(OMP_NUM_THREADS=2) # each worker would start a thread pool for all cores
  several=(-n 8)
fi

if asked B; then
  part "CUDA tests" 90 "${pytest[@]}" tests/device/test_cuda.py \
    --deselect tests/device/test_cuda.py::test_triton_ops_on_the_device
  tests "CUDA ops on the device" 90 tests/device/on_device.py -k cuda
  tests "CUDA trees on the device" 40 tests/device/trees_on_device.py -k cuda
  tests "CUDA graphs of forwards" 60 tests/device/compiled_on_device.py
fi

if asked C; then
  if ! sanitizer=$(found compute-sanitizer); then
    note "ABSENT   compute-sanitizer: no memcheck, racecheck or synccheck"
  elif (($(now) + 20 > END)); then
    fail "compute-sanitizer: no time left"
  elif ! timeout --kill-after=5 20 "$sanitizer" --tool memcheck --error-exitcode 9 \
    "$python" -c 'import torch; torch.zeros(1, device="cuda").cpu()'; then
    note "ABSENT   compute-sanitizer does not run on this device: no memcheck, racecheck, synccheck"
  else
    # sanitize TOOL LIMIT
    sanitize() {
      # Without PyTorch's caching allocator, each tensor is an allocation of its own, so that
      # accesses past its end are found.
      part "$1" "$2" env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$1" \
        --error-exitcode 9 "$python" -m bench.sanitize --budget "$(own "$2" 25)"
    }
    sanitize memcheck 65
    sanitize racecheck 95
    sanitize synccheck 60
  fi
fi

# sweep OP LIMIT
sweep() {
  part "sweep of $1" "$2" "$python" -m bench.sweep --op "$1" --device cuda --quick \
    --budget "$(own "$2" 20)" --out "$OUT"
}

if asked D; then
  readonly headers=${SPECDEC_FLASHINFER:-.carry/flashinfer/include}
  if [[ -e $headers/flashinfer/sampling.cuh ]]; then
    if part "FlashInfer's kernel" 60 "$python" -m bench.peers.flashinfer_headers; then
      goals "goals by FlashInfer" 30 flashinfer_headers
    fi
  else
    note "ABSENT   FlashInfer's headers in $headers: its kernel was not timed"
    note "NOTE     python -m bench.peers.flashinfer_headers --prepare puts them there, to be carried"
  fi
  sweep verify_chain 80
  sweep verify_tree 80
  sweep kv_compact_ 40
  if "$python" -c 'import triton' 2>/dev/null; then
    tests "Triton ops on the device" 90 tests/device/on_device.py -k triton
    tests "Triton trees on the device" 60 tests/device/trees_on_device.py -k triton
    tests "Triton cache ops on the device" 40 tests/device/kv_on_device.py
    tests "layout of trees on the device" 30 tests/device/tree_layout_on_device.py
  else
    note "ABSENT   triton: its ops were not run"
  fi
fi

# Figures are drawn elsewhere: python -m bench.plot FILE.json
printf '\nSummary after %d s\n' "$(($(now) - END + BUDGET))"
printf '  %s\n' "${summary[@]}"
exec >&- 2>&-
# A process that outlives its part may still hold the log open.
for _ in 1 2 3 4 5; do
  kill -0 "$log" 2>/dev/null || break
  sleep 0.5
done
exit $((failures > 0))
