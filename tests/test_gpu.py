"""The GPU path: which kernels serve a card, and, on a device, one captured step for every length."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import gpu_kernels
import pytest
import torch
from rich.console import Console

import quest
from quest import QuestConfig, backends, gpu, packing_of, reference, reference_packed
from quest.bench import gpu as bench
from quest.bench import gpu_check, gpu_offload
from quest.bench.shapes import Shape, paged_layers, plain_layers

CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        ("80;90;100;120+PTX", (8, 0), True),
        ("80;90;100;120+PTX", (8, 9), True),
        ("80;90;100;120+PTX", (9, 0), True),
        ("80;90;100;120+PTX", (10, 3), True),
        ("80;90;100;120+PTX", (12, 1), True),
        ("80;90;100;120+PTX", (13, 0), True),
        ("80;90;100;120+PTX", (11, 0), False),
        ("80;90;100;120+PTX", (7, 5), False),
        ("120", (13, 0), False),
        ("90", (8, 9), False),
        ("90+PTX", (10, 0), True),
    ],
)
def test_cards_that_machine_code_serves(monkeypatch, archs, capability, runs):
    monkeypatch.setattr(gpu, "extension_archs", lambda: archs)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    reason = gpu.extension_missing(CUDA)
    assert (reason == "") == runs
    if not runs:
        assert f"sm_{capability[0]}{capability[1]}" in reason
        assert archs in reason


def test_choice_of_a_backend(monkeypatch):
    """CUDA where it can, else Triton, else every reason; a name never means another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    missing = {"extension": "", "triton": ""}
    monkeypatch.setattr(gpu, "extension_missing", lambda device=None: missing["extension"])
    monkeypatch.setattr(gpu, "triton_missing", lambda: missing["triton"])
    assert backends.choose("auto", CUDA) == "cuda"
    missing["extension"] = "no code for this card"
    assert backends.choose("auto", CUDA) == "triton"
    with pytest.raises(ValueError, match="backend cuda can't run: no code for this card"):
        backends.choose("cuda", CUDA)
    missing["triton"] = "no triton"
    with pytest.raises(ValueError, match=r"backend auto: no backend for tensors on cuda: no triton; no code for this "):
        backends.choose("auto", CUDA)
    with pytest.raises(ValueError, match="backend verbs can't run: the tensors are on cuda"):
        backends.choose("verbs", CUDA)
    with pytest.raises(ValueError, match="backend triton can't run: no triton; the tensors are on cpu"):
        backends.choose("triton", torch.device("cpu"))
    assert backends.choose("auto", torch.device("cpu")) == "cpu"


def test_import_needs_no_triton_and_starts_no_cuda():
    code = """
import importlib.util, sys
sys.modules["triton"] = None
import quest, torch
from quest import backends
if importlib.util.find_spec("transformers"):
    from quest.integrations import transformers
assert not torch.cuda.is_initialized()
assert "quest.triton_kernels" not in sys.modules
print(backends.available()[1].reasons)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "triton" in done.stdout or torch.cuda.is_available()


GPU = [pytest.param(name, marks=pytest.mark.gpu) if name == "device" else name for name in gpu_kernels.NAMES]


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize(
    "config", [QuestConfig(budget=32, block_size=64), QuestConfig(page_size=16, budget=64)], ids=["packed", "pages"]
)
def test_step_equals_the_reference(name, config):
    """The whole step: what it stores, summarises, selects and attends to; one row stores nothing, one is empty."""
    op, spec = quest.decode, reference.decode
    if config.summary_bits is not None:
        op, spec = quest.decode_packed, reference_packed.decode_packed
    ours, theirs = (make_step(config, torch.float32, lengths=[96, 64, 193, 0, 1]) for _ in range(2))
    for step in (ours, theirs):
        step[-1][1] = -1
    expected = spec(*theirs, config=config, sinks=torch.ones(8), window=150, softcap=9.0)
    with gpu_kernels.in_place_of_cpu(name):
        out, lse = op(*ours, config=config, sinks=torch.ones(8), window=150, softcap=9.0)
    assert torch.allclose(out, expected[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(lse, expected[1], rtol=1e-4, atol=1e-5)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("budget", [256, 1.0], ids=str)
@pytest.mark.parametrize("preset", [{}, {"page_size": 16}], ids=["packed", "pages"])
def test_a_budget_of_all_is_dense_and_scores_nothing(monkeypatch, name, preset, budget):
    config = QuestConfig(block_size=64, **preset)
    op = quest.decode if config.summary_bits is None else quest.decode_packed
    sparse, dense = (make_step(config, torch.float32, lengths=[96, 193, 1], tokens=256) for _ in range(2))
    with gpu_kernels.in_place_of_cpu(name):
        expected = op(*dense, config=config.replace(dense_layers=(0,)))
        for verb in ("score", "select", "select_packed"):
            monkeypatch.setattr(gpu.triton_kernels(), verb, None)
        got = op(*sparse, config=config.replace(budget=budget))
    assert all(map(torch.equal, got, expected))
    assert all(map(torch.equal, sparse, dense))


@pytest.mark.parametrize("preset", ["default", "pages16"])
def test_benchmark_layers_lie_where_they_are_asked_for(preset):
    shape = Shape(300, 2, 64, "bfloat16", 4, 2, 32, preset=preset)
    with torch.device("meta"):
        (paged,), (plain,) = paged_layers(shape, shape.config, 1), plain_layers(shape, 1)
    tensors = [paged.k_cache, paged.v_cache, *paged.summaries, *paged[3:], plain.key, plain.value]
    assert {x.device.type for x in tensors} == {"meta"}


@pytest.mark.parametrize(("name", "preset"), [("triton", "pages16"), ("cuda", "default")])
def test_benchmark_runs_the_stages_of_the_step(name, preset):
    """Here on the CPU, interpreted or emulated: what `bench/gpu_check.py` measures on a device is what a step does."""
    if name not in gpu_kernels.NAMES:
        pytest.skip("a GPU is here: bench/gpu_check.py measures on it")
    shape = Shape(150, 1, 64, "float32", 2, 1, 32, preset=preset)
    with gpu_kernels.in_place_of_cpu(name):
        row = bench.measure(shape, 1e9, torch.device("cpu"), rounds=1)
    stages = {"store", "select", "attend"} | ({"score"} if preset == "pages16" else set())
    assert all(row[f"{stage}_ms"] > 0 for stage in stages)
    assert min(row["ms"], row["eager_ms"], row["dense_ms"], row["own_dense_ms"]) > 0
    assert row["flashinfer_ms"] is None or row["flashinfer_ms"] > 0


@pytest.mark.usefixtures("slots_on_cpu")
@pytest.mark.parametrize("preset", ["default", "pages16"])
def test_benchmark_of_a_part_in_memory(preset):
    row = gpu_offload.measure(Shape(600, 2, 64, "float32", 4, 2, 32, preset=preset), 4, torch.device("cpu"), steps=3)
    assert row["max_difference"] < 1e-5
    assert 0 < row["hit_rate"] < 1
    assert min(row["ms"], row["all_resident_ms"], row["bytes_in"]) > 0
    gpu_offload.show([row], console := Console(record=True, file=io.StringIO(), width=200))
    assert f"{row['hit_rate']:.1%}" in console.export_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: it would build, test and measure for minutes")
def test_gpu_check_without_a_gpu_is_one_sentence():
    script = Path(__file__).parents[1] / "bench/gpu_check.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "gpu_check: torch sees no CUDA device here\n")


def test_gpu_check_says_what_does_not_fit_the_time(tmp_path, monkeypatch, capsys):
    """No time at all: every shape is in the table and the file, with the reason."""
    monkeypatch.setattr(bench, "describe", lambda device: {"device": "some card"})
    monkeypatch.setattr(bench, "copy_bandwidth", lambda device: 2e12)
    gpu_check.report(0.0, {"status": 0}, tmp_path / "gpu.json")
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["machine"]["copy_gb_per_s"] == 2000
    assert [row["skipped"] for row in written["rows"]] == ["no time left"] * 18
    assert written["machine"]["offload"] == []
    assert "copies run at 2,000 GB/s" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("preset", ["default", "pages16", "dense"])
def test_captured_step_serves_other_lengths(preset, dtype):
    """A replay equals the same step without a graph, whatever lengths, tables and keys the tensors now hold."""
    config = {
        "default": QuestConfig(budget=64, block_size=64),
        "pages16": QuestConfig(page_size=16, budget=64),
        "dense": QuestConfig(page_size=16, budget=4096),
    }[preset]
    here = on_device(make_step(config, dtype, lengths=[700, 64, 1]))
    call(here, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call(here, config)
    for lengths in ([700, 64, 1], [701, 0, 2], [63, 640, 130], [1000, 1024, 1023]):
        other = on_device(make_step(config, dtype, lengths, seed=sum(lengths)))
        for there, new in zip(here, other, strict=True):
            there.copy_(new)
        graph.replay()
        expected_out, expected_lse = call(other, config)
        assert out.equal(expected_out)
        assert lse.equal(expected_lse)
        assert all(a.equal(b) for a, b in zip(here, other, strict=True))


def on_device(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.cuda() for x in tensors]


def make_step(
    config: QuestConfig, dtype: torch.dtype, lengths: list[int], seed: int = 0, tokens: int = 1024
) -> list[torch.Tensor]:
    """The tensors that `decode` takes, of equal shapes for all lengths up to `tokens`."""
    rng = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, dim, size = len(lengths), 8, 2, 64, config.block_size
    blocks = tokens // size
    random = lambda *shape: torch.randn(shape, generator=rng).to(dtype)  # noqa: E731
    k_cache, v_cache = (random(batch * blocks, kv_heads, size, dim) for _ in range(2))
    table = torch.randperm(batch * blocks, generator=rng).view(batch, blocks).int()
    lens = torch.tensor(lengths, dtype=torch.int32)
    last = (lens.long() - 1).clamp_min(0)[:, None]
    slots = table.long().gather(1, last // size) * size + last % size
    slots[lens == 0] = -1
    before = (lens - 1).clamp_min(0)
    packing = packing_of(config)
    if packing is None:
        summaries = [
            torch.zeros(batch * blocks, kv_heads, size // config.page_size, dim, dtype=dtype) for _ in range(2)
        ]
        reference.summarise(k_cache, *summaries, table, before, before)
    else:
        summaries = [torch.zeros(batch * blocks, kv_heads, packing.num_bytes(dim), dtype=torch.uint8)]
        sink = config.sink_tokens
        reference_packed.pack(k_cache, *summaries, table, before, before, packing=packing, sink_tokens=sink)
    new = [random(batch, 1, n, dim) for n in (heads, kv_heads, kv_heads)]
    return [*new, k_cache, v_cache, *summaries, table, lens, slots]


def call(tensors: list[torch.Tensor], config: QuestConfig) -> tuple[torch.Tensor, torch.Tensor]:
    op = quest.decode if config.summary_bits is None else quest.decode_packed
    return op(*tensors, config=config)
