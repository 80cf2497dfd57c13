"""A decode step on a GPU, stage by stage and as a whole, against dense attention and the device's copy bandwidth.

Everything is timed inside CUDA graphs, where launches cost least, and the whole step without one too. Several layers
take turns, so that no cache holds what is read.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quest import gpu
from quest.bench.decode import sdpa_best
from quest.bench.gpu_peers import PEERS
from quest.bench.shapes import Paged, Shape, decode, paged_layers, plain_layers
from quest.config import forced_pages, max_selected
from quest.packing import packing_of

__all__ = ["copy_bandwidth", "describe", "measure", "shapes", "show"]

ROUNDS = 20
MEMORY_SHARE = 0.85  # of the device's free memory, for one shape
COPIED = 4 << 30  # bytes that the bandwidth is measured with

Call = Callable[[], Any]


def shapes() -> list[Shape]:
    """Llama 3 8B's heads in bf16: the default preset, and 16-token pages at a budget of 2,048."""
    ways = (("default", 512), ("pages16", 2048))
    return [
        Shape(context, batch, budget, "bfloat16", 32, 8, 128, preset=preset)
        for batch in (1, 8, 64)
        for context in (8192, 32768, 131072)
        for preset, budget in ways
    ]


def describe(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"device": "cpu", "l2_bytes": 0}
    found = torch.cuda.get_device_properties(device)
    return {
        "device": found.name,
        "capability": f"sm_{found.major}{found.minor}",
        "multiprocessors": found.multi_processor_count,
        "l2_bytes": found.L2_cache_size,
        "attend": gpu.extension_missing(device) or f"CUDA C++ ({gpu.extension_archs()})",
        "triton": gpu.triton_missing() or "yes",
        "cuda": torch.version.cuda,
    }


def copy_bandwidth(device: torch.device, size: int = COPIED) -> float:
    """Bytes per second of a copy inside the device's memory, read and written ones counted."""
    source, target = (torch.empty(size, dtype=torch.uint8, device=device).fill_(value) for value in (1, 2))
    return 2 * size / seconds(lambda: target.copy_(source), device)


def seconds(call: Call, device: torch.device, rounds: int = ROUNDS) -> float:
    """Median time of a call that has been made before."""
    times = []
    for _ in range(rounds):
        if device.type != "cuda":
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
            continue
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def per_call_ms(calls: Sequence[Call], device: torch.device, rounds: int, graph: bool = True) -> float:
    """Median milliseconds of one of `calls`, which run one after the other, on a GPU inside a graph unless told not."""
    for call in calls[:1] * 2:
        call()  # compiles, and allocates what later calls use again

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda" or not graph:
        all_of_them()
        return seconds(all_of_them, device, rounds) / len(calls) * 1e3
    torch.cuda.synchronize(device)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        all_of_them()
    captured.replay()
    return seconds(captured.replay, device, rounds) / len(calls) * 1e3


def measure(shape: Shape, bandwidth: float, device: torch.device, rounds: int = ROUNDS) -> dict[str, Any]:
    """One shape.

    Returns:
        The shape's fields; `bytes`, of them `summary_bytes` and `kv_bytes`; `ms` of the step inside a graph,
        `eager_ms` without; `<stage>_ms` of store, score, select and attend; `attend_copy_fraction`: of the device's
        copy bandwidth; `dense_ms` of PyTorch's attention in its best formulation, `own_dense_ms` of quest's with the
        whole context as budget, `speedup_dense`; `<peer>_ms` of dense attention by whom is installed; with `skipped`
        instead where the device's memory is too small.
    """
    row: dict[str, Any] = dict(vars(shape))
    config, read = shape.config, shape.bytes(shape.config)
    dense_bytes = shape.bytes(shape.dense_config).total
    layers = _layers(device, read.total)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if 2.3 * dense_bytes > MEMORY_SHARE * free:
            return row | {"skipped": f"needs {2.3 * dense_bytes / 1e9:.0f} GB, {free / 1e9:.0f} GB are free"}
        layers = max(1, min(layers, int((MEMORY_SHARE * free - 1.1 * dense_bytes) / (1.2 * dense_bytes))))
    with torch.device(device):
        paged = paged_layers(shape, config, layers)
        new = torch.randn(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim).to(shape.torch_dtype).unbind()
        query = torch.randn(shape.batch, 1, shape.num_heads, shape.head_dim).to(shape.torch_dtype)
        plain = plain_layers(shape, max(1, min(layers, _layers(device, dense_bytes))))

    def step(layer: Paged) -> Call:
        return lambda: decode(query, new, layer, config)

    steps, own_dense = [step(x) for x in paged], [lambda x=x: decode(query, new, x, shape.dense_config) for x in paged]
    row |= {"bytes": read.total, "summary_bytes": read.summaries, "kv_bytes": read.kv}
    row["ms"] = per_call_ms(steps, device, rounds)
    row["eager_ms"] = per_call_ms(steps, device, rounds, graph=False)
    per_layer = [stages(query, new, x, shape) for x in paged]
    for name in per_layer[0]:
        row[f"{name}_ms"] = per_call_ms([calls[name] for calls in per_layer], device, rounds)
    row["attend_gb_per_s"] = read.kv / row["attend_ms"] / 1e6
    row["attend_copy_fraction"] = read.kv / row["attend_ms"] * 1e3 / bandwidth
    row["copy_fraction"] = read.total / row["ms"] * 1e3 / bandwidth
    row["own_dense_ms"] = per_call_ms(own_dense[: len(plain)], device, rounds)
    row["dense_ms"] = per_call_ms([lambda x=x: sdpa_best(query, x) for x in plain], device, rounds)
    row["speedup_dense"] = row["dense_ms"] / row["ms"]
    for name, make in PEERS.items():
        try:
            peer = make(query, paged[0])
            row[f"{name}_ms"] = per_call_ms([peer], device, rounds) if peer else None
        except Exception as error:  # a peer of another version: said, not hidden
            row[f"{name}_ms"], row[f"{name}_error"] = None, f"{type(error).__name__}: {error}"
    return row


def _layers(device: torch.device, touched: int) -> int:
    """Layers that must take turns until the device's cache holds nothing of one at its next turn."""
    return -(-4 * describe(device)["l2_bytes"] // max(1, touched)) or 1


def stages(query: Tensor, new: Sequence[Tensor], layer: Paged, shape: Shape) -> dict[str, Call]:
    """What `quest.gpu.decode` and `decode_packed` do, one after the other."""
    config, packing, triton = shape.config, packing_of(shape.config), gpu.triton_kernels()
    setting, page_size = config.layer(0), config.page_size
    k_cache, v_cache, summaries, table, lens, slots = layer
    scale, budget = shape.head_dim**-0.5, setting.budget
    sink, recent = forced_pages(setting.sink_tokens, setting.recent_tokens, page_size)
    read = budget, 0.0, sink, recent
    max_pages = table.shape[1] * (config.block_size // page_size)
    width = max_selected(max_pages, 1, page_size, budget, sink, recent, None)
    side = gpu.side_of(query, k_cache, v_cache)
    calls: dict[str, Call] = {}
    if packing is None:
        calls["store"] = lambda: side.append_summarise(*new, k_cache, v_cache, *summaries, table, lens, slots)
        agree = scale, setting.slack, setting.group_rule
        calls["score"] = lambda: triton.score(query, *summaries, table, lens, page_size, *agree, -1, False)
        scores = calls["score"]()
        calls["select"] = lambda: triton.select(scores, lens, page_size, *read, -1, width, False)
    else:
        layout = page_size, packing.coarse_size or 0, packing.bits

        def store_packed() -> None:
            side.append(*new, k_cache, v_cache, slots, False)
            triton.pack_new(k_cache, *summaries, table, lens, slots, *layout, sink)

        levels = float(setting.coarse_keep), setting.coarse_limit
        agree = scale, setting.slack, setting.coarse_slack, setting.group_rule
        rows = query, k_cache, *summaries, table, lens
        calls["store"] = store_packed
        calls["select"] = lambda: triton.select_packed(*rows, *layout, *levels, *read, *agree, -1, width)
    page_idx = calls["select"]()[0]
    calls["attend"] = lambda: side.attend(
        query, k_cache, v_cache, table, lens, page_idx, page_size, scale, 0.0, None, -1, False
    )
    return calls


def show(machine: dict[str, Any], rows: Sequence[dict[str, Any]], console: Console) -> None:
    copied = machine["copy_gb_per_s"]
    table = Table(title=f"One decode step, one layer, on {machine['device']}; copies run at {copied:,.0f} GB/s")
    for name in ("batch", "context", "preset", "budget", "MB", "ms", "eager", "store", "score", "select", "attend",
                 "of copy", "SDPA", "own dense", *PEERS):  # fmt: skip
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['batch']}", f"{row['context']:,}", row["preset"], f"{row['budget']:,}"]
        if "skipped" in row:
            table.add_row(*cells, row["skipped"])
            continue
        cells += [f"{row['bytes'] / 1e6:.1f}", f"{row['ms']:.3f}", f"{row['eager_ms']:.3f}"]
        cells += [_cell(row, f"{stage}_ms") for stage in ("store", "score", "select", "attend")]
        cells += [f"{row['attend_copy_fraction']:.0%}", f"{row['dense_ms']:.3f}, {row['speedup_dense']:.1f}x"]
        table.add_row(*cells, _cell(row, "own_dense_ms"), *(_cell(row, f"{peer}_ms") for peer in PEERS))
    console.print(table)
    console.print(
        "ms: median of the whole step inside a CUDA graph; eager: without one; then its stages (with packed summaries "
        "select holds the scores). Of copy: bytes of K and V that attend reads over its time, as a share of the copy "
        "bandwidth. SDPA: PyTorch's attention over everything, a group's queries as rows; own dense: quest's.",
        highlight=False,
    )


def _cell(row: dict[str, Any], name: str) -> str:
    return "" if row.get(name) is None else f"{row[name]:.3f}"
