#!/usr/bin/env bash
# The fault suite: bash tests/faults/run.sh [--only FAULT] [--fraction F] [--jobs N] …
# See --help, and docs/about/reliability.md. It uses the environment that tests/run.sh has made.
set -euo pipefail
# shellcheck source=jobs/environment.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/../../jobs/environment.sh"

choose_environment
[ -x "$PYTHON" ] || die "no Python with torch and mpi4py: run bash tests/run.sh first, or activate one"
export MPIDDP_TEST_WHEELS=${MPIDDP_TEST_WHEELS:-$ROOT}
export PYTHONPATH=$ROOT:$ROOT/tests/support:$ROOT/tests/programs${PYTHONPATH:+:$PYTHONPATH}
PATH=$(dirname -- "$PYTHON"):$PATH exec "$PYTHON" -B "$ROOT/tests/faults/command.py" "$@"
