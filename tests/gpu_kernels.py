"""The GPU's kernels in place of the CPU's, so that the same tests hold them to the reference.

    triton  every verb by Triton, in its interpreter
    cuda    the GPU path as it is: Triton packs, scores and selects, CUDA C++ appends and attends, emulated thread for
            thread (tests/emulated.py)
    device  the GPU path on a GPU: tensors go there, and what an op has written comes back

The first two need TRITON_INTERPRET=1 before the kernels are imported (conftest.py) and run where no GPU is, the last
where one is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import quest.backends  # noqa: F401  # registers the ops
from quest import gpu

NAMES = ("device",) if torch.cuda.is_available() else ("triton", "cuda")


def interpret() -> None:
    """To be called before Triton's kernels are imported."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"


@contextlib.contextmanager
def in_place_of_cpu(name: str) -> Iterator[None]:
    """Skips where Triton or what the emulation needs is missing."""
    if not importlib.util.find_spec("triton"):
        pytest.skip("triton is not installed")
    with contextlib.ExitStack() as stack:
        if name == "cuda":
            import emulated

            emulated.load()
            stack.enter_context(_patched(gpu, "extension_missing", lambda device=None: ""))
        elif name == "triton":
            stack.enter_context(gpu.using("triton"))
        functions = {verb: _on_device(verb) for verb in gpu.OPS} if name == "device" else gpu.OPS
        library = torch.library.Library("quest", "IMPL")
        stack.callback(library._destroy)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators")
            for verb, function in functions.items():
                library.impl(verb, function, "CPU", allow_override=True)
        yield


@contextlib.contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _on_device(verb: str) -> Callable[..., Any]:
    """The op on copies in the GPU's memory, with the strides that the tensors have here."""
    op = getattr(torch.ops.quest, verb).default
    written = [bool(argument.alias_info and argument.alias_info.is_write) for argument in op._schema.arguments]

    def run(*args: Any) -> Any:
        moved = [_moved(x) if isinstance(x, torch.Tensor) else x for x in args]
        result = op(*moved)
        for here, there, changed in zip(args, moved, written[: len(args)], strict=True):
            if changed:
                here.copy_(there)
        if isinstance(result, tuple):
            return tuple(x.cpu() for x in result)
        return result.cpu() if isinstance(result, torch.Tensor) else result

    return run


def _moved(x: torch.Tensor) -> torch.Tensor:
    if not x.numel():
        return x.cuda()
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    flat = torch.as_strided(x, (size,), (1,))
    return torch.as_strided(flat.cuda(), x.shape, x.stride())
