"""What the subcommands of `quest` have in common: options, errors as one line, the model."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


class Dtype(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Preset(StrEnum):
    default = "default"
    long = "long"
    paper = "paper"


Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads, torch's choice if not given.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write machine and rows to this file.")]
Model = Annotated[
    Path | None, typer.Option(help="A transformers folder or a .gguf file; SmolLM2-135M from its package if not given.")
]


@contextlib.contextmanager
def errors() -> Iterator[None]:
    """What a user can mend is one line and exit code 2; anything else keeps its traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def load_model(path: Path | None, dtype: Dtype, console: Console) -> tuple[Any, Any, str]:
    """Model, tokenizer, and a name for people. The hub is switched off: nothing is to be looked for there."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from quest import models

    name = "SmolLM2-135M-Instruct" if path is None else path.stem if path.suffix == ".gguf" else path.resolve().name
    with console.status(f"loading {name}"):
        return *models.load(path, models.DTYPES[dtype.value]), name


def gguf(path: Path | None) -> Path | None:
    """The GGUF file that `load_model` reads, None if it reads another kind."""
    from quest import models

    folder, file = models.locate(models.packaged_model() if path is None else path.expanduser())
    return folder / file if file else None


def names(option: str, text: str | None) -> list[str]:
    """Names separated by commas, each once; none for None."""
    found = [] if text is None else list(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in found:
        raise ValueError(f"{option} must be names separated by commas, got {text!r}")
    return found


def whole_numbers(option: str, text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be whole numbers separated by commas, got {text!r}") from None


def read_prompt(path: Path) -> str:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: a prompt is UTF-8 text") from None
    if not text.strip():
        raise ValueError(f"{path}: the prompt is empty")
    return text
