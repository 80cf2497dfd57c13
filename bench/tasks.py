"""Tasks with one right answer over a long context: the passkey, and tasks like RULER's (arXiv 2404.06654) without data.

The sentences are our own, so compare scores with dense attention's, not with papers. A task is a prompt in two parts,
so that its question can be read sparsely too. Everything is made from the seed.
"""

from __future__ import annotations

import random
import re
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from quest.passkey import QUESTION, document, encode, opening, passkeys

__all__ = ["TASKS", "Sample", "make", "make_passkeys", "score"]

PASSKEY_TOKENS = 12  # of an answer
SHORT = 4096  # tokens; shorter prompts of `cwe` repeat its words less often

ADJECTIVES = (
    "amber ancient bitter blunt brave brisk calm careful clever cold crisp curious damp dark distant dusty eager "
    "early empty faint fierce flat fresh gentle giant golden grand green heavy hidden hollow honest humble idle jolly "
    "keen late lazy little lonely loud lucky mellow merry mild modest narrow neat noble odd pale patient plain polite "
    "proud quick quiet rapid rare rough round rusty sharp shy silent silver simple slow small smooth solid steady "
    "stiff strange sunny swift tall tame tender tidy tiny vivid warm weary wide wild wise young"
)
NOUNS = (
    "anchor apple arrow badge barrel basket beacon bell bottle branch bridge bucket button cabin candle canyon carpet "
    "castle chain cherry circle cloud comet copper corner cradle desert door dragon drum eagle engine feather fence "
    "field flute forest fountain garden gate glacier hammer harbor helmet hill island jacket jungle kettle ladder "
    "lake lantern lemon library lizard map maple marble meadow mirror monkey mountain needle ocean orchard otter "
    "paddle palace parrot pebble pencil pepper piano pillow planet pocket puzzle quarry rabbit river rocket saddle "
    "sailor scarf shadow shelf spoon stone table teapot temple ticket tiger tower trumpet tunnel turtle valley violin "
    "wagon"
)
FILLER = "The road bends to the left. A bird sits on the wall. It rained in the morning. Nothing else happened."


@dataclass(frozen=True)
class Sample:
    """One prompt.

    Attributes:
        before: its tokens up to the question; question: the rest, where the answer must follow.
        answers: all of them are asked for.
        new_tokens: the longest answer, in tokens.
    """

    before: list[int]
    question: list[int]
    answers: tuple[str, ...]
    new_tokens: int

    @property
    def length(self) -> int:
        """Prompt and answer."""
        return len(self.before) + len(self.question) + self.new_tokens


@dataclass(frozen=True)
class Text:
    """What a task's writer makes for a size: `before`, `question`, the answers."""

    before: str
    question: str
    answers: tuple[str, ...]


Writer = Callable[[int, int, float, random.Random], Text]  # size (lines or words), wanted length, depth, randomness


def niah_single_1(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """One needle in lines that repeat."""
    key, value = _keys(1, rng)[0], _number(7, rng)
    lines = [FILLER] * size
    lines.insert(round(depth * size), f"The special number of {key} is {value}.")
    return Text(
        "One special number is hidden in the following text. Remember it.\n\n" + "\n".join(lines),
        f"\n\nWhat is the special number of {key} in the text above? The special number of {key} is",
        (value,),
    )


def multikey_2(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """The haystack is needles, words to numbers."""
    keys, values = _keys(size, rng), [_number(7, rng) for _ in range(size)]
    return _pairs(keys, values, depth)


def multikey_3(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """The haystack is needles, UUIDs to UUIDs."""
    made = [str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(2 * size)]
    return _pairs(made[:size], made[size:], depth)


def _pairs(keys: list[str], values: list[str], depth: float) -> Text:
    wanted = int(depth * len(keys))
    lines = [f"The special value of {key} is {value}." for key, value in zip(keys, values, strict=True)]
    return Text(
        "The following lines give a special value to each of many names. Remember them.\n\n" + "\n".join(lines),
        f"\n\nWhat is the special value of {keys[wanted]} in the text above? The special value of {keys[wanted]} is",
        (values[wanted],),
    )


def vt(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """A chain of assignments, to be followed from its number; an example with a shorter text comes first."""

    def chain(filler: int) -> tuple[str, str, list[str]]:
        names = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(5)]
        number = _number(5, rng)
        steps = [f"VAR {names[0]} = {number}."]
        steps += [f"VAR {new} = VAR {old}." for old, new in pairwise(names)]  # 4 hops
        lines = [FILLER] * filler
        for place, step in reversed(list(zip(sorted(rng.choices(range(filler + 1), k=len(steps))), steps))):
            lines.insert(place, step)
        ask = f"\n\nWhich variables have the value {number} in the text above? The five variables are:"
        return "Follow the assignments of variables in the text.\n\n" + "\n".join(lines), ask, names

    example, asked, found = chain(2)
    text, question, names = chain(size)
    return Text(f"{example}{asked} {', '.join(found)}.\n\n{text}", question, tuple(names))


def cwe(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """Ten words that are common in a numbered list; an example comes first."""
    often, seldom = (30, 3) if length >= SHORT else (6, 1)
    words = _words(size + 40, rng)

    def listing(rare: int, often: int, seldom: int) -> tuple[str, list[str]]:
        common, others = [words.pop() for _ in range(10)], [words.pop() for _ in range(rare)]
        every = common * often + others * seldom
        rng.shuffle(every)
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(every, 1))
        return f"Below is a numbered list of words. Some come more often than others.\n\n{listed}", common

    ask = "\n\nWhich ten words are the most common in the list above? The ten most common words are:"
    example, found = listing(20, 3, 1)
    text, common = listing(size, often, seldom)
    shown = " ".join(f"{i}. {word}" for i, word in enumerate(found, 1))
    return Text(f"{example}{ask} {shown}\n\n{text}", ask, tuple(common))


def fwe(size: int, length: int, depth: float, rng: random.Random) -> Text:
    """The three most frequent of coded words whose counts follow a Zipf law of exponent 2."""
    vocabulary = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(max(4, length // 50))]
    weights = [(i + 1) ** -2.0 for i in range(len(vocabulary))]
    counts = [max(1, round(size * weight / sum(weights))) for weight in weights]
    words = [word for word, count in zip(vocabulary, counts) for _ in range(count)]
    rng.shuffle(words)
    return Text(
        "Below is a coded text of words without a meaning. Count how often each comes.\n\n" + " ".join(words),
        "\n\nWhich three words come most often in the coded text above? The three most frequent words are:",
        tuple(word for word, _ in Counter(words).most_common(3)),
    )


# Name: writer, new tokens
TASKS: dict[str, tuple[Writer, int]] = {
    "niah_single_1": (niah_single_1, 128),
    "multikey_2": (multikey_2, 128),
    "multikey_3": (multikey_3, 128),
    "vt": (vt, 30),
    "cwe": (cwe, 120),
    "fwe": (fwe, 50),
}


def make(
    tokenizer: Any, name: str, length: int, samples: int, *, longest_answer: int = 128, seed: int = 0
) -> list[Sample]:
    """Prompts of a task, as long as fits into `length` tokens with the answer.

    Raises:
        ValueError: the length holds not even the smallest.
    """
    writer, new_tokens = TASKS[name]
    new_tokens = min(new_tokens, longest_answer)

    def sample(size: int, number: int) -> Sample:
        depth = (number + 0.5) / samples  # of the needle, where there is one
        text = writer(size, length, depth, random.Random(f"{name} {length} {seed} {number}"))
        before = opening(tokenizer) + encode(tokenizer, text.before)
        return Sample(before, encode(tokenizer, text.question), text.answers, new_tokens)

    made = []
    for number in range(samples):
        low, high = 1, 2  # sizes that fit, and that don't
        while sample(high, number).length <= length:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sample(middle, number).length <= length else (low, middle)
        found = sample(low, number)
        if found.length > length:
            raise ValueError(f"task {name}: length must hold the smallest prompt's {found.length} tokens, got {length}")
        made.append(found)
    return made


def make_passkeys(tokenizer: Any, context: int, depths: Sequence[float]) -> list[Sample]:
    """The passkey test of `quest.passkey`, `context` tokens each."""
    asked = len(encode(tokenizer, QUESTION))
    return [
        Sample(one.tokens[:-asked], one.tokens[-asked:], (one.key,), PASSKEY_TOKENS)
        for one in passkeys(tokenizer, context, depths)
    ]


def score(answers: Sequence[str], output: str) -> float:
    """Share of the answers that the output has, whatever their case."""
    output = output.lower()
    return sum(answer.lower() in output for answer in answers) / len(answers)


def _keys(count: int, rng: random.Random) -> list[str]:
    """Different names, an adjective and a noun; with a number where they run out."""
    names = [f"{adjective}-{noun}" for adjective in ADJECTIVES.split() for noun in NOUNS.split()]
    pairs = len(names)
    chosen = rng.sample(range(pairs * -(-count // pairs)), count)
    return [names[i % pairs] + (f"-{i // pairs + 1}" if i >= pairs else "") for i in chosen]


def _number(digits: int, rng: random.Random) -> str:
    return str(rng.randrange(10 ** (digits - 1), 10**digits))


def _words(count: int, rng: random.Random) -> list[str]:
    """Different English words, from the documentation that Python ships; two joined where they run out."""
    words = sorted(set(re.findall(r"\b[a-z]{4,10}\b", document())))
    rng.shuffle(words)
    joined = (f"{first}-{second}" for gap in range(1, len(words)) for first, second in zip(words, words[gap:]))
    return [*words, *islice(joined, max(0, count - len(words)))][:count]
