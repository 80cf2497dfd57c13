"""The passkey test: a number hidden in a long text of no interest, asked for at its end.

After the test of Mohtashami and Jaggi, "Landmark Attention" (arXiv 2305.16300), filler and question included.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Passkey", "document", "passkeys"]

INTRODUCTION = (
    "There is an important pass key hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about it.\n\n"
)
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
PLACEHOLDER = "@@TEXT@@"


@dataclass(frozen=True)
class Passkey:
    """One prompt of the test: `key` is hidden at `depth` (0 = the text's beginning, 1 = its end) of `tokens`."""

    key: str
    depth: float
    tokens: list[int]


def passkeys(tokenizer: Any, context: int, depths: Sequence[float], *, seed: int = 0) -> list[Passkey]:
    """One prompt of `context` tokens per depth, each with a number of its own. It ends where the number must follow.

    Raises:
        ValueError: the context doesn't hold the question.
    """
    before = opening(tokenizer) + encode(tokenizer, INTRODUCTION)
    after = encode(tokenizer, QUESTION)
    filler = encode(tokenizer, FILLER)
    rng = random.Random(seed)
    prompts = []
    for depth in depths:
        key = str(rng.randint(10000, 99999))
        needle = encode(tokenizer, NEEDLE.format(key=key))
        length = context - len(before) - len(needle) - len(after)
        if length < 1:
            raise ValueError(f"passkey: context must exceed the question's {context - length} tokens, got {context}")
        text = (filler * (length // len(filler) + 1))[:length]
        place = round(depth * length)
        prompts.append(Passkey(key, depth, before + text[:place] + needle + text[place:] + after))
    return prompts


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
    """About 465,000 characters of technical English that every Python ships: the language reference of `pydoc`."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())
