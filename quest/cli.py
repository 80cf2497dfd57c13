"""The `quest` command. A subcommand imports what it needs itself, so that `quest info` needs little and is quick."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(
    name="quest",
    help="Query-aware sparse-read attention: the KV cache keeps every token, a decode step reads only the best pages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks; each prints the machine first.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Preset(StrEnum):
    default = "default"
    long = "long"
    paper = "paper"


Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads, torch's choice if not given.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write machine and rows to this file.")]
Model = Annotated[
    Path | None, typer.Option(help="A transformers folder or a .gguf file; SmolLM2-135M from its package if not given.")
]


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """What a user can mend is one line and exit code 2; anything else keeps its traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def show_version(wanted: bool) -> None:
    if wanted:
        import quest

        typer.echo(f"quest {quest.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def info() -> None:
    """Version, build, instruction set in use, backends, and why those that can't run can't."""
    import torch

    import quest
    from quest import backends
    from quest.bench.machine import describe

    machine, console = describe(), Console()
    table = Table.grid(padding=(0, 2))
    table.add_row("quest", quest.__version__)
    table.add_row("built with", torch.ops.quest.build())
    table.add_row("CPU", f"{machine['cpu']}, {machine['cores']} cores")
    others = [isa for isa in backends.isas() if isa != machine["isa"]]
    table.add_row("instruction set", machine["isa"] + (f" (also usable: {', '.join(others)})" if others else ""))
    table.add_row("threads", str(machine["threads"]))
    table.add_row("torch", f"{torch.__version__}, Python {machine['python']}")
    console.print(table, highlight=False)
    console.print()
    table = Table("backend", "what it is", "runs here")
    for backend in backends.available():
        table.add_row(backend.name, backend.what, "no: " + "; ".join(backend.reasons) if backend.reasons else "yes")
    console.print(table)


@app.command()
def demo(
    model: Model = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Answer this prompt instead of the passkey test.")] = None,
    budgets: Annotated[str, typer.Option(help="Tokens read per KV head and step, separated by commas.")] = (
        "64,128,256,512,1024"
    ),
    preset: Annotated[
        Preset, typer.Option(help="How the cache is summarised and scored, and which layers stay dense.")
    ] = Preset.default,
    context: Annotated[int, typer.Option(min=1, help="Length of a passkey prompt in tokens.")] = 7000,
    depths: Annotated[int, typer.Option(min=1, help="Places where a passkey is hidden, a prompt each.")] = 4,
    further_tokens: Annotated[int, typer.Option(min=1, help="Tokens of English to compare with dense.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the answer to a prompt of yours.")] = 128,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and KV cache.")] = Dtype.float32,
    threads: Threads = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for results.json and results.png; the passkey test writes to demo/ if not given."),
    ] = None,
) -> None:
    """A language model answers from a long prompt, densely and with sparse reads.

    Without a prompt: a number is hidden at several depths of a long text, and asked for at its end.
    """
    with errors():
        from quest.bench.machine import describe, summary, write_json
        from quest.demo import answer_prompt, run_passkeys
        from quest.demo_report import as_rows, draw, print_answers, print_table

        wanted = whole_numbers("--budgets", budgets)
        text = None if prompt_file is None else read_prompt(prompt_file)
        config = presets(preset, wanted)
        console, start = Console(), time.monotonic()
        set_threads(threads)
        machine = describe()
        console.print(summary(machine), highlight=False)
        net, tokenizer, name = load_model(model, dtype, console)
        if text is None:
            places = [(i + 0.5) / depths for i in range(depths)]
            rows = run_passkeys(
                net,
                tokenizer,
                budgets=wanted,
                context=context,
                depths=places,
                further=further_tokens,
                config=config,
                console=console,
            )
            title = f"{name}, {dtype.value}: passkey at {depths} depths of {context:,} tokens"
            out = Path("demo") if out is None else out
        else:
            rows = answer_prompt(
                net,
                tokenizer,
                text,
                budgets=wanted,
                max_new_tokens=max_new_tokens,
                config=config,
                console=console,
            )
            title = f"{name}, {dtype.value}: a prompt of {rows[0].context:,} tokens"
            print_answers(rows, console)
        print_table(rows, console, title)
        if out is not None:
            write_json(
                out / "results.json", machine, as_rows(rows), model=name, dtype=dtype.value, context=rows[0].context
            )
            draw(rows, out / "results.png", f"{title}; points are budgets in tokens\n{summary(machine)}")
            console.print(f"wrote {out / 'results.json'} and {out / 'results.png'}", highlight=False)
        console.print(f"{time.monotonic() - start:.0f} s", highlight=False)


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
            options |= dict(tokens=tokens, directory=directory)
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


def gguf(path: Path | None) -> Path | None:
    """The GGUF file that `load_model` reads, None if it reads another kind."""
    from quest import models

    folder, file = models.locate(models.packaged_model() if path is None else path.expanduser())
    return folder / file if file else None


def load_model(path: Path | None, dtype: Dtype, console: Console) -> tuple[Any, Any, str]:
    """Model, tokenizer, and a name for people. The hub is switched off: nothing is to be looked for there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from quest import models

    name = "SmolLM2-135M-Instruct" if path is None else path.stem if path.suffix == ".gguf" else path.resolve().name
    with console.status(f"loading {name}"):
        return *models.load(path, models.DTYPES[dtype.value]), name


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


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def presets(preset: Preset, budgets: list[int]) -> Any:
    """The preset's config; every budget is tried on it, so that a bad one is an error before anything is loaded."""
    from quest import QuestConfig

    makers: dict[str, Callable[..., QuestConfig]] = {
        "default": QuestConfig,
        "long": QuestConfig.long,
        "paper": QuestConfig.paper,
    }
    made = makers[preset.value]()
    for budget in budgets:
        made.replace(budget=budget)
    return made


def read_prompt(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: a prompt is UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path}: the prompt is empty")
    return text


def names(option: str, text: str | None) -> list[str]:
    """Names separated by commas, each once; none for None."""
    found = [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in found:
        raise ValueError(f"{option} must be names separated by commas, got {text!r}")
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers separated by commas, got {text!r}") from None
