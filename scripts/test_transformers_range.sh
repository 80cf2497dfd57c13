#!/usr/bin/env bash
# Run the tests of quest.integrations.transformers against the lowest and the newest supported version of transformers
# (or against those given as arguments). Each is installed, with what it needs, into a folder of its own.
#
#   scripts/test_transformers_range.sh [VERSION ...]
#
# PYTHON: the interpreter whose torch and quest are used (default: .venv/bin/python, else python3).
# RANGE_DIR: where the folders go and stay for the next run (default: build/transformers).
set -euo pipefail
cd "$(dirname "$0")/.."
exec </dev/null

python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
folder=${RANGE_DIR:-build/transformers}

if [ $# -eq 0 ]; then
    # LOWEST and NEWEST stand in the module's own source: "(5, 0)" is 5.0.0 and the last release of 5.24.
    read -r lowest newest < <("$python" - <<'PYTHON'
import ast, pathlib
tree = ast.parse(pathlib.Path("quest/integrations/transformers.py").read_text())
line = next(x for x in tree.body if isinstance(x, ast.Assign) and getattr(x.targets[0], "elts", [None])[0] is not None)
low, new = ast.literal_eval(line.value)
print(f"{low[0]}.{low[1]}.0", f"{new[0]}.{new[1]}.*")
PYTHON
    )
    set -- "$lowest" "$newest"
fi

for version in "$@"; do
    target=$folder/${version//\*/x}
    if [ ! -f "$target/.ready" ]; then
        echo "== installing transformers $version into $target"
        rm -rf "$target"
        "$python" -m pip install -q --no-warn-conflicts --target "$target" "transformers==$version"
        touch "$target/.ready"
    fi
    echo "== tests with transformers $version"
    PYTHONPATH="$target${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
        "$python" -m pytest -q tests/test_transformers*.py
done
