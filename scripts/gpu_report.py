"""What the GPU kernels need of a card, without one: registers, spills and shared memory, read from machine code.

Run with the Python that quest is installed in. Prints a table of the CUDA kernels as built, and one of Triton's as
compiled for each architecture; exits with 1 if anything spills, or tensor cores or asynchronous copies are missing.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import gpu_report_cuda
from rich.console import Console
from rich.progress import track
from rich.table import Table

ARCHS = (80, 90, 100, 120)
TRITON_VERBS = ("append", "pack", "score", "score_packed", "select", "attend", "merge", "move")


class Row(NamedTuple):
    kernel: str
    configuration: str
    arch: int
    registers: int  # of a thread
    spills: int  # bytes of a thread
    shared: int  # bytes of a block


# --- Triton -----------------------------------------------------------------------------------------------------------


class Compilation(NamedTuple):
    """A launch as its verb's `configurations()` lists it, by its place there: that of a kernel can't be pickled."""

    verb: str
    place: int
    arch: int


@functools.cache
def triton_launches(verb: str) -> list[Any]:
    """The launches of a verb that differ in what is compiled."""
    module = importlib.import_module(f"quest.triton_kernels.{verb}")
    distinct: dict[tuple[str, str], Any] = {}
    for launch in module.configurations():
        distinct.setdefault((launch.kernel.__name__, describe(launch.arguments)), launch)
    return list(distinct.values())


def describe(arguments: dict[str, Any]) -> str:
    """What a kernel is compiled for: dtypes, constants, warps."""
    dtypes = dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in _tensors(arguments) if x.is_floating_point())
    absent = [f"no {name}" for name, value in arguments.items() if value is None]
    constants = [f"{name}={value}" for name, value in arguments.items() if name.isupper()]
    return " ".join(["/".join(dtypes), *constants, *absent, f"warps={arguments.get('num_warps', 4)}"])


def _tensors(arguments: dict[str, Any]) -> Iterator[Any]:
    for value in arguments.values():
        first = value[0] if isinstance(value, tuple) else value
        if hasattr(first, "dtype"):
            yield first


def compile_triton(compilation: Compilation) -> Row:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    launch = triton_launches(compilation.verb)[compilation.place]
    kernel, target = launch.kernel, GPUTarget("cuda", compilation.arch, 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, debug=False)
    options, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=target, options=options.__dict__)
    registers, stack = resources(compiled.asm["cubin"])
    shared = compiled.metadata.shared
    return Row(kernel.__name__, describe(launch.arguments), compilation.arch, registers, stack, shared)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of a thread: Triton's kernels keep nothing there but spilled registers."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return int(registers), int(stack)


def triton_rows(archs: Iterable[int] = ARCHS, first_only: bool = False) -> list[Row]:
    """Each configuration on each architecture; with first_only, of each kernel the first one."""
    work, seen = [], set()
    for verb in TRITON_VERBS:
        for place, launch in enumerate(triton_launches(verb)):
            if not first_only or launch.kernel.__name__ not in seen:
                work += [Compilation(verb, place, arch) for arch in archs]
            seen.add(launch.kernel.__name__)
    with multiprocessing.get_context("spawn").Pool() as pool:
        rows = pool.imap(compile_triton, work)
        return list(track(rows, "Compiling", len(work), console=Console(stderr=True), transient=True))


# --- the report -------------------------------------------------------------------------------------------------------


def print_table(part: str, rows: list[Any], counted: Iterable[str] = ()) -> None:
    """`counted`: instructions that rows of machine code count."""
    table = Table(title=part)
    for name in ("kernel", "configuration"):
        table.add_column(name, overflow="fold")
    for name in ("sm", "registers", "spills", "shared", *counted):
        table.add_column(name, justify="right")
    for row in rows:
        counts = [row.instructions[name] for name in counted] if counted else []
        table.add_row(*map(str, [*row[:6], *counts]), style="red" if row.spills else None)
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main() -> int:
    cuda = gpu_report_cuda.cuda_rows()
    if cuda:
        print_table("CUDA C++: quest._C_cuda", cuda, gpu_report_cuda.INSTRUCTIONS)
        print(gpu_report_cuda.summary(cuda))
    else:
        print("quest._C_cuda is not built here (QUEST_CUDA=1 builds it)")
    triton = triton_rows()
    print_table("Triton", triton)
    faults = gpu_report_cuda.missing(cuda)
    faults += [f"{row.kernel} {row.configuration} sm_{row.arch}: spills" for row in [*cuda, *triton] if row.spills]
    print(f"{len(cuda) + len(triton)} kernels, {len(faults)} faults", *faults, sep="\n  ")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
