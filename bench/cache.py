"""What the cache's bookkeeping costs: a step's tables and slots, blocks, prefixes. No K or V is touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from quest import PagedKVCache, Pools, QuestConfig
from quest.bench.machine import timed

__all__ = ["run", "show"]


def run(batches: Sequence[int], context: int, block_sizes: Sequence[int], *, rounds: int = 200) -> list[dict[str, Any]]:
    """Measure every block size and batch, all rows of `context` tokens.

    Returns:
        One dict per block size, batch and call: `block_size`, `batch`, `context`, `call`, `us` (median; `us_min`,
        `us_max`), `blocks` (that the call takes, releases or finds).
    """
    return [row for size in block_sizes for batch in batches for row in measure(batch, context, size, rounds)]


def measure(batch: int, context: int, block_size: int, rounds: int) -> list[dict[str, Any]]:
    config = QuestConfig(page_size=16, block_size=block_size)
    per_row = -(-(context + rounds) // block_size)
    pools = Pools(1, config=config, num_blocks=(batch + 2) * per_row)
    cache = PagedKVCache.on(pools, batch)
    cache.extend(context)
    tokens = torch.arange(context).numpy()
    blocks = context // block_size

    calls: dict[str, tuple[int, Callable[[], Any], Callable[[], Any]]] = {  # blocks, the call, what undoes it
        "extend by 1": (batch, lambda: cache.extend(1), lambda: None),
        "select others": (0, lambda: cache.select(cache.ids[::-1]), lambda: None),
        "fork": (blocks, lambda: cache.copy(cache.ids[0]), lambda: cache.remove(cache.ids[-1])),
    }
    made = [measured(name, *call, rounds) for name, call in calls.items()]

    ids: list[int] = pools.blocks.allocate(blocks)
    pools.blocks.remember(tokens, ids, repr(()))  # as `PagedKVCache.remember` does once layers have stored them
    for block in reversed(ids):
        pools.blocks.release(block)
    empty = PagedKVCache.on(pools)
    if not empty.reuse(tokens):
        raise RuntimeError("bench cache: the prefix must be found")
    empty.reset()
    found = blocks, lambda: empty.reuse(tokens), empty.reset
    made.append(measured("find a prefix", *found, rounds))
    grown = blocks, lambda: empty.extend(context), empty.reset
    made.append(measured("extend by all", *grown, rounds))
    return [{"block_size": block_size, "batch": batch, "context": context, **row} for row in made]


def measured(name: str, blocks: int, call: Callable[[], Any], undo: Callable[[], Any], rounds: int) -> dict[str, Any]:
    seconds = []
    for _ in range(rounds):
        seconds.append(timed(call))
        undo()
    seconds.sort()
    us = [1e6 * x for x in (seconds[len(seconds) // 2], seconds[0], seconds[-1])]
    return {"call": name, "blocks": blocks} | dict(zip(("us", "us_min", "us_max"), us, strict=True))


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title="Bookkeeping of the cache, from Python")
    for name in ("block size", "batch", "context", "call", "blocks", "us"):
        table.add_column(name, justify="left" if name == "call" else "right")
    for row in rows:
        if row["call"] == "extend by 1":
            table.add_section()
        numbers = (f"{row[name]:,}" for name in ("block_size", "batch", "context"))
        us = f"{row['us']:,.1f} ({row['us_min']:,.1f}-{row['us_max']:,.1f})"
        table.add_row(*numbers, row["call"], f"{row['blocks']:,}", us)
    console.print(table)
    console.print(
        "us: median (least-most). extend: slots, block table and lengths of a step of all layers; 'by all' gives one "
        "row all its blocks. fork: a sequence that shares all blocks of another. A prefix is hashed and compared token "
        "by token.",
        highlight=False,
    )
