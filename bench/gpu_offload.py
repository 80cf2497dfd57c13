"""Steps of a cache on a GPU of which only a part is in its memory, against the same with all of it there.

K has topics of some hundred tokens, and queries stay with one for some steps, so that a step selects much of what the
step before has selected, as a model's do (`quest bench offload` runs a model, on a CPU).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from quest import Offload, PagedKVCache
from quest.bench.shapes import Shape

__all__ = ["measure", "shapes", "show"]

LAYERS = 4
TOPIC = 512  # tokens
WARM_UP = 8
PARTS = (4, 16)  # how many times the first tier's budget K and V take


def shapes() -> list[Shape]:
    ways = (("default", 512), ("pages16", 2048))
    return [Shape(32768, 1, budget, "bfloat16", 32, 8, 128, preset=preset) for preset, budget in ways]


def measure(shape: Shape, part: int, device: torch.device, steps: int = 64) -> dict[str, Any]:
    """One shape, with a `part`th of K and V in the device's memory.

    Returns:
        The shape's fields, `part`, `kv_bytes`; `ms` and `all_resident_ms` of one layer's step (medians, which took
        turns), `hit_rate`, and per layer and step `bytes_in`, `bytes_out`; `max_difference` of their results.
    """
    itemsize, config = shape.torch_dtype.itemsize, shape.config
    kv_bytes = 2 * LAYERS * shape.batch * shape.context * shape.num_kv_heads * shape.head_dim * itemsize
    room = shape.batch * (-(-(shape.context + WARM_UP + steps) // config.block_size))
    pools: dict[str, Any] = dict(config=config, num_blocks=room, device=device)
    few = PagedKVCache(LAYERS, shape.batch, offload=Offload(max_bytes=kv_bytes // part), **pools)
    whole = PagedKVCache(LAYERS, shape.batch, **pools)
    made = _numbers(shape, device)
    prompt = [next(made) for _ in range(LAYERS)]
    for cache in (few, whole):
        step = cache.extend(shape.context)
        for layer, (_, key, value) in enumerate(prompt):
            cache.append(layer, key, value, step)
    del prompt
    seconds: dict[str, list[float]] = {"few": [], "whole": []}
    difference = 0.0
    for turn in range(WARM_UP + steps):
        if turn == WARM_UP:
            before = few.offload_stats
        new, outs = [next(made) for _ in range(LAYERS)], []
        for name, cache in (("few", few), ("whole", whole)):
            _wait(device)
            start = perf_counter()
            step = cache.extend(1)
            outs.append([cache.decode(layer, *rows, step)[0] for layer, rows in enumerate(new)])
            _wait(device)
            seconds[name].append((perf_counter() - start) / LAYERS)
        difference = max(difference, *((a - b).abs().max().item() for a, b in zip(*outs, strict=True)))
    after = few.offload_stats
    if before is None or after is None:
        raise ValueError("bench gpu_offload: the cache must be offloaded")
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return vars(shape) | {
        "part": part,
        "kv_bytes": kv_bytes,
        "ms": statistics.median(seconds["few"][WARM_UP:]) * 1e3,
        "all_resident_ms": statistics.median(seconds["whole"][WARM_UP:]) * 1e3,
        "hit_rate": hits / (hits + misses),
        "bytes_in": (after.bytes_in - before.bytes_in) / steps / LAYERS,
        "bytes_out": (after.bytes_out - before.bytes_out) / steps / LAYERS,
        "max_difference": difference,
    }


def _numbers(shape: Shape, device: torch.device) -> Iterator[list[Tensor]]:
    """Query, key and value of each layer in turn: of the prompt, and then token by token."""
    rng = torch.Generator(device).manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, shape.head_dim, generator=rng, device=device)

    topics = random(-(-shape.context // TOPIC), shape.num_kv_heads)
    group = shape.num_heads // shape.num_kv_heads
    for turn in range(1 << 30):
        tokens = shape.context if turn < LAYERS else 1
        at = torch.arange(tokens, device=device) // TOPIC
        if turn >= LAYERS:
            at = at + turn // LAYERS // 16 * 7 % len(topics)  # another topic every 16 steps
        about = topics[at].expand(shape.batch, -1, -1, -1)
        query = about.repeat_interleave(group, 2) + random(shape.batch, tokens, shape.num_heads)
        key, value = about + random(*about.shape[:3]), random(*about.shape[:3])
        yield [x.to(shape.torch_dtype) for x in (query, key, value)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="One layer's step with a part of K and V in the device's memory, the rest in the host's")
    for name in ("context", "preset", "budget", "part", "ms", "all resident", "found", "MB in", "MB out"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [f"{row['context']:,}", row["preset"], f"{row['budget']:,}", f"1/{row['part']}", f"{row['ms']:.3f}"]
        cells += [f"{row['all_resident_ms']:.3f}", f"{row['hit_rate']:.1%}"]
        table.add_row(*cells, f"{row['bytes_in'] / 1e6:.2f}", f"{row['bytes_out'] / 1e6:.2f}")
    console.print(table)
