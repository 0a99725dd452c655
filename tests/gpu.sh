#!/usr/bin/env bash
# All that one machine with one GPU can show, in one command of at most six minutes:
#
#   bash tests/gpu.sh                   all parts; with options of pytest the tests alone
#   bash tests/gpu.sh wheels [FOLDER]   where there is a network: fetch what a bare machine lacks
#
# It needs a Python with torch (MPIDDP_PYTHON, an active environment, .venv, or python3), and changes
# nothing in it: the wheels of MPIDDP_GPU_WHEELS (gpu-wheels in the checkout) go into an environment
# of its own, which is removed at the end. At most 8 files come to OUT (./gpu-report).
# Exit code 0: all was good. Parts that need a GPU are left out where there is none.
set -uo pipefail
case ${1:-} in
-h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' -- "${BASH_SOURCE[0]}"
    exit
    ;;
esac
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../jobs/environment.sh"

choose_environment
[ -x "$PYTHON" ] || PYTHON=$(command -v python3) ||
    die "no Python: name one that has torch in MPIDDP_PYTHON"
exec "$PYTHON" -B "$ROOT/tests/gpu/gpu_run.py" "$@"
