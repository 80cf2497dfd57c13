"""Plots of `quest bench decode`: time against context, and how near the limits that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quest.bench.decode import titles

__all__ = ["draw"]


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """The rows that differ in context alone, those of the most common shape, as a picture.

    Raises:
        ValueError: no two rows differ in context alone.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault((titles(row), row["budget"]), []).append(row)
    (title, budget), found = max(kinds.items(), key=lambda kind: len(kind[1]))
    if len(found) < 2:
        raise ValueError("--plot needs rows of at least two contexts, and the same shape otherwise")
    found = sorted(found, key=lambda row: row["context"])
    contexts = [row["context"] for row in found]

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.5), constrained_layout=True)
    figure.suptitle(f"One decode step, one layer: {title}, budget {budget:,}", fontsize=11)

    def line(label: str, values: list[float], style: str, color: str) -> None:
        left.plot(contexts, values, style, color=color, label=label, markersize=4)

    line("PyTorch, as transformers calls it", [row["sdpa_default_ms"] for row in found], "o-", "tab:gray")
    line("PyTorch, best formulation", [row["sdpa_best_ms"] for row in found], "o-", "tab:orange")
    if all("dense_ms" in row for row in found):
        line("quest, dense", [row["dense_ms"] for row in found], "o-", "tab:green")
    line("quest", [row["ms"] for row in found], "o-", "tab:blue")
    line("limit: reading those bytes", [row["ms"] * row["limit_fraction"] for row in found], "--", "tab:blue")
    line("limit: multiplying them", [row["ms"] * row["fma_fraction"] for row in found], ":", "tab:blue")
    left.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="ms per step")
    left.set_xscale("log", base=2)
    left.legend(fontsize=8)

    right.plot(contexts, [100 * row["limit_fraction"] for row in found], "o-", label="of the read limit", markersize=4)
    right.plot(contexts, [100 * row["fma_fraction"] for row in found], "s:", label="of the FMA peak", markersize=4)
    if all("dense_ms" in row for row in found):
        dense = [100 * row["dense_limit_fraction"] for row in found]
        right.plot(contexts, dense, "o-", color="tab:green", label="dense, of its tighter limit", markersize=4)
    right.set(xlabel="context, tokens", ylabel="% of the limit", ylim=(0, 105))
    right.set_xscale("log", base=2)
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(True, which="major", alpha=0.3)
        axes.set_xticks(contexts, [f"{c >> 10}K" if c < 1 << 20 else f"{c >> 20}M" for c in contexts])
        axes.tick_params(labelsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
