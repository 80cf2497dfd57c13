"""A serving loop under a load: throughput, waiting times and the cache's state, dense reads against sparse ones.

The same requests come at the same times for every row. The clock is real, but where there is nothing to do it jumps to
the next arrival. Answers are as long as their requests ask for: no token stops them, so all rows do the same work.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from quest import Pools, QuestConfig
from quest.bench.serving import Engine, Request
from quest.sequences import Usage

__all__ = ["Clock", "config_of", "run", "serve", "show"]

# Smaller than the default's: less of it stays empty at the end of a sequence, and shorter beginnings are found again.
BLOCK_SIZE = 64
WATERMARK = 0.02  # of the blocks


class Clock:
    """Seconds since it was made, and those that it skipped."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() - self.start + self.skipped

    def skip_to(self, moment: float) -> None:
        self.skipped += max(0.0, moment - self())


def serve(
    engine: Engine, requests: Sequence[Request], clock: Clock, watch: Callable[[list[Request]], Any] | None = None
) -> None:
    """Submit every request at its time, until all have ended; `watch` gets those that each step has ended."""
    coming = deque(sorted(requests, key=attrgetter("arrival")))
    while coming or engine.busy:
        while coming and coming[0].arrival <= clock():
            engine.submit(coming.popleft())
        if not engine.busy:
            clock.skip_to(coming[0].arrival)
            continue
        ended = engine.step()
        if watch is not None:
            watch(ended)


def config_of(budget: int | float) -> QuestConfig:
    return QuestConfig(budget=budget, block_size=BLOCK_SIZE)


def run(
    model: Any,
    name: str,
    requests: Sequence[Request],
    *,
    blocks: Sequence[int],
    budget: int,
    chunk: int,
    preempt: str,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Serve all requests from each size of pool, densely and sparsely, on the same paged cache.

    Returns:
        One dict each; `same_answers` is the share of those that the first one gave.
    """
    rows, first = list[dict[str, Any]](), list[list[int]]()
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("warming up")
        options: dict[str, Any] = dict(chunk=chunk, preempt=preempt)
        measure(model, [replace(requests[0], arrival=0.0)], blocks[0], config_of(1.0), options)
        for count in blocks:
            for reads, tokens in (("dense", 1.0), ("sparse", budget)):
                own = [replace(request, output=[], times=[]) for request in requests]
                what = f"{reads}, {count:,} blocks: "

                def advance(ended: int, what: str = what) -> None:
                    progress.update(task, description=f"{what}{ended} of {len(requests)} requests")

                row = measure(model, own, count, config_of(tokens), options, advance)
                answers = [request.output for request in own]
                first = first or answers
                row |= {"same_answers": statistics.fmean(a == b for a, b in zip(answers, first, strict=True))}
                rows.append({"model": name, "reads": reads, "budget": budget if reads == "sparse" else None, **row})
        progress.update(task, description="done")
    return rows


def measure(
    model: Any,
    requests: Sequence[Request],
    blocks: int,
    config: QuestConfig,
    options: dict[str, Any],
    advance: Callable[[int], None] = lambda ended: None,
) -> dict[str, Any]:
    """Serve requests from a new pool."""
    watermark = math.ceil(WATERMARK * blocks)
    layers = model.config.get_text_config().num_hidden_layers
    pools = Pools(layers, config=config, num_blocks=blocks, max_blocks=blocks, watermark=watermark)
    clock = Clock()
    engine = Engine(model, pools, clock=clock, **options)
    ended, usages = list[Request](), list[Usage]()

    def watch(done: list[Request]) -> None:
        ended.extend(done)
        usages.append(engine.paged.usage())
        advance(len(ended))

    serve(engine, requests, clock, watch)
    seconds = clock() - clock.skipped
    finished = [request for request in ended if request.error is None]
    output, prompt = (sum(len(getattr(request, what)) for request in finished) for what in ("output", "prompt"))
    waits = [request.times[0] - request.arrival for request in finished]
    paces = [(r.times[-1] - r.times[0]) / (len(r.times) - 1) * 1e3 for r in finished if len(r.times) > 1]
    counters, read = engine.counters, engine.cache.stats.total
    used = sum(usage.used for usage in usages)
    return {
        "blocks": blocks,
        "block_size": config.block_size,
        "watermark": watermark,
        **options,
        "requests": len(requests),
        "finished": len(finished),
        "errors": {request.id: request.error for request in ended if request.error is not None},
        "preemptions": counters.preemptions,
        "seconds": seconds,
        "output_tokens": output,
        "prompt_tokens": prompt,
        "computed_tokens": counters.computed,
        "output_tokens_per_s": output / seconds,
        "prompt_tokens_per_s": prompt / seconds,
        "first_token_s": spread(waits),
        "token_ms": spread(paces),
        "hit_rate": counters.found / max(1, counters.looked_up),
        "used_blocks": max(usage.used for usage in usages),
        "shared_blocks": max(usage.shared for usage in usages),
        "waste": sum(usage.waste * usage.used for usage in usages) / max(1, used),
        "bytes_per_token": read.bytes.total * layers / max(1, read.tokens),
        "bytes_of_dense": read.fraction,
    }


def spread(numbers: Sequence[float]) -> dict[str, float] | None:
    """Median and 95th percentile (the nearest rank), None of nothing."""
    if not numbers:
        return None
    return {"median": statistics.median(numbers), "p95": sorted(numbers)[math.ceil(0.95 * len(numbers)) - 1]}


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    first = rows[0]
    title = f"{first['model']}: {first['requests']:,} requests; median / 95th percentile"
    columns = ["finished", "preempted", "answer tokens/s", "prompt tokens/s", "first token, s", "ms per token"]
    table(title, columns, rows, speeds, console)
    console.print(
        "Prompt tokens per second: of finished requests, whether found in the cache or computed.\n", highlight=False
    )
    title = f"blocks of {first['block_size']} tokens, prompts in chunks of {first['chunk']}"
    columns = ["prefix found", "used", "shared", "empty slots", "KB read per token", "of dense", "same answers"]
    table(title, columns, rows, cache, console)
    console.print(
        "Blocks used, and shared by several sequences: the most of all steps. Empty slots: mean.\n"
        "Read: by decode steps. Same answers: as in the first row.",
        highlight=False,
    )
    for row in rows:
        for request, error in row["errors"].items():
            console.print(
                f"{row['reads']}, {row['blocks']:,} blocks: request {request}: {error}", markup=False, highlight=False
            )


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[dict[str, Any]],
    cells: Callable[[dict[str, Any]], Sequence[str]],
    console: Console,
) -> None:
    made = Table(title=title)
    for name in ("reads", "blocks", *columns):
        made.add_column(name, justify="right")
    for row in rows:
        reads = "dense" if row["budget"] is None else f"{row['budget']:,} tokens"
        made.add_row(reads, f"{row['blocks']:,}", *cells(row))
    console.print(made)


def speeds(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['finished']:,}",
        f"{row['preemptions']:,}",
        f"{row['output_tokens_per_s']:.1f}",
        f"{row['prompt_tokens_per_s']:,.0f}",
        pair(row["first_token_s"], 1),
        pair(row["token_ms"], 0),
    ]


def cache(row: dict[str, Any]) -> list[str]:
    return [
        f"{row['hit_rate']:.1%}",
        f"{row['used_blocks']:,}",
        f"{row['shared_blocks']:,}",
        f"{row['waste']:.1%}",
        f"{row['bytes_per_token'] / 1e3:,.0f}",
        f"{row['bytes_of_dense']:.1%}",
        f"{row['same_answers']:.1%}",
    ]


def pair(numbers: dict[str, float] | None, digits: int) -> str:
    return "-" if numbers is None else f"{numbers['median']:,.{digits}f} / {numbers['p95']:,.{digits}f}"
