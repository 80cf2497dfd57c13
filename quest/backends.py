"""Which implementations of a decode step exist here and, for those that can't run, why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

import quest.fakes  # noqa: F401  # registers the ops


@dataclass(frozen=True)
class Backend:
    """One implementation. `reasons` says why it can't run here; empty if it can."""

    name: str
    what: str
    reasons: tuple[str, ...] = ()


def available() -> list[Backend]:
    """All backends, the preferred first."""
    cuda = ["this version has no CUDA kernels yet"]
    if not torch.cuda.is_available():
        cuda.append("torch sees no CUDA device")
    return [
        Backend("cuda", "Triton scores and selects, CUDA C++ attends", tuple(cuda)),
        Backend("cpu", f"one fused C++ op ({isa()})"),
        Backend("verbs", "the C++ verbs one by one"),
        Backend("reference", "plain PyTorch in fp32, the specification"),
    ]


def choose(name: str, device: torch.device) -> str:
    """The backend that runs for tensors on `device`. Only "auto" chooses; a name runs or raises with all reasons."""
    if name == "auto":
        if device.type != "cpu":
            raise ValueError(f"decode: backend auto: no backend for tensors on {device}: this version runs on the CPU")
        return "cpu"
    for backend in available():
        if backend.name == name:
            reasons = list(backend.reasons)
            if device.type != "cpu" and name != "cuda":
                reasons.append(f"the tensors are on {device}, it runs on the CPU")
            if reasons:
                raise ValueError(f"decode: backend {name} can't run: {'; '.join(reasons)}")
            return name
    names = ", ".join(backend.name for backend in available())
    raise ValueError(f"decode: backend must be auto or one of {names}, got {name!r}")


def isa() -> str:
    """The instruction set whose CPU kernels are in use: avx512_bf16, avx512, avx2, neon or baseline."""
    return torch.ops.quest.isa()


def isas() -> list[str]:
    """The instruction sets that are built and that this CPU has, best first."""
    return torch.ops.quest.isas().split(",")


def use_isa(name: str | None = None) -> None:
    """Run the CPU kernels of another instruction set (None: the best). For tests and benchmarks, process-wide."""
    torch.ops.quest.use_isa(name or "")
