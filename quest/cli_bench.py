"""`quest bench`: each command measures, prints the machine and a table, and writes both where it is told to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from quest.cli_options import (
    Dtype,
    Json,
    Model,
    Threads,
    errors,
    gguf,
    load_model,
    names,
    read_prompt,
    set_threads,
    whole_numbers,
)

bench = typer.Typer(help="Benchmarks; each prints the machine first.", no_args_is_help=True)


class Sweep(StrEnum):
    contexts = "contexts"
    budgets = "budgets"
    batches = "batches"
    groups = "groups"
    dtypes = "dtypes"
    all = "all"


Sweeps = Annotated[list[Sweep], typer.Option(help="Prepared rows instead: 32K tokens, budget 2,048, one thing varied.")]
Contexts = Annotated[list[int], typer.Option(min=1, help="Tokens; may be given several times, as all lists.")]
Numbers = Annotated[list[int], typer.Option(min=1)]
Number = Annotated[int, typer.Option(min=1)]
Presets = Annotated[
    list[str],
    typer.Option("--preset", help="How a step reads: default, long, page4, pages16, paper; several if wanted."),
]
Rounds = Annotated[int, typer.Option(min=1, help="Repetitions per row; the median counts.")]
Isa = Annotated[str | None, typer.Option(help="Instruction set of the kernels, the best if not given.")]


@bench.command("decode")
def bench_decode(
    context: Contexts = [8192, 32768],  # noqa: B006
    batch: Numbers = [1],  # noqa: B006
    budget: Numbers = [512, 2048],  # noqa: B006
    preset: Presets = ["default"],  # noqa: B006
    dtype: Annotated[list[Dtype], typer.Option()] = [Dtype.bfloat16],  # noqa: B006
    num_heads: Number = 32,
    num_kv_heads: Number = 8,
    head_dim: Annotated[int, typer.Option(min=8)] = 128,
    sweep: Annotated[
        list[Sweep], typer.Option(help="Prepared rows instead: 32K tokens, pages16, budget 2,048, one varied.")
    ] = [],  # noqa: B006
    plot: Annotated[Path | None, typer.Option(help="Draw time against context into this file.")] = None,
    rounds: Rounds = 20,
    isa: Isa = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """One decode step of one layer, against PyTorch's attention and the limits of the machine."""
    with errors():
        from quest.bench import decode

        settle(isa, threads)
        if sweep:
            names = decode.SWEEPS if Sweep.all in sweep else [name.value for name in sweep]
            shapes = decode.sweep(names)
        else:
            shapes = shapes_of(context, batch, budget, preset, dtype, num_heads, num_kv_heads, head_dim)
        with reported(json) as (console, rows, _):
            rows += decode.run(shapes, rounds=rounds, console=console)
            decode.show(rows, console)
        if plot is not None:  # after the rows are safe
            from quest.bench.report import draw

            draw(rows, plot)
            console.print(f"wrote {plot}", highlight=False)


@bench.command("steps")
def bench_steps(
    context: Contexts = [32768, 131072],  # noqa: B006
    batch: Numbers = [1],  # noqa: B006
    budget: Numbers = [512],  # noqa: B006
    preset: Presets = ["default"],  # noqa: B006
    dtype: Annotated[list[Dtype], typer.Option()] = [Dtype.bfloat16],  # noqa: B006
    num_heads: Number = 32,
    num_kv_heads: Number = 8,
    head_dim: Annotated[int, typer.Option(min=8)] = 128,
    rounds: Rounds = 20,
    isa: Isa = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """The verbs of one decode step one by one, against the limits of the machine."""
    with errors():
        from quest.bench import steps

        settle(isa, threads)
        shapes = shapes_of(context, batch, budget, preset, dtype, num_heads, num_kv_heads, head_dim)
        with reported(json) as (console, rows, _):
            rows += steps.run(shapes, rounds=rounds, console=console)
            steps.show(rows, console)


@bench.command("hf")
def bench_hf(
    contexts: Annotated[list[int], typer.Option(min=1, help="Tokens; may be given several times.")] = [64, 7168],  # noqa: B006
    dtype: Annotated[list[Dtype], typer.Option()] = [Dtype.float32, Dtype.bfloat16],  # noqa: B006
    budget: Annotated[int, typer.Option(min=1)] = 512,
    preset: Annotated[str, typer.Option(help="How a step reads, as for `quest bench decode`.")] = "default",
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=2, help="Steps per row; the median counts.")] = 32,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """A whole model through transformers, time per token: DynamicCache with sdpa, and QuestCache.

    A GGUF model also runs in llama.cpp, if llama-cpp-python is installed.
    """
    with errors():
        from quest.bench import hf, peers

        known_presets([preset])
        set_threads(threads)
        with reported(json) as (console, rows, others):
            net, tokenizer, name = load_model(model, Dtype.float32, console)
            kinds = [kind.value for kind in dtype]
            options: dict[str, Any] = dict(budget=budget, preset=preset, tokens=tokens, console=console)
            rows += hf.run(net, tokenizer, name, contexts, kinds, **options)
            file = gguf(model)
            if file is not None and peers.llama_available():
                others += hf.run_llama(file, tokenizer, name, contexts, tokens=tokens, console=console)
            hf.show(rows, others, console)


@bench.command("cache")
def bench_cache(
    batch: Annotated[list[int], typer.Option(min=1, help="Rows; may be given several times.")] = [1, 64],  # noqa: B006
    context: Annotated[int, typer.Option(min=16, help="Tokens of each row.")] = 131072,
    block_size: Annotated[list[int], typer.Option(min=16, help="A multiple of 16.")] = [16, 256],  # noqa: B006
    json: Json = None,
) -> None:
    """The cache's bookkeeping: tables and slots of a step, forks, prefixes. No K or V is touched."""
    with errors():
        from quest.bench import cache

        with reported(json) as (console, rows, _):
            rows += cache.run(batch, context, block_size)
            cache.show(rows, console)


Parts = Annotated[list[int], typer.Option(min=1, help="How many times K and V of the context exceed the memory.")]


@bench.command("offload")
def bench_offload(
    context: Annotated[int, typer.Option(min=1, help="Tokens.")] = 7168,
    part: Parts = [4, 16],  # noqa: B006
    budget: Numbers = [256],  # noqa: B006
    dtype: Annotated[Dtype, typer.Option()] = Dtype.bfloat16,
    preset: Annotated[str, typer.Option(help="How a step reads, as for `quest bench decode`.")] = "default",
    model: Model = None,
    tokens: Annotated[int, typer.Option(min=2, help="Steps per row; the median counts.")] = 64,
    directory: Annotated[
        Path | None, typer.Option(help="Where K and V go, the folder for temporary files if none.")
    ] = None,
    cold: Annotated[bool, typer.Option(help="Read files from the disk, not from the system's page cache.")] = False,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """A model whose K and V are larger than the memory for them: time per token, hits, and bytes moved."""
    with errors():
        from quest.bench import offload

        known_presets([preset])
        set_threads(threads)
        with reported(json) as (console, rows, _):
            net, tokenizer, name = load_model(model, Dtype.float32, console)
            options: dict[str, Any] = dict(context=context, budgets=budget, dtype=dtype.value, preset=preset)
            options |= dict(tokens=tokens, directory=directory, cold=cold)
            rows += offload.run(net, tokenizer, name, part, **options, console=console)
            offload.show(rows, console)


class Preempt(StrEnum):
    recompute = "recompute"
    suspend = "suspend"


@bench.command("serve")
def bench_serve(
    requests: Annotated[
        Path | None, typer.Option(help="JSON lines, see bench/workload.py; requests are made up if not given.")
    ] = None,
    write_requests: Annotated[Path | None, typer.Option(help="Write the made up requests to this file.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Made up requests.")] = 200,
    rate: Annotated[float, typer.Option(help="Arrivals per second of made up requests.")] = 2.0,
    longest: Annotated[int, typer.Option(help="Tokens of a made up prompt at most, beside the system prompt.")] = 768,
    seed: Annotated[int, typer.Option(help="Of made up requests.")] = 0,
    budget: Annotated[int, typer.Option(min=1, help="Tokens that a sparse step reads per KV head.")] = 256,
    blocks: Annotated[list[int], typer.Option(min=1, help="Of the pool; may be given several times.")] = [512, 48],  # noqa: B006
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens between two decode steps.")] = 256,
    preempt: Annotated[
        Preempt, typer.Option(help="What becomes of a sequence that makes room for older ones.")
    ] = Preempt.recompute,
    model: Model = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """A serving loop with continuous batching: throughput, waiting times, cache; dense reads against sparse."""
    with errors():
        from quest.bench import serve, workload

        serve.config_of(budget)  # a bad one is an error before anything is loaded
        set_threads(threads)
        with reported(json) as (console, rows, _):
            net, tokenizer, name = load_model(model, Dtype.float32, console)
            if requests is None:
                wanted = workload.make(tokenizer, count, rate=rate, longest=longest, seed=seed)
            else:
                wanted = workload.read(requests, net.get_input_embeddings().num_embeddings)
            if write_requests is not None:
                workload.write(write_requests, wanted)
                console.print(f"wrote {write_requests}", highlight=False)
            load = workload.to_requests(tokenizer, wanted)
            options: dict[str, Any] = dict(blocks=blocks, budget=budget, chunk=chunk, preempt=preempt.value)
            rows += serve.run(net, name, load, **options, console=console)
            serve.show(rows, console)


class Mode(StrEnum):
    quick = "quick"
    full = "full"


@bench.command("accuracy")
def bench_accuracy(
    models: Annotated[
        str, typer.Option(help="Separated by commas: smollm2, gemma3-270m, or paths as of --model elsewhere.")
    ] = "smollm2,gemma3-270m",
    methods: Annotated[str | None, typer.Option(help="Separated by commas; the mode's if not given.")] = None,
    budgets: Annotated[str | None, typer.Option(help="Tokens, separated by commas; the mode's if not given.")] = None,
    measures: Annotated[
        str | None, typer.Option(help="text, passkey and names of tasks; the mode's if not given.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="quick: minutes; full: hours, for numbers to quote.")] = Mode.quick,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to predict, Python's manual if not given.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Stretches of the text.")] = None,
    tokens: Annotated[int | None, typer.Option(min=2, help="Last tokens of a document that are decoded.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Prompts of each task and length.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw PREFIX-MODEL.png for this prefix.")] = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Bytes read against accuracy: divergence from dense, perplexity, passkey, RULER-like tasks, by method and budget.

    With --json every finished measure is stored at once, and the same command goes on where it was stopped.
    """
    with errors():
        from dataclasses import asdict, replace

        from quest.bench import accuracy, accuracy_methods, accuracy_plot, accuracy_report
        from quest.bench.accuracy_store import Store, fingerprint
        from quest.bench.machine import describe, summary
        from quest.passkey import document

        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        full = mode is Mode.full
        given = {"documents": documents, "tokens": tokens, "samples": samples}
        changes: dict[str, Any] = {name: number for name, number in given.items() if number is not None}
        settings = replace(accuracy.FULL if full else accuracy.QUICK, **changes)
        chosen = names("--methods", methods) or list(accuracy_methods.METHODS if full else accuracy_methods.QUICK)
        wanted = whole_numbers("--budgets", budgets or ("64,128,256,512,1024" if full else "128,512"))
        accuracy_methods.check(chosen, wanted)
        measured = names("--measures", measures) or (accuracy.MEASURES if full else accuracy.QUICK_MEASURES)
        words = document() if text is None else read_prompt(text)
        set_threads(threads)
        console, machine = Console(), describe()
        console.print(summary(machine), highlight=False)
        store = Store(json, machine, {**asdict(settings), "text": fingerprint(words)})
        rows = accuracy.run(
            names("--models", models),
            chosen,
            sorted({*wanted}),
            settings,
            words,
            store,
            measures=measured,
            console=console,
        )
        accuracy_report.show(rows, store.tasks, console)
        if plot is not None:
            for path in accuracy_plot.draw(rows, plot):
                console.print(f"wrote {path}", highlight=False)
        if json is not None:
            console.print(f"wrote {json}", highlight=False)


@contextlib.contextmanager
def reported(json: Path | None) -> Iterator[tuple[Console, list[dict[str, Any]], list[dict[str, Any]]]]:
    """The machine first; at the end, `json` if wanted, with the rows and those of peers."""
    from quest.bench.machine import describe, summary, write_json

    console, machine, rows, peers = Console(), describe(), list[dict[str, Any]](), list[dict[str, Any]]()
    console.print(summary(machine), highlight=False)
    yield console, rows, peers
    if json is not None:
        write_json(json, machine, rows, **({"peers": peers} if peers else {}))
        console.print(f"wrote {json}", highlight=False)


def shapes_of(
    context: list[int],
    batch: list[int],
    budget: list[int],
    preset: list[str],
    dtype: list[Dtype],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> list[Any]:
    from quest.bench.shapes import Shape

    if num_heads % num_kv_heads:
        raise ValueError(f"--num-heads must be a multiple of --num-kv-heads ({num_kv_heads}), got {num_heads}")
    return [
        Shape(length, rows, tokens, kind.value, num_heads, num_kv_heads, head_dim, preset=name)
        for kind in dtype
        for length in context
        for rows in batch
        for name in known_presets(preset)
        for tokens in budget
    ]


def known_presets(given: list[str]) -> list[str]:
    """Presets of benchmarks, also several in one, separated by commas."""
    from quest.bench.shapes import PRESETS

    found = names("--preset", ",".join(given))
    if unknown := [name for name in found if name not in PRESETS]:
        raise ValueError(f"--preset must be of {', '.join(PRESETS)}, got {', '.join(unknown)}")
    return found


def settle(isa: str | None, threads: int | None) -> None:
    from quest import backends

    if isa is not None and isa not in backends.isas():
        raise ValueError(f"--isa must be one of {', '.join(backends.isas())}, got {isa!r}")
    set_threads(threads)
    backends.use_isa(isa)
