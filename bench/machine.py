"""The machine a number comes from: what it is, and how fast it reads memory."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import quest
from quest import backends

__all__ = ["describe", "last_level_cache", "read_bandwidth", "summary", "write_json"]


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


def read_bandwidth(seconds: float = 2.0) -> float:
    """Bytes per second that torch's threads read from memory: the best of many sums over buffers that no cache holds.

    Two buffers of at least four times the last-level cache take turns, so that each is cold when its turn comes. The
    best, not the median: it serves as a limit.
    """
    size = min(max(4 * last_level_cache(), 256 << 20), 1 << 30)
    buffers = [torch.ones(size // 8, dtype=torch.int64) for _ in range(2)]
    best, end, turn = 0.0, time.perf_counter() + seconds, 0
    while time.perf_counter() < end or turn < 4:
        start = time.perf_counter()
        buffers[turn % 2].sum()
        best = max(best, size / (time.perf_counter() - start))
        turn += 1
    return best


def median_ms(seconds: list[float]) -> float:
    return statistics.median(seconds) * 1e3


def write_json(path: str | os.PathLike[str], machine: dict[str, Any], rows: list[dict[str, Any]], **more: Any) -> None:
    """`machine` and `rows`, and whatever else belongs to a run."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps({"machine": machine, **more, "rows": rows}, indent=2) + "\n")
