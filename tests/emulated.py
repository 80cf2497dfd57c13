"""The CUDA C++ kernels on the CPU: the sources of csrc/cuda compiled against the emulator in tests/emulator.

`load()` builds them, as far as anything has changed, and makes `torch.ops.quest_cuda` run on CPU tensors; `configure`
says in which order threads and blocks run.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
TORCH = Path(torch.__file__).parent
ORDERS = ("forward", "reverse", "shuffled")

CXX = shlex.split(os.environ.get("CXX", "")) or ["g++"]
COMMON = [*CXX, "-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-DQUEST_EMULATE", "-Icsrc", "-Itests"]
KERNEL = [*COMMON, "-x", "c++", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
TORCH_FLAGS = ["-DTORCH_TARGET_VERSION=0x020b000000000000ULL", f"-isystem{TORCH}/include"]
PYTHON_FLAGS = ["-DPy_LIMITED_API=0x030b0000", f"-isystem{sysconfig.get_path('include')}"]


class Build:
    """Objects and what is linked of them, in a folder of build/; `run` lets ninja do what has changed."""

    def __init__(self, name: str) -> None:
        self.folder = Path("build") / name
        self.lines = [f"builddir = {self.folder}"]
        self.lines += ["rule compile", "  command = $cmd -MMD -MF $out.d -c $in -o $out"]
        self.lines += ["  depfile = $out.d", "  deps = gcc", "rule link", "  command = $cmd $in $libs -o $out"]

    def compile(self, source: str, command: list[str]) -> Path:
        target = self.folder / f"{source}.o"
        self.lines += [f"build {target}: compile {source}", f"  cmd = {shlex.join(command)}"]
        return target

    def kernels(self, *flags: str) -> list[Path]:
        sources = sorted((ROOT / "csrc/cuda").glob("*.cu"))
        return [self.compile(str(source.relative_to(ROOT)), [*KERNEL, *flags]) for source in sources]

    def link(self, name: str, objects: list[Path], *flags: str, libs: tuple[str, ...] = ()) -> Path:
        target = self.folder / name
        self.lines += [f"build {target}: link {' '.join(map(str, objects))}"]
        self.lines += [f"  cmd = {shlex.join([*CXX, *flags])}", f"  libs = {shlex.join(libs)}"]
        return ROOT / target

    def run(self) -> None:
        folder = ROOT / self.folder
        folder.mkdir(parents=True, exist_ok=True)
        ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
        assert ninja, "ninja is needed to build the emulated kernels"
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        with (folder / "lock").open("w") as lock:  # tests run in several processes
            fcntl.flock(lock, fcntl.LOCK_EX)
            (folder / "build.ninja").write_text("\n".join(self.lines) + "\n")
            command = [ninja, "-f", str(self.folder / "build.ninja"), "-j", jobs]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def load() -> ctypes.CDLL:
    """Build and load; the library, for `configure`."""
    build = Build("emulated")
    binding = [*COMMON, *TORCH_FLAGS]
    objects = [build.compile(source, binding) for source in ("csrc/arguments.cpp", "csrc/cuda/binding.cpp")]
    objects.append(build.compile("tests/emulator/configure.cpp", COMMON))
    libs = (f"-L{TORCH}/lib", "-ltorch_cpu")
    kernels = build.link("kernels.so", objects + build.kernels(), "-shared", libs=libs)
    schemas = [*binding, *PYTHON_FLAGS, '-DQUEST_CUDA_ARCHS="emulated"']
    schemas_only = build.link(
        "schemas.so", [build.compile("csrc/cuda/registration.cpp", schemas)], "-shared", libs=libs
    )
    build.run()

    try:
        import quest._C_cuda  # noqa: F401  # no second one may register the schemas
    except ImportError:
        torch.ops.load_library(schemas_only)
    torch.ops.load_library(kernels)
    return ctypes.CDLL(str(kernels))


def configure(order: str = "forward", seed: int = 1) -> None:
    """The order in which threads and blocks run from now on: forward, reverse or shuffled by the seed."""
    load().quest_emulator_configure(ORDERS.index(order), seed)
