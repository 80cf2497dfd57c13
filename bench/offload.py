"""Decoding with less memory than the context needs: a model over a `QuestCache` whose K and V are partly in files.

The first tier holds a part of the context's K and V. The same text goes through a cache that has all of it in memory;
both read the same pages, so what differs is the time, and the bytes that move. Files lie in the system's page cache as
far as memory is free, so this is the time of the copies, not that of a disk; `cold` is that of the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from quest.bench.hf import WARM_UP, start_at
from quest.bench.machine import median_ms
from quest.bench.shapes import PRESETS
from quest.measure import Decoder, context_limit, follow, prefill
from quest.models import DTYPES
from quest.offload import Offload, OffloadStats
from quest.passkey import document, encode
from quest.pools import Pools
from quest.residency import Residency

__all__ = ["run", "show"]


def run(
    model: Any,
    tokenizer: Any,
    name: str,
    parts: Sequence[int],
    *,
    context: int,
    budgets: Sequence[int],
    dtype: str,
    preset: str = "default",
    tokens: int = 64,
    directory: str | os.PathLike[str] | None = None,
    cold: bool = False,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure every budget of tokens and every part; `model`, loaded in fp32, is cast in place.

    Args:
        parts: how many times the first tier's budget K and V of the context take.
        cold: before each step the system forgets what it keeps of the files, so that they are read from the disk.

    Returns:
        One dict each: `model`, `dtype`, `preset`, `context`, `budget`, `part`, `cold`, `kv_bytes` (of the context),
        `max_bytes` (of the first tier), `resident_bytes` and `peak_bytes` (the prompt's included), `ms_per_token`,
        `all_resident_ms` (medians, which took turns), `hit_rate`, `bytes_in` and `bytes_out` per token, and
        `same_choice`, the share of steps in which both would have gone on with the same token.

    Raises:
        ValueError: the context is longer than the model's positions, or than the text.
    """
    text, room, limit = encode(tokenizer, document()), WARM_UP + tokens, context_limit(model)
    most = min(len(text), limit or len(text)) - room
    if context > most:
        raise ValueError(f"bench offload: context must be at most {most:,} for {room} steps, got {context:,}")
    rows = []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"reading {context:,} tokens")
        start = start_at(prefill(model, text[:context]), 0, dtype)
        model.to(DTYPES[dtype])
        kv_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in start.layers)
        for budget in budgets:
            for part in parts:
                progress.update(task, description=f"budget {budget:,}, a {part}th in memory")
                config, offload = PRESETS[preset].replace(budget=budget), Offload(directory, max_bytes=kv_bytes // part)
                pools = Pools(len(start.layers), config=config, offload=offload)
                pair = [Decoder(model, start, config), Decoder(model, start, config, pools)]
                follow(pair, text[context : context + WARM_UP])
                before = _stats(pools)
                forget = partial(_forget_files, pools) if cold else None
                chosen = follow(pair, text[context + WARM_UP : context + room], forget)
                after = _stats(pools)
                whole, offloaded = (decoder.seconds[WARM_UP:] for decoder in pair)
                hits, misses = after.hits - before.hits, after.misses - before.misses
                rows.append(
                    {
                        "model": name,
                        "dtype": dtype,
                        "preset": preset,
                        "context": context,
                        "budget": budget,
                        "part": part,
                        "cold": cold,
                        "kv_bytes": kv_bytes,
                        "max_bytes": offload.max_bytes,
                        "resident_bytes": after.resident_bytes,
                        "peak_bytes": after.peak_resident_bytes,
                        "ms_per_token": median_ms(offloaded),
                        "all_resident_ms": median_ms(whole),
                        "hit_rate": hits / (hits + misses),
                        "bytes_in": (after.bytes_in - before.bytes_in) / tokens,
                        "bytes_out": (after.bytes_out - before.bytes_out) / tokens,
                        "same_choice": (chosen[0] == chosen[1]).float().mean().item(),
                    }
                )
        progress.update(task, description="done")
    return rows


def _stats(pools: Pools) -> OffloadStats:
    if pools.residency is None:
        raise ValueError("bench offload: pools must be offloaded")
    return pools.residency.stats


def _forget_files(pools: Pools) -> None:
    """Have nothing of the files in the system's page cache."""
    for file in pools.residency.files if isinstance(pools.residency, Residency) else ():
        os.fdatasync(file.fileno())  # what is not written yet can't be forgotten
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    first = rows[0]
    table = Table(
        title=f"{first['model']}, {first['dtype']}, {first['context']:,} tokens ({first['kv_bytes'] / 1e6:,.0f} MB of "
        f"K and V), {first['preset']}, files {'read from the disk' if first['cold'] else 'in the page cache'}"
    )
    for title in (
        "budget",
        "context / memory",
        "memory MB",
        "most MB",
        "ms per token",
        "all resident",
        "ratio",
        "hit rate",
        "MB in per token",
        "MB out",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            f"{row['budget']:,}",
            f"{row['part']}x",
            f"{row['max_bytes'] / 1e6:,.1f}",
            f"{row['peak_bytes'] / 1e6:,.1f}",
            f"{row['ms_per_token']:.1f}",
            f"{row['all_resident_ms']:.1f}",
            f"{row['ms_per_token'] / row['all_resident_ms']:.2f}",
            f"{row['hit_rate']:.1%}",
            f"{row['bytes_in'] / 1e6:.2f}",
            f"{row['bytes_out'] / 1e6:.2f}",
        )
    console.print(table)
    console.print(
        "Medians of a model's whole step, the two caches taking turns. The most in memory is while a layer's prompt is "
        "stored. Files that lie in the system's page cache take no disk's time (--cold reads them from there).",
        highlight=False,
    )
