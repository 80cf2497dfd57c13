"""What the machine code of quest._C_cuda is made of, read with cuobjdump: the part "CUDA C++" of gpu_report.py."""

from __future__ import annotations

import collections
import functools
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
DTYPES = {"f": "float32", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}
KERNEL = re.compile(r"_ZN5quest4cuda\d+([a-z_]+)I(f|6__half|13__nv_bfloat16)(?:Li(\d+))?E")
# Copies of 16 bytes past the registers, tensor-core products and their matrix loads, and spilled registers.
INSTRUCTIONS = {"LDGSTS.128": r"LDGSTS\S*\.128", "HMMA": r"HMMA", "LDSM": r"LDSM", "local": r"(?:LDL|STL)\b"}


class CudaRow(NamedTuple):
    kernel: str
    configuration: str
    arch: int
    registers: int  # of a thread
    spills: int  # bytes of a thread
    shared: int  # bytes of a block
    instructions: dict[str, int]  # how many of each in INSTRUCTIONS


def cuobjdump() -> str:
    """CUDA's, that of the package nvidia-cuda-cuobjdump, or Triton's."""
    places = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin/cuobjdump"]
    for package, inside in (("nvidia", "cu13/bin/cuobjdump"), ("triton", "backends/nvidia/bin/cuobjdump")):
        if spec := importlib.util.find_spec(package):
            places += [Path(folder) / inside for folder in spec.submodule_search_locations or ()]
    found = shutil.which("cuobjdump") or next((str(place) for place in places if place.exists()), None)
    if not found:
        raise FileNotFoundError("cuobjdump is needed to read machine code: pip install nvidia-cuda-cuobjdump")
    return found


def dump(library: Path, *options: str) -> list[tuple[int, str, str]]:
    """What cuobjdump says of each kernel: (architecture, mangled name, text)."""
    text = subprocess.run([cuobjdump(), *options, library], capture_output=True, text=True, check=True).stdout
    parts = []
    for file in re.split(r"\nFatbin elf code:\n", text)[1:]:
        arch = int(re.search(r"arch = sm_(\d+)", file)[1])
        functions = re.split(r"\n\s*Function\s*:?\s*", file)[1:]
        parts += [(arch, *re.match(r"(\w+)(.*)", function, re.DOTALL).groups()) for function in functions]
    return parts


@functools.cache
def shared_memory() -> dict[tuple[str, int], int]:
    """Bytes of a block of `attend` by dtype and padded head_dim, which are asked for at the launch."""
    lines = [
        f'std::printf("{dtype} {dim} %d\\n", quest::cuda::Layout<{element}, {dim}>::kSharedUsed);'
        for dtype, element in (("float32", "float"), ("float16", "short"), ("bfloat16", "short"))
        for dim in (64, 128, 192, 256)
    ]
    code = f'#include <cstdio>\n#include "cuda/layout.h"\nint main() {{ {" ".join(lines)} }}'
    program = ROOT / "build/attend_layout"
    program.parent.mkdir(exist_ok=True)
    compiler = os.environ.get("CXX", "g++").split()
    command = [*compiler, "-std=c++17", f"-I{ROOT}/csrc", "-x", "c++", "-", "-o", program]
    subprocess.run(command, input=code, text=True, check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return {(dtype, int(dim)): int(size) for dtype, dim, size in map(str.split, printed.splitlines())}


def cuda_rows(library: Path | None = None) -> list[CudaRow]:
    """Every kernel of the library (quest._C_cuda as built, if none is named) on every architecture."""
    if library is None:
        spec = importlib.util.find_spec("quest._C_cuda")
        if spec is None:
            return []
        library = Path(spec.origin)
    usage = {(arch, name): text for arch, name, text in dump(library, "--dump-resource-usage")}
    rows = []
    for arch, name, code in dump(library, "--dump-sass"):
        if not (kernel := KERNEL.match(name)):
            continue
        verb, dtype, dim = kernel[1], DTYPES[kernel[2]], int(kernel[3] or 0)
        used = dict(re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage[arch, name]))
        shared = int(used["SHARED"]) + (shared_memory()[dtype, dim] if dim else 0)
        spills = int(used["STACK"]) + int(used["LOCAL"])
        counts = {what: len(re.findall(rf"\s{pattern}", code)) for what, pattern in INSTRUCTIONS.items()}
        configuration = f"{dtype} D={dim}" if dim else dtype
        rows.append(CudaRow(verb, configuration, arch, int(used["REG"]), spills, shared, counts))
    return sorted(rows)


def missing(rows: list[CudaRow]) -> list[str]:
    """What `attend` should be made of and isn't."""
    faults = []
    for row in rows:
        if row.kernel != "attend":
            continue
        wanted = ["LDGSTS.128"] if row.configuration.startswith("float32") else ["LDGSTS.128", "HMMA", "LDSM"]
        faults += [
            f"attend {row.configuration} sm_{row.arch}: no {what}" for what in wanted if not row.instructions[what]
        ]
    return faults


def summary(rows: list[CudaRow]) -> str:
    archs = collections.Counter(row.arch for row in rows)
    return ", ".join(f"{count} kernels for sm_{arch}" for arch, count in sorted(archs.items()))
