"""Rows of `quest bench accuracy`, kept in a file from the first result on, so that an interrupted run goes on there."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quest.bench.machine import write_json
from quest.bench.tasks import TASKS

__all__ = ["COLUMNS", "Store", "fingerprint"]

# What a row has beside its key; null until it is measured, and for tasks that dense attention doesn't solve.
COLUMNS = (
    *("kind", "dense", "context", "summary_bytes_per_token", "bytes_per_token", "bytes_fraction"),
    *("kl", "kl_ci95", "kl_median", "kl_p99", "share_above_1_nat", "perplexity", "top1_agreement"),
    *(f"{task}_{protocol}" for task in ("passkey", *TASKS) for protocol in "ab"),
    *("recall", "lost_mass", "hits", "recall_by_layer"),
)

Key = tuple[str, str, int | None]  # model, method, budget


def fingerprint(*settings: Any) -> str:
    """A short name for settings, the same in every process."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Store:
    """Rows by model, method and budget, written as a whole after each measure: whoever reads sees all or nothing.

    Args:
        path: the JSON file, None to keep rows in memory only.
        settings: what all rows share. A file of other settings is refused.

    Attributes:
        tasks: per model, task and length, how many answers dense attention found.
    """

    def __init__(self, path: Path | None, machine: dict[str, Any], settings: dict[str, Any]) -> None:
        self.path, self.machine, self.settings = path, machine, json.loads(json.dumps(settings))
        self.rows: dict[Key, dict[str, Any]] = {}
        self.tasks: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            rows, settings, tasks = found["rows"], found["settings"], found["tasks"]
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--json {path} must be a file of `quest bench accuracy`, or a new one") from None
        names = sorted({*settings, *self.settings})
        other = [n for n in names if settings.get(n) != self.settings.get(n)]
        if other:
            told = ", ".join(f"{n} {settings.get(n)} there, {self.settings.get(n)} now" for n in other)
            raise ValueError(
                f"--json {path} holds results of other settings ({told}): give a new file or the same ones"
            )
        self.rows = {(row["model"], row["method"], row["budget"]): row for row in rows}
        self.tasks = tasks

    def has(self, key: Key, print_: str, measure: str) -> bool:
        row = self.rows.get(key)
        return row is not None and row["fingerprint"] == print_ and measure in row["measures"]

    def put(
        self, key: Key, print_: str, measure: str, values: dict[str, Any], seconds: float, beats: Sequence[str] = ()
    ) -> None:
        """Add a measure to a row; a row of another fingerprint is begun anew.

        Args:
            seconds: what measuring took.
            beats: what came out better than with dense attention.
        """
        row = self.rows.get(key)
        if row is None or row["fingerprint"] != print_:
            row = dict(zip(("model", "method", "budget"), key, strict=True)) | dict.fromkeys(COLUMNS)
            row |= {"fingerprint": print_, "measures": [], "seconds": {}, "beats_dense": []}
            self.rows[key] = row
        row.update(values)
        row["measures"].append(measure)
        row["seconds"][measure] = seconds
        row["beats_dense"] += beats
        self.save()

    def task(self, model: str, print_: str, name: str) -> list[dict[str, Any]]:
        """Dense scores of a task at the lengths that were tried."""
        return [x for x in self.tasks if (x["model"], x["fingerprint"], x["task"]) == (model, print_, name)]

    def put_task(self, model: str, print_: str, name: str, tried: list[dict[str, Any]]) -> None:
        self.tasks = [x for x in self.tasks if (x["model"], x["task"]) != (model, name)]
        self.tasks += [{"model": model, "task": name, **one, "fingerprint": print_} for one in tried]
        self.save()

    def save(self) -> None:
        if self.path is not None:
            part = self.path.with_name(self.path.name + ".part")
            write_json(part, self.machine, list(self.rows.values()), settings=self.settings, tasks=self.tasks)
            os.replace(part, self.path)
