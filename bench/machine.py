"""The machine a number comes from: what it is, how fast it reads memory, and how fast it multiplies."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import quest
from quest import backends

__all__ = [
    "Reader",
    "copies",
    "describe",
    "fma_peak",
    "last_level_cache",
    "median_ms",
    "summary",
    "timed",
    "write_json",
]


def describe() -> dict[str, Any]:
    """CPU, instruction set in use, threads, memory, versions: what a result needs beside it."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": backends.isa(),
        "threads": torch.get_num_threads(),
        "llc_bytes": last_level_cache(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "quest": quest.__version__,
    }


def summary(machine: dict[str, Any]) -> str:
    """One line of `describe`."""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, {machine['isa']}, "
        f"torch {machine['torch']}, quest {machine['quest']}"
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def last_level_cache() -> int:
    """Bytes of the largest cache that Linux reports, 32 MiB where it reports none."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [32 << 20]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text and text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def copies(touched: int, size: int) -> int:
    """Layers that must take turns until what a step touches has left the last-level cache by its next turn.

    Fewer where layers of `size` bytes would fill more than a quarter of the machine's memory: then whoever reads all of
    one, as dense attention does between two turns, leaves nothing of the others there.
    """
    wanted = max(1, -(-4 * last_level_cache() // max(1, touched)))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(wanted, max(1, memory // 4 // size))


class Reader:
    """Reads cold memory, `size` bytes a call: the time that takes is the limit for whoever reads as much.

    Args:
        memory: what the measured code reads too, so that both meet the same memory; its parts take turns. Together at
            least four times the last-level cache, see `copies`.

    A part is read as a sum of integers: one load and one addition per vector, on all of torch's threads.
    """

    def __init__(self, size: int, memory: Sequence[Tensor]) -> None:
        flat = [x.view(-1).view(torch.int64) for x in memory if x.nbytes % 8 == 0]
        part = min(size // 8, min(map(len, flat)))
        self.parts = [x[start : start + part] for x in flat for start in range(0, len(x) - part + 1, part)]
        self.scale = size / (8 * part)
        self.turn = 0

    def __call__(self) -> float:
        """Seconds for `size` bytes."""
        self.turn = (self.turn + 1) % len(self.parts)
        return timed(self.parts[self.turn].sum) * self.scale


def fma_peak(seconds: float = 0.5) -> float:
    """fp32 multiply-adds per second, as torch's matrix product reaches them: the best of many."""
    n = 1024
    a, b = torch.ones(n, n), torch.ones(n, n)
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        best = min(best, timed(lambda: a @ b))
    return n**3 / best


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def write_json(path: str | os.PathLike[str], machine: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """`machine` and `rows`, and whatever else belongs to a run."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine, **more, "rows": rows}, indent=2) + "\n")
