#!/usr/bin/env bash
# Is the timer right on this machine's GPU? Prints a short table and exits 0 if so, 1 if not; without CUDA it says so
# and exits 0. Uses the environment that is active, or installs the project into one of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

installed='import importlib.util as u; assert all(map(u.find_spec, ("stepbench", "lightning", "torch")))'
if ! python -c "$installed" 2> /dev/null; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    python3 -m venv --system-site-packages "$environment"
    # shellcheck disable=SC1091
    . "$environment/bin/activate"
    python -m pip install --quiet -e .
fi
python scripts/gpu_check.py "$@"
