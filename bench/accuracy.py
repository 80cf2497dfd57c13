"""`quest bench accuracy`: what reading less of the KV cache costs, in bytes and in accuracy, method by method.

Every text and prompt is read densely once per model; all methods and budgets start from its keys and values.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quest import models
from quest.bench.accuracy_measures import Document, answer_score, cut, measure_text, read_document
from quest.bench.accuracy_methods import METHODS
from quest.bench.accuracy_store import Store, fingerprint
from quest.bench.simulate import Prompt, read_prompt
from quest.bench.tasks import TASKS, Sample, make, make_passkeys
from quest.measure import context_limit

__all__ = ["FULL", "MEASURES", "QUICK", "QUICK_MEASURES", "Settings", "run"]


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Args:
        documents, tokens, context: texts, the last tokens of each that are decoded, and its length (at most 3/4 of the
            model's positions).
        passkey, depths: length of its prompts in tokens (at most 7/8 of the positions), and where the key is hidden.
        lengths, samples: of a task's prompts: lengths are tried from the shortest on as long as dense attention solves
            them, with so many prompts each. The methods are compared at the longest one solved.
        solved: the dense score from which on a task counts as solved.
        longest_answer: tokens.
    """

    documents: int = 6
    tokens: int = 128
    context: int = 8192
    passkey: int = 7000
    depths: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    lengths: tuple[int, ...] = (1024, 2048, 4096, 6144)
    samples: int = 5
    solved: float = 0.8
    longest_answer: int = 64


FULL = Settings()
QUICK = Settings(
    documents=1,
    tokens=32,
    context=3072,
    passkey=2048,
    depths=(0.3, 0.7),
    lengths=(2048,),
    samples=1,
    longest_answer=16,
)

MEASURES = ("text", "passkey", *TASKS)
QUICK_MEASURES = MEASURES[:3]

Job = tuple[str, int | None]  # method, budget


def run(
    names: Sequence[str],
    methods: Sequence[str],
    budgets: Sequence[int],
    settings: Settings,
    text: str,
    store: Store,
    *,
    measures: Sequence[str] = MEASURES,
    console: Console | None = None,
) -> list[dict[str, Any]]:
    """Measure what the store doesn't have yet.

    Args:
        names: models, as `quest.models.find` takes them.
        methods: names in `METHODS`; "dense" is always among them.
        measures: names in `MEASURES`.

    Returns:
        The rows of these models, methods and budgets, by model, then method, then budget.

    Raises:
        ValueError: a measure is unknown, or the text or a model's positions are too short for the settings.
    """
    if unknown := [name for name in measures if name not in MEASURES]:
        raise ValueError(f"--measures must be among {', '.join(MEASURES)}, got {', '.join(map(repr, unknown))}")
    jobs: list[Job] = [("dense", None), *((m, b) for m in methods if m != "dense" for b in budgets)]
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    found = []
    with Progress(*columns, console=console, transient=True) as progress:
        for name in names:
            one = ModelRun(name, jobs, measures, settings, text, store, progress)
            one.run()
            found += [store.rows[one.label, *job] for job in jobs]
    return found


class ModelRun:
    """One model, all methods and budgets."""

    def __init__(
        self,
        name: str,
        jobs: Sequence[Job],
        measures: Sequence[str],
        settings: Settings,
        text: str,
        store: Store,
        progress: Progress,
    ) -> None:
        self.path, self.label = models.find(name)
        self.jobs, self.measures, self.settings, self.text = jobs, measures, settings, text
        self.store, self.progress = store, progress
        self.shared = fingerprint(asdict(settings), text, identity(self.path))
        self.prints = {job: fingerprint(self.shared, METHODS[job[0]].settings(job[1])) for job in jobs}
        self.sum_mass = any(METHODS[method].sums_mass for method, _ in jobs)

    def missing(self, measure: str) -> list[Job]:
        return [job for job in self.jobs if not self.store.has((self.label, *job), self.prints[job], measure)]

    def run(self) -> None:
        total = sum(len(self.missing(measure)) for measure in self.measures)
        self.bar = self.progress.add_task(self.label, total=total)
        if not total:
            return
        self.say("loading")
        self.model, self.tokenizer = models.load(self.path)
        self.limit = context_limit(self.model) or 1 << 20
        for measure in self.measures:
            if todo := self.missing(measure):
                if measure == "text":
                    self.run_text(todo)
                else:
                    self.run_task(measure, todo)
        self.say("done")

    def run_text(self, todo: Sequence[Job]) -> None:
        given = self.settings
        context = min(given.context, self.limit * 3 // 4)
        if context <= given.tokens + 1:
            raise ValueError(f"--tokens must leave some of the context's {context} tokens to read, got {given.tokens}")
        documents: list[Document] = []
        for tokens in cut(self.tokenizer, self.text, given.documents, context):
            self.say(f"reading document {len(documents) + 1} of {given.documents}, {context:,} tokens")
            documents.append(read_document(self.model, tokens, given.tokens, self.sum_mass))
        for job in self.each("text", todo):
            start = time.perf_counter()
            values, beats = measure_text(self.model, documents, METHODS[job[0]], job[1])
            self.keep(job, "text", values, start, ["perplexity"] if beats and not values["dense"] else [])

    def run_task(self, name: str, todo: Sequence[Job]) -> None:
        """Score the methods at the longest length that dense attention solves, if there is one."""
        tried, samples, prompts = self.tried(name)
        solved = [one for one in tried if one["score"] >= self.settings.solved]
        if solved and not prompts:
            samples, prompts = self.prompts(name, solved[-1]["length"])
        for job in self.each(name, todo):
            start = time.perf_counter()
            scores: list[float | None] = [None, None]
            if solved and job[0] == "dense":
                scores = [solved[-1]["score"]] * 2
            elif solved:
                scores = [self.score(samples, prompts, job, sparse_question=later) for later in (False, True)]
            values = {f"{name}_{protocol}": value for protocol, value in zip("ab", scores, strict=True)}
            better = [key for key, value in values.items() if value is not None and value > solved[-1]["score"]]
            self.keep(job, name, values, start, better)

    def tried(self, name: str) -> tuple[list[dict[str, Any]], list[Sample], list[Prompt]]:
        """Dense scores by length, and the prompts of the longest one solved if they have just been read."""
        if known := self.store.task(self.label, self.shared, name):
            return known, [], []
        tried: list[dict[str, Any]] = []
        best: tuple[list[Sample], list[Prompt]] = [], []
        for length in self.lengths(name):
            samples, prompts = self.prompts(name, length)
            self.say(f"{name}, {length:,} tokens: dense")
            value = self.score(samples, prompts, ("dense", None))
            solved = value >= self.settings.solved
            tried.append({"length": length, "samples": len(samples), "score": value, "solved": solved})
            if not solved:
                break
            best = samples, prompts
        self.store.put_task(self.label, self.shared, name, tried)
        return tried, *best

    def lengths(self, name: str) -> list[int]:
        if name == "passkey":
            return [min(self.settings.passkey, self.limit * 7 // 8)]
        return sorted({min(length, self.limit * 3 // 4) for length in self.settings.lengths})

    def prompts(self, name: str, length: int) -> tuple[list[Sample], list[Prompt]]:
        if name == "passkey":
            samples = make_passkeys(self.tokenizer, length, self.settings.depths)
        else:
            longest = self.settings.longest_answer
            samples = make(self.tokenizer, name, length, self.settings.samples, longest_answer=longest)
        prompts: list[Prompt] = []
        for one in samples:
            self.say(f"{name}, {length:,} tokens: reading {len(prompts) + 1} of {len(samples)}")
            room = len(one.question) + one.new_tokens
            prompts.append(read_prompt(self.model, one.before, room, sum_mass=self.sum_mass))
        return samples, prompts

    def score(
        self, samples: Sequence[Sample], prompts: Sequence[Prompt], job: Job, *, sparse_question: bool = False
    ) -> float:
        given = self.model, self.tokenizer
        method, budget = METHODS[job[0]], job[1]
        return fmean(
            answer_score(*given, prompt, sample, method, budget, sparse_question=sparse_question)
            for prompt, sample in zip(prompts, samples, strict=True)
        )

    def each(self, measure: str, todo: Sequence[Job]) -> Iterator[Job]:
        for method, budget in todo:
            self.say(f"{measure}: {method}" + (f" {budget:,}" if budget else ""))
            yield method, budget
            self.progress.advance(self.bar)

    def keep(self, job: Job, measure: str, values: dict[str, Any], start: float, beats: Sequence[str]) -> None:
        values = {"kind": METHODS[job[0]].kind, **values}
        seconds = round(time.perf_counter() - start, 2)
        self.store.put((self.label, *job), self.prints[job], measure, values, seconds, beats)

    def say(self, what: str) -> None:
        self.progress.update(self.bar, description=f"{self.label}: {what}")


def identity(path: Path) -> str:
    """A checksum of a model's file; of a folder, its config and the sizes of its files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    sizes = sorted((file.name, file.stat().st_size) for file in path.iterdir() if file.is_file())
    config = path / "config.json"
    return fingerprint(sizes, config.read_text() if config.exists() else "")
