"""Tasks of `quest bench accuracy`: lengths, answers that are there to be found, scoring."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import demo_models

from quest import models
from quest.bench import tasks


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = demo_models.save(tmp_path_factory.mktemp("tiny"))
    return models.load(folder)[1]


LENGTHS = {"vt": 2500, "cwe": 6000}  # the tokenizer's tokens are bytes


@pytest.mark.parametrize("name", tasks.TASKS)
def test_prompts_fill_their_length(tokenizer: Any, name: str) -> None:
    length = LENGTHS.get(name, 2000)
    made = tasks.make(tokenizer, name, length, 3)
    assert made == tasks.make(tokenizer, name, length, 3)
    assert made != tasks.make(tokenizer, name, length, 3, seed=1)
    assert len({one.answers for one in made}) == 3
    for one in made:
        text = tokenizer.decode(one.before)
        assert length - 200 < one.length <= length
        assert one.length == len(one.before) + len(one.question) + one.new_tokens
        assert all(re.search(rf"\b{answer}\b", text) for answer in one.answers)
        assert not any(answer in tokenizer.decode(one.question) for answer in one.answers)
        assert tasks.score(one.answers, text) == 1
    with pytest.raises(ValueError, match=f"task {name}: length must hold"):
        tasks.make(tokenizer, name, 50, 1)
    assert tasks.make(tokenizer, name, length, 1, longest_answer=5)[0].new_tokens == 5


def test_the_answers_are_right() -> None:
    rng = random.Random(0)
    text = tasks.niah_single_1(40, 2000, 0.25, rng)
    key = re.search(r"special number of (\S+) in", text.question)[1]  # type: ignore[index]
    assert f"The special number of {key} is {text.answers[0]}." in text.before.splitlines()
    assert len(text.answers[0]) == 7
    assert text.before.splitlines()[2:].index(f"The special number of {key} is {text.answers[0]}.") == 10

    for writer in (tasks.multikey_2, tasks.multikey_3):
        text = writer(50, 2000, 0.25, rng)
        pairs = dict(re.findall(r"The special value of (\S+) is (\S+)\.", text.before))
        key = re.search(r"special value of (\S+) in", text.question)[1]  # type: ignore[index]
        assert len(pairs) == 50
        assert (pairs[key],) == text.answers
        assert [*pairs].index(key) == 12

    text = tasks.vt(30, 2000, 0.5, rng)
    number = re.search(r"value (\d{5}) in", text.question)[1]  # type: ignore[index]
    values = {}
    for name, value in re.findall(r"VAR (\w{5}) = (?:VAR )?(\w{5})\.", text.before):
        values[name] = values.get(value, value)
    assert {name for name, value in values.items() if value == number} == {*text.answers}
    assert len(text.answers) == 5
    assert len(values) == 10  # with those of the example

    for length, often, seldom in ((8192, 30, 3), (2048, 6, 1)):
        text = tasks.cwe(60, length, 0.5, rng)
        counts = Counter(re.findall(r"\d+\. (\S+)", text.before.rsplit("Below is", 1)[1]))
        assert {word for word, count in counts.items() if count == often} == {*text.answers}
        assert Counter(counts.values()) == {often: 10, seldom: 60}

    text = tasks.fwe(500, 2000, 0.5, rng)
    counts = Counter(re.findall(r"\b[a-z]{6}\b", text.before.rsplit("\n\n", 1)[1]))
    assert [word for word, _ in counts.most_common(3)] == [*text.answers]
    ranked = [count for _, count in counts.most_common()]
    assert ranked[0] == pytest.approx(4 * ranked[1], rel=0.02)
    assert len(counts) == 40


def test_words_and_names_do_not_run_out() -> None:
    rng = random.Random(0)
    assert len({*tasks._words(5000, rng)}) == 5000
    assert len({*tasks._keys(20_000, rng)}) == 20_000


def test_scores() -> None:
    assert tasks.score(("Ab", "cd"), "xABx") == 0.5
    assert tasks.score(("1234567",), "is 1234567.") == 1
    assert tasks.score(("1234567",), "is 123456") == 0


def test_passkeys_are_cut_before_their_question(tokenizer: Any) -> None:
    made = tasks.make_passkeys(tokenizer, 600, (0.1, 0.9))
    for one in made:
        assert len(one.before) + len(one.question) == 600
        assert tokenizer.decode(one.question).strip() == "What is the pass key? The pass key is"
        assert one.answers[0] in tokenizer.decode(one.before)
