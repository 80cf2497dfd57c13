"""Build quest: every CPU kernel once per instruction set, bindings on LibTorch's stable ABI, ninja for the work.

`quest._C` and `quest._C_cuda` know torch and no Python version; `quest._host` (pybind11) knows Python and no torch.

What the package is called and needs stands in pyproject.toml; this file finds torch without importing it, lists what
to compile, and hands that list to ninja. Objects stay in build/quest, so that a second build only redoes what changed.

Environment variables: CXX, CXXFLAGS, LDFLAGS, MAX_JOBS; QUEST_CUDA=auto|0|1, QUEST_CUDA_ARCHS="80;90;100;120+PTX",
CUDA_HOME.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NoReturn

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

VERSION = "0.1.0"
TORCH_MIN = (2, 11)
PYTHON_MIN = (3, 11)
CUDA_ARCHS = os.environ.get("QUEST_CUDA_ARCHS", "80;90;100;120+PTX")

ROOT = Path(__file__).resolve().parent
BUILD = Path("build/quest")  # every path in build.ninja is relative to ROOT, so a copied tree need not compile again
MACOS = sys.platform == "darwin"

# Folders at the top that are installed inside quest: `triton_kernels` is also the name of a package of Triton's own.
MAPPED_PACKAGES = {"quest.bench": "bench", "quest.triton_kernels": "triton_kernels"}

AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
# What each copy of a CPU kernel may use beyond the architecture's own baseline.
ISA_FLAGS = {
    "x86_64": {
        "baseline": [],
        "avx2": ["-mavx2", "-mfma", "-mf16c"],
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    },
    "aarch64": {"neon": []},
}
MACHINE = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
ISAS = ISA_FLAGS.get(MACHINE, {"baseline": []})

COMMON = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Icsrc"]
# Not -ffast-math: the rules for NaN and infinity are part of what the kernels promise.
KERNEL = ["-O3", "-ffp-contract=fast", "-fno-math-errno"]


def fail(message: str) -> NoReturn:
    sys.exit(f"quest-attention: {message}")


# --- torch -----------------------------------------------------------------------------------------------------------


def find_torch() -> tuple[Path, str]:
    """The folder and the version of the installed torch, read without importing it.

    pip's isolated build environment hides the surrounding one through PYTHONPATH; `python -E` ignores that variable,
    so the second try still sees the environment that quest is being installed into.
    """
    code = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"
    for flags in ([], ["-E"]):
        found = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True).stdout.strip()
        if found:
            break
    wanted = ".".join(map(str, TORCH_MIN))
    if not found:
        fail(
            f"torch {wanted} or newer (any build, CPU is enough) must be installed before quest is built, and none was "
            f"found: run `pip install 'torch>={wanted}'` first; if it is installed, add --no-build-isolation."
        )
    folder = Path(found).parent
    version_file = folder / "version.py"
    match = re.search(r"__version__ = '(\d+)\.(\d+)([^']*)'", version_file.read_text() if version_file.exists() else "")
    if not match:
        fail(f"the version of the torch in {folder} could not be read, torch {wanted} or newer is needed.")
    version = f"{match[1]}.{match[2]}{match[3]}"
    if (int(match[1]), int(match[2])) < TORCH_MIN:
        fail(f"torch {wanted} or newer is needed, but {version} is installed: run `pip install -U 'torch>={wanted}'`.")
    return folder, version


# --- CUDA ------------------------------------------------------------------------------------------------------------


def find_cuda() -> Path | None:
    """The CUDA toolkit to build quest._C_cuda with, or None for a CPU-only build. Never asks for a GPU."""
    wish = os.environ.get("QUEST_CUDA", "auto")
    if wish not in ("auto", "0", "1"):
        fail(f"QUEST_CUDA must be auto, 0 or 1, not {wish!r}.")
    if wish == "0":
        return None
    if not list(ROOT.glob("csrc/cuda/*.cu")):
        if wish == "1":
            fail("QUEST_CUDA=1 was asked for, but this version has no CUDA sources (csrc/cuda/*.cu).")
        return None
    chosen = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    places = [Path(chosen)] if chosen else [Path("/usr/local/cuda")]
    if not chosen and (nvcc := shutil.which("nvcc")):
        places.append(Path(nvcc).resolve().parents[1])
    for place in places:
        if (place / "bin/nvcc").exists() and (place / "include/cuda_runtime.h").exists():
            return place
    if wish == "1":
        fail(f"QUEST_CUDA=1 was asked for, but no CUDA toolkit is in {' or '.join(map(str, places))}: set CUDA_HOME.")
    return None


def cuda_tag(cuda: Path) -> str:
    text = subprocess.check_output([cuda / "bin/nvcc", "--version"], text=True)
    return "cu" + "".join(re.search(r"release (\d+)\.(\d+)", text).groups())


def gencode() -> list[str]:
    flags = []
    for arch in CUDA_ARCHS.split(";"):
        number = arch.removesuffix("+PTX")
        flags += ["-gencode", f"arch=compute_{number},code=sm_{number}"]
        if arch.endswith("+PTX"):
            flags += ["-gencode", f"arch=compute_{number},code=compute_{number}"]
    return flags


# --- what to compile -------------------------------------------------------------------------------------------------


def find_compiler() -> tuple[list[str], str]:
    """The C++ compiler's command and a name for people, such as 'g++ (Debian 12.2.0-14) 12.2.0'."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    for name in names:
        command = shlex.split(name)
        if shutil.which(command[0]):
            lines = subprocess.run([*command, "--version"], capture_output=True, text=True).stdout.splitlines()
            return command, lines[0] if lines else name
    fail(f"a C++17 compiler is needed, and none was found (tried {', '.join(names)}): install g++ or set CXX.")


def find_ninja() -> str:
    ninja = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    return ninja or fail("ninja is needed to build without build isolation: `pip install ninja`.")


def find_pybind11() -> str:
    try:
        import pybind11
    except ImportError:
        fail("pybind11 is needed to build without build isolation: `pip install pybind11`.")
    return pybind11.get_include()


class NinjaFile:
    """A build.ninja in the making: one line per object, one per library."""

    def __init__(self) -> None:
        self.lines = [f"builddir = {BUILD}"]
        self.rule("compile", "$cmd -MMD -MF $out.d -c $in -o $out", "depfile = $out.d", "deps = gcc")
        self.rule("link", "$cmd $in $libs -o $out")

    def rule(self, name: str, command: str, *settings: str) -> None:
        self.lines += [f"rule {name}", f"  command = {command}", f"  description = {name} $out"]
        self.lines += [f"  {setting}" for setting in settings]

    def compile(self, source: Path, command: list[str], suffix: str = "") -> Path:
        target = BUILD / source.relative_to("csrc").with_suffix(f"{suffix}.o")
        self.lines += [f"build {target}: compile {source}", f"  cmd = {self.quote(command)}"]
        return target

    def link(self, name: str, objects: list[Path], command: list[str], libs: list[str]) -> Path:
        target = BUILD / f"{name}.so"
        self.lines += [f"build {target}: link {' '.join(map(str, objects))}"]
        self.lines += [f"  cmd = {self.quote(command)}", f"  libs = {self.quote(libs)}"]
        return target

    @staticmethod
    def quote(words: list[str]) -> str:
        return shlex.join(map(str, words)).replace("$", "$$")


class BuildExt(build_ext):
    """Compile with ninja, whatever folder setuptools wants the libraries in."""

    def build_extensions(self) -> None:
        os.chdir(ROOT)
        BUILD.mkdir(parents=True, exist_ok=True)
        ninja_file = NinjaFile()
        libraries = {ext.name: self.plan(ext.name, ninja_file) for ext in self.extensions}
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)) if not MACOS else os.cpu_count())
        with (BUILD / "lock").open("w") as lock:  # two builds of one tree at a time would mix their objects
            fcntl.flock(lock, fcntl.LOCK_EX)
            (BUILD / "build.ninja").write_text("\n".join(ninja_file.lines) + "\n")
            command = [find_ninja(), "-f", str(BUILD / "build.ninja"), "-j", jobs]
            if subprocess.run(command).returncode:
                fail("compiling failed, the compiler's messages are above.")
            for name, library in libraries.items():
                target = Path(self.get_ext_fullpath(name))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)  # never write into a library that a running process has mapped
                shutil.copy2(library, target)

    def plan(self, name: str, ninja_file: NinjaFile) -> Path:
        cxx, cxx_name = find_compiler()
        python_include = sysconfig.get_path("include")
        if not (Path(python_include) / "Python.h").exists():
            fail(f"Python's headers are needed, and {python_include} holds none: install python3-dev or the like.")
        own_flags = shlex.split(os.environ.get("CXXFLAGS", ""))
        link = [*cxx, "-shared", *shlex.split(os.environ.get("LDFLAGS", "")), *own_flags]
        link += ["-undefined", "dynamic_lookup"] if MACOS else ["-Wl,--as-needed", "-Wl,--exclude-libs,ALL"]
        if name == "quest._host":
            include = [f"-isystem{python_include}", f"-isystem{find_pybind11()}"]
            command = [*cxx, *COMMON, "-O2", *include, *own_flags]
            objects = [ninja_file.compile(source, command) for source in sources("csrc/host/*.cpp")]
            return ninja_file.link(name, objects, link, [])

        torch, torch_version = find_torch()
        binding = [
            *cxx,
            *COMMON,
            "-O2",
            f"-DTORCH_TARGET_VERSION=0x{TORCH_MIN[0]:02x}{TORCH_MIN[1]:02x}000000000000ULL",
            f"-DPy_LIMITED_API=0x{PYTHON_MIN[0]:02x}{PYTHON_MIN[1]:02x}0000",
            f"-isystem{torch}/include",
            f"-isystem{python_include}",
        ]
        libs = [f"-L{torch}/lib", "-ltorch_cpu"]
        if name == "quest._C":
            with_cuda = f"{cuda_tag(CUDA)} for {CUDA_ARCHS}" if CUDA else "no CUDA"
            flags = shlex.join([*KERNEL, *own_flags])
            build = f"{cxx_name}; {flags}; {' '.join(ISAS)}; {with_cuda}; torch {torch_version}"
            binding += [f'-DQUEST_VERSION="{FULL_VERSION}"', f'-DQUEST_BUILD="{build}"', *own_flags]
            objects = [ninja_file.compile(source, binding) for source in sources("csrc/*.cpp")]
            for source in sources("csrc/cpu/*.cpp"):
                if source.name == "dispatch.cpp":
                    have = [f"-DQUEST_HAVE_{isa.upper()}" for isa in ISAS]
                    objects.append(ninja_file.compile(source, [*cxx, *COMMON, *KERNEL, *have, *own_flags]))
                    continue
                for isa, isa_flags in ISAS.items():
                    command = [*cxx, *COMMON, *KERNEL, *isa_flags, f"-DQUEST_ISA={isa}", *own_flags]
                    objects.append(ninja_file.compile(source, command, f".{isa}"))
        else:
            binding += [f"-isystem{CUDA}/include", f'-DQUEST_CUDA_ARCHS="{CUDA_ARCHS}"', *own_flags]
            objects = [ninja_file.compile(source, binding) for source in sources("csrc/cuda/*.cpp")]
            objects.append(BUILD / "arguments.o")  # which quest._C has too
            nvcc = [CUDA / "bin/nvcc", "-ccbin", cxx[-1], "-std=c++17", "-O3", "-Xcompiler=-fPIC,-fvisibility=hidden"]
            nvcc += ["--expt-relaxed-constexpr", "-Icsrc", *gencode()]
            objects += [ninja_file.compile(source, nvcc, ".cu") for source in sources("csrc/cuda/*.cu")]
            libs += [f"-L{CUDA}/lib64", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
        return ninja_file.link(name, objects, link, libs)


def sources(pattern: str) -> list[Path]:
    return sorted(path.relative_to(ROOT) for path in ROOT.glob(pattern))


class BuildPy(build_py):
    """Start from an empty folder, or a module that was removed since the last build would still reach the wheel."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


# pip makes the metadata first, then downloads what it names: say there that torch is missing, not after gigabytes.
if {"dist_info", "bdist_wheel", "editable_wheel", "build_ext"} & set(sys.argv):
    find_torch()

CUDA = find_cuda()
FULL_VERSION = f"{VERSION}+{cuda_tag(CUDA)}" if CUDA else VERSION
mapped = {name: folder for name, folder in MAPPED_PACKAGES.items() if list((ROOT / folder).glob("*.py"))}
torch_modules = ["quest._C", *(["quest._C_cuda"] if CUDA else [])]

setup(
    version=FULL_VERSION,
    packages=[*find_packages(include=["quest", "quest.*"]), *mapped],
    package_dir=mapped,
    ext_modules=[
        *(Extension(name, sources=[], py_limited_api=True) for name in torch_modules),
        Extension("quest._host", sources=[]),
    ],
    cmdclass={"build_ext": BuildExt, "build_py": BuildPy},
    zip_safe=False,
)
