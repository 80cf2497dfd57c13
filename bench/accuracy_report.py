"""Tables of `quest bench accuracy`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["by_model", "show"]

Rows = Sequence[dict[str, Any]]


def by_model(rows: Rows) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, list(group)) for name, group in groupby(rows, lambda row: row["model"])]


def show(rows: Rows, tasks: Sequence[dict[str, Any]], console: Console) -> None:
    """Per model: accuracy on texts against bytes, and the tasks that dense attention solves."""
    for model, found in by_model(rows):
        if texts := [row for row in found if "text" in row["measures"]]:
            console.print(text_table(model, texts))
        tried = [one for one in tasks if one["model"] == model]
        if any(one["solved"] for one in tried):
            console.print(task_table(model, found, tried))
        for name, group in groupby(tried, lambda one: one["task"]):
            told = ", ".join(f"{one['score']:.0%} at {one['length']:,}" for one in group)
            solved = any(one["solved"] for one in tried if one["task"] == name)
            console.print(f"{name}: dense finds {told}" + ("" if solved else "; not compared"), highlight=False)
        for row in found:
            if row["beats_dense"]:
                console.print(
                    f"{title(row)} beats dense in {', '.join(row['beats_dense'])}: chance, or something is wrong",
                    style="yellow",
                    highlight=False,
                )
    console.print(
        "KL in nats per token against dense, with its 95 % interval (bootstrap: documents, then tokens of each). "
        "Bytes: all layers, summaries included, 2 per number as in bf16; accuracy is that of fp32. Summary bytes: per "
        "token of context, KV head and layer read sparsely. Recall: dense attention mass in what is read. Oracles know "
        "the attention beforehand.",
        highlight=False,
    )


def text_table(model: str, rows: Rows) -> Table:
    context = rows[0]["context"]
    table = Table(title=f"{model}: the last tokens of texts of {context:,}")
    table.add_column("method")
    names = ("budget", "MB/token", "of dense", "summary B", "KL", "95 %", "median", "p99", "> 1 nat", "perplexity")
    for name in (*names, "top-1", "recall"):
        table.add_column(name, justify="right")
    method = None
    for row in rows:
        if row["method"] != method:
            table.add_section()
            method = row["method"]
        low, high = row["kl_ci95"]
        flag = " !" if "perplexity" in row["beats_dense"] else ""
        table.add_row(
            method,
            budget(row),
            f"{row['bytes_per_token'] / 1e6:.2f}",
            f"{row['bytes_fraction']:.1%}",
            f"{row['summary_bytes_per_token']:.1f}",
            f"{row['kl']:.4f}",
            f"{low:.4f}-{high:.4f}",
            f"{row['kl_median']:.4f}",
            f"{row['kl_p99']:.3f}",
            f"{row['share_above_1_nat']:.1%}",
            f"{row['perplexity']:.3f}{flag}",
            f"{row['top1_agreement']:.1%}",
            f"{row['recall']:.3f}",
        )
    return table


def task_table(model: str, rows: Rows, tried: Sequence[dict[str, Any]]) -> Table:
    solved = {one["task"]: one["length"] for one in tried if one["solved"]}  # the longest is the last
    table = Table(title=f"{model}: answers found, question read densely / sparsely")
    table.add_column("method")
    table.add_column("budget", justify="right")
    for name, length in solved.items():
        table.add_column(f"{name}\n{length:,} tokens", justify="right")
    method = None
    for row in rows:
        if row["method"] != method:
            table.add_section()
            method = row["method"]
        cells = []
        for name in solved:
            scores = (row[f"{name}_a"], row[f"{name}_b"])
            flag = " !" if {f"{name}_a", f"{name}_b"} & {*row["beats_dense"]} else ""
            cells.append("" if None in scores else f"{scores[0]:.0%} / {scores[1]:.0%}{flag}")
        table.add_row(method, budget(row), *cells)
    return table


def budget(row: dict[str, Any]) -> str:
    return "" if row["budget"] is None else f"{row['budget']:,}" + (" (dense)" if row["dense"] else "")


def title(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['method']} {budget(row)}".strip()
