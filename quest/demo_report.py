"""What the demo shows: a table, the answers, a JSON file and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from quest.demo import Row

__all__ = ["as_rows", "draw", "print_answers", "print_table"]

# One hue per quantity, readable for the colour-blind and in grey; dense is grey throughout.
ANSWERED, AGREES, SPEED, DENSE, INK = "#1b6ca8", "#d1762b", "#2a8a57", "#8a8a8a", "#303030"


def as_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows of results.json. Where no passkey was hidden, the answer's text stands in place of `answered`."""
    dense = rows[0].seconds_per_token
    found = []
    for row in rows:
        entry: dict[str, Any] = {"budget": "dense" if row.config is None else row.config.budget}
        if row.depths:
            entry |= {"answered": row.answered, "depths": row.depths}
        else:
            entry |= {"text": row.texts[-1]}
        entry |= {
            "speedup": dense / row.seconds_per_token,
            "bytes_per_token": row.bytes_per_token,
            "bytes_fraction": row.bytes_fraction,
            "top1_agreement": row.top1_agreement,
            "ms_per_token": row.seconds_per_token * 1e3,
            "tokens_per_second": 1 / row.seconds_per_token,
            "dense": row.dense,
        }
        found.append(entry)
    return found


def print_table(rows: Sequence[Row], console: Console, title: str) -> None:
    table = Table(title=title)
    table.add_column("budget", justify="right")
    if rows[0].depths:
        table.add_column("answered", justify="right")
    for name in ("tokens/s", "against dense", "MB read per token", "of dense", "top-1 as dense"):
        table.add_column(name, justify="right")
    for row, entry in zip(rows, as_rows(rows), strict=True):
        budget = "dense" if row.config is None else f"{entry['budget']:,}" + (" (dense)" if row.dense else "")
        table.add_row(
            budget,
            *([f"{row.answered} of {row.depths}"] if row.depths else []),
            f"{entry['tokens_per_second']:.1f}",
            f"{entry['speedup']:.2f}x",
            f"{row.bytes_per_token / 1e6:.1f}",
            f"{row.bytes_fraction:.1%}",
            f"{row.top1_agreement:.1%}",
        )
    console.print(table)
    for row in rows[1:]:
        if row.answered > rows[0].answered:
            console.print(f"{row.name} answered more than dense did: chance, or something is wrong", style="yellow")


def print_answers(rows: Sequence[Row], console: Console) -> None:
    width = min(console.width, 110) - 2
    for row in rows:
        console.print(f"[bold]{row.name}[/bold]", highlight=False)
        for paragraph in row.texts[-1].splitlines() or [""]:
            lines = textwrap.wrap(paragraph, width) or [""]
            console.print("\n".join("  " + line for line in lines), markup=False, highlight=False)


def draw(rows: Sequence[Row], path: str | Path, caption: str) -> None:
    """Accuracy (left) and speed (right) against the bytes that a token reads, one labelled point per row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    entries = as_rows(rows)
    dense, sparse = entries[0], [entry for entry in entries[1:] if not entry["dense"]]
    megabytes = [entry["bytes_per_token"] / 1e6 for entry in sparse]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")

    curves = [("top1_agreement", "same next token as dense", AGREES, [entry["top1_agreement"] for entry in sparse])]
    if rows[0].depths:
        answered = [entry["answered"] / entry["depths"] for entry in sparse]
        curves.append(("answered", "passkey answered", ANSWERED, answered))
    for _, label, colour, values in curves:
        left.plot(megabytes, [100 * value for value in values], "o-", color=colour, label=label, clip_on=False)
    left.set(title="Accuracy", ylabel="%", ylim=(0, 108))
    if sparse:
        left.legend(loc="lower right", frameon=False)

    right.plot(megabytes, [entry["speedup"] for entry in sparse], "o-", color=SPEED)
    right.axhline(1, color=DENSE, linewidth=1, linestyle="--")
    right.set(title="Speed, whole model", ylabel="tokens per second against dense")
    right.set_ylim(0, 1.15 * max(entry["speedup"] for entry in entries))

    top = {"left": [100 * max(c[3][i] for c in curves) for i in range(len(sparse))]}
    top["right"] = [entry["speedup"] for entry in sparse]
    for axis, side, at_dense in ((left, "left", 100), (right, "right", 1)):
        axis.plot(dense["bytes_per_token"] / 1e6, at_dense, "s", color=DENSE, clip_on=False)
        axis.annotate("dense", (dense["bytes_per_token"] / 1e6, at_dense), (0, 8), **_label(DENSE))
        for i, (entry, x, y) in enumerate(zip(sparse, megabytes, top[side], strict=True)):
            axis.annotate(f"{entry['budget']:,}", (x, y), (0 if i else -5, 8), **_label(INK))
        axis.set(xlabel="MB of KV cache and summaries read per token", xscale="log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.grid(True, which="major", color="#e6e6e6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(caption, fontsize=10, color=INK)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _label(colour: str) -> dict[str, Any]:
    halo = dict(facecolor="white", edgecolor="none", pad=0.5, alpha=0.8)
    return dict(textcoords="offset points", ha="center", fontsize=9, color=colour, bbox=halo)
