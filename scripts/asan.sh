#!/usr/bin/env bash
# The tests of the verbs and of the cache under AddressSanitizer and UndefinedBehaviorSanitizer, on a build of their own
# in build/asan. Emulated CUDA kernels are run under it by tests/test_cuda_kernels.py.
# Usage: scripts/asan.sh [pytest arguments]. PYTHON says which interpreter (default: .venv/bin/python, else python3).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || command -v python3)}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
cxx=${CXX:-g++}
tree=build/asan

mkdir -p $tree
for part in csrc quest tests examples bench setup.py pyproject.toml; do
    [ -e $part ] && rm -rf ${tree:?}/$part && cp -rp $part $tree/
done
rm -f $tree/quest/*.so
cd $tree
# What is read or written beyond a tensor's own memory aborts with a report, as does every undefined operation. Python
# and torch are not instrumented, so what they leak is not looked at; vptr would need torch's RTTI.
sanitize="-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -fno-omit-frame-pointer"
CXXFLAGS="$sanitize -g -O1 -Wno-maybe-uninitialized" LDFLAGS="$sanitize" QUEST_CUDA=0 "$python" setup.py -q build_ext --inplace

verbs=$(echo tests/test_{append,summarise,score,select,attend,merge,decode,packed,properties,checks}.py)
[ $# -gt 0 ] || set -- $verbs tests/test_{host,cache,sequences,gaps,offload,slots,random_operations}.py
libasan=$($cxx -print-file-name=libasan.so)
libubsan=$($cxx -print-file-name=libubsan.so)
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH=$PWD PYTHONMALLOC=malloc OMP_NUM_THREADS=1
LD_PRELOAD="$libasan $libubsan" "$python" -c "import quest; assert quest.__file__.startswith('$PWD'), quest.__file__"
# --capture=sys leaves the sanitizers' own reports alone.
LD_PRELOAD="$libasan $libubsan" exec "$python" -m pytest -q -p no:cacheprovider --capture=sys -k "not triton and not cuda" "$@"
