"""The ops under torch: opcheck, and torch.compile of a decode step without graph break, copy or recompile per token."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cases import Case, make, same
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch.torch_version import TorchVersion

import quest
from quest import QuestConfig

# ---- opcheck ----


def decode_arguments(case: Case) -> tuple[Any, ...]:
    # dense, scale, budget, fraction, sink and recent pages, width, slack, rule, softcap, sinks, window
    return (*case.step, False, 0.3, 24, 0.0, 1, 1, 3, 0.5, "relative", 2.0, torch.zeros(case.shape.num_heads), 30)


def samples(op: str) -> list[tuple[Any, ...]]:
    found = []
    for shape in ("page_8", "group_6", "many_tokens", "no_rows"):
        case = make(shape, poison=0.0)  # opcheck compares results with equal_nan, but mutated inputs without
        size, lens = case.page_size, case.seq_lens
        scores = quest.score(case.query, *case.summary, page_size=size)
        page_idx, _ = quest.select(scores, lens, page_size=size, budget=2 * size)
        out, lse = quest.attend(case.query, *case.cache, page_size=size)
        found.append({
            "append": (case.key, case.value, case.k_cache, case.v_cache, case.slot_mapping),
            "summarise": (case.k_cache, *case.summary, lens),
            "score": (case.query, *case.summary, size, 0.3, 1.0, "per_head"),
            "select": (scores, lens, size, 2 * size, 0.0, 0, 1, -1, page_idx.shape[-1]),
            "attend": (case.query, *case.cache, page_idx, size, 0.3),
            "merge": (out, lse, out, lse),
            "decode": decode_arguments(case),
        }[op])  # fmt: skip
    return found


@pytest.mark.parametrize("op", ["append", "summarise", "score", "select", "attend", "merge", "decode"])
def test_opcheck(op):
    """Schema and mutation as declared, fakes as the real outputs (strides too), functionalisation, dynamic shapes."""
    for arguments in samples(op):
        torch.library.opcheck(getattr(torch.ops.quest, op).default, arguments)
    if op == "decode":
        query, key, value, *rest = arguments
        heads = [x.transpose(1, 2) for x in (query, key, value)]
        torch.library.opcheck(torch.ops.quest.decode.default, (*heads, *rest), {"heads_first": True})


def test_fakes_on_the_meta_device():
    case = make("group_7")
    out, lse = quest.attend(case.query.to("meta"), *(x.to("meta") for x in case.cache))
    assert (out.device.type, out.shape, out.dtype) == ("meta", case.query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == (case.query.shape[:3], torch.float32)


# ---- torch.compile ----

BLOCKS, KV_HEADS, BLOCK, PAGE, DIM, HEADS, LAYERS = 37, 2, 8, 4, 24, 6, 3
CONFIG = QuestConfig(page_size=PAGE, block_size=BLOCK, budget=16, sink_tokens=4, recent_tokens=4)


class Buffers(nn.Module):
    """The cache as four buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k_cache", "v_cache"):
            self.register_buffer(name, torch.zeros(BLOCKS, KV_HEADS, BLOCK, DIM))
        for name in ("page_min", "page_max"):
            self.register_buffer(name, torch.zeros(BLOCKS, KV_HEADS, BLOCK // PAGE, DIM))

    def pools(self) -> tuple[Tensor, ...]:
        return self.k_cache, self.v_cache, self.page_min, self.page_max

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
        # As a projection leaves it: [batch, heads, q_len, head_dim], seen through a transpose.
        return quest.decode(query.transpose(1, 2), key, value, *self.pools(), *places, config=CONFIG)


class Stacked(Buffers):
    """The cache as a layer's views of pools that all layers share."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.register_buffer("kv", torch.zeros(LAYERS, 2, BLOCKS, KV_HEADS, BLOCK, DIM))
        self.register_buffer("summary", torch.zeros(LAYERS, 2, BLOCKS, KV_HEADS, BLOCK // PAGE, DIM))

    def pools(self) -> tuple[Tensor, ...]:
        return *self.kv[1].unbind(), *self.summary[1].unbind()


def step_of(batch: int, length: int) -> tuple[Tensor, ...]:
    """The new token and the places of every row, all `length` long after it."""
    rng = torch.Generator().manual_seed(length)
    rows = [torch.randn(batch, HEADS, 1, DIM, generator=rng)]
    rows += [torch.randn(batch, 1, KV_HEADS, DIM, generator=rng) for _ in range(2)]
    table = torch.arange(BLOCKS - 1, dtype=torch.int32).flip(0).view(2, -1)[:batch].contiguous()
    lens = torch.full((batch,), length, dtype=torch.int32)
    slots = table[:, (length - 1) // BLOCK, None].long() * BLOCK + (length - 1) % BLOCK
    return *rows, table, lens, slots


@pytest.mark.parametrize("module", [Buffers, Stacked])
def test_c39_decode_step(module):
    """Compiled equals eager bit for bit over page and block edges; one graph, a second one when the batch grows."""
    torch._dynamo.reset()
    eager, layer = module(), module()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for batch in (1, 2):
        for length in range(1, 65):
            arguments = step_of(batch, length)
            expected, got = eager(*arguments), compiled(*arguments)
            assert all(map(torch.equal, got, expected))
            assert [x.stride() for x in got] == [x.stride() for x in expected]
        assert all(map(torch.equal, layer.buffers(), eager.buffers()))
        assert counter.frame_count <= batch


@pytest.mark.parametrize("module", [Buffers, Stacked])
def test_the_cache_is_not_copied(module):
    """The generated code hands the pools to the op as they are: nothing of their size is made, copied or computed."""
    torch._dynamo.reset()
    layer = module()
    _, code = run_and_get_code(torch.compile(layer, fullgraph=True), *step_of(1, 15))
    text = "\n".join(code).split("def get_args")[0]
    assert text.count("torch.ops.quest.decode.default(") == 1
    assert "auto_functionalized" not in text
    for line in text.splitlines():
        sizes = [tuple(map(int, re.findall(r"\d+", shape))) for shape in re.findall(r"\(((?:\d+, )+\d*)\)", line)]
        if any(BLOCKS in shape for shape in sizes):
            assert "assert_size_stride" in line or "torch.ops.quest.decode.default(" in line, line
    assert ".copy_(" not in text
    assert "async_compile.cpp" not in text  # no kernel at all: the op is the whole graph


def test_growing_table():
    """The table's width is a symbolic size: no graph is added as it grows."""
    torch._dynamo.reset()
    eager, layer = Buffers(), Buffers()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    first = None
    for length in range(60, 80):
        *rows, table, lens, slots = step_of(2, length)
        table = table[:, : length // BLOCK + 2].contiguous()
        arguments = (*rows, table, lens, slots)
        assert all(map(torch.equal, compiled(*arguments), eager(*arguments)))
        first = first or counter.frame_count
    assert counter.frame_count == first


@pytest.mark.skipif(
    TorchVersion(torch.__version__) < (2, 13), reason="torch 2.11 fails to trace select where sizes vary"
)
def test_verbs_one_by_one():
    """Each verb traces too; a fraction of the context is a budget as well."""
    torch._dynamo.reset()

    def step(state: Buffers, query: Tensor, key: Tensor, value: Tensor, *places: Tensor) -> Tensor:
        k_cache, v_cache, page_min, page_max = state.pools()
        table, lens, slots = places
        quest.append(key, value, k_cache, v_cache, slots)
        quest.summarise(k_cache, page_min, page_max, table, lens, torch.ones_like(lens))
        scores = quest.score(query.transpose(1, 2), page_min, page_max, table, lens, page_size=PAGE)
        page_idx, _ = quest.select(scores, lens, page_size=PAGE, budget=0.3)
        options = {"softcap": 3.0, "sinks": torch.ones(HEADS), "window": 20}
        sparse = quest.attend(query.transpose(1, 2), k_cache, v_cache, table, lens, page_idx, page_size=PAGE, **options)
        return quest.merge(*sparse, *sparse)[0]

    eager, layer = Buffers(), Buffers()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in range(1, 30):
        arguments = step_of(2, length)
        assert torch.equal(compiled(layer, *arguments), step(eager, *arguments))
    assert all(map(same, layer.buffers(), eager.buffers()))


def test_values_are_checked_in_the_compiled_step():
    """A bad block id is an error of the compiled step too, and nothing is written."""
    torch._dynamo.reset()
    layer = Buffers()
    compiled = torch.compile(layer, fullgraph=True)
    compiled(*step_of(1, 9))
    before = [x.clone() for x in layer.buffers()]
    *rows, table, lens, slots = step_of(1, 10)
    with pytest.raises(ValueError, match=r"decode: block_table\[0, 1\]: block id must be in \[0, 37\)"):
        compiled(*rows, torch.where(table == table[0, 1], 99, table), lens, slots)
    assert all(map(torch.equal, layer.buffers(), before))


def test_wrong_shapes_are_named_under_compile():
    torch._dynamo.reset()
    _, key, value, *places = step_of(1, 9)
    compiled = torch.compile(Buffers(), backend="eager")
    with pytest.raises(Exception, match="decode: query must have a multiple of 2 heads"):
        compiled(torch.zeros(1, 5, 1, DIM), key, value, *places)
