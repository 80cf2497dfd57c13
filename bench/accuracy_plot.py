"""Plots of `quest bench accuracy`: accuracy against bytes, a line per method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from quest.bench.accuracy_methods import METHODS
from quest.bench.accuracy_report import by_model
from quest.bench.tasks import TASKS

__all__ = ["draw", "task_score"]

Rows = Sequence[dict[str, Any]]
# By kind: line style, marker, colours in the order of the methods (a hue of its own for each kind; ours stand out)
KINDS = {
    "sparse": ("-", "o", ("#d1762b", "#b5322a", "#e0a93b", "#8c4a2f")),
    "ours": ("-", "o", ("#0b4f8a", "#2e8bc0", "#56b4e9", "#1b9e9e", "#5a6ad0", "#7fb2ff")),
    "loses": (":", "x", ("#8a3d8f", "#c479b8", "#6b5b95")),
    "oracle": ("--", "^", ("#2a7a3f", "#6abf69", "#9aa33b")),
}
DENSE = dict(color="#8a8a8a", linewidth=1, linestyle=(0, (6, 3, 1, 3)))
LEAST_KL = 1e-6  # nats; below it is rounding


def task_score(row: dict[str, Any], protocol: str) -> float | None:
    """Mean over the tasks that dense attention solves, None if it solves none."""
    scores = [row[f"{name}_{protocol}"] for name in ("passkey", *TASKS)]
    known = [score for score in scores if score is not None]
    return fmean(known) if known else None


def percent(score: float | None) -> float | None:
    return None if score is None else 100 * score


# Title of a panel: its value, None where there is nothing to draw
PANELS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "KL against dense, nats per token": lambda row: row["kl"] if row["kl"] > LEAST_KL else None,
    "same next token as dense, %": lambda row: 100 * row["top1_agreement"],
    "tasks answered, question read densely, %": lambda row: percent(task_score(row, "a")),
    "tasks answered, question read sparsely, %": lambda row: percent(task_score(row, "b")),
}


def draw(rows: Rows, prefix: Path) -> list[Path]:
    """One picture per model, `PREFIX-MODEL.png`, of the rows that have texts: those know their bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    written = []
    for model, found in by_model([row for row in rows if "text" in row["measures"]]):
        figure, axes = pyplot.subplots(2, 2, figsize=(13, 8.5), layout="constrained")
        for axis, (name, value) in zip(axes.flat, PANELS.items(), strict=True):
            draw_panel(axis, found, value)
            axis.set(title=name, xscale="log", xlabel="MB read per token, summaries and dense layers included")
            axis.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.xaxis.set_minor_formatter(NullFormatter())
            axis.grid(True, color="#e6e6e6", linewidth=0.8)
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0, 0].set_yscale("log")
        handles, labels = axes[0, 1].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=10)
        budgets = ", ".join(f"{b:,}" for b in sorted({row["budget"] for row in found if row["budget"]}))
        told = f"points are budgets of {budgets} tokens; dashed: oracles, dotted: tokens are lost for good"
        figure.suptitle(f"{model}: {told}", fontsize=11)
        path = prefix.with_name(f"{prefix.name}-{model}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written


def draw_panel(axis: Any, rows: Rows, value: Callable[[dict[str, Any]], float | None]) -> None:
    """Bytes against one value; a method's points are its budgets, in order. Dense is two grey lines."""
    empty = True
    for method, group in groupby(rows, lambda row: row["method"]):
        found = [(row["bytes_per_token"] / 1e6, value(row)) for row in group]
        points = [(read, known) for read, known in found if known is not None]
        if method == "dense":
            axis.axvline(found[0][0], label=method, **DENSE)
            for _, known in points:
                axis.axhline(known, **DENSE)
        elif points:
            axis.plot(*zip(*points, strict=True), label=method, clip_on=False, **style(method))
            empty = False
    if empty:
        axis.text(0.5, 0.5, "no task measured here that dense attention solves", ha="center", transform=axis.transAxes)


def style(method: str) -> dict[str, Any]:
    def kind(name: str) -> str:
        return "ours" if name.startswith("ours") else METHODS[name].kind

    line, marker, colours = KINDS[kind(method)]
    alike = [name for name in METHODS if kind(name) == kind(method)]
    strong = dict(linewidth=2.2, zorder=3) if kind(method) == "ours" else dict(linewidth=1.3)
    colour = colours[alike.index(method) % len(colours)]
    return dict(linestyle=line, marker=marker, markersize=5, color=colour, **strong)
