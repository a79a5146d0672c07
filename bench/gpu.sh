#!/usr/bin/env bash
# Tests, sanitizes and measures the GPU kernels on a machine with an NVIDIA GPU and torch >= 2.10.
#
#   bench/gpu.sh            # PYTHON= another interpreter, BUDGET= seconds (480), OUT= a folder
#
# Needs no network. Uses specdec_kernels/_C.so if it loads and holds CUDA kernels, else builds it.
# Every part runs even if others fail; the exit status is 0 only if all of them passed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly OUT="${OUT:-bench/results}"
readonly END=$((SECONDS + ${BUDGET:-480}))
readonly PACKAGES=(numpy pytest scipy typer rich matplotlib)
export PYTHONPATH="$PWD:$PWD/python:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
mkdir -p "$OUT"
summary=()
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
    fail "$name: stopped after $limit s"
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

with_cuda_kernels() {
  "$python" -c 'import sys, specdec_kernels as s; sys.exit(not s.has_cuda_kernels())'
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
began=$(mktemp)
readonly python
export python
export -f build
PATH="$(dirname "$python"):$PATH"

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
"$python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
missing=()
for package in "${PACKAGES[@]}"; do
  "$python" -c "import $package" 2>/dev/null || missing+=("$package")
done
if ((${#missing[@]})); then fail "packages missing, and with them some parts: ${missing[*]}"; fi

if with_cuda_kernels 2>/dev/null; then
  note "passed   _C.so built elsewhere loads"
else
  part build 200 270 bash -c build
fi
with_cuda_kernels || fail "_C.so has no CUDA kernels: their tests are skipped"

# No plug-in may be installed here, so that options which need one are cleared.
pytest=("$python" -m pytest -q -o addopts= -p no:randomly -p no:cacheprovider -rs)
on_device=(env TRITON_INTERPRET=0)
several=()
if "$python" -c 'import xdist' 2>/dev/null; then
  on_device+=(OMP_NUM_THREADS=2)  # each worker would start a thread pool for all cores
  several=(-n 8)
fi
on_device+=("${pytest[@]}" "${several[@]}")
part "CUDA tests" 90 270 "${pytest[@]}" tests/device/test_cuda.py \
  --deselect tests/device/test_cuda.py::test_triton_ops_on_the_device
part "CUDA ops on the device" 100 240 "${on_device[@]}" tests/device/on_device.py -k cuda
part "CUDA trees on the device" 40 230 "${on_device[@]}" tests/device/trees_on_device.py -k cuda
if "$python" -c 'import triton' 2>/dev/null; then
  part "Triton ops on the device" 100 220 "${on_device[@]}" tests/device/on_device.py -k triton
  part "Triton trees on the device" 70 200 "${on_device[@]}" tests/device/trees_on_device.py -k triton
  part "Triton cache ops on the device" 40 190 "${on_device[@]}" tests/device/kv_on_device.py
  part "layout of trees on the device" 40 190 "${on_device[@]}" tests/device/tree_layout_on_device.py
else
  note "ABSENT   triton: its ops were not run"
fi
if "$python" -c 'import transformers, triton' 2>/dev/null; then
  part "CUDA graphs of forwards" 90 190 "${on_device[@]}" tests/device/compiled_on_device.py
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
    part "$tool" 60 120 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
      "$sanitizer" --tool "$tool" --error-exitcode 9 "$python" -m bench.sanitize
  done
fi

# sweep OP LIMIT RESERVE: the sweep's own budget is shorter than LIMIT, because it takes time to start
# and to finish its last config.
sweep() {
  part "sweep of $1" "$2" "$3" "$python" -m bench.sweep --op "$1" --device cuda --quick \
    --budget $(($2 > 45 ? $2 - 25 : 20)) --out "$OUT"
}
half=$(((END - SECONDS - 60) / 2))
sweep verify_chain "$half" $((half + 60))
sweep verify_tree "$half" 60
sweep kv_compact_ 30 30
mapfile -t files < <(find "$OUT" -maxdepth 1 -name 'cuda-*.json' -newer "$began" | sort)
for file in "${files[@]}"; do
  part "plots of $(basename "$file")" 15 0 "$python" -m bench.plot "$file"
done
if ((${#files[@]} == 0)); then fail "plots: the sweeps left no results"; fi

printf '\nSummary after %d s\n' "$SECONDS"
printf '  %s\n' "${summary[@]}"
rm -f "$began"
exec >&- 2>&-
# A process that outlives its part may still hold the log open.
for _ in 1 2 3 4 5; do
  kill -0 "$log" 2>/dev/null || break
  sleep 0.5
done
exit $((failures > 0))
