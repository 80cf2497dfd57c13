"""Time per token of a whole model through transformers: `DynamicCache` with sdpa attention, and `QuestCache`.

A text is read once, in fp32; both caches start from its keys and values, and their steps take turns.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch
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
PATH_STEPS = 8  # in which the parts of a step are timed


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
    """Microseconds per layer that a `QuestCache` takes in a step: all from `update` to the attention's result, and the
    op alone. Medians over the steps; wrapped functions take the times, so the steps themselves are a little slower."""
    from transformers.modeling_utils import AttentionInterface

    from quest.integrations import transformers as integration
    from quest.integrations.transformers_layer import QuestLayer

    spent = {"path": 0.0, "op": 0.0}

    def timed(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[what] += perf_counter() - start

        return call

    name = "decode" if decoder.cache.config.summary_bits is None else "decode_packed"
    op, update, attend = getattr(torch.ops.quest, name), QuestLayer.update, integration.quest_attention_forward
    layers, steps = len(decoder.cache.paged_layers), []
    try:
        setattr(torch.ops.quest, name, SimpleNamespace(default=timed("op", op.default)))
        QuestLayer.update = timed("path", update)  # type: ignore[method-assign]
        AttentionInterface.register(integration.NAME, timed("path", attend))
        for token in tokens:
            spent.update(path=0.0, op=0.0)
            decoder.step(token)
            steps.append((spent["path"] / layers * 1e6, spent["op"] / layers * 1e6))
    finally:
        setattr(torch.ops.quest, name, op)
        QuestLayer.update = update  # type: ignore[method-assign]
        AttentionInterface.register(integration.NAME, attend)
    path, alone = (statistics.median(times) for times in zip(*steps, strict=True))
    return path, alone


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
