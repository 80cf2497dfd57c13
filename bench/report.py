"""Plots of `quest bench decode`: time against context, and how near the limits that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quest.bench.decode import titles

__all__ = ["draw"]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The rows of the most common shape as a picture: time against context, a line per preset and budget.

    Raises:
        ValueError: no two rows differ in context alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in sorted(rows, key=lambda row: row["context"]):
        ways = shapes.setdefault(titles(row), {})
        ways.setdefault(f"{row['preset']}, budget {row['budget']:,}", []).append(row)
    shapes = {title: {way: kind for way, kind in ways.items() if len(kind) > 1} for title, ways in shapes.items()}
    title, ways = max(shapes.items(), key=lambda shape: sum(map(len, shape[1].values())))
    if not ways:
        raise ValueError("--plot needs rows of at least two contexts, and the same shape otherwise")

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.5), constrained_layout=True)
    figure.suptitle(f"One decode step, one layer: {title}", fontsize=11)

    found = max(ways.values(), key=len)  # dense attention is the same for all
    contexts = [row["context"] for row in found]
    dense = {"sdpa_default_ms": ("PyTorch, as transformers calls it", "tab:gray"),
             "sdpa_best_ms": ("PyTorch, best formulation", "tab:olive"),
             "dense_ms": ("quest, dense", "black")}  # fmt: skip
    for name, (label, color) in dense.items():
        if all(name in row for row in found):
            left.plot(contexts, [row[name] for row in found], "o-", color=color, label=label, markersize=4)
    if all("dense_limit_fraction" in row for row in found):
        shares = [100 * row["dense_limit_fraction"] for row in found]
        right.plot(contexts, shares, "o-", color="black", label="dense, of its tighter limit", markersize=4)
    for number, (way, kind) in enumerate(ways.items()):
        at, color = [row["context"] for row in kind], f"C{number}"
        left.plot(at, [row["ms"] for row in kind], "o-", color=color, label=f"quest: {way}", markersize=4)
        for name, style, what in (("limit_fraction", "--", "reading"), ("fma_fraction", ":", "multiplying")):
            limits = [row["ms"] * row[name] for row in kind]
            left.plot(at, limits, style, color=color, label=None if number else f"limit: {what}")
            right.plot(at, [100 * row[name] for row in kind], style, color=color, label=f"{way}: {what}")
    left.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms per step")
    left.set_xscale("log", base=2)

    right.set(xlabel="context, tokens", ylabel="% of the limit", ylim=(0, 105))
    right.set_xscale("log", base=2)
    for axes in (left, right):
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
        axes.grid(True, which="major", alpha=0.3)
        axes.set_xticks(contexts, [f"{c >> 10}K" if c < 1 << 20 else f"{c >> 20}M" for c in contexts])
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
