"""A Llama-style decoder in plain PyTorch on the ops: eager and compiled, against the same model without a cache."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from quest import QuestConfig

EXAMPLE = Path(__file__).resolve().parents[1] / "examples/llama.py"
VOCAB, DIM, LAYERS, HEADS, KV_HEADS, BLOCKS, PAGE, BLOCK = 61, 48, 2, 6, 2, 24, 4, 8


@pytest.fixture(scope="module")
def llama() -> Any:
    spec = importlib.util.spec_from_file_location("llama_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def model_of(llama: Any, budget: int | float = 1.0, layers_of_model: int = LAYERS, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"sink_tokens": PAGE, "recent_tokens": PAGE} | settings
    config = QuestConfig(page_size=PAGE, block_size=BLOCK, budget=budget, **settings)
    model = llama.Llama(VOCAB, DIM, layers_of_model, HEADS, KV_HEADS, BLOCKS, config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model


def prompt_and_table(batch: int = 2, length: int = 21) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    prompt = torch.randint(VOCAB, (batch, length), generator=rng)
    return prompt, torch.randperm(BLOCKS, generator=rng).int().view(batch, -1)


@torch.no_grad()
def dense(llama: Any, model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of every token, by causal attention over the whole sequence at once."""
    positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
    x = model.embed(tokens)
    for i, (attention, mlp) in enumerate(zip(model.attention, model.mlp)):
        qkv = attention.qkv(model.norms[2 * i](x)).unflatten(-1, (-1, attention.head_dim))
        query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], 2)
        query, key = llama.rotate(query, positions), llama.rotate(key, positions)
        rows = [z.transpose(1, 2).repeat_interleave(HEADS // z.shape[2], 1) for z in (query, key, value)]
        out = F.scaled_dot_product_attention(*rows, is_causal=True)
        x = x + attention.out(out.transpose(1, 2).flatten(2))
        x = x + mlp(model.norms[2 * i + 1](x))
    return model.norms[-1](x) @ model.embed.weight.T


def greedy_dense(llama: Any, model: nn.Module, tokens: Tensor, new_tokens: int) -> Tensor:
    start = tokens.shape[1]
    for _ in range(new_tokens):
        tokens = torch.cat([tokens, dense(llama, model, tokens)[:, -1:].argmax(-1)], 1)
    return tokens[:, start:]


def test_a_full_budget_gives_the_dense_text(llama, isa):
    prompt, table = prompt_and_table()
    model = model_of(llama)
    text = llama.generate(model, prompt, 40, table, BLOCK)
    assert text.equal(greedy_dense(llama, model, prompt, 40))
    assert len(text.unique()) > 5


def test_chunks_give_the_same_logits(llama):
    """A prompt at once, in chunks or token by token: every token sees what is before it."""
    tokens, table = prompt_and_table(length=30)
    expected = None
    for chunks in ((30,), (1,) * 30, (7, 9, 1, 13)):
        model, length, logits = model_of(llama), 0, []
        for chunk in chunks:
            place = torch.arange(length, length + chunk)
            slots = table[:, place // BLOCK].long() * BLOCK + place % BLOCK
            length += chunk
            lens = torch.full((2,), length, dtype=torch.int32)
            with torch.no_grad():
                logits.append(model(tokens[:, place], table, lens, slots))
        expected = dense(llama, model, tokens) if expected is None else expected
        assert torch.allclose(torch.cat(logits, 1), expected, rtol=1e-4, atol=1e-4)


def test_sparse_reads_differ_from_dense_only_in_what_they_leave_out(llama):
    """A small budget reads less and may say something else; dense layers bring the dense text back."""
    prompt, table = prompt_and_table(length=60)
    sparse = llama.generate(model_of(llama, budget=12), prompt, 20, table, BLOCK)
    full = llama.generate(model_of(llama), prompt, 20, table, BLOCK)
    assert not sparse.equal(full)
    assert llama.generate(model_of(llama, budget=12, dense_layers=range(LAYERS)), prompt, 20, table, BLOCK).equal(full)


@pytest.mark.slow
@torch.no_grad()
def test_compiled_equals_eager(llama):
    """Sparse steps over page and block edges: one graph for all of them, and the same logits."""
    torch._dynamo.reset()
    prompt, table = prompt_and_table(length=30)
    eager, model = (model_of(llama, budget=16, layers_of_model=1) for _ in range(2))
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    token = llama.generate(eager, prompt, 1, table, BLOCK)
    assert token.equal(llama.generate(model, prompt, 1, table, BLOCK))
    for length in range(31, 61):
        lens = torch.full((2,), length, dtype=torch.int32)
        slots = table[:, (length - 1) // BLOCK, None].long() * BLOCK + (length - 1) % BLOCK
        expected, got = (m(token, table, lens, slots) for m in (eager, compiled))
        assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4)
        token = expected.argmax(-1)
    assert counter.frame_count == 1
