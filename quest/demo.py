"""The demo: a real model answers from a long prompt, densely and reading a small part of its KV cache.

Without a prompt it is the passkey test; with one, the model answers that. Either way a prompt is read once, by
transformers alone, and every budget starts from the same keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from quest.bytes import model_bytes
from quest.config import QuestConfig
from quest.measure import Decoder, context_limit, follow, prefill
from quest.passkey import Passkey, document, encode, passkeys, prompt

__all__ = ["BUDGETS", "CONTEXT", "DEPTHS", "Row", "answer_prompt", "run_passkeys"]

BUDGETS = (64, 128, 256, 512, 1024)
CONTEXT = 7000
DEPTHS = (0.125, 0.375, 0.625, 0.875)
FURTHER = 64  # tokens of English on which every budget is compared with dense
ANSWER_TOKENS = 16
READING = 100  # what reading a prompt takes, in steps: for the progress bar only


@dataclass
class Row:
    """One line of the table, filled while the demo runs. `config` None is dense attention by transformers."""

    config: QuestConfig | None
    context: int
    bytes_per_token: int
    bytes_fraction: float
    answered: int = 0
    depths: int = 0
    agreed: int = 0
    compared: int = 0
    seconds: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        if self.config is None:
            return "dense"
        return f"budget {self.config.budget}" + (" (dense)" if self.dense else "")

    @property
    def dense(self) -> bool:
        """Whether everything is read: by transformers, or because the budget covers the context."""
        return self.config is None or self.config.budget >= self.context

    @property
    def top1_agreement(self) -> float:
        return self.agreed / self.compared if self.compared else 0.0

    @property
    def seconds_per_token(self) -> float:
        return median(self.seconds)


def run_passkeys(
    model: Any,
    tokenizer: Any,
    *,
    budgets: Sequence[int] = BUDGETS,
    context: int = CONTEXT,
    depths: Sequence[float] = DEPTHS,
    further: int = FURTHER,
    config: QuestConfig | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Hide a number at each depth of a prompt of `context` tokens; ask for it densely and at each budget.

    The prompt's last token and the answer are decoded step by step, so every token of an answer comes from a sparse
    read. Then `context` tokens of English are read and the `further` tokens that follow them fed to all budgets in
    turn: speed and agreement are taken there.

    Raises:
        ValueError: the model's positions don't reach that far, the English text doesn't, or a budget doesn't hold the
            forced pages.
    """
    _check_length(model, context, max(ANSWER_TOKENS, further))
    rows = _rows(model, budgets, context, config or QuestConfig())
    prompts = passkeys(tokenizer, context, depths)
    text = encode(tokenizer, document())[: context + further]
    if len(text) < context + further:
        raise ValueError(f"context must leave {further} of the text's {len(text):,} tokens to follow, got {context:,}")
    with _Bar(console, (len(prompts) + 1) * READING + len(rows) * (len(prompts) * ANSWER_TOKENS + further)) as bar:
        for number, one in enumerate(prompts, 1):
            bar.prefix = f"depth {number}/{len(prompts)}: "
            _run_passkey(model, tokenizer, one, rows, bar)
        bar.prefix = "text: "
        bar.say(f"reading {context:,} tokens")
        source = prefill(model, text[: context - 1])
        bar.advance(READING)
        bar.say(f"comparing, {further} further tokens")
        _compare(model, source, rows, text[context - 1 : -1], bar)
    return rows


def _run_passkey(model: Any, tokenizer: Any, one: Passkey, rows: Sequence[Row], bar: _Bar) -> None:
    bar.say(f"reading {len(one.tokens):,} tokens")
    source = prefill(model, one.tokens[:-1])
    bar.advance(READING)
    for row in rows:
        bar.say(f"answering, {row.name}")
        answer, _ = _answer(model, tokenizer, source, row, one.tokens[-1], ANSWER_TOKENS)
        row.answered += one.key in answer
        row.depths += 1
        bar.advance(ANSWER_TOKENS)


def answer_prompt(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    budgets: Sequence[int] = BUDGETS,
    max_new_tokens: int = 128,
    config: QuestConfig | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Answer a prompt densely and at each budget; the last of a row's `texts` is its answer.

    Speed and agreement are taken on the dense answer, fed to all budgets in turn.

    Raises:
        ValueError: the prompt is empty, or longer than the model's positions reach.
    """
    if not text.strip():
        raise ValueError("the prompt is empty")
    tokens = prompt(tokenizer, text)
    _check_length(model, len(tokens), max_new_tokens)
    rows = _rows(model, budgets, len(tokens), config or QuestConfig())
    with _Bar(console, READING + 2 * len(rows) * max_new_tokens) as bar:
        bar.say(f"reading {len(tokens):,} tokens")
        source = prefill(model, tokens[:-1])
        bar.advance(READING)
        answers = []
        for row in rows:
            bar.say(f"answering, {row.name}")
            answers.append(_answer(model, tokenizer, source, row, tokens[-1], max_new_tokens)[1])
            bar.advance(max_new_tokens)
        bar.say("comparing on the dense answer")
        _compare(model, source, rows, [tokens[-1], *answers[0]][:max_new_tokens], bar)
    return rows


def _answer(model: Any, tokenizer: Any, source: Any, row: Row, last: int, max_new_tokens: int) -> tuple[str, list[int]]:
    """What a row answers after the prompt's last token, as text and tokens."""
    stop = model.generation_config.eos_token_id
    stops = {tokenizer.eos_token_id, *(stop if isinstance(stop, list) else [stop])}
    tokens = Decoder(model, source, row.config).generate(last, max_new_tokens, stops)
    row.texts.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return row.texts[-1], tokens


def _compare(model: Any, source: Any, rows: Sequence[Row], tokens: Sequence[int], bar: _Bar) -> None:
    """Feed `tokens` to all rows in turn; the first row is the one that the others must agree with."""
    decoders = [Decoder(model, source, row.config) for row in rows]
    chosen = follow(decoders, tokens, bar.advance)
    for row, decoder, mine in zip(rows, decoders, chosen, strict=True):
        row.agreed += int((mine == chosen[0]).sum())
        row.compared += len(tokens)
        row.seconds += decoder.seconds


def _rows(model: Any, budgets: Sequence[int], context: int, config: QuestConfig) -> list[Row]:
    """Dense first, then the budgets; bytes are counted for the first token after the prompt's."""
    rows = []
    for each in [None, *(config.replace(budget=budget) for budget in sorted(set(budgets)))]:
        counted = model_bytes(model.config, each or config, context, model.dtype.itemsize)
        read = counted.total if each else counted.dense
        rows.append(Row(each, context, read, read / counted.dense if counted.dense else 1.0))
    return rows


def _check_length(model: Any, context: int, more: int) -> None:
    limit = context_limit(model)
    if limit is not None and context + more > limit:
        raise ValueError(
            f"the prompt has {context:,} tokens, and {more:,} more are to follow; the model's context is {limit:,}"
        )


class _Bar:
    """Progress of the whole run, with a word on what is being done."""

    def __init__(self, console: Console | None, total: int) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns, console=console, transient=True)
        self._task = self._progress.add_task("", total=total)
        self.prefix = ""

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=self.prefix + text)

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
