"""The `quest` command: what it prints and writes, and one line for what a user got wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import quest
from quest import backends
from quest.cli import app

SMALL = ["--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "16", "--rounds", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    pytest.importorskip("transformers")
    import demo_models

    return str(demo_models.save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(autouse=True)
def same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke(app, list(arguments))
    if code == 0 and result.exception is not None:
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def refused(*arguments: str) -> str:
    """The one line of an error."""
    lines = run(*arguments, code=2).strip().splitlines()
    assert lines[-1].startswith("error: ")
    return lines[-1]


def test_version() -> None:
    assert run("--version") == f"quest {quest.__version__}\n"


def test_info_names_every_backend_and_every_reason() -> None:
    shown = run("info")
    assert backends.isa() in shown
    assert quest.__version__ in shown
    for backend in backends.available():
        assert backend.name in shown
        assert all(reason in shown for reason in backend.reasons)


def test_info_needs_no_transformers() -> None:
    code = "import sys; sys.modules['transformers'] = None; from quest.cli import app; app(['info'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_layers_that_take_turns_fit_the_memory() -> None:
    """A context of a million tokens, of which a step touches little, once asked for three layers and ended the run."""
    from quest.bench.machine import copies, last_level_cache

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    touched = last_level_cache() // 2
    assert copies(touched, 1 << 20) == 8
    assert copies(touched, memory // 4 // 3) == 3
    assert copies(touched, memory // 4) == copies(touched, memory) == 1


def test_bench_decode(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "x.json"
    shown = run(
        "bench",
        "decode",
        "--context",
        "256",
        "--budget",
        "64",
        "--budget",
        "256",
        "--preset",
        "pages16",
        "--batch",
        "2",
        *SMALL,
        "--json",
        str(file),
    )
    assert shown.splitlines()[0].count(backends.isa()) == 1
    found = json.loads(file.read_text())
    assert {"cpu", "isa", "threads", "torch"} <= set(found["machine"])
    keys = "context batch budget dtype num_heads num_kv_heads head_dim ms bytes limit_fraction"
    assert {*keys.split(), "speedup_sdpa_best", "speedup_sdpa_default"} <= set(found["rows"][0])
    sparse, dense = (row["bytes"] for row in found["rows"])
    assert dense == 2 * 256 * 2 * 2 * 16 * 2
    assert sparse == 2 * 2 * (16 * 2 * 16 + 64 * 2 * 16) * 2


def test_bench_presets(tmp_path: Path) -> None:
    """One after the other, each row with its preset's bytes; a preset's rows name it in the table and in the plot."""
    file, plot = tmp_path / "x.json", tmp_path / "x.png"
    given = ["--preset", "default,long", "--preset", "pages16,page4,paper", "--budget", "64", "--plot", str(plot)]
    contexts = ["--context", "1024", "--context", "2048"]
    shown = run("bench", "decode", *contexts, *given, *SMALL, "--rounds", "1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    names = ["default", "long", "pages16", "page4", "paper"]
    assert [row["preset"] for row in rows] == 2 * names
    assert all(name in shown for name in names)
    assert all(row["bytes"] == row["summary_bytes"] + row["kv_bytes"] for row in rows)
    by_name = dict(zip(names, rows[5:], strict=True))
    assert by_name["default"]["kv_bytes"] == by_name["pages16"]["kv_bytes"] == 2 * 64 * 2 * 16 * 2
    assert by_name["paper"]["kv_bytes"] == 2 * by_name["pages16"]["kv_bytes"]  # each query head its own
    assert by_name["pages16"]["summary_bytes"] == 2 * (2048 // 16) * 2 * 16 * 2
    assert plot.stat().st_size > 10_000
    assert "--preset must be of default, long" in refused("bench", "decode", "--preset", "default,longer")
    assert "--preset must be of default, long" in refused("bench", "hf", "--preset", "longer")


@pytest.mark.parametrize("preset", ["default", "pages16", "page4"])
@pytest.mark.parametrize("ragged", [False, True])
def test_bench_decode_computes_what_it_times(ragged: bool, preset: str) -> None:
    from quest.bench import decode, shapes

    shape = shapes.Shape(1600, 3, 1600, "float32", 6, 2, 16, ragged, preset)
    query = torch.randn(3, 1, 6, 16)
    config, whole = shape.config, [400, 1000, 1600] if ragged else [1600] * 3
    assert shape.lengths == (whole if preset == "pages16" else [length // 16 * 16 - 8 for length in whole])
    plain = shapes.plain_layers(shape, 1)[0]
    torch.testing.assert_close(decode.sdpa_best(query, plain), decode.sdpa_default(query, plain))
    layer = shapes.paged_layers(shape, config, 1)[0]
    for row, (length, blocks) in enumerate(zip(shape.lengths, layer.block_table, strict=True)):
        for paged, dense in zip(layer[:2], plain[:2], strict=True):
            dense[row, :, :length] = paged[blocks].transpose(0, 1).flatten(1, 2)[:, :length]
    new = [torch.stack([x[row, :, n - 1] for row, n in enumerate(shape.lengths)])[:, None] for x in plain[:2]]
    got = shapes.decode(query, new, layer, config)
    torch.testing.assert_close(got, decode.sdpa_best(query, plain))
    read = shape.bytes(config)
    assert read.total == sum(shape.lengths) * 2 * 2 * 16 * 4
    assert shape.fmas(read, config) == read.total // 4 * 3


def test_bench_counts_products_of_codes() -> None:
    from quest.bench.shapes import Shape

    shape = Shape(2048, 1, 64, "bfloat16", 4, 2, 32, preset="default")
    read, blocks, kept = shape.bytes(shape.config), 8, 32  # a quarter of 127 groups: 2,040 tokens
    assert (read.coarse, read.open) == (2 * blocks * 16 * 32 * 2 * 2 // 8, 0)
    per_head = 64 * 2 * 32 + blocks * 16 * 32 * 2 + kept * 16 * 32 + blocks * 2 * 32
    assert shape.fmas(read, shape.config) == 4 * per_head


def test_bench_sweep_and_plot(tmp_path: Path) -> None:
    from quest.bench import decode, report

    shapes = decode.sweep(decode.SWEEPS)
    assert {1 << 12, 1 << 20} <= {shape.context for shape in shapes}
    assert {1, 8, 32} == {shape.batch for shape in shapes}
    assert {1, 3, 4, 7, 8} == {shape.num_heads // shape.num_kv_heads for shape in shapes}
    assert len(shapes) == len(set(shapes))
    long = [(shape.preset, shape.budget) for shape in shapes if shape.context == 1 << 20]
    assert long == [("pages16", 2048), ("default", 512), ("long", 512), ("page4", 512)]
    assert {shape.preset for shape in shapes if shape.budget != 512} == {"pages16"}
    file = tmp_path / "plot.png"
    with pytest.raises(ValueError, match="two contexts"):
        report.draw([{**vars(shapes[0])}], file)


@pytest.mark.parametrize(
    ("preset", "summarise", "score"),
    [("default", "pack", "score_packed"), ("page4", "pack", "score_packed"), ("pages16", "summarise", "score")],
)
def test_bench_steps(tmp_path: Path, preset: str, summarise: str, score: str) -> None:
    file = tmp_path / "x.json"
    given = ["--context", "1024", "--budget", "64", "--preset", preset]
    run("bench", "steps", *given, *SMALL, "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert [row["verb"] for row in rows] == ["append", summarise, score, "select", "attend", "decode"]
    by_verb = {row["verb"]: row for row in rows}
    assert by_verb["decode"]["bytes"] == by_verb[score]["bytes"] + by_verb["attend"]["bytes"]
    assert by_verb["decode"]["fmas"] == by_verb[score]["fmas"] + by_verb["attend"]["fmas"]
    assert by_verb[summarise]["bytes"] == 2 * (16 if preset == "pages16" else 256) * 16 * 2
    assert {row["preset"] for row in rows} == {preset}
    assert all(row["ms"] > 0 for row in rows)


def test_bench_cache(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    shown = run("bench", "cache", "--batch", "3", "--context", "640", "--block-size", "32", "--json", str(file))
    assert "find a prefix" in shown
    rows = json.loads(file.read_text())["rows"]
    assert {row["call"]: row["blocks"] for row in rows} == {
        "extend by 1": 3,
        "select others": 0,
        "fork": 20,
        "find a prefix": 20,
        "extend by all": 20,
    }
    assert all(row["us"] > 0 for row in rows)


@pytest.mark.parametrize("preset", ["default", "pages16"])
def test_bench_hf(folder: str, tmp_path: Path, preset: str) -> None:
    file = tmp_path / "x.json"
    options = ["--contexts", "64", "--contexts", "300", "--budget", "128", "--tokens", "4", "--preset", preset]
    shown = run("bench", "hf", "--model", folder, *options, "--json", str(file))
    assert "DynamicCache" in shown
    rows = json.loads(file.read_text())["rows"]
    assert [(row["dtype"], row["context"], row["cache"]) for row in rows] == [
        (dtype, context, cache)
        for dtype in ("float32", "bfloat16")
        for context in (64, 300)
        for cache in ("dynamic", "quest")
    ]
    assert all(row["ms_per_token"] > 0 for row in rows)
    assert all(min(row["path_us"], row["op_us"]) > 0 for row in rows[1::2])
    assert "exceed the model's context" in refused("bench", "hf", "--model", folder, "--contexts", "700")


@pytest.mark.parametrize("files", ["--cold", "--no-cold"])
def test_bench_offload(folder: str, tmp_path: Path, files: str) -> None:
    file, sizes = tmp_path / "o.json", ["--context", "500", "--budget", "64", "--tokens", "3", "--part", "4"]
    shown = run("bench", "offload", "--model", folder, *sizes, files, "--directory", str(tmp_path), "--json", str(file))
    (row,) = json.loads(file.read_text())["rows"]
    assert f"{row['hit_rate']:.1%}"[:4] in shown
    assert (row["context"], row["part"], row["cold"]) == (500, 4, files == "--cold")
    assert row["max_bytes"] == row["kv_bytes"] // 4
    assert row["resident_bytes"] <= row["max_bytes"]
    assert min(row["ms_per_token"], row["all_resident_ms"], row["bytes_in"]) > 0
    assert row["same_choice"] == 1
    assert "context must be at most" in refused("bench", "offload", "--model", folder, "--context", "700")


def test_demo_passkey(folder: str, tmp_path: Path) -> None:
    options = ["--context", "500", "--depths", "2", "--further-tokens", "4", "--budgets", "64,512"]
    shown = run("demo", "--model", folder, *options, "--out", str(tmp_path), "--threads", "1")
    assert "512 (dense)" in shown
    found: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    assert found["machine"]["threads"] == 1
    assert [row["budget"] for row in found["rows"]] == ["dense", 64, 512]
    keys = "answered depths speedup bytes_per_token bytes_fraction top1_agreement"
    assert set(keys.split()) <= set(found["rows"][0])
    assert (tmp_path / "results.png").stat().st_size > 10_000


def test_demo_with_a_prompt(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Tell me about [bold]pages[/bold]. " * 10)
    shown = run("demo", "--model", folder, "--prompt-file", str(file), "--budgets", "64", "--max-new-tokens", "5")
    assert "budget 64" in shown
    assert "prompt of" in shown
    assert not Path("demo/results.json").exists() or "wrote" not in shown


def test_mistakes_are_one_line(folder: str, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    assert "no such file" in refused("demo", "--prompt-file", str(file))
    file.write_text(" \n")
    assert "empty" in refused("demo", "--prompt-file", str(file))
    file.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in refused("demo", "--prompt-file", str(file))
    file.write_text("word " * 200)
    assert "the model's context is 640" in refused("demo", "--model", folder, "--prompt-file", str(file))
    assert "no such file or folder" in refused("demo", "--model", str(tmp_path / "none"))
    assert "neither a config.json nor a .gguf" in refused("demo", "--model", str(tmp_path))
    assert "--budgets must be" in refused("demo", "--budgets", "few")
    assert "forced pages" in refused("demo", "--budgets", "16")
    assert "the model's context is 640" in refused("demo", "--model", folder)
    assert "--isa must be one of" in refused("bench", "decode", "--isa", "mmx")
    assert "multiple of --num-kv-heads" in refused("bench", "decode", "--num-heads", "7")
