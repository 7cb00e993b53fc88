#!/usr/bin/env bash
# Measures the study whose pictures the README shows, and puts them in docs/images. Best on an otherwise idle machine.
set -euo pipefail
cd "$(dirname "$0")/.."
study=$(mktemp -d)
trap 'rm -rf "$study"' EXIT
python -m stepbench -m precision=32,16-mixed batch_size=8,16,32,64,128 "hydra.sweep.dir=$study/sweep" plots=false
mkdir -p docs/images
cp "$study"/sweep/{step_time,phases}.png docs/images/
