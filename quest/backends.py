"""Which implementations of a decode step exist here and, for those that can't run, why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import quest.fakes  # noqa: F401  # registers the ops
from quest import gpu

_GPU_OPS = gpu.register()


@dataclass(frozen=True)
class Backend:
    """One implementation. `reasons` says why it can't run here; empty if it can."""

    name: str
    what: str
    reasons: tuple[str, ...] = ()


def available() -> list[Backend]:
    """All backends, the preferred first."""
    triton = [gpu.triton_missing()]
    if not torch.cuda.is_available():
        triton.append("torch sees no CUDA device")
    cuda = [*triton, gpu.extension_missing() if torch.cuda.is_available() else ""]
    return [
        _backend("cuda", "Triton scores and selects, CUDA C++ appends and attends", cuda),
        _backend("triton", "Triton does all", triton),
        Backend("cpu", f"one fused C++ op ({isa()})"),
        Backend("verbs", "the C++ verbs one by one"),
        Backend("reference", "plain PyTorch in fp32, the specification"),
    ]


def _backend(name: str, what: str, reasons: list[str]) -> Backend:
    return Backend(name, what, tuple(filter(None, reasons)))


def choose(name: str, device: torch.device) -> str:
    """The backend that runs for tensors on `device`. Only "auto" chooses; a name runs or raises with all reasons."""
    if name == "auto" and device.type == "cpu":
        return "cpu"
    backends = available()
    names = ", ".join(backend.name for backend in backends)
    if name != "auto" and name not in [backend.name for backend in backends]:
        raise ValueError(f"decode: backend must be auto or one of {names}, got {name!r}")
    wanted = [backend for backend in backends if name in ("auto", backend.name)]
    refused = {backend.name: [*backend.reasons, *_elsewhere(backend.name, device)] for backend in wanted}
    for backend, reasons in refused.items():
        if not reasons:
            return backend
    why = "; ".join(dict.fromkeys(reason for reasons in refused.values() for reason in reasons))
    if name == "auto":
        raise ValueError(f"decode: backend auto: no backend for tensors on {device}: {why}")
    raise ValueError(f"decode: backend {name} can't run: {why}")


def _elsewhere(name: str, device: torch.device) -> list[str]:
    where = "cuda" if name in ("cuda", "triton") else "cpu"
    return [] if device.type == where else [f"the tensors are on {device}, {name} runs on {where} tensors"]


def isa() -> str:
    """The instruction set whose CPU kernels are in use: avx512_bf16, avx512, avx2, neon or baseline."""
    return torch.ops.quest.isa()


def isas() -> list[str]:
    """The instruction sets that are built and that this CPU has, best first."""
    return torch.ops.quest.isas().split(",")


def use_isa(name: str | None = None) -> None:
    """Run the CPU kernels of another instruction set (None: the best). For tests and benchmarks, process-wide."""
    torch.ops.quest.use_isa(name or "")
