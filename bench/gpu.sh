#!/usr/bin/env bash
# Measures, tests and sanitizes the GPU kernels on a machine with an NVIDIA GPU and torch >= 2.10.
#
#   bench/gpu.sh            # PYTHON= another interpreter, BUDGET= seconds (480), OUT= a folder
#
# Needs no network. Uses specdec_kernels/_C.so if its kernels run on the device, else builds it. What
# tells most comes first: after 150 seconds the goals have been timed, and $OUT/cuda-goals.jsonl
# holds them even if the machine is taken away. Without git, SPECDEC_COMMIT names the commit. Every
# part runs even if others fail; the exit status is 0 only if all of them passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly OUT="${OUT:-bench/results}"
readonly END=$((SECONDS + ${BUDGET:-480}))
readonly PACKAGES=(numpy pytest scipy typer rich networkx)
export PYTHONPATH="$PWD:$PWD/python:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
summary=()
several=()
failures=0

note() {
  summary+=("$1")
  echo "== $1"
}

fail() {
  failures=$((failures + 1))
  note "FAILED   $1"
}

# part NAME LIMIT RESERVE COMMAND...: runs COMMAND for at most LIMIT seconds, and leaves RESERVE
# seconds of the budget to later parts.
part() {
  local name=$1 limit=$2 reserve=$3 begin=$SECONDS left status
  shift 3
  left=$((END - SECONDS - reserve))
  if ((left < limit)); then limit=$left; fi
  if ((limit < 5)); then
    fail "$name: no time left"
    return 1
  fi
  echo "== $name: at most $limit s"
  timeout --kill-after=10 "$limit" "$@"
  status=$?
  if ((status == 0)); then
    note "passed   $name ($((SECONDS - begin)) s)"
  elif ((status == 124 || status == 137)); then
    fail "$name: a hang, or too slow: no end after $limit s"
    if ((${#several[@]})); then
      several=() # of several processes on one device, one that hangs makes the others fail
      note "NOTE     later tests run in one process"
    fi
  else
    fail "$name: exit status $status ($((SECONDS - begin)) s)"
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
  local torch
  torch=$("$python" -c 'import os, torch; print(os.path.dirname(torch.__file__))') || return 1
  cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release -DTORCH_ROOT="$torch" -DSPECDEC_CUDA=on \
    -DSPECDEC_HOST=off -DCMAKE_CUDA_ARCHITECTURES=native &&
    cmake --build build/gpu --parallel && cp build/gpu/_C.so specdec_kernels/_C.so
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
missing=$("$python" -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if not find_spec(name)))' "${PACKAGES[@]}")
if [[ -n $missing ]]; then fail "packages missing, and with them some parts: $missing"; fi

# A library that only loads has not shown that the driver can run its kernels.
timeout --kill-after=10 25 "$python" -m bench.smoke
status=$?
if ((status == 0)); then
  note "passed   launch of the kernels of _C.so"
elif ((status == 124 || status == 137)); then # it would hang again
  fail "launch of the kernels of _C.so: a hang, or too slow: no end after 25 s"
else
  part build 200 200 bash -c build
  part "launch of the kernels built here" 30 200 "$python" -m bench.smoke
fi

# No plug-in may be installed here, so that options which need one are cleared.
pytest=("$python" -m pytest -q -o addopts= -o faulthandler_timeout=25 -p no:randomly
  -p no:cacheprovider -rs)
on_device=(env TRITON_INTERPRET=0)

# tests NAME LIMIT RESERVE ARGUMENTS...
tests() {
  part "$1" "$2" "$3" "${on_device[@]}" "${pytest[@]}" "${several[@]}" "${@:4}"
}

# goals NAME LIMIT RESERVE PEER: its own budget leaves time to finish the last config.
goals() {
  part "$1" "$2" "$3" "$python" -m bench.goals --only "$4" --budget $(($2 * 4 / 5)) --out "$OUT"
}

tests "brief cases" 30 0 tests/device/brief_on_device.py
goals "goals" 90 0 cuda
clocks

readonly headers=${SPECDEC_FLASHINFER:-.carry/flashinfer/include}
if [[ -e $headers/flashinfer/sampling.cuh ]]; then
  if part "FlashInfer's kernel" 60 150 "$python" -m bench.peers.flashinfer_headers; then
    goals "goals by FlashInfer" 30 150 flashinfer_headers
  fi
else
  note "ABSENT   FlashInfer's headers in $headers: its kernel was not timed"
fi
part "stages" 35 150 "$python" -m bench.stages --out "$OUT"
part "grids" 20 150 "$python" -m bench.smoke --launches

if "$python" -c 'import xdist' 2>/dev/null; then
  on_device+=(OMP_NUM_THREADS=2) # each worker would start a thread pool for all cores
  several=(-n 8)
fi
part "CUDA tests" 90 120 "${pytest[@]}" tests/device/test_cuda.py \
  --deselect tests/device/test_cuda.py::test_triton_ops_on_the_device
tests "CUDA ops on the device" 100 110 tests/device/on_device.py -k cuda
tests "CUDA trees on the device" 40 100 tests/device/trees_on_device.py -k cuda

# sweep OP LIMIT RESERVE: the sweep's own budget is shorter than LIMIT, because it takes time to start
# and to finish its last config.
sweep() {
  part "sweep of $1" "$2" "$3" "$python" -m bench.sweep --op "$1" --device cuda --quick \
    --budget $(($2 > 45 ? $2 - 25 : 20)) --out "$OUT"
}
half=$(((END - SECONDS) / 4))
sweep verify_chain "$half" 60
sweep verify_tree "$half" 60
sweep kv_compact_ 30 40

if "$python" -c 'import triton' 2>/dev/null; then
  tests "Triton ops on the device" 100 40 tests/device/on_device.py -k triton
  tests "Triton trees on the device" 70 40 tests/device/trees_on_device.py -k triton
  tests "Triton cache ops on the device" 40 30 tests/device/kv_on_device.py
  tests "layout of trees on the device" 40 30 tests/device/tree_layout_on_device.py
else
  note "ABSENT   triton: its ops were not run"
fi
if "$python" -c 'import transformers, triton' 2>/dev/null; then
  tests "CUDA graphs of forwards" 90 30 tests/device/compiled_on_device.py
else
  note "ABSENT   transformers or triton: no forwards were recorded"
fi

if ! sanitizer=$(command -v compute-sanitizer || command -v /usr/local/cuda/bin/compute-sanitizer)
then
  note "ABSENT   compute-sanitizer: memcheck and racecheck were not run"
elif ! timeout --kill-after=5 30 "$sanitizer" --tool memcheck --error-exitcode 9 \
  "$python" -c 'import torch; torch.zeros(1, device="cuda").cpu()'; then
  note "ABSENT   compute-sanitizer does not run on this device: no memcheck, no racecheck"
else
  for tool in memcheck racecheck; do
    # Without PyTorch's caching allocator, each tensor is an allocation of its own, so that accesses
    # past its end are found.
    part "$tool" 60 0 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -m bench.sanitize
  done
fi

# Figures are drawn elsewhere: python -m bench.plot FILE.json
printf '\nSummary after %d s\n' "$SECONDS"
printf '  %s\n' "${summary[@]}"
exec >&- 2>&-
# A process that outlives its part may still hold the log open.
for _ in 1 2 3 4 5; do
  kill -0 "$log" 2>/dev/null || break
  sleep 0.5
done
exit $((failures > 0))
