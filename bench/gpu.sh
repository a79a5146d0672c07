#!/usr/bin/env bash
# Tests and measures the CUDA kernels on a machine with an NVIDIA GPU, in one command of eight minutes.
#
#   bench/gpu.sh                       # PYTHON= another interpreter, OUT= a folder
#   PARTS="smoke goals" BUDGET=120 bench/gpu.sh
#   DEVICE=cpu BUDGET=300 bench/gpu.sh # a rehearsal in small sizes, without a GPU
#
# It builds nothing and needs no network: specdec_kernels/_C.so is built elsewhere and copied along,
# and so is .carry, where `python -m bench.carried` puts other projects' kernels. Parts run in
# the order of ALL_PARTS, each within a limit; the limits of DEFAULT_PARTS add up to the
# BUDGET of 480 s, and a part that fails, hangs or lacks a program stops no other. The exit status
# is 0 only if none failed. SPECDEC_SECOND names another _C.so, which is timed in turns with the
# first. Figures and outcomes are lines of JSON in $OUT/DEVICE-goals.jsonl, written at once.
# Without git, SPECDEC_COMMIT names the commit.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

readonly DEFAULT_PARTS="smoke cases tests goals stages peers turns profile loop"
readonly ALL_PARTS="$DEFAULT_PARTS sanitize sweep"
readonly PARTS="${PARTS:-$DEFAULT_PARTS}"
readonly DEVICE="${DEVICE:-cuda}"
readonly BUDGET="${BUDGET:-480}"
export OUT="${OUT:-bench/results}"
export PYTHONPATH="$PWD:$PWD/python:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1
summary=()
failures=0

refuse() {
  echo "bench/gpu.sh: $1" >&2
  exit 2
}

for name in $PARTS; do
  [[ " $ALL_PARTS " == *" $name "* ]] || refuse "PARTS must be among $ALL_PARTS, got $name"
done
[[ $BUDGET =~ ^[1-9][0-9]*$ ]] || refuse "BUDGET must be a whole number of seconds, got $BUDGET"
[[ $DEVICE == cuda || $DEVICE == cpu ]] || refuse "DEVICE must be cuda or cpu, got $DEVICE"
mkdir -p "$OUT"

now() {
  date +%s
}

END=$(($(now) + BUDGET))
readonly END

# usable PYTHON: whether its torch is new enough and sees the device.
usable() {
  "$1" -c "import sys, torch
version = tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2])
sys.exit(version < (2, 10) or not ('$DEVICE' == 'cpu' or torch.cuda.is_available()))" 2>/dev/null
}

python=
for candidate in ${PYTHON:+"$PYTHON"} .venv/bin/python python3 python; do
  if command -v "$candidate" >/dev/null && usable "$candidate"; then
    python=$(command -v "$candidate")
    break
  fi
done
[[ -n $python ]] || refuse "no Python here has torch >= 2.10 that sees a device of kind $DEVICE"

exec > >(tee "$OUT/gpu.log") 2>&1
readonly log=$!
readonly python

# note OUTCOME NAME SECONDS REMARK
note() {
  summary+=("$(printf '%-8s %s %s' "$1" "$2" "$4")")
  printf '{"part": {"name": "%s", "outcome": "%s", "seconds": %d, "remark": "%s"}}\n' \
    "$2" "$1" "$3" "$4" | tee -a "$OUT/$DEVICE-goals.jsonl"
  if [[ $1 == FAILED ]]; then failures=$((failures + 1)); fi
}

asked() {
  [[ " $PARTS " == *" $1 "* ]]
}

# part NAME LIMIT COMMAND...: runs COMMAND for at most LIMIT seconds, or what is left of the budget.
part() {
  local name=$1 limit=$2 left status begin
  shift 2
  begin=$(now)
  left=$((END - begin))
  if ((left < limit)); then limit=$left; fi
  if ((limit < 5)); then
    note FAILED "$name" 0 "no time left"
    return 1
  fi
  echo "== $name: at most $limit s"
  timeout --kill-after=10 "$limit" "$@"
  status=$?
  case $status in
    0) note passed "$name" $(($(now) - begin)) "" ;;
    124 | 137) note FAILED "$name" $(($(now) - begin)) "a hang, or too slow: no end after $limit s" ;;
    *) note FAILED "$name" $(($(now) - begin)) "exit status $status" ;;
  esac
  return "$status"
}

clocks() {
  if [[ $DEVICE == cuda ]]; then
    nvidia-smi --format=csv,noheader --query-gpu=name,driver_version,memory.total,clocks.sm,\
clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu
  fi
}

# found PROGRAM: the path of a program of the CUDA toolkit.
found() {
  command -v "$1" || command -v "/usr/local/cuda/bin/$1"
}

clocks
echo "commit ${SPECDEC_COMMIT:-$(git rev-parse HEAD 2>/dev/null || echo unknown)}"
echo "parts $PARTS on $DEVICE in $BUDGET s"

# Without this question Triton would serve the ops of a library without CUDA kernels, and compile
# until the time is over.
if [[ $DEVICE == cuda ]] && ! timeout --kill-after=5 20 "$python" -c \
  'import specdec_kernels as s; raise SystemExit(0 if s.has_cuda_kernels() else 3)'; then
  note FAILED library 0 "specdec_kernels/_C.so is missing, does not load or has no CUDA kernels"
  exit 1
fi

measured=(--device "$DEVICE" --out "$OUT")
only=(--only cuda)
peers=(--only flashinfer --only flashinfer-pipeline --only vllm-v2 --only eager --seconds 0.4)
model=(--shape 8B --dtype bfloat16 --compile --runs 2 --max-new-tokens 64)
# No plug-in may be installed here, so that options which need one are cleared. Other files than
# test_cuda.py need Triton's compiler.
pytest=(env TRITON_INTERPRET=0 "$python" -m pytest -q -o addopts= -o faulthandler_timeout=25
  -p no:randomly -p no:cacheprovider -rs)
several=()
if [[ $DEVICE == cpu ]]; then
  measured+=(--small --seconds 0.01)
  only=(--only cpp)
  peers=(--only eager)
  model=(--shape tiny --dtype float32 --runs 1 --max-new-tokens 8)
  pytest+=(--collect-only)
elif "$python" -c 'import xdist' 2>/dev/null; then
  several=(-n 8)
fi

# The loop needs a Transformers that may be newer than the machine's: its wheel is copied along.
wheel=$(find .carry -name 'transformers-*.whl' 2>/dev/null | head -n 1)
if [[ $DEVICE == cuda && -n $wheel ]] && { asked loop || asked tests; }; then
  unpacked=$(mktemp -d)
  trap 'rm -rf "$unpacked"' EXIT
  if "$python" -m zipfile -e "$wheel" "$unpacked"; then PYTHONPATH="$unpacked:$PYTHONPATH"; fi
fi

if asked smoke; then
  part smoke 20 "$python" -m bench.smoke --device "$DEVICE"
fi
if asked cases; then
  part cases 30 "${pytest[@]}" tests/device/brief_on_device.py
fi
if asked tests; then
  # Each worker would start a thread pool for all cores.
  part tests 100 env OMP_NUM_THREADS=2 "${pytest[@]}" "${several[@]}" -k "cuda or compiled or layout" \
    --deselect tests/device/test_cuda.py::test_triton_ops_on_the_device tests/device/test_cuda.py \
    tests/device/on_device.py tests/device/trees_on_device.py tests/device/tree_layout_on_device.py \
    tests/device/compiled_on_device.py
fi
if asked goals; then
  part goals 55 "$python" -m bench.goals "${measured[@]}" "${only[@]}" --budget 40
  clocks
fi
if asked stages; then
  part stages 45 "$python" -m bench.stages "${measured[@]}" --budget 35
fi
if asked peers; then
  part peers 55 "$python" -m bench.goals "${measured[@]}" "${only[@]}" "${peers[@]}" --budget 40
fi
if asked turns && [[ -z ${SPECDEC_SECOND:-} ]]; then
  note ABSENT turns 0 "SPECDEC_SECOND names no second library"
elif asked turns; then
  part turns 40 "$python" -m bench.turns "$SPECDEC_SECOND" "${measured[@]}" --budget 30
fi
if asked profile && { [[ $DEVICE == cpu ]] || ! profiler=$(found ncu); }; then
  note ABSENT profile 0 "no ncu, or no GPU"
elif asked profile; then
  for filters in t.8-k50-p.9 t.8; do
    part "profile $filters" 20 "$profiler" --section SourceCounters --section WarpStateStats \
      --section SpeedOfLight --clock-control none --profile-from-start off --log-file \
      "$OUT/ncu-$filters.log" --export "$OUT/$filters" --force-overwrite \
      "$python" -m bench.goals --called "$filters"
  done
fi
if asked loop; then
  part loop 95 "$python" -m specdec_hf bench-synthetic --device "$DEVICE" "${model[@]}" \
    --acceptance .8 --limit 1 --json "$OUT/loop.json"
fi
if asked sanitize && { [[ $DEVICE == cpu ]] || ! sanitizer=$(found compute-sanitizer); }; then
  note ABSENT sanitize 0 "no compute-sanitizer, or no GPU"
elif asked sanitize; then
  for tool in memcheck racecheck synccheck; do
    # Without PyTorch's caching allocator, each tensor is an allocation of its own, so that
    # accesses past its end are found.
    part "$tool" 95 env PYTORCH_NO_CUDA_MEMORY_CACHING=1 "$sanitizer" --tool "$tool" \
      --error-exitcode 9 "$python" -m bench.sanitize --budget 60
  done
fi
if asked sweep; then
  for op in verify_chain verify_tree kv_compact_; do
    part "sweep of $op" 80 "$python" -m bench.sweep --op "$op" --device "$DEVICE" --quick \
      --budget 60 --out "$OUT"
  done
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
