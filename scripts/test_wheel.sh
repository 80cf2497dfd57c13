#!/usr/bin/env bash
# A wheel in fresh environments: for each torch, install it and the wheel, then import, decode, and look around.
# Neither a CUDA toolkit nor a GPU is used.
#
#   scripts/test_wheel.sh dist/quest_attention-*.whl torch==2.13.0 torch==2.14.1
set -euo pipefail

wheel=$(realpath "$1")
shift
check=$(realpath "$(dirname "$0")/check_install.py")
for torch in "$@"; do
  echo "==> $torch"
  folder=$(mktemp -d)
  python3 -m venv "$folder"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$torch"
  "$folder/bin/python" -m pip install -qq --disable-pip-version-check "$wheel"
  (cd "$folder" && env -u CUDA_HOME -u CUDA_PATH PATH=/usr/bin:/bin CUDA_VISIBLE_DEVICES= bin/python "$check")
  rm -rf "$folder"
done
