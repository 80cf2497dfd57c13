"""Requests for a serving loop: read from a file, or made of English text, with arrival times.

A file has a JSON object per line:

    {"arrival": 0.35, "prompt": "text", "max_new_tokens": 32}
    {"arrival": 1.2, "prompt": [17, 4, 99], "max_new_tokens": 8, "system": true, "id": "second"}

`arrival` is in seconds after the start, `prompt` text or token ids. `system` puts a text before the prompt: its own, or
with `true` the one that requests made here share. `id` is for people, the line's number if it is missing.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quest.bench.serving import Request
from quest.passkey import document, encode, opening

__all__ = ["make", "read", "to_requests", "write"]

FIELDS = ("arrival", "prompt", "max_new_tokens", "system", "id")
NEEDED = FIELDS[:3]
SYSTEM_LETTERS = 1600  # of the shared system prompt, about 400 tokens
SHORTEST = 16  # tokens of a prompt
ANSWERS = 8, 64  # tokens, the fewest and the most

Row = dict[str, Any]


def make(tokenizer: Any, count: int, *, rate: float, longest: int, seed: int = 0) -> list[Row]:
    """Requests as of a file: passages of the standard library's manual after a system prompt that all share.

    Args:
        rate: arrivals per second, a Poisson process.
        longest: tokens of a prompt; lengths are spread evenly over their logarithms, those of answers too.

    Raises:
        ValueError: `longest` or `rate` is out of range.
    """
    text = encode(tokenizer, document()[SYSTEM_LETTERS:])
    if not SHORTEST <= longest < len(text):
        raise ValueError(f"--longest must be {SHORTEST} to {len(text) - 1:,} tokens, got {longest:,}")
    if not 0 < rate < math.inf:
        raise ValueError(f"--rate must be above 0, got {rate}")
    choose, arrival, rows = random.Random(seed), 0.0, []
    for number in range(1, count + 1):
        arrival += choose.expovariate(rate)
        length = log_uniform(choose, SHORTEST, longest)
        start = choose.randrange(len(text) - length)
        row = {
            "id": str(number),
            "arrival": round(arrival, 3),
            "prompt": tokenizer.decode(text[start : start + length]),
            "max_new_tokens": log_uniform(choose, *ANSWERS),
            "system": True,
        }
        rows.append(row)
    return rows


def log_uniform(choose: random.Random, low: int, high: int) -> int:
    return round(math.exp(choose.uniform(math.log(low), math.log(high))))


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path, vocabulary: int) -> list[Row]:
    """The rows of a file, in its order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a line is no request: its number, the field, and what came.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    rows, lines = list[Row](), dict[str, int]()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{where}: not JSON: {error}") from None
        check(where, row, vocabulary)
        row.setdefault("id", str(number))
        if (other := lines.setdefault(row["id"], number)) != number:
            raise ValueError(f"{where}: id must differ from those before, got {row['id']!r}, as in line {other}")
        rows.append(row)
    if not rows:
        raise ValueError(f"{path}: holds no requests")
    return rows


def check(where: str, row: Any, vocabulary: int) -> None:
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a request must be a JSON object, got {shown(row)}")
    if unknown := [name for name in row if name not in FIELDS]:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    if missing := [name for name in NEEDED if name not in row]:
        raise ValueError(f"{where}: {missing[0]} is missing")
    arrival, prompt, answer = (row[name] for name in NEEDED)
    rules = {
        "arrival": (is_number(arrival) and 0 <= arrival < math.inf, "seconds, at least 0"),
        "prompt": (is_prompt(prompt, vocabulary), f"text or token ids below {vocabulary}, at least one"),
        "max_new_tokens": (is_number(answer, int) and answer > 0, "a whole number, at least 1"),
        "system": (isinstance(row.get("system", False), bool | str), "true, false or text"),
        "id": (isinstance(row.get("id", ""), str), "text"),
    }
    for name, (right, rule) in rules.items():
        if not right:
            raise ValueError(f"{where}: {name} must be {rule}, got {shown(row[name])}")


def is_number(value: Any, kind: Any = int | float) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def is_prompt(value: Any, vocabulary: int) -> bool:
    if isinstance(value, list):
        return bool(value) and all(is_number(token, int) and 0 <= token < vocabulary for token in value)
    return isinstance(value, str) and bool(value)


def shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def to_requests(tokenizer: Any, rows: Sequence[Row]) -> list[Request]:
    """In token ids. Every one begins as the tokenizer's texts do, unless its prompt is token ids alone."""
    first, texts = opening(tokenizer), dict[str, list[int]]()

    def tokens(prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        return texts.setdefault(prompt, encode(tokenizer, prompt))

    requests = []
    for row in rows:
        system, prompt = row.get("system", False), row["prompt"]
        parts = [document()[:SYSTEM_LETTERS] if system is True else system, prompt] if system else [prompt]
        whole = [token for part in parts for token in tokens(part)]
        if isinstance(parts[0], str):
            whole = first + whole
        requests.append(Request(whole, row["max_new_tokens"], row["id"], row["arrival"]))
    return requests
