"""Tables and plots of `quest bench accuracy`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from quest.bench.accuracy_methods import METHODS
from quest.bench.tasks import TASKS

__all__ = ["draw", "show", "task_score"]

Rows = Sequence[dict[str, Any]]
KINDS = {"sparse": "-", "loses": ":", "oracle": "--"}  # line styles


def by_model(rows: Rows) -> list[tuple[str, list[dict[str, Any]]]]:
    return [(name, list(group)) for name, group in groupby(rows, lambda row: row["model"])]


def show(rows: Rows, tasks: Sequence[dict[str, Any]], console: Console) -> None:
    """Per model: accuracy on texts against bytes, and the tasks that dense attention solves."""
    for model, found in by_model(rows):
        console.print(text_table(model, found))
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
            method + (" (oracle)" if row["kind"] == "oracle" and "oracle" not in method else ""),
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


def task_score(row: dict[str, Any], protocol: str) -> float | None:
    """Mean over the tasks that dense attention solves, None if it solves none."""
    scores = [row[f"{name}_{protocol}"] for name in ("passkey", *TASKS)]
    known = [score for score in scores if score is not None]
    return fmean(known) if known else None


def draw(rows: Rows, prefix: Path) -> list[Path]:
    """One picture per model, `PREFIX-MODEL.png`: accuracy against bytes, a line per method over its budgets."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for model, found in by_model(rows):
        figure, axes = pyplot.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
        for axis, (name, value) in zip(axes.flat, PANELS.items(), strict=True):
            draw_panel(axis, found, value)
            axis.set(title=name, xscale="log", xlabel="MB read per token, all kinds of bytes")
        axes[0, 0].set_yscale("log")
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
        budgets = sorted({row["budget"] for row in found if row["budget"]})
        told = f"points are budgets of {', '.join(map(str, budgets))} tokens; dashed: oracles, dotted: lose tokens"
        figure.suptitle(f"{model}: {told}", fontsize=11)
        path = prefix.with_name(f"{prefix.name}-{model}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def draw_panel(axis: Any, rows: Rows, value: Callable[[dict[str, Any]], float | None]) -> None:
    colours = {name: f"C{i % 10}" for i, name in enumerate(name for name in METHODS if name != "dense")}
    for method, group in groupby(rows, lambda row: row["method"]):
        found = [(row["bytes_per_token"] / 1e6, value(row)) for row in group]
        points = [(read, known) for read, known in found if known is not None]
        if method == "dense":
            axis.axvline(found[0][0], color="tab:gray", linewidth=1, linestyle="-.", label="dense")
            for _, known in points:
                axis.axhline(known, color="tab:gray", linewidth=1, linestyle="-.")
            continue
        if not points:
            continue
        kind = METHODS[method].kind
        strong = dict(linewidth=2.2, zorder=3) if method.startswith("ours") else dict(linewidth=1.3)
        marks = {"sparse": "o", "loses": "x", "oracle": "^"}
        style = dict(linestyle=KINDS[kind], marker=marks[kind], markersize=5, color=colours[method], **strong)
        axis.plot(*zip(*sorted(points), strict=True), label=method, clip_on=False, **style)
    axis.grid(True, which="both", alpha=0.2)
    axis.spines[["top", "right"]].set_visible(False)


def percent(score: float | None) -> float | None:
    return None if score is None else 100 * score


# Title of a panel: its value, None where there is nothing to draw
PANELS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "KL against dense, nats per token": lambda row: None if row["dense"] else row["kl"] or None,
    "same next token as dense, %": lambda row: 100 * row["top1_agreement"],
    "tasks answered, question read densely, %": lambda row: percent(task_score(row, "a")),
    "tasks answered, question read sparsely, %": lambda row: percent(task_score(row, "b")),
}
