"""The `quest` command. A subcommand imports what it needs itself, so that `quest info` needs little and is quick."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from quest.cli_bench import bench
from quest.cli_options import (
    Dtype,
    Model,
    Preset,
    Threads,
    errors,
    load_model,
    read_prompt,
    set_threads,
    whole_numbers,
)

app = typer.Typer(
    name="quest",
    help="Query-aware sparse-read attention: the KV cache keeps every token, a decode step reads only the best pages.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")


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
