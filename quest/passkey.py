"""The passkey test: a number hidden in a long text, asked for at the end (after Mohtashami and Jaggi, 2023).

The text is real English that every Python ships, the language reference of `pydoc`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Passkey", "document", "passkeys"]

INTRODUCTION = "Read the following text. A secret number is hidden in it.\n\n"
NEEDLE = "\n\nThe secret number is {key}. Remember: the secret number is {key}.\n\n"
QUESTION = "\n\nWhat is the secret number?"
ANSWER = "The secret number is"  # asks a model without chat template
PLACEHOLDER = "@@TEXT@@"


@dataclass(frozen=True)
class Passkey:
    """One prompt. `tokens[:haystack]` ends where the text ends; `further` is what the text goes on with."""

    key: str
    depth: float
    tokens: list[int]
    haystack: int
    further: list[int]


def passkeys(
    tokenizer: Any, context: int, depths: Sequence[float], *, further: int = 64, seed: int = 0
) -> list[Passkey]:
    """One prompt of `context` tokens per depth (0 = the text's beginning, 1 = its end), each in a text of its own.

    Raises:
        ValueError: the context doesn't hold the question, or the text is too short for it.
    """
    before, after = frame(tokenizer)
    text = encode(tokenizer, document())
    rng = random.Random(seed)
    prompts = []
    for index, depth in enumerate(depths):
        key = str(rng.randint(10000, 99999))
        needle = encode(tokenizer, NEEDLE.format(key=key))
        length = context - len(before) - len(needle) - len(after)
        start = index * len(text) // len(depths)
        if length < 1:
            raise ValueError(f"passkey: context must exceed the question's {context - length} tokens, got {context}")
        if start + length + further > len(text):
            raise ValueError(f"passkey: context must leave room in a text of {len(text)} tokens, got {context}")
        hay = text[start : start + length]
        place = round(depth * length)
        haystack = before + hay[:place] + needle + hay[place:]
        more = text[start + length : start + length + further]
        prompts.append(Passkey(key, depth, haystack + after, len(haystack), more))
    return prompts


def frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What stands before and after the text: introduction and question, as the model's chat template wants them."""
    content = INTRODUCTION + PLACEHOLDER + QUESTION
    if has_template(tokenizer):
        before, after = in_template(tokenizer, content).split(PLACEHOLDER)
        return encode(tokenizer, before), encode(tokenizer, after)
    before, after = f"{content}\n\n{ANSWER}".split(PLACEHOLDER)
    return opening(tokenizer) + encode(tokenizer, before), encode(tokenizer, after)


def prompt(tokenizer: Any, content: str) -> list[int]:
    """A user's message, in the model's chat template if it has one."""
    if has_template(tokenizer):
        return encode(tokenizer, in_template(tokenizer, content))
    return opening(tokenizer) + encode(tokenizer, content)


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def in_template(tokenizer: Any, content: str) -> str:
    message = {"role": "user", "content": content}
    return tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)


def opening(tokenizer: Any) -> list[int]:
    """The token that a text must begin with, if the tokenizer puts one there."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode(tokenizer: Any, text: str) -> list[int]:
    # verbose: no remark that the text is longer than the model's context, it is cut to fit
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def document() -> str:
    """About 465,000 characters of technical English."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())
