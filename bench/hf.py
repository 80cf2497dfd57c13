"""Time per token of a whole model through transformers: `DynamicCache` with sdpa attention, and `QuestCache`.

A text is read once, in fp32; both caches start from its keys and values, and their steps take turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from quest.bench.machine import median_ms
from quest.bench.peers import LlamaCpp
from quest.bench.shapes import PRESETS
from quest.measure import Decoder, context_limit, follow, prefill
from quest.models import DTYPES
from quest.passkey import document, encode

__all__ = ["run", "run_llama", "show"]

WARM_UP = 3  # steps that don't count
PATH_STEPS = 48  # in which the parts of a step are timed


def run(
    model: Any,
    tokenizer: Any,
    name: str,
    contexts: Sequence[int],
    dtypes: Sequence[str],
    *,
    budget: int = 512,
    preset: str = "default",
    tokens: int = 32,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure every dtype and context; `model`, loaded in fp32, is cast in place to each dtype in turn.

    Returns:
        Two dicts per dtype and context, `cache` "dynamic" and "quest": `model`, `dtype`, `context` (at the first
        step), `budget`, `preset`, `ms_per_token` (median; `ms_min`, `ms_max`), and for "quest" `path_us`, `op_us`: see
        `attention_us`.

    Raises:
        ValueError: a context is longer than the model's positions, or than the text.
    """
    text = encode(tokenizer, document())
    longest, limit = max(contexts), context_limit(model)
    steps = WARM_UP + tokens
    room = steps + PATH_STEPS
    if limit is not None and longest + room > limit:
        raise ValueError(f"bench hf: context {longest:,} and {room} steps exceed the model's context of {limit:,}")
    if longest + room > len(text):
        raise ValueError(f"bench hf: context must leave {room} of the text's {len(text):,} tokens, got {longest:,}")
    rows = []
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task(f"reading {longest:,} tokens")
        source = prefill(model, text[:longest])
        for dtype in dtypes:
            model.to(DTYPES[dtype])
            for context in contexts:
                progress.update(task, description=f"{dtype}, {context:,} tokens")
                start = start_at(source, longest - context, dtype)
                pair = [Decoder(model, start, None), Decoder(model, start, PRESETS[preset].replace(budget=budget))]
                follow(pair, text[context : context + steps])
                for cache, decoder in zip(("dynamic", "quest"), pair, strict=True):
                    seconds = decoder.seconds[WARM_UP:]
                    rows.append(
                        {
                            "model": name,
                            "dtype": dtype,
                            "context": context,
                            "cache": cache,
                            "budget": None if cache == "dynamic" else budget,
                            "preset": None if cache == "dynamic" else preset,
                            "ms_per_token": median_ms(seconds),
                            "ms_min": min(seconds) * 1e3,
                            "ms_max": max(seconds) * 1e3,
                        }
                    )
                path, op = attention_us(pair[1], text[context + steps : context + room])
                rows[-1] |= {"path_us": path, "op_us": op}
        progress.update(task, description="done")
    return rows


def attention_us(decoder: Decoder, tokens: Sequence[int]) -> tuple[float, float]:
    """Microseconds per layer that a `QuestCache` takes in a step: `update` and the attention function as a whole, and
    the op alone. Medians over steps that take turns, since a clock around the op would count in the other time."""
    from transformers.modeling_utils import AttentionInterface

    from quest.integrations import transformers as integration
    from quest.integrations.transformers_layer import QuestLayer

    spent = 0.0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal spent
            start = perf_counter()
            result = function(*args, **kwargs)
            spent += perf_counter() - start
            return result

        return call

    paged, layers = decoder.cache.paged, len(decoder.cache.paged_layers)
    op, update, attend = paged._op, QuestLayer.update, integration.quest_attention_forward
    times: tuple[list[float], list[float]] = [], []
    try:
        for place, token in enumerate(tokens):
            alone = place % 2
            paged._op = timed(op) if alone else op
            QuestLayer.update = update if alone else timed(update)  # type: ignore[method-assign]
            AttentionInterface.register(integration.NAME, attend if alone else timed(attend))
            spent = 0.0
            decoder.step(token)
            times[alone].append(spent / layers * 1e6)
    finally:
        paged._op = op
        QuestLayer.update = update  # type: ignore[method-assign]
        AttentionInterface.register(integration.NAME, attend)
    return statistics.median(times[0]), statistics.median(times[1])


def run_llama(
    file: Path, tokenizer: Any, name: str, contexts: Sequence[int], *, tokens: int = 32, console: Console | None = None
) -> list[dict[str, Any]]:
    """The same text through llama.cpp: weights as in the GGUF file, so it is engine against engine."""
    text = encode(tokenizer, document())
    steps = WARM_UP + tokens
    console = console or Console()
    with console.status("llama.cpp"):
        engine = LlamaCpp(file, max(contexts) + steps)
        rows = []
        for context in contexts:
            seconds = engine.seconds(text[:context], text[context : context + steps])[WARM_UP:]
            row = {"model": name, "engine": "llama.cpp", "context": context, "ms_per_token": median_ms(seconds)}
            rows.append(row | {"ms_min": min(seconds) * 1e3, "ms_max": max(seconds) * 1e3})
    return rows


def start_at(source: Any, less: int, dtype: str) -> Any:
    """A copy of a `DynamicCache` in another dtype, without its last `less` tokens."""
    cache = copy.deepcopy(source)
    if less:
        cache.crop(-less)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.to(DTYPES[dtype]), layer.values.to(DTYPES[dtype])
        layer.dtype = DTYPES[dtype]
    return cache


def show(rows: Sequence[dict[str, Any]], peers: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"{rows[0]['model']}: ms per token")
    for name in (
        "dtype",
        "context",
        "preset",
        "budget",
        "DynamicCache, sdpa",
        "QuestCache",
        "ratio",
        "us per layer",
        "of them the op",
    ):
        table.add_column(name, justify="right")
    for dynamic, quest in zip(rows[::2], rows[1::2], strict=True):
        table.add_row(
            quest["dtype"],
            f"{quest['context']:,}",
            quest["preset"],
            f"{quest['budget']:,}" + (" (dense)" if quest["budget"] >= quest["context"] else ""),
            f"{dynamic['ms_per_token']:.1f}",
            f"{quest['ms_per_token']:.1f}",
            f"{quest['ms_per_token'] / dynamic['ms_per_token']:.2f}",
            f"{quest['path_us']:.0f}",
            f"{quest['op_us']:.0f}",
        )
    console.print(table)
    for row in peers:
        spread = f"({row['ms_min']:.1f}-{row['ms_max']:.1f})"
        console.print(f"llama.cpp, {row['context']:,} tokens: {row['ms_per_token']:.1f} ms {spread}", highlight=False)
